"""Which collective is started when: the one reduction behind every front end.

Every rank starts the same collectives in the same order, decided by program order alone. When a
bucket is ready, its P (with everything that is not compressed) starts on its way while backward
still runs. When the step's last bucket is ready, this thread walks over all buckets: wait for P,
compute Q, start it. It then waits for all Q, and only when the whole step is known to be finite on
all ranks it changes the state. No thread, no callback, at most two collectives per bucket.

A step that meets an inf or a NaN anywhere leaves the state as it was, and makes every compressed
gradient of the step NaN on all ranks, so that no optimizer applies what the residuals still hold.
No flag has to travel for this: a non-finite gradient makes P non-finite, and sums of it stay so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from powersgd.agreement import require_agreement
from powersgd.compression import Compression, compress, decompress_if_, project, rehearse
from powersgd.layout import ParameterSpec
from powersgd.memory import BucketState
from powersgd.phases import EAGER
from powersgd.plan import make_plan, make_square_plan
from powersgd.state import PowerSGDState

Future = torch.futures.Future[Tensor]


@dataclass
class _InFlight:
    """A bucket on its way through a step."""

    future: Future
    parameters: Sequence[Tensor]
    buffer: Tensor  # what the front end gets back
    message: Tensor  # what the running collective sums up
    work: dist.Work | None
    compression: Compression | None = None  # None: plain averaging


def find_group(state: PowerSGDState) -> dist.ProcessGroup:
    """Return the state's process group, or the default one.

    Args:
        state: The state.

    Returns:
        The group.

    Raises:
        RuntimeError: If the state names no group and there is no default one.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "PowerSGD needs a process group: call torch.distributed.init_process_group first"
        )
    group = state.process_group if state.process_group is not None else dist.group.WORLD
    assert group is not None  # there is a default group once torch.distributed is initialised
    return group


def require_same_group(state: PowerSGDState, of_ddp: dist.ProcessGroup) -> None:
    """Raise unless the state's process group has the ranks of DDP's.

    Args:
        state: The state.
        of_ddp: The group over which DDP averages.

    Raises:
        ValueError: If the ranks differ: the replicas would drift apart without a word.
    """
    mine = dist.get_process_group_ranks(find_group(state))
    theirs = dist.get_process_group_ranks(of_ddp)
    if mine != theirs:
        raise ValueError(
            f"the state's process group has the ranks {mine}, but DDP averages over the "
            f"ranks {theirs}; give both the same process group"
        )


def reduce_bucket(
    state: PowerSGDState,
    buffer: Tensor,
    parameters: Sequence[Tensor],
    *,
    is_first: bool,
    is_last: bool,
    is_square: bool = False,
) -> Future:
    """Start to average a bucket's gradients over the ranks; the step's last bucket ends the step.

    Args:
        state: The state; counts no iteration here.
        buffer: The bucket's gradients, shape ``(numel,)``, or one sparse gradient. Overwritten.
        parameters: The parameters in the order of the buffer, in which they lie without gaps.
        is_first: Whether this is the step's first bucket.
        is_last: Whether this is the step's last bucket.
        is_square: View the whole bucket as one square matrix.

    Returns:
        A future of ``buffer``. Once compression has started it is complete when this function has
        returned for the step's last bucket.

    Raises:
        RuntimeError: If there is no process group, or a collective fails (a rank died, a timeout).
        ValueError: If the parameters are another model's, or ranks differ in settings or plan.
    """
    group = find_group(state)
    kind = "sparse" if buffer.layout is torch.sparse_coo else str(parameters[0].dtype)
    # Hooks run in whatever mode backward was called: with create_graph, under autocast.
    with torch.no_grad(), torch.autocast(buffer.device.type, enabled=False):
        state.positions.register(parameters, kind)
        bucket = None
        if kind != "sparse":
            bucket = _find_bucket(state, buffer, parameters, group, is_last, is_square)
        if state.is_warming_up():
            state.positions.is_complete |= is_last
            return _average(buffer, group)
        if is_first:
            _begin_step(state, parameters)
        in_flight = (
            _start_plain(parameters, buffer, group)
            if bucket is None
            else _start_compressed(state, bucket, buffer, group)
        )
        state.in_flight.append(in_flight)
        if is_last:
            _finish_step(state, group)
    return in_flight.future


def _begin_step(state: PowerSGDState, parameters: Sequence[Tensor]) -> None:
    # A step that has begun and not ended is either of a backward that was aborted, or another's.
    if state.in_flight and state.in_flight[0].parameters[0] is not parameters[0]:
        raise ValueError(
            "one PowerSGDState serves one model: the step of another one has not ended yet; make a "
            "new PowerSGDState for each DDP model"
        )
    state.in_flight.clear()


def _find_bucket(
    state: PowerSGDState,
    buffer: Tensor,
    parameters: Sequence[Tensor],
    group: dist.ProcessGroup,
    is_last: bool,
    is_square: bool,
) -> BucketState:
    rank, rate = state.matrix_approximation_rank, state.min_compression_rate
    stack = state.batch_tensors_with_same_shape
    key = (is_square, buffer.dtype, buffer.device, rank, rate, stack)
    bucket = state.find_bucket(parameters, key)
    if bucket is not None:
        return bucket
    specs = [ParameterSpec.of(parameter) for parameter in parameters]
    plan = make_square_plan(specs, rank) if is_square else make_plan(specs, rank, rate, stack)
    facts = {
        **state.settings(),
        "the hook": "batched_powerSGD_hook" if is_square else "powerSGD_hook",
        "the bucket's parameter shapes": [list(spec.shape) for spec in specs],
        "the bucket's parameter strides": [list(spec.stride) for spec in specs],
        "the bucket's dtype": str(buffer.dtype),
        "whether the bucket is the last": is_last,
        "whether the steps are powersgd.EAGER": state.steps is EAGER,
    }
    require_agreement(facts, group, buffer.device)
    bucket = BucketState(key, tuple(parameters), plan)
    state.add_bucket(bucket, buffer)
    if state.steps is not EAGER:
        rehearse(state, plan, buffer)
    return bucket


def _all_reduce(message: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    if not message.is_sparse and not message.numel():
        return None
    # Divide first: the sum of two finite half-precision numbers need not be finite. As DDP itself
    # does it, so that plain averaging is equal to DDP's to the bit.
    if message.is_sparse:
        message.div_(group.size())
    else:
        message.mul_(1.0 / group.size())
    work: dist.Work | None = dist.all_reduce(message, group=group, async_op=True)
    return work


def _new_future(device: torch.device) -> Future:
    return torch.futures.Future(devices=None if device.type == "cpu" else [device])


def _average(buffer: Tensor, group: dist.ProcessGroup) -> Future:
    # Before compression starts each bucket is done on its own: in the first step under
    # static_graph, DDP does not say which bucket is the last.
    work = _all_reduce(buffer, group)
    if work is None:
        future = _new_future(buffer.device)
        future.set_result(buffer)
        return future
    averaged: Future = work.get_future().then(lambda future: future.value()[0])
    return averaged


def _start_plain(
    parameters: Sequence[Tensor], buffer: Tensor, group: dist.ProcessGroup
) -> _InFlight:
    work = _all_reduce(buffer, group)
    return _InFlight(_new_future(buffer.device), parameters, buffer, buffer, work)


def _start_compressed(
    state: PowerSGDState, bucket: BucketState, buffer: Tensor, group: dist.ProcessGroup
) -> _InFlight:
    compression, message = compress(state, bucket, buffer)
    work = _all_reduce(message, group)
    future = _new_future(buffer.device)
    return _InFlight(future, bucket.parameters, buffer, message, work, compression)


def _finish_step(state: PowerSGDState, group: dist.ProcessGroup) -> None:
    step: list[_InFlight] = list(state.in_flight)
    state.in_flight.clear()
    _wait(step)
    compressed = [(f, f.compression) for f in step if f.compression is not None]
    if compressed:
        finite = _is_finite(step)
        for in_flight, compression in compressed:
            in_flight.message = project(state, compression, in_flight.message, group.size())
            in_flight.work = _all_reduce(in_flight.message, group)
        _wait(step)
        finite = finite & _is_finite(step)
        for in_flight, compression in compressed:
            decompress_if_(finite, state, compression, in_flight.message)
        plans = [compression.bucket.plan for _, compression in compressed]
        state.count(plans, sum(in_flight.buffer.numel() for in_flight, _ in compressed))
    state.positions.is_complete = True
    for in_flight in step:
        in_flight.future.set_result(in_flight.buffer)


def _wait(step: Sequence[_InFlight]) -> None:
    for in_flight in step:
        if in_flight.work is not None:
            in_flight.work.wait()
            in_flight.work = None


def _is_finite(step: Sequence[_InFlight]) -> Tensor:
    # Equal on all ranks, because the sums are. Stays on the device: nothing waits for it there.
    total = torch.zeros((), device=step[0].buffer.device)
    for in_flight in step:
        message = in_flight.message
        values = message._values() if message.is_sparse else message
        total = total + (values * 0).sum(dtype=torch.float32)
    return total == 0

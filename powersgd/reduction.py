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

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from powersgd.agreement import require_agreement
from powersgd.memory import BucketState
from powersgd.plan import ParameterSpec, Plan, batch, make_plan, make_square_plan, unbatch_
from powersgd.state import PowerSGDState
from powersgd.steps import Steps, replace_zero_rows

Future = torch.futures.Future[Tensor]


@dataclass
class _InFlight:
    """A bucket on its way through a step."""

    future: Future
    buffer: Tensor  # what the front end gets back
    message: Tensor  # what the running collective sums up
    work: dist.Work | None
    compression: "_Compression | None" = None  # None: plain averaging


@dataclass
class _Compression:
    """What a compressed bucket carries from one phase of the step to the next, lists by group."""

    bucket: BucketState
    flat: Tensor  # the buffer that the plan describes
    matrices: list[Tensor] = field(default_factory=list)  # gradient plus residual
    masks: list[Tensor | None] = field(default_factory=list)  # 0 where a parameter was unused
    p: list[Tensor] = field(default_factory=list)  # orthonormal
    q_local: list[Tensor] = field(default_factory=list)  # before the all-reduce


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
        A future of ``buffer``, complete when this function has returned for the last bucket.

    Raises:
        RuntimeError: If there is no process group, or a collective fails (a rank died, a timeout).
        ValueError: If the parameters are another model's, or ranks differ in settings or plan.
    """
    group = find_group(state)
    if is_first:
        state.in_flight.clear()  # of a backward that was aborted
    # Hooks run in whatever mode backward was called: with create_graph, under autocast.
    with torch.no_grad(), torch.autocast(buffer.device.type, enabled=False):
        if buffer.layout is torch.sparse_coo:
            state.register(parameters, "sparse", is_first)
            in_flight = _start_plain(buffer, group)
        else:
            state.register(parameters, str(parameters[0].dtype), is_first)
            bucket = _find_bucket(state, buffer, parameters, group, is_last, is_square)
            in_flight = (
                _start_plain(buffer, group)
                if state.is_warming_up()
                else _start_p(state, bucket, buffer, group)
            )
        state.in_flight.append(in_flight)
        if is_last:
            _finish_step(state, group)
    return in_flight.future


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
    }
    require_agreement(facts, group, buffer.device)
    bucket = BucketState(key, tuple(parameters), plan)
    state.add_bucket(bucket, buffer)
    return bucket


def _all_reduce(message: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    if not message.is_sparse and not message.numel():
        return None
    # Divide first: the sum of two finite half-precision numbers need not be finite. A product, as
    # in DDP itself, so that plain averaging is equal to DDP's to the bit.
    message.mul_(1.0 / group.size())
    work: dist.Work | None = dist.all_reduce(message, group=group, async_op=True)
    return work


def _new_future(device: torch.device) -> Future:
    return torch.futures.Future(devices=None if device.type == "cpu" else [device])


def _start_plain(buffer: Tensor, group: dist.ProcessGroup) -> _InFlight:
    return _InFlight(_new_future(buffer.device), buffer, buffer, _all_reduce(buffer, group))


def _start_p(
    state: PowerSGDState, bucket: BucketState, buffer: Tensor, group: dist.ProcessGroup
) -> _InFlight:
    plan = bucket.plan
    state.allocate(bucket, buffer)
    q = state.draw_q(bucket, buffer) if bucket.q is None else bucket.q
    flat = buffer
    if plan.numel > buffer.numel():  # the square matrix has room to spare
        flat = torch.nn.functional.pad(buffer, (0, plan.numel - buffer.numel()))
    compression = _Compression(bucket, flat)
    pieces = []
    for shape in plan.groups:
        matrix = batch(flat, shape)
        mask = _mask_unused(matrix, [bucket.parameters[i] for i in shape.members])
        residual = None if bucket.residual is None else shape.residual_block(bucket.residual)
        p = state.steps.compress_(matrix, residual, shape.q_block(q))
        compression.matrices.append(matrix)
        compression.masks.append(mask)
        pieces.append(p if mask is None else p * mask)
    pieces += [flat[offset : offset + numel] for offset, numel in plan.spans]
    message = _flatten(pieces, buffer)
    work = _all_reduce(message, group)
    return _InFlight(_new_future(buffer.device), buffer, message, work, compression)


def _mask_unused(matrix: Tensor, parameters: Sequence[Tensor]) -> Tensor | None:
    # A parameter that this rank did not use this step gets nothing and keeps its residual: if no
    # rank used it, DDP throws the average away. Its gradient is None, and zero in the bucket.
    unused = [parameter.grad is None for parameter in parameters]
    if not any(unused):
        return None
    has_gradient = [matrix[i].any() if u else matrix.new_ones(()) for i, u in enumerate(unused)]
    return torch.stack(has_gradient).to(matrix.dtype).view(-1, 1, 1)


def _flatten(pieces: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([p.reshape(-1) for p in pieces]) if pieces else like.new_empty(0)


def _finish_step(state: PowerSGDState, group: dist.ProcessGroup) -> None:
    step: list[_InFlight] = list(state.in_flight)
    state.in_flight.clear()
    compressed = [f for f in step if f.compression is not None]
    _wait(step)
    finite = _is_finite(step) if compressed else None
    for in_flight in compressed:
        _start_q(state, in_flight, group)
    _wait(compressed)
    if finite is not None:
        finite = finite & _is_finite(compressed)
        for in_flight in compressed:
            _finish_bucket(state, in_flight, finite)
        plans = [f.compression.bucket.plan for f in compressed if f.compression]
        state.count(plans, sum(f.buffer.numel() for f in compressed))
    state.has_seen_all = True
    for in_flight in step:
        in_flight.future.set_result(in_flight.buffer)


def _wait(step: Sequence[_InFlight]) -> None:
    for in_flight in step:
        if in_flight.work is not None:
            in_flight.work.wait()


def _is_finite(step: Sequence[_InFlight]) -> Tensor:
    # Equal on all ranks, because the sums are. Stays on the device: nothing waits for it there.
    total = torch.zeros((), device=step[0].buffer.device)
    for in_flight in step:
        message = in_flight.message
        values = message._values() if message.is_sparse else message
        total = total + (values * 0).sum(dtype=torch.float32)
    return total == 0


def _start_q(state: PowerSGDState, in_flight: _InFlight, group: dist.ProcessGroup) -> None:
    compression = in_flight.compression
    assert compression is not None
    plan = compression.bucket.plan
    _scatter_plain(plan, in_flight)
    # The message holds the mean of P, where torch adds its epsilon to the sum.
    epsilon = state.orthogonalization_epsilon / group.size()
    factors = [shape.p_block(in_flight.message) for shape in plan.groups]
    compression.p = state.steps.orthogonalize_all(factors, epsilon) if factors else []
    for matrix, p, mask in zip(compression.matrices, compression.p, compression.masks, strict=True):
        q = state.steps.compute_q(matrix, p)
        compression.q_local.append(q if mask is None else q * mask)
    in_flight.message = _flatten(compression.q_local, in_flight.buffer)
    in_flight.work = _all_reduce(in_flight.message, group)


def _scatter_plain(plan: Plan, in_flight: _InFlight) -> None:
    position = plan.p_numel
    for offset, numel in plan.spans:
        in_flight.buffer[offset : offset + numel] = in_flight.message[position : position + numel]
        position += numel


def _finish_bucket(state: PowerSGDState, in_flight: _InFlight, finite: Tensor) -> None:
    compression = in_flight.compression
    assert compression is not None
    bucket = compression.bucket
    for i, shape in enumerate(bucket.plan.groups):
        matrix = compression.matrices[i]
        residual = None if bucket.residual is None else shape.residual_block(bucket.residual)
        factors = (compression.p[i], compression.q_local[i], shape.q_block(in_flight.message))
        if finite.is_cpu and finite:  # asking a GPU would make the host wait
            state.steps.decompress_(matrix, residual, *factors)
        else:
            _decompress_if_(finite, state.steps, matrix, residual, *factors)
        unbatch_(compression.flat, shape, matrix)
    if compression.flat is not in_flight.buffer:
        in_flight.buffer.copy_(compression.flat[: in_flight.buffer.numel()])
    if bucket.q is not None and bucket.plan.groups:
        _update_q(state, bucket, in_flight.message, finite)


def _decompress_if_(
    finite: Tensor,
    steps: Steps,
    matrix: Tensor,
    residual: Tensor | None,
    p: Tensor,
    q_local: Tensor,
    q: Tensor,
) -> None:
    fresh = None if residual is None else torch.empty_like(residual)
    steps.decompress_(matrix, fresh, p, q_local, torch.where(finite, q, math.nan))
    if fresh is not None and residual is not None:
        torch.where(finite, fresh, residual, out=residual)


def _update_q(state: PowerSGDState, bucket: BucketState, q: Tensor, finite: Tensor) -> None:
    assert bucket.q is not None
    assert bucket.spare is not None
    factors = [shape.q_block(q) for shape in bucket.plan.groups]
    units = state.steps.orthogonalize_all(factors, state.orthogonalization_epsilon)
    # A dead row gets another random direction each step; half of its last one stays in it, so that
    # a parameter that was unused for a step keeps its warm start.
    fresh = (bucket.q + torch.roll(bucket.spare, state.iter)) / 2
    rows = [
        replace_zero_rows(unit, shape.q_block(fresh))
        for unit, shape in zip(units, bucket.plan.groups, strict=True)
    ]
    torch.where(finite, _flatten(rows, q), bucket.q, out=bucket.q)

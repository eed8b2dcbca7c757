"""The hooks for ``DistributedDataParallel.register_comm_hook``."""

# DDP compares the annotations of a hook with the real classes: no `from __future__ import
# annotations` in this file.

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from powersgd.agreement import require_agreement
from powersgd.arrival import Arrival
from powersgd.collectives import Collectives, ProcessGroupCollectives, find_collectives
from powersgd.names import named_parameters
from powersgd.owner import find_new_ddp
from powersgd.reduction import finish_step, reduce_bucket
from powersgd.state import PowerSGDState


def powerSGD_hook(  # noqa: N802 (torch's name)
    state: PowerSGDState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients with PowerSGD, parameter by parameter.

    Drop-in for the hook of the same name in
    ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook``. Until
    ``state.start_powerSGD_iter`` it averages plainly, equal to DDP without a hook.

    Args:
        state: Settings and memory; one for each DDP model.
        bucket: The bucket that is ready.

    Returns:
        A future of the averaged gradients, complete once compression has started when the step's
        last bucket was handed in, before that when the bucket is averaged; None in a graph, see
        `powersgd.traced`.
        If any rank had an inf or a NaN in this step, all compressed gradients are NaN on all ranks,
        and ``state`` is as it was; likewise if a float16 residual (on CPU, of any dtype) would
        become so large that later steps overflow.

    Raises:
        RuntimeError: If there is no process group, a collective fails (a rank died, a timeout), or
            DDP's ``python_reducer`` is used without compiled autograd.
        TypeError: If ``state`` is not a `powersgd.PowerSGDState`.
        ValueError: On all ranks, if the state serves another model, if its process group is not
            DDP's, if it holds another rank's residuals or is a copy of another model's state, or if
            ranks differ in their settings, models or kinds of files.

    References:
        Algorithms 1 and 2 of Vogels et al. (2019), arXiv:1905.13727.

    Example:
        >>> state = PowerSGDState(process_group=None, start_powerSGD_iter=10)
        >>> ddp_model.register_comm_hook(state, powerSGD_hook)  # doctest: +SKIP
    """
    return run_hook(state, bucket)


def batched_powerSGD_hook(  # noqa: N802 (torch's name)
    state: PowerSGDState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients with PowerSGD, the whole bucket as one square matrix.

    Fewer, larger operations than `powerSGD_hook`, but rows and columns mean nothing here: usually a
    much lower accuracy, above all for a rank over 1. Every bucket is compressed;
    ``min_compression_rate`` plays no part.

    Args:
        state: Settings and memory; one for each DDP model.
        bucket: The bucket that is ready.

    Returns:
        See `powerSGD_hook`.

    Raises:
        RuntimeError: See `powerSGD_hook`.
        TypeError: See `powerSGD_hook`.
        ValueError: See `powerSGD_hook`.

    Example:
        >>> state = PowerSGDState(process_group=None, start_powerSGD_iter=10)
        >>> ddp_model.register_comm_hook(state, batched_powerSGD_hook)  # doctest: +SKIP
    """
    return run_hook(state, bucket, is_square=True)


@dataclass
class _Owner:
    """The DDP model that a state serves.

    Attributes:
        ddp: The model; None if it was not found among Python's objects.
        address: Where the first bucket of its last step lay; 0 if that says nothing.
        seen: Parameters whose buckets it has handed in.
        former: All models so far, this one included.
        group: The model's process group. Held so that Python is the last to let go of it: torch
            waits for the group's threads then, which may need Python's lock, and DDP's C++ code
            would not give it to them.
    """

    ddp: weakref.ref[DistributedDataParallel] | None = None
    address: int = -1
    seen: set[torch.Tensor] = field(default_factory=set)
    former: weakref.WeakSet[DistributedDataParallel] = field(default_factory=weakref.WeakSet)
    group: dist.ProcessGroup | None = None

    def find(self) -> DistributedDataParallel | None:
        return None if self.ddp is None else self.ddp()

    def is_gone(self) -> bool:
        return self.ddp is not None and self.ddp() is None


def run_hook(
    state: PowerSGDState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
    *,
    is_square: bool = False,
    reduce: Callable[[PowerSGDState, Arrival], torch.futures.Future[torch.Tensor]] = reduce_bucket,
) -> torch.futures.Future[torch.Tensor]:
    """Hand in a bucket of DDP's: what all hooks have in common.

    Args:
        state: Settings and memory.
        bucket: The bucket that is ready.
        is_square: View the whole bucket as one square matrix.
        reduce: Averages the bucket.

    Returns:
        See `powerSGD_hook`.

    Raises:
        RuntimeError: See `powerSGD_hook`.
        TypeError: See `powerSGD_hook`.
    """
    if isinstance(bucket, tuple):  # from DDP's python_reducer, which ignores what is returned
        if not isinstance(state, PowerSGDState):
            raise _wrong_type(state)
        if is_square:
            raise RuntimeError("batched_powerSGD_hook needs DDP's buckets: use powerSGD_hook")
        # Not above: it needs the compiler, whose import takes a second and pulls in numpy.
        from powersgd.traced import reduce_parameter

        reduce_parameter(state, *bucket)
        return None  # type: ignore[return-value]
    if not isinstance(state, PowerSGDState):
        _refuse(state, bucket)
    ddp, is_new = _find_ddp(state, bucket)
    arrival = _describe(state, bucket, ddp, is_new=is_new, is_square=is_square)
    if arrival.is_first and ddp is not None and ddp.skip_all_reduce_unused_params:
        _end_with_backward(state)
    future = reduce(state, arrival)
    _remember(state, bucket, ddp, is_first=arrival.is_first)
    if arrival.is_last:
        _close(state)
        state.count_iteration()
    return future


def _find_ddp(
    state: PowerSGDState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> tuple[DistributedDataParallel | None, bool]:
    # And whether this step is its first. The search through all objects is dear: only if the model
    # is gone, or a step begins in other memory: DDP has built new buckets, or it is a new DDP.
    owner: _Owner = state.owner or _Owner()
    ddp, address = owner.find(), _address(bucket)
    is_joined = ddp is not None and not _is_in_backward()
    is_later = bucket.index() > state.last_index
    if is_later or is_joined or (address == owner.address and not owner.is_gone()):
        return ddp, False
    new = find_new_ddp(state, bucket.parameters()[0], owner.former)
    if ddp is None and new is None:
        return None, not state.positions.knows(bucket.parameters())
    # Without an address, ranks may notice in different steps, when their old model is collected.
    is_noticed_by_all = state.owner is None or address != 0
    return new or ddp, new is not None and is_noticed_by_all


def _describe(
    state: PowerSGDState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
    ddp: DistributedDataParallel | None,
    *,
    is_new: bool,
    is_square: bool,
) -> Arrival:
    # In the first step of a static graph, when the whole backward is over, DDP gives every bucket
    # the number 0 and does not say which is the last: the one that completes the model.
    parameters, is_static = bucket.parameters(), ddp is not None and ddp.static_graph
    is_known = state.owner is not None and ddp is state.owner.find()
    seen = state.owner.seen if is_known else set()
    is_unnumbered = is_static and not seen.issuperset(parameters)
    is_first = bucket.index() <= state.last_index
    is_complete = is_unnumbered and seen.union(parameters).issuperset(_trainable(ddp))
    return Arrival(
        bucket.buffer(),
        parameters,
        None if ddp is None else partial(named_parameters, ddp),
        _find_collectives(state.process_group, ddp),
        bucket.index(),
        # A backward that was aborted may have left its last bucket's number.
        is_first=is_new or (state.last_index == math.inf if is_unnumbered else is_first),
        is_last=bucket.is_last() or is_complete,
        is_new=is_new,
        is_square=is_square,
        may_be_unused=ddp is None or is_static or ddp.find_unused_parameters,
    )


def _find_collectives(process_group: Any, ddp: DistributedDataParallel | None) -> Collectives:
    # DDP's own, so that a state that was given another group is an error and not a hang.
    if ddp is None or isinstance(process_group, Collectives):
        return find_collectives(process_group)
    return ProcessGroupCollectives(ddp.process_group)


def _trainable(ddp: DistributedDataParallel | None) -> list[torch.Tensor]:
    return [] if ddp is None else [p for p in ddp._module_parameters if p.requires_grad]


def _remember(
    state: PowerSGDState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
    ddp: DistributedDataParallel | None,
    *,
    is_first: bool,
) -> None:
    # Only now, because a bucket that was refused leaves everything as it was.
    owner: _Owner | None = state.owner
    if owner is None or owner.is_gone() or ddp is not owner.find():
        former = weakref.WeakSet() if owner is None else owner.former
        state.owner = _Owner(former=former)
        if ddp is not None:
            state.owner.ddp, state.owner.group = weakref.ref(ddp), ddp.process_group
            former.add(ddp)
    if is_first:
        state.owner.address = _address(bucket)
    state.owner.seen.update(bucket.parameters())
    state.last_index = bucket.index()


def _address(bucket: dist.GradBucket) -> int:  # type: ignore[name-defined]
    # Sparse gradients, and a hook wrapped around ours, bring another buffer in each step.
    buffer = bucket.buffer()
    is_ddps_own = not buffer.is_sparse and buffer.dtype == bucket.parameters()[0].dtype
    return buffer.data_ptr() if is_ddps_own else 0


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _wrong_type(state: object) -> TypeError:
    return TypeError(f"the hook's state must be a powersgd.PowerSGDState, got {type(state)!r}")


def _refuse(state: object, bucket: dist.GradBucket) -> NoReturn:  # type: ignore[name-defined]
    def complain() -> dict[str, str]:
        raise _wrong_type(state)

    ddp = find_new_ddp(state, bucket.parameters()[0], ())
    require_agreement(complain, _find_collectives(None, ddp), bucket.buffer().device)
    raise AssertionError  # require_agreement has raised


def _close(state: PowerSGDState) -> None:
    state.positions.is_complete = state.owner.find() is None
    state.last_index = math.inf


def _end_with_backward(state: PowerSGDState) -> None:
    # DDP leaves out buckets that nobody used, also the last one. Its own callback, which waits for
    # the averages, comes later.
    def end() -> None:
        if state.last_index != math.inf:
            finish_step(state)
            _close(state)
            state.count_iteration()

    if _is_in_backward():  # a rank that has joined hands in all buckets
        Variable._execution_engine.queue_callback(end)

"""The hooks for ``DistributedDataParallel.register_comm_hook``."""

# DDP compares the annotations of a hook with the real classes: no `from __future__ import
# annotations` in this file.

import gc
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from powersgd.reduction import reduce_bucket, require_same_group
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
        A future of the averaged gradients, complete once the step's last bucket was handed in;
        None in a graph, see `powersgd.traced`.
        If any rank had an inf or a NaN in this step, all compressed gradients are NaN on all ranks,
        and ``state`` is as it was; likewise if a float16 residual (on CPU, of any dtype) would
        become so large that later steps overflow.

    Raises:
        RuntimeError: If there is no process group, a collective fails (a rank died, a timeout), or
            DDP's ``python_reducer`` is used without compiled autograd.
        TypeError: If ``state`` is not a `powersgd.PowerSGDState`.
        ValueError: If the state serves another model, if its process group is not DDP's, or if
            ranks differ in their settings or models.

    References:
        Algorithms 1 and 2 of Vogels et al. (2019), arXiv:1905.13727.

    Example:
        >>> state = PowerSGDState(process_group=None, start_powerSGD_iter=10)
        >>> ddp_model.register_comm_hook(state, powerSGD_hook)  # doctest: +SKIP
    """
    return _run(state, bucket, is_square=False)


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
    return _run(state, bucket, is_square=True)


def _run(
    state: PowerSGDState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
    is_square: bool,
) -> torch.futures.Future[torch.Tensor]:
    if not isinstance(state, PowerSGDState):
        raise TypeError(f"the hook's state must be a powersgd.PowerSGDState, got {type(state)!r}")
    if isinstance(bucket, tuple):  # from DDP's python_reducer, which ignores what is returned
        if is_square:
            raise RuntimeError("batched_powerSGD_hook needs DDP's buckets: use powerSGD_hook")
        # Not above: it needs the compiler, whose import takes a second and pulls in numpy.
        from powersgd.traced import reduce_parameter

        reduce_parameter(state, *bucket)
        return None  # type: ignore[return-value]
    parameters = bucket.parameters()
    is_first = bucket.index() == 0
    if is_first and not state.positions.is_complete:
        _require_group_of_ddp(state, parameters)
    future = reduce_bucket(
        state,
        bucket.buffer(),
        parameters,
        is_first=is_first,
        is_last=bucket.is_last(),
        is_square=is_square,
    )
    state.maybe_increase_iter(bucket)
    return future


def _require_group_of_ddp(state: PowerSGDState, parameters: Sequence[Tensor]) -> None:
    # DDP does not tell a hook which group it averages over: look for the instance, once in a run.
    for thing in gc.get_objects():
        if not issubclass(type(thing), DistributedDataParallel):
            continue
        if any(parameter is parameters[0] for parameter in thing.parameters()):
            if thing.static_graph and state.start_powerSGD_iter == 0:
                raise ValueError(
                    "start_powerSGD_iter is 0, but must be >= 1 with DDP's static_graph, whose "
                    "first step does not say which bucket is the last"
                )
            require_same_group(state, thing.process_group)

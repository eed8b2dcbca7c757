"""The collectives, and what is said when one fails."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor


def start_mean_(tensor: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Start to replace a tensor by its mean over the ranks.

    Args:
        tensor: Dense or sparse, of any shape; equal in shape on all ranks.
        group: The process group, all of whose ranks make this call.

    Returns:
        The running all-reduce, for `wait`; None if there is nothing to send.

    Raises:
        RuntimeError: If the group has failed; see `explained`.
    """
    if not tensor.is_sparse and not tensor.numel():
        return None
    # Divide first: the sum of two finite half-precision numbers need not be finite. As DDP itself
    # does it, so that plain averaging is equal to DDP's to the bit.
    if tensor.is_sparse:
        tensor.div_(group.size())
    else:
        tensor.mul_(1.0 / group.size())
    with explained():
        work: dist.Work | None = dist.all_reduce(tensor, group=group, async_op=True)
    return work


def wait(work: dist.Work | None) -> None:
    """Wait for what `start_mean_` has started; on a GPU, make the stream wait.

    Args:
        work: The running all-reduce, if any.

    Raises:
        RuntimeError: If the all-reduce has failed; see `explained`.
    """
    if work is not None:
        with explained():
            work.wait()


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Gather a tensor from all ranks.

    Args:
        tensor: Equal in shape and dtype on all ranks.
        group: The process group, all of whose ranks make this call.

    Returns:
        Every rank's tensor.

    Raises:
        RuntimeError: If the group has failed; see `explained`.
    """
    gathered = [torch.empty_like(tensor) for _ in range(group.size())]
    with explained():
        dist.all_gather(gathered, tensor, group=group)
    return gathered


@contextmanager
def explained() -> Iterator[None]:
    """Say in the error of a collective what it means and what to do.

    Raises:
        RuntimeError: Of the type that the backend raised, such as ``DistBackendError``.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # Some ranks may have had their answer before the group failed: they are a step ahead.
        raise type(error)(
            "a collective of PowerSGD has failed, mostly because a rank died, left the group or "
            "was too slow. Load the last checkpoint on all ranks before you go on, because some "
            f"may have ended a step that others have not. The backend says: {error}"
        ) from error

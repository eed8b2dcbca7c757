"""The one seam to a communication backend, and what is said when a collective fails."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

if not dist.is_initialized():
    # The default arguments of its functions hold the default group of the moment, for ever. DDP
    # imports it when it wraps a model: `destroy_process_group` would no longer end gloo's threads,
    # and one that frees a tensor while Python ends aborts the process.
    import torch.distributed.nn.functional  # noqa: F401


class Work(Protocol):
    """A collective that is under way."""

    def wait(self) -> Any:
        """Wait until it is done; on a GPU, make the current stream wait."""


class Collectives(ABC):
    """What PowerSGD asks of a communication backend.

    Another backend is a subclass of a few lines, which the state gets as its ``process_group``.
    All members make the same calls in the same order; a backend with several threads of its own
    must keep that order.

    Example:
        >>> class Alone(Collectives):
        ...     name = "alone"
        ...     def rank(self): return 0
        ...     def size(self): return 1
        ...     def start_mean_(self, tensor): return None
        ...     def all_gather(self, tensor): return [tensor]
        >>> find_collectives(Alone()).members()
        [0]
    """

    name: str  # equal on all members: one of the facts that they compare

    @abstractmethod
    def rank(self) -> int:
        """Return this member's number, by which checkpoints know whose residuals are whose."""

    @abstractmethod
    def size(self) -> int:
        """Return the number of members."""

    @abstractmethod
    def start_mean_(self, tensor: Tensor) -> Work | None:
        """Start to replace a tensor by its mean over the members.

        Args:
            tensor: Dense or sparse, of any shape, not empty; equal in shape on all members.

        Returns:
            What is under way; None if it is done.
        """

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all members, which are equal in shape and dtype, by member."""

    def members(self) -> list[int]:
        """Return the numbers of all members, in the order of `all_gather`."""
        return list(range(self.size()))

    def average_(self, tensor: Tensor) -> torch.futures.Future[Tensor]:
        """Replace a tensor by its mean over the members.

        Args:
            tensor: See `start_mean_`.

        Returns:
            A future of the tensor.
        """
        wait(self.start_mean_(tensor))
        return completed(tensor)


class ProcessGroupCollectives(Collectives):
    """The collectives of ``torch.distributed``, asynchronous where they can be.

    Args:
        group: The process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    @property
    def name(self) -> str:  # type: ignore[override]  # noqa: D102
        return str(self.group.group_name)

    def rank(self) -> int:
        """Return this rank in the world."""
        return dist.get_rank()

    def size(self) -> int:
        """Return the number of ranks of the group."""
        return self.group.size()

    def members(self) -> list[int]:
        """Return the ranks of the world that are in the group.

        Raises:
            KeyError: If the group has been destroyed.
        """
        return dist.get_process_group_ranks(self.group)

    def start_mean_(self, tensor: Tensor) -> dist.Work:
        """Start an all-reduce."""
        # Divide first: the sum of two finite half-precision numbers need not be finite. As DDP
        # itself does it, so that plain averaging is equal to DDP's to the bit.
        if tensor.is_sparse:
            tensor.div_(self.size())
        else:
            tensor.mul_(1.0 / self.size())
        work: dist.Work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return work

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather from all ranks of the group."""
        gathered = [torch.empty_like(tensor) for _ in range(self.size())]
        dist.all_gather(gathered, tensor, group=self.group)
        return gathered

    def average_(self, tensor: Tensor) -> torch.futures.Future[Tensor]:
        """Start an all-reduce; its own future, so that no thread of Python has to wait."""
        averaged: torch.futures.Future[Tensor] = self.start_mean_(tensor).get_future().then(_first)
        return averaged


def find_collectives(process_group: Any) -> Collectives:
    """Return the collectives of a process group.

    Args:
        process_group: A process group, None for the default one, or `Collectives`.

    Returns:
        The collectives.

    Raises:
        RuntimeError: If there is no default group.
    """
    if isinstance(process_group, Collectives):
        return process_group
    if not dist.is_initialized():
        raise RuntimeError(
            "PowerSGD needs a process group: call torch.distributed.init_process_group first"
        )
    group: Any = dist.group.WORLD if process_group is None else process_group
    return ProcessGroupCollectives(group)


def start_mean_(tensor: Tensor, collectives: Collectives) -> Work | None:
    """Start to replace a tensor by its mean over the members.

    Args:
        tensor: Dense or sparse, of any shape; equal in shape on all members.
        collectives: The backend, all of whose members make this call.

    Returns:
        What is under way, for `wait`; None if there is nothing to wait for.

    Raises:
        RuntimeError: If the backend has failed; see `explained`.
    """
    if not tensor.is_sparse and not tensor.numel():
        return None
    with explained():
        return collectives.start_mean_(tensor)


def wait(work: Work | None) -> None:
    """Wait for what `start_mean_` has started; on a GPU, make the stream wait.

    Args:
        work: What is under way, if anything.

    Raises:
        RuntimeError: If it has failed; see `explained`.
    """
    if work is not None:
        with explained():
            work.wait()


def average_(tensor: Tensor, collectives: Collectives) -> torch.futures.Future[Tensor]:
    """Replace a tensor by its mean over the members.

    Args:
        tensor: See `start_mean_`.
        collectives: The backend, all of whose members make this call.

    Returns:
        A future of the tensor, on a GPU for the stream that waits for it.

    Raises:
        RuntimeError: If the backend has failed; see `explained`. Later, from the future, too.
    """
    if not tensor.is_sparse and not tensor.numel():
        return completed(tensor)
    with explained():
        return collectives.average_(tensor)


def new_future(device: torch.device) -> torch.futures.Future[Tensor]:
    """Make a future of a tensor on this device."""
    return torch.futures.Future(devices=None if device.type == "cpu" else [device])


def completed(tensor: Tensor) -> torch.futures.Future[Tensor]:
    """Make a future that has this result."""
    future = new_future(tensor.device)
    future.set_result(tensor)
    return future


def _first(future: torch.futures.Future[list[Tensor]]) -> Tensor:
    with explained():
        return future.value()[0]


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

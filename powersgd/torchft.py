"""The front end for torchft: replicas come and go, and a step counts only if it is committed."""

# DDP compares the annotations of a hook with the real classes: no `from __future__ import
# annotations` in this file.

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchft import Manager
from torchft.process_group import ProcessGroupDummy

from powersgd.allocation import allocate
from powersgd.arrival import Arrival, meet
from powersgd.collectives import Collectives, Work, find_collectives, start_mean_, wait
from powersgd.ddp import run_hook
from powersgd.memory import BucketState
from powersgd.reduction import reduce_bucket
from powersgd.saving import COUNTERS, SHARED
from powersgd.state import PowerSGDState


class ManagerCollectives(Collectives):
    """The all-reduce of torchft's manager, which reports an error and does not raise it.

    Replicas cannot be asked for what they have set: one that heals compares its settings with what
    it is sent.

    Args:
        manager: The manager.
    """

    name = "torchft"

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    def rank(self) -> int:
        """Return no rank: a replica's residuals may go to any other."""
        return SHARED

    def size(self) -> int:
        """Return the number of replicas that take part in this step."""
        return max(1, int(self._manager.num_participants()))

    def start_mean_(self, tensor: Tensor) -> Work:
        """Start the manager's all-reduce; what a replica that heals brings counts as zero."""
        work: Work = self._manager.allreduce(tensor)
        return work

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return this replica's tensor alone."""
        return [tensor]


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torchft's DDP, with PowerSGD between the replicas.

    In place of ``torchft.DistributedDataParallel``. All replicas must use the same parameters in a
    step, as there.

    A replica that heals gets the others' Q and their mean residual, by one all-reduce of that size
    at the start of the first step in which it takes part. Steps that are not committed leave no
    trace in the state, which needs a second buffer of the size of its residuals for this; before
    you save the state yourself, call ``model.replica.settle()``.

    Args:
        manager: The manager; the state gets its all-reduce in place of a process group.
        module: The model.
        state: Settings and memory; one for each model, with the same settings on all replicas.
        **kwargs: For ``torch.nn.parallel.DistributedDataParallel``.

    Raises:
        TypeError: If ``state`` is not a `powersgd.PowerSGDState`.

    References:
        ``torchft.DistributedDataParallel``.

    Example:
        >>> model = DistributedDataParallel(manager, model, state)  # doctest: +SKIP
        >>> optimizer = torchft.Optimizer(manager, optimizer)  # doctest: +SKIP
    """

    def __init__(
        self, manager: Manager, module: nn.Module, state: PowerSGDState, **kwargs: Any
    ) -> None:
        if not isinstance(state, PowerSGDState):
            raise TypeError(f"state must be a powersgd.PowerSGDState, got {type(state)!r}")
        # As in torchft: the manager does what the group of DDP would do, and buckets that were
        # built anew would not be those of a replica that has just started.
        super().__init__(
            module,
            process_group=ProcessGroupDummy(0, 1),
            find_unused_parameters=True,
            **kwargs,
        )
        state.process_group = ManagerCollectives(manager)
        self.replica = Replica(manager, state)
        self.register_comm_hook(self.replica, _hook)


def _hook(
    replica: "Replica",
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    return run_hook(replica.state, bucket, reduce=replica.reduce)


class Replica:
    """A state whose steps count once the manager has committed them.

    Args:
        manager: The manager, from which it learns whether a step was committed, and that this
            replica has to heal.
        state: The state.
        key: Under which the manager sends settings to replicas that heal.
    """

    def __init__(self, manager: Manager, state: PowerSGDState, key: str = "powersgd") -> None:
        self.state, self._manager = state, manager
        self._undo: _Undo | None = None  # of the last step, until it is known to be committed
        self._step = -1  # the manager's number of the step that was begun last
        self._took_part = False
        self._is_new = False  # its memory is nothing that the others know
        self._new_share = 0.0  # of those that take part
        manager.register_state_dict_fn(key, self._heal, self._teach)

    def settle(self) -> None:
        """Undo the last step if it was not committed; call it before you save the state."""
        if self._undo is None:
            return
        if self._manager.current_step() == self._step:
            self._undo.restore()
        elif self._took_part:
            self._is_new = False
        self._undo = None

    def reduce(self, state: PowerSGDState, arrival: Arrival) -> torch.futures.Future[Tensor]:
        """Average a bucket as `powersgd.reduction.reduce_bucket` does, in a step that may fail."""
        if arrival.is_first:
            self._begin_step(arrival.buffer.device)
        bucket = meet(state, arrival)
        if bucket is not None and self._undo is not None:
            self._undo.add(bucket)
            if 0 < self._new_share < 1 and not state.is_warming_up():
                self._share_(bucket, arrival)
        return reduce_bucket(state, replace(arrival, is_new=False))

    def _begin_step(self, device: torch.device) -> None:
        state, manager = self.state, self._manager
        manager.wait_quorum()
        self.settle()
        self._step, self._took_part = manager.current_step(), manager.is_participating()
        # One that heals, or a spare, leaves gradients in its residual that it does not bring.
        self._is_new = self._is_new or not self._took_part
        self._undo = _Undo(state)
        count = 0 if self._is_new else state.iter
        header = torch.tensor([self._is_new, count], dtype=torch.float64, device=device)
        wait(start_mean_(header, find_collectives(state.process_group)))
        self._new_share, count = header.tolist()
        if self._new_share < 1 and self._is_new:
            self._set_iter(round(count / (1 - self._new_share)))

    def _set_iter(self, count: int) -> None:
        self.state.iter = count
        if self.state.agreed is not None:
            self.state.agreed = self.state.agreed._replace(iter=count)

    def _share_(self, bucket: BucketState, arrival: Arrival) -> None:
        # Those that are new bring zeros and take all; the others take Q, so that it is equal on all
        # to the bit, and keep their residuals, whose mean stays what it was.
        state = self.state
        allocate(state, bucket, arrival.buffer)
        scale = state.loss_scale / bucket.settle_scale()
        factors = [factor for factor in (bucket.q, bucket.spare) if factor is not None]
        residuals = [] if bucket.residual is None else [bucket.residual]
        if not factors and not residuals:
            return
        message = torch.cat([*factors, *(residual * scale for residual in residuals)])
        wide = message.to(torch.promote_types(message.dtype, torch.float32))
        wide = torch.zeros_like(wide) if self._is_new else wide
        wait(start_mean_(wide, arrival.collectives))
        wide /= 1 - self._new_share
        means = torch.split(wide, [part.numel() for part in (*factors, *residuals)])
        taken = [*factors, *(residuals if self._is_new else ())]
        for part, mean in zip(taken, means, strict=False):
            part.copy_(mean)
        if self._is_new:
            bucket.loss_scale = state.loss_scale

    def _teach(self) -> dict[str, Any]:
        # In the thread of the quorum, before this replica's next step can begin.
        self.settle()
        return self.state.in_force._asdict()

    def _heal(self, theirs: dict[str, Any]) -> None:
        mine = self.state.in_force._asdict()
        for name, value in theirs.items():
            if name != "iter" and value != mine[name]:
                raise ValueError(
                    f"this replica has set {name} to {mine[name]!r}, but those that it heals from "
                    f"to {value!r}; it must be the same on all replicas"
                )
        self._undo, self._is_new = None, True
        if self._step != self._manager.current_step():  # else it has counted this step already
            self._set_iter(theirs["iter"])


class _Undo:
    """What a state was before a step."""

    def __init__(self, state: PowerSGDState) -> None:
        self._state, self._agreed = state, state.agreed
        self._counters = {name: getattr(state, name) for name in COUNTERS}
        self._held: list[tuple[BucketState, dict[str, Any]]] = []

    def add(self, bucket: BucketState) -> None:
        """Hold what a bucket carries over, which is about to change."""
        held = {name: getattr(bucket, name) for name in ("residual", "q", "spare")}
        kept = {name: None if t is None else t.clone() for name, t in held.items()}
        owed = {i: None if t is None else t.clone() for i, t in bucket.owed.items()}
        self._held.append((bucket, {**kept, "owed": owed, "loss_scale": bucket.settle_scale()}))

    def restore(self) -> None:
        """Make the state what it was."""
        for bucket, held in self._held:
            for name, value in {**held, "rescaled": None}.items():
                setattr(bucket, name, value)
        for name, value in self._counters.items():
            setattr(self._state, name, value)
        self._state.agreed, self._state.change = self._agreed, None

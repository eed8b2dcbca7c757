"""What the parameters of one bucket carry over from step to step."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from powersgd.plan import Plan


@dataclass
class BucketState:
    """What the parameters of one bucket carry over to the next step, in flat tensors.

    The plan says where each parameter's part lies. ``None`` until the first compressed step, and
    for what the settings switch off.

    Attributes:
        key: The settings that the plan follows; another key asks for a new plan.
        parameters: The bucket's parameters, in the order of its buffer.
        plan: How the bucket is sent.
        residual: Shape ``(plan.residual_numel,)``, this rank's own.
        q: Shape ``(plan.q_numel,)``: the next step's Q, no row zero, equal on all ranks.
        spare: Shape of ``q``: where a new row comes from when one has died.
        owed: By index of a parameter that is no longer compressed, flat, what is left of its
            residual; the next plain average takes it up. On CPU None
            once nothing is left: the entry stays, equal on all ranks, which mark the parameter's
            gradient in a bad step.
    """

    key: tuple[Any, ...]
    parameters: tuple[Tensor, ...]
    plan: Plan
    residual: Tensor | None = None
    q: Tensor | None = None
    spare: Tensor | None = None
    owed: dict[int, Tensor | None] = field(default_factory=dict)

    def is_empty(self) -> bool:
        """Tell whether nothing has to be carried over."""
        return self.residual is None and self.q is None and not self.owed


def residual_slice(bucket: BucketState, parameter: Tensor) -> Tensor | None:
    """View a parameter's residual, flat, in the order of its memory; None if it has none."""
    index = _index(bucket, parameter)
    where = bucket.plan.residual_slices[index]
    if where is None:
        return bucket.owed.get(index)
    return None if bucket.residual is None else bucket.residual.narrow(0, *where)


def _index(bucket: BucketState, parameter: Tensor) -> int:
    return next(i for i, p in enumerate(bucket.parameters) if p is parameter)


def _q_slice(bucket: BucketState, flat: Tensor | None, parameter: Tensor) -> Tensor | None:
    for group in bucket.plan.groups if flat is not None else ():
        for i, member in enumerate(group.members):
            if bucket.parameters[member] is parameter:
                return group.q_block(flat)[i]  # type: ignore[arg-type]
    return None


def carry_over(parameter: Tensor, old: BucketState, new: BucketState) -> None:
    """Copy what a parameter has in its old bucket into its new one, Q only if the shapes agree."""
    residual, index = residual_slice(old, parameter), _index(new, parameter)
    was_owed = residual is not None or _index(old, parameter) in old.owed
    if was_owed and new.plan.residual_slices[index] is None:
        new.owed[index] = None if residual is None else residual.clone()
    pairs = [
        (residual, residual_slice(new, parameter)),
        (_q_slice(old, old.q, parameter), _q_slice(new, new.q, parameter)),
        (_q_slice(old, old.spare, parameter), _q_slice(new, new.spare, parameter)),
    ]
    for source, target in pairs:
        if source is not None and target is not None and source.shape == target.shape:
            target.copy_(source)

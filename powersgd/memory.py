"""What the parameters of one bucket carry over from step to step."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from powersgd.layout import ParameterSpec, flatten, unflatten
from powersgd.plan import Plan


@dataclass
class Carried:
    """What one parameter carries over to the next step, apart from any bucket.

    Attributes:
        residual: Shape of the parameter, so that it may come to lie otherwise in memory.
        q: Shape ``(r, m)``; of parameters that share one matrix, only the first has it.
        spare: Shape of ``q``.
        loss_scale: By which the residual is multiplied.
        is_owed: Whether the parameter is no longer compressed: the next plain average takes its
            residual up, if anything is left of it.
        is_square: Whether Q belongs to a whole bucket as one square matrix.
    """

    residual: Tensor | None = None
    q: Tensor | None = None
    spare: Tensor | None = None
    loss_scale: float = 1.0
    is_owed: bool = False
    is_square: bool = False

    def is_empty(self) -> bool:
        """Tell whether nothing has to be carried over."""
        return self.residual is None and self.q is None and not self.is_owed


@dataclass
class BucketState:
    """What the parameters of one bucket carry over to the next step, in flat tensors.

    The plan says where each parameter's part lies. ``None`` until the first compressed step, and
    for what the settings switch off.

    Attributes:
        key: The settings that the plan follows; another key asks for a new plan.
        parameters: The bucket's parameters, in the order of its buffer.
        specs: How each of them lies in the buffer.
        plan: How the bucket is sent.
        residual: Shape ``(plan.residual_numel,)``, this rank's own.
        q: Shape ``(plan.q_numel,)``: the next step's Q, no row zero, equal on all ranks.
        spare: Shape of ``q``: where a new row comes from when one has died.
        owed: By index of a parameter that is no longer compressed, flat, what is left of its
            residual; the next plain average takes it up. On CPU None
            once nothing is left: the entry stays, equal on all ranks, which mark the parameter's
            gradient in a bad step.
        loss_scale: By which residuals are multiplied, as the gradients were that left them.
        rescaled: The loss scale of the last step if it was another one, and whether that step was
            good, so that its residuals have it. Not yet asked, because the answer is on its way.
        scale: Of a bucket in a graph, which cannot wait for an answer, the loss scale; 0-dim.
    """

    key: tuple[Any, ...]
    parameters: tuple[Tensor, ...]
    specs: tuple[ParameterSpec, ...]
    plan: Plan
    residual: Tensor | None = None
    q: Tensor | None = None
    spare: Tensor | None = None
    owed: dict[int, Tensor | None] = field(default_factory=dict)
    loss_scale: float = 1.0
    rescaled: tuple[float, Tensor] | None = None
    scale: Tensor | None = None

    def settle_scale(self) -> float:
        """Return the loss scale of the residuals; waits for the last step only if it changed."""
        if self.rescaled is not None:
            scale, was_good = self.rescaled
            self.loss_scale = scale if was_good else self.loss_scale
            self.rescaled = None
        return self.loss_scale if self.scale is None else float(self.scale)

    def carried(self, parameter: Tensor) -> Carried:
        """Return what a parameter of this bucket carries over, as views."""
        index = self._index(parameter)
        where, scale = self.plan.residual_slices[index], self.settle_scale()
        q, spare = self._q_slice(self.q, index), self._q_slice(self.spare, index)
        flat = self.owed.get(index)
        if where is not None and self.residual is not None:
            flat = self.residual.narrow(0, *where)
        residual = None if flat is None else unflatten(flat, self.specs[index])
        is_square = self.plan.is_square
        return Carried(residual, q, spare, scale, index in self.owed, is_square)

    def take_up_(self, parameter: Tensor, carried: Carried) -> None:
        """Copy in what a parameter has carried over, Q only if the shapes agree."""
        index, left = self._index(parameter), carried.residual
        where, spec = self.plan.residual_slices[index], self.specs[index]
        if left is not None:
            left = left * (self.settle_scale() / carried.loss_scale)
        if where is None and (left is not None or carried.is_owed):
            self.owed[index] = None if left is None else flatten(left, spec)
        elif where is not None and left is not None and self.residual is not None:
            unflatten(self.residual.narrow(0, *where), spec).copy_(left)
        for flat, source in ((self.q, carried.q), (self.spare, carried.spare)):
            target = self._q_slice(flat, index)
            if target is not None and source is not None and source.shape == target.shape:
                target.copy_(source)

    def _index(self, parameter: Tensor) -> int:
        return next(i for i, p in enumerate(self.parameters) if p is parameter)

    def _q_slice(self, flat: Tensor | None, index: int) -> Tensor | None:
        for group in self.plan.groups if flat is not None else ():
            for i, member in enumerate(group.members):
                if member == index:
                    return group.q_block(flat)[i]  # type: ignore[arg-type]
        return None

"""Where each parameter stands in its model: what makes random draws equal on all ranks."""

import hashlib
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from torch import Tensor

Place = tuple[str, int]  # a parameter's kind, and its number among those of its kind


class Positions:
    """The parameters of one model, in an order that does not depend on the size of its buckets.

    Attributes:
        is_complete: Whether a whole step was made while the model was not known, so that other
            parameters are another model's.
    """

    def __init__(self) -> None:
        self._of: dict[Tensor, Place] = {}
        self.is_complete = False

    def knows(self, parameters: Sequence[Tensor]) -> bool:
        """Tell whether all of a bucket's parameters are registered."""
        return all(parameter in self._of for parameter in parameters)

    def require_same_model(
        self, parameters: Sequence[Tensor], model: AbstractSet[Tensor] | None, *, is_new: bool
    ) -> None:
        """Raise if a bucket belongs to another model than the buckets registered so far.

        Args:
            parameters: The bucket's parameters.
            model: All parameters of its model, some of which may come to be trained later; None if
                the model is not known.
            is_new: Whether it is the first bucket of a model wrapper that was not met before.

        Raises:
            ValueError: If it does.
        """
        unknown = sum(parameter not in self._of for parameter in parameters)
        is_foreign = self.is_complete or unknown < len(parameters) or (is_new and self._of)
        if model is not None:
            is_foreign = not self._of.keys() | set(parameters) <= model
        if unknown and is_foreign:
            raise ValueError(
                f"one PowerSGDState serves one model: it serves one of {len(self._of)} "
                f"parameters and now got a bucket with {unknown} others; make a new PowerSGDState "
                "for each DDP model"
            )

    def register(self, parameters: Sequence[Tensor], kind: str) -> None:
        """Learn the model's parameters, bucket by bucket, during the first step.

        Args:
            parameters: A bucket's parameters, in the order of its buffer.
            kind: What DDP keeps apart when it fills its buckets: the dtype, or sparse gradients.
        """
        # DDP fills its first buckets from the model's last parameter on, each kind on its own.
        # Counted from the end, a position does not depend on the size of the buckets.
        start = sum(k == kind for k, _ in self._of.values())
        unknown = [parameter for parameter in parameters if parameter not in self._of]
        for i, parameter in enumerate(reversed(unknown)):
            self._of[parameter] = (kind, start + i)

    def parameters(self) -> set[Tensor]:
        """Return all registered parameters."""
        return set(self._of)

    def place(self, parameter: Tensor) -> Place:
        """Return a parameter's kind and its number among those; ``("", -1)`` if not registered."""
        return self._of.get(parameter, ("", -1))

    def restore(self, places: Mapping[Tensor, Place]) -> None:
        """Take over the places that `place` returned for the parameters of a model."""
        self._of = {p: place for p, place in places.items() if place[1] >= 0}
        self.is_complete = False

    def seed(self, parameter: Tensor, *more: int) -> int:
        """Make a seed of a parameter's position and more numbers.

        Neighbouring positions and numbers do not give related streams.

        Args:
            parameter: A registered parameter.
            *more: What else the seed depends on.

        Returns:
            An integer for ``torch.Generator.manual_seed``.
        """
        parts = (*more, *self._of[parameter])
        digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

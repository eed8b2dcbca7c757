"""Gradients of any size in any number of square matrices, to see what cost depends on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

MIB = 1 << 20
SIZES = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)  # of the gradient, in MiB
COUNTS = (1, 4, 16, 64, 256, 1024)  # matrices
COMMON_SIZE = 64.0  # where the number of matrices is swept
COMMON_COUNT = 16  # where the size is swept


class Sweep(str, Enum):
    """What is varied."""

    SIZE = "size"
    TENSORS = "tensors"


@dataclass(frozen=True)
class Squares:
    """Equal square matrices.

    Attributes:
        count: Of matrices.
        side: Rows of each, and columns.
    """

    count: int
    side: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Their shapes."""
        return [(self.side, self.side)] * self.count

    @property
    def name(self) -> str:
        """What they are, for people."""
        return f"{self.count} x {self.side} x {self.side}"


def make_squares(size_mib: float, count: int) -> Squares:
    """Split a float32 gradient into square matrices.

    Args:
        size_mib: Of all of them, in MiB, met as well as whole sides allow.
        count: Of matrices.

    Returns:
        The matrices.

    Raises:
        ValueError: If a matrix would have less than one element.

    Example:
        >>> make_squares(64, 16)
        Squares(count=16, side=1024)
    """
    side = round(math.sqrt(size_mib * MIB / 4 / count))
    if side < 1:
        raise ValueError(f"{size_mib:g} MiB are too little for {count} matrices")
    return Squares(count, side)


def make_sweep(sweep: Sweep, sizes: Sequence[float], counts: Sequence[int]) -> list[Squares]:
    """Return the gradients of a sweep, by what is varied.

    Args:
        sweep: What is varied.
        sizes: In MiB; one at most where the number of matrices is varied. Empty: the usual ones.
        counts: Of matrices; one at most where the size is varied. Empty: the usual ones.

    Returns:
        The gradients; each size or number once, in ascending order.

    Raises:
        ValueError: If both are varied, or sizes are too small.

    Example:
        >>> [squares.name for squares in make_sweep(Sweep.TENSORS, [4], [16, 1])]
        ['1 x 1024 x 1024', '16 x 256 x 256']
    """
    if sweep is Sweep.SIZE and len(counts) > 1:
        raise ValueError("a sweep over sizes takes one number of matrices: give --tensors once")
    if sweep is Sweep.TENSORS and len(sizes) > 1:
        raise ValueError("a sweep over tensors takes one size: give --size once")
    if sweep is Sweep.SIZE:
        count = counts[0] if counts else COMMON_COUNT
        return [make_squares(size, count) for size in sorted(set(sizes or SIZES))]
    size = sizes[0] if sizes else COMMON_SIZE
    return [make_squares(size, count) for count in sorted(set(counts or COUNTS))]

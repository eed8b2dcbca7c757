"""The plan of a bucket: what is compressed, how it is grouped, where everything lies.

Plain frozen data, computed once per bucket from the parameters' shapes; the reduction follows it
and the statistics read it. Offsets and counts are in elements of the bucket's flat buffer, in
which a complex parameter is a run of real pairs.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from powersgd.layout import ParameterSpec, matrix_shape


@dataclass(frozen=True)
class Group:
    """Compressed matrices of one shape, which every step handles as one batch.

    Attributes:
        n: Rows.
        m: Columns.
        rank: ``min(n, m, matrix_approximation_rank)``.
        members: Positions of the parameters in the bucket.
        offsets: Where each matrix begins in the bucket's flat buffer.
        spacing: Distance between neighbours if it is the same for all, so that the batch is a view
            of the buffer; None if the matrices must be copied together.
        p_offset: Where the block of P, ``(count, rank, n)``, begins among all P.
        q_offset: Where the block of Q, ``(count, rank, m)``, begins among all Q.
        residual_offset: Where the block ``(count, n, m)`` begins among all residuals.
    """

    n: int
    m: int
    rank: int
    members: tuple[int, ...]
    offsets: tuple[int, ...]
    spacing: int | None
    p_offset: int = 0
    q_offset: int = 0
    residual_offset: int = 0

    @property
    def p_numel(self) -> int:
        """Elements of the block of P."""
        return len(self.members) * self.rank * self.n

    @property
    def q_numel(self) -> int:
        """Elements of the block of Q."""
        return len(self.members) * self.rank * self.m

    @property
    def residual_numel(self) -> int:
        """Elements of the matrices."""
        return len(self.members) * self.n * self.m

    def p_block(self, flat: Tensor) -> Tensor:
        """View the group's P, ``(count, rank, n)``, in a flat tensor of all P."""
        return _block(flat, self.p_offset, (len(self.members), self.rank, self.n))

    def q_block(self, flat: Tensor) -> Tensor:
        """View the group's Q, ``(count, rank, m)``, in a flat tensor of all Q."""
        return _block(flat, self.q_offset, (len(self.members), self.rank, self.m))

    def residual_block(self, flat: Tensor) -> Tensor:
        """View the group's residuals, ``(count, n, m)``, in a flat tensor of all residuals."""
        return _block(flat, self.residual_offset, (len(self.members), self.n, self.m))


@dataclass(frozen=True)
class Plan:
    """How one bucket is sent.

    Attributes:
        numel: Length of the flat buffer that the plan describes.
        groups: The compressed matrices.
        spans: ``(offset, numel)`` of what is sent as it is, in the flat buffer.
        residual_slices: Per parameter ``(offset, numel)`` of its residual among all residuals, in
            the order of its memory; None if it is not compressed.
        shared: ``(offset, numel)`` of each of several parameters that share one matrix, in the
            flat buffer. For each of them one element travels: whether it was used.
        is_square: Whether the whole bucket is one square matrix.
    """

    numel: int
    groups: tuple[Group, ...]
    spans: tuple[tuple[int, int], ...]
    residual_slices: tuple[tuple[int, int] | None, ...]
    shared: tuple[tuple[int, int], ...] = ()
    is_square: bool = False

    @property
    def p_numel(self) -> int:
        """Elements of all P."""
        return sum(group.p_numel for group in self.groups)

    @property
    def q_numel(self) -> int:
        """Elements of all Q."""
        return sum(group.q_numel for group in self.groups)

    @cached_property
    def q_row_offsets(self) -> list[int]:
        """Where each row of Q begins among all Q."""
        return [
            group.q_offset + i * group.m
            for group in self.groups
            for i in range(len(group.members) * group.rank)
        ]

    @property
    def residual_numel(self) -> int:
        """Elements of all compressed matrices."""
        return sum(group.residual_numel for group in self.groups)

    @property
    def uncompressed_numel(self) -> int:
        """Elements that are sent as they are."""
        return sum(numel for _, numel in self.spans)

    @property
    def sent_numel(self) -> int:
        """Elements that this rank hands to all-reduce in a compressed step, less the one flag."""
        return self.p_numel + self.q_numel + self.uncompressed_numel + len(self.shared)


def is_worth_compressing(n: int, m: int, rank: int, min_compression_rate: float) -> bool:
    """Apply torch's rule, ``(n + m) * rank * min_compression_rate < n * m``."""
    return (n + m) * rank * min_compression_rate < n * m


def make_plan(
    specs: Sequence[ParameterSpec], rank: int, min_compression_rate: float, stack: bool = False
) -> Plan:
    """Plan a bucket for `powerSGD_hook`.

    Args:
        specs: The bucket's parameters, in the order in which they lie in its buffer, gapless.
        rank: The largest rank of a factor.
        min_compression_rate: See `is_worth_compressing`.
        stack: Batch all matrices of a shape, also those that do not lie evenly spaced and so have
            to be copied together.

    Returns:
        The plan; it depends on the arguments alone.
    """
    offsets = _offsets(specs)
    shapes: dict[tuple[int, int], list[int]] = {}
    for index, spec in enumerate(specs):
        shape = matrix_shape(spec)
        if shape is not None and is_worth_compressing(
            *shape, min(*shape, rank), min_compression_rate
        ):
            shapes.setdefault(shape, []).append(index)

    groups: list[Group] = []
    slices: list[tuple[int, int] | None] = [None] * len(specs)
    p_offset = q_offset = residual_offset = 0
    for (n, m), indices in shapes.items():
        for members, spacing in _batches(indices, offsets, stack):
            starts = tuple(offsets[index] for index in members)
            factors = (p_offset, q_offset, residual_offset)
            groups.append(Group(n, m, min(n, m, rank), members, starts, spacing, *factors))
            for i, index in enumerate(members):
                slices[index] = (residual_offset + i * n * m, n * m)
            p_offset += groups[-1].p_numel
            q_offset += groups[-1].q_numel
            residual_offset += groups[-1].residual_numel
    plain = [(o, s.numel) for o, s, c in zip(offsets, specs, slices, strict=False) if c is None]
    return Plan(offsets[-1], tuple(groups), tuple(_merge(plain)), tuple(slices))


def make_square_plan(specs: Sequence[ParameterSpec], rank: int) -> Plan:
    """Plan a bucket for `batched_powerSGD_hook`: the smallest square matrix that holds all of it.

    Args:
        specs: The bucket's parameters, in the order in which they lie in its buffer, gapless.
        rank: The largest rank of a factor.

    Returns:
        A plan for the buffer padded to ``numel`` elements; one group with one matrix, or none if
        the bucket is empty.
    """
    offsets = _offsets(specs)
    side = math.isqrt(max(offsets[-1] - 1, 0)) + 1 if offsets[-1] else 0
    groups = (Group(side, side, min(side, rank), (0,), (0,), 0),) if side else ()
    slices = tuple((o, spec.numel) for o, spec in zip(offsets, specs, strict=False))
    shared = slices if len(slices) > 1 and side else ()
    return Plan(side * side, groups, (), slices, shared, is_square=True)


def batch(buffer: Tensor, group: Group) -> Tensor:
    """Collect a group's matrices.

    Args:
        buffer: The bucket's flat buffer, shape ``(numel,)``.
        group: Which matrices.

    Returns:
        Shape ``(count, n, m)``: a view of the buffer if the group is evenly spaced, or else a copy,
        see `unbatch_`.
    """
    if group.spacing is not None:
        size, stride = (len(group.members), group.n, group.m), (group.spacing, group.m, 1)
        return buffer[group.offsets[0] :].as_strided(size, stride)
    return torch.stack([_block(buffer, offset, (group.n, group.m)) for offset in group.offsets])


def unbatch_(buffer: Tensor, group: Group, matrices: Tensor) -> None:
    """Write a group's matrices back into the buffer, where `batch` has copied them."""
    if group.spacing is None:
        for offset, matrix in zip(group.offsets, matrices, strict=True):
            _block(buffer, offset, (group.n, group.m)).copy_(matrix)


def _block(flat: Tensor, offset: int, shape: tuple[int, ...]) -> Tensor:
    return flat[offset : offset + math.prod(shape)].view(shape)


def _offsets(specs: Sequence[ParameterSpec]) -> list[int]:
    offsets = [0]
    for spec in specs:
        offsets.append(offsets[-1] + spec.numel)
    return offsets


def _batches(
    indices: Sequence[int], offsets: Sequence[int], stack: bool
) -> Iterable[tuple[tuple[int, ...], int | None]]:
    # Greedy split into the longest evenly spaced batches, from the left.
    gaps = [offsets[b] - offsets[a] for a, b in itertools.pairwise(indices)]
    if stack and len(set(gaps)) > 1:
        yield tuple(indices), None
        return
    start = 0
    while start < len(indices):
        stop = start + 1
        while stop < len(indices) and gaps[stop - 1] == gaps[start]:
            stop += 1
        yield tuple(indices[start:stop]), gaps[start] if stop > start + 1 else 0
        start = stop


def _merge(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for offset, numel in spans:
        if merged and sum(merged[-1]) == offset:
            merged[-1] = (merged[-1][0], merged[-1][1] + numel)
        elif numel:
            merged.append((offset, numel))
    return merged

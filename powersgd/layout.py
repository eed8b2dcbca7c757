"""How a parameter lies in memory, and which matrix that makes of it."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class ParameterSpec(NamedTuple):
    """What the planner needs to know of a parameter."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_complex: bool = False

    @classmethod
    def of(cls, parameter: Tensor) -> "ParameterSpec":
        """Read the spec off a parameter, of any dtype and layout in memory; of its local part."""
        parameter = local(parameter)
        return cls(tuple(parameter.shape), tuple(parameter.stride()), parameter.is_complex())

    @property
    def numel(self) -> int:
        """Number of real elements."""
        return math.prod(self.shape) * (2 if self.is_complex else 1)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that is sharded over ranks.

    Args:
        tensor: Any; sharded if it is a ``DTensor``, as FSDP2 makes them.

    Returns:
        Its part, sharing memory with it; the tensor itself if it is not sharded.
    """
    # Asked this way, DTensor need not be imported for those who do not use it.
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def matrix_shape(spec: ParameterSpec) -> tuple[int, int] | None:
    """View a parameter as a matrix without moving its memory.

    Rows are the first dimension, columns all others, as in torch's hook and in section 3 of the
    paper. Where another dimension is the outermost in memory (a transposed weight), that one gives
    the rows: the transpose of a matrix is as low-rank as the matrix.

    Args:
        spec: A parameter of any shape and strides.

    Returns:
        ``(n, m)`` in real elements, or None for what is never compressed: fewer than 2 dimensions,
        or empty.
    """
    if len(spec.shape) < 2 or spec.numel == 0:
        return None
    rows = spec.shape[0]
    if rows > 1 and _is_dense(spec):
        rows = max(zip(spec.stride, spec.shape, strict=True), key=lambda d: (d[1] > 1, d[0]))[1]
    return rows, spec.numel // rows


def memory_order(spec: ParameterSpec) -> list[int]:
    """List the dimensions of a parameter's gradient from the outermost in memory to the innermost.

    Args:
        spec: A parameter of any shape and strides.

    Returns:
        A permutation of the dimensions; that of a row-major tensor where the parameter has gaps,
        because DDP lays out such a gradient row by row.
    """
    dimensions = range(len(spec.shape))
    if not _is_dense(spec):
        return list(dimensions)
    return sorted(dimensions, key=lambda d: (-spec.stride[d], d))


def unflatten(flat: Tensor, spec: ParameterSpec) -> Tensor:
    """View real elements in the order of a parameter's memory as a tensor like the parameter.

    Args:
        flat: Shape ``(spec.numel,)``.
        spec: A parameter of any shape and strides.

    Returns:
        Shape, memory order and kind (real or complex) of the parameter; a view of ``flat``.
    """
    if spec.is_complex:
        flat = torch.view_as_complex(flat.view(-1, 2))
    order = memory_order(spec)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return flat.view([spec.shape[d] for d in order]).permute(inverse)


def flatten(tensor: Tensor, spec: ParameterSpec) -> Tensor:
    """Copy a tensor like a parameter into real elements in the order of the parameter's memory.

    Args:
        tensor: Shape and kind of the parameter, any strides.
        spec: A parameter of any shape and strides.

    Returns:
        Shape ``(spec.numel,)``, see `unflatten`.
    """
    flat = torch.empty(spec.numel, dtype=tensor.dtype.to_real(), device=tensor.device)
    unflatten(flat, spec).copy_(tensor)
    return flat


def _is_dense(spec: ParameterSpec) -> bool:
    # What ATen calls non-overlapping and dense: DDP lays such a gradient out like its parameter,
    # and every other one row by row.
    expected = 1
    for stride, size in sorted(zip(spec.stride, spec.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True

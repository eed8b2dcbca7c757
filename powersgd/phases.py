"""The steps as the reduction runs them: in place, and in the blocks that a CPU works fastest on.

The arithmetic is that of `powersgd.steps`; what differs is the order of memory accesses, and that
float16 is widened where torch has no fast products for it. Sizes and choices in this file are
measured on CPU (x86, AVX-512), with one thread and with two.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from powersgd.orthogonalization import orthogonalize_all
from powersgd.steps import compute_p, compute_q

_TILE_NUMEL = 1 << 20  # stays in the cache from one operation to the next
_BLOCK_NUMEL = 1 << 16  # one matrix product of a batch
_LARGEST_UNPACKED_RANK = 3  # with more rows, matrix products copy their operands into place


def compress_(gradient: Tensor, residual: Tensor | None, q: Tensor) -> Tensor:
    """Add the residual to the gradients, in place, and compute P of the sums.

    In place because the caller owns the gradients and a copy would cost a pass over memory.

    Args:
        gradient: Shape ``(b, n, m)``, any strides; becomes ``gradient + residual``.
        residual: Shape ``(b, n, m)``, or None without error feedback. Not changed.
        q: Shape ``(b, r, m)``. Not changed.

    Returns:
        P, shape ``(b, r, n)``.
    """
    p = q.new_empty(q.size(0), q.size(1), gradient.size(1))
    is_large = _is_large(gradient)
    q = _aligned(q)
    for matrices, rows in _tiles(gradient):
        tile = gradient[matrices, rows]
        if residual is not None:
            tile.add_(residual[matrices, rows])
        tile = _aligned(tile) if q.size(1) <= _LARGEST_UNPACKED_RANK else tile
        parts = _parts(tile, tile.size(1))
        if is_large and parts == 1:  # not a batch of one: in bfloat16 it takes 15 times as long
            p[matrices.start, :, rows] = compute_p(tile[0], q[matrices.start])
        elif parts == 1:
            p[matrices, :, rows] = compute_p(tile, q[matrices])
        else:
            split = torch.unflatten(tile[0], 0, (parts, -1))
            products = compute_p(split, q[matrices].expand(parts, -1, -1))
            p[matrices, :, rows] = products.transpose(0, 1).flatten(1)
    return p


def project(matrix: Tensor, p: Tensor) -> Tensor:
    """Compute Q of a batch of matrices, as `powersgd.compute_q` does.

    Args:
        matrix: Shape ``(b, n, m)``, any strides. Not changed.
        p: The orthonormal factor, shape ``(b, r, n)``. Not changed.

    Returns:
        Q, shape ``(b, r, m)``.
    """
    if _is_widened(matrix):
        total = p.new_zeros(p.size(0), p.size(1), matrix.size(2), dtype=torch.float32)
        for matrices, rows in _tiles(matrix):
            factor = p[matrices, :, rows].float()
            total[matrices] += compute_q(matrix[matrices, rows].float(), factor)
        return total.to(p.dtype)
    parts = _parts(matrix, matrix.size(2))
    if p.size(1) <= _LARGEST_UNPACKED_RANK and not _is_aligned(p):
        return torch.cat(
            [compute_q(matrix[i : i + 1], _aligned(one[None])) for i, one in enumerate(p)]
        )
    if parts == 1:
        return compute_q(matrix, p)
    columns = torch.unflatten(matrix[0], 1, (parts, -1)).transpose(0, 1)
    return compute_q(columns, p.expand(parts, -1, -1)).transpose(0, 1).flatten(1).unsqueeze(0)


def decompress_(
    matrix: Tensor, residual: Tensor | None, p: Tensor, q_local: Tensor, q: Tensor
) -> None:
    """Write the new residual, then the averaged gradient over the matrices, both in place.

    Args:
        matrix: Gradient plus old residual, shape ``(b, n, m)``, any strides; becomes
            ``reconstruct(p, q)``.
        residual: Shape ``(b, n, m)``, or None without error feedback; becomes
            ``matrix - reconstruct(p, q_local)``.
        p: The orthonormal factor, shape ``(b, r, n)``. Not changed.
        q_local: This rank's own factor, shape ``(b, r, m)``. Not changed.
        q: The factor's mean over ranks, shape ``(b, r, m)``. Not changed.
    """
    is_widened = _is_widened(matrix)
    if is_widened:
        p, q_local, q = p.float(), q_local.float(), q.float()
    for matrices, rows in _tiles(matrix):
        tile = matrix[matrices, rows]
        left = None if residual is None else residual[matrices, rows]
        factors = p[matrices, :, rows], q_local[matrices], q[matrices]
        if not is_widened:
            _decompress_tile_(tile, left, *factors)
            continue
        wide = tile.float()
        wide_left = None if left is None else torch.empty_like(wide)
        _decompress_tile_(wide, wide_left, *factors)
        tile.copy_(wide)
        if left is not None and wide_left is not None:
            left.copy_(wide_left)


def _decompress_tile_(
    matrix: Tensor, residual: Tensor | None, p: Tensor, q_local: Tensor, q: Tensor
) -> None:
    if residual is not None:
        _residual_out(matrix, p, q_local, residual)
    _reconstruct_out(p, q, matrix)


def _is_widened(matrix: Tensor) -> bool:
    # Products of float16 that are not inner products of rows take up to 60 times as long.
    return matrix.is_cpu and matrix.dtype == torch.float16


def _tiles(matrix: Tensor) -> Iterator[tuple[slice, slice]]:
    # Several small matrices, or rows of a large one.
    count, rows, columns = matrix.shape
    step, row_step = max(1, _TILE_NUMEL // (rows * columns)), rows
    if _is_large(matrix):
        block = _block_rows(columns)
        step, row_step = 1, block * max(1, _TILE_NUMEL // (block * columns))
    for i in range(0, count, step):
        for j in range(0, rows, row_step):
            yield slice(i, i + step), slice(j, j + row_step)


def _is_large(matrix: Tensor) -> bool:
    # Whether each matrix of a batch has tiles of its own.
    return matrix.size(1) * matrix.size(2) > _BLOCK_NUMEL


def _block_rows(columns: int) -> int:
    # A power of two, because it divides the number of rows of most matrices.
    return 1 << (max(1, _BLOCK_NUMEL // columns).bit_length() - 1)


def _is_aligned(matrix: Tensor) -> bool:
    # Products of few columns are summed up in another order where memory does not begin with a
    # whole vector. Buckets decide where it begins: a resumed run must not depend on them.
    is_even = matrix.size(0) == 1 or matrix.stride(0) * matrix.element_size() % 64 == 0
    return not matrix.is_cpu or (matrix.data_ptr() % 64 == 0 and is_even)


def _aligned(matrix: Tensor) -> Tensor:
    if _is_aligned(matrix):
        return matrix
    line = 64 // matrix.element_size()
    count, rows, columns = matrix.shape
    spacing = line * math.ceil(rows * columns / line)
    whole = matrix.new_empty(count * spacing)
    return whole.as_strided(matrix.shape, (spacing, columns, 1)).copy_(matrix)


def _parts(matrix: Tensor, size: int) -> int:
    # A batch of products is spread over threads, a single thin one hardly is.
    if matrix.size(0) > 1 or matrix.numel() < _BLOCK_NUMEL:
        return 1
    return math.gcd(size, 1 << (torch.get_num_threads().bit_length() - 1))


def _blocks(q: Tensor, *tensors: Tensor) -> Iterator[list[Tensor]]:
    # The rows of one matrix as a batch of equal blocks, then those that are left, each with its Q.
    count, rows, _ = tensors[0].shape
    block = _block_rows(q.size(-1))
    if count > 1 or rows <= block:
        yield [*tensors, q]
        return
    whole = rows - rows % block
    views = [torch.unflatten(tensor[0, :whole], 0, (-1, block)) for tensor in tensors]
    yield [*views, q.expand(whole // block, -1, -1)]
    if whole < rows:
        yield [*(tensor[:, whole:] for tensor in tensors), q]


def _should_update(matrix: Tensor, rank: int) -> bool:
    # Whether rank-one updates beat a matrix product, which crawls if rows lie whole pages apart.
    is_paged = matrix.stride(-2) * matrix.element_size() % 4096 == 0
    return rank <= 3 or (rank <= 6 and is_paged)


def _residual_out(matrix: Tensor, p: Tensor, q: Tensor, out: Tensor) -> None:
    if not _should_update(matrix, p.size(-2)):
        for base, p_block, target, q_block in _blocks(q, matrix, p.mT, out):
            torch.baddbmm(base, p_block, q_block, alpha=-1, out=target)
        return
    for i in range(p.size(-2)):
        base = matrix if i == 0 else out
        torch.addcmul(base, p[:, i].unsqueeze(-1), q[:, i].unsqueeze(-2), value=-1, out=out)


def _reconstruct_out(p: Tensor, q: Tensor, out: Tensor) -> None:
    if not _should_update(out, p.size(-2)):
        for p_block, target, q_block in _blocks(q, p.mT, out):
            torch.bmm(p_block, q_block, out=target)
        return
    torch.mul(p[:, 0].unsqueeze(-1), q[:, 0].unsqueeze(-2), out=out)
    for i in range(1, p.size(-2)):
        out.addcmul_(p[:, i].unsqueeze(-1), q[:, i].unsqueeze(-2))


class Steps(NamedTuple):
    """One implementation of every step: the seam through which compiled forms come in.

    All implementations have the signatures of the functions of the same names and give the same
    results to rounding.
    """

    orthogonalize_all: Callable[[list[Tensor], float], list[Tensor]]
    compress_: Callable[[Tensor, Tensor | None, Tensor], Tensor]
    project: Callable[[Tensor, Tensor], Tensor]
    decompress_: Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor], None]


EAGER = Steps(orthogonalize_all, compress_, project, decompress_)

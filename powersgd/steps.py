r"""The steps of PowerSGD: pure tensor functions, no state and no collectives.

One matrix ``M`` of shape ``(n, m)`` is sent as two thin factors. In the order of Algorithm 1 of
Vogels et al. (2019), arXiv:1905.13727::

    P = M Q                  compute_p, then all-reduce P
    P = orthogonalize(P)     orthogonalize, in orthogonalization.py
    Q = M^T P                compute_q, then all-reduce Q
    M ~ P Q^T                reconstruct
    M - P Q^T                residual: what this rank keeps for its next step

Shapes, everywhere in this package: matrices are ``(..., n, m)``, factors are stored by rows as
``(..., r, n)`` and ``(..., r, m)``, so row ``i`` of a factor is column ``i`` of the paper's P or Q.
Row-major factors let matrix products read a matrix once, in the order in which it lies in memory.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from powersgd.orthogonalization import orthogonalize_all


def compute_p(matrix: Tensor, q: Tensor) -> Tensor:
    """Multiply a batch of matrices with the factor Q.

    Args:
        matrix: Shape ``(..., n, m)``, any floating dtype.
        q: Shape ``(..., r, m)``, same dtype.

    Returns:
        P, shape ``(..., r, n)``. A non-finite entry of ``matrix`` makes its column of P non-finite.

    References:
        Line 3 of Algorithm 1 of Vogels et al. (2019), arXiv:1905.13727.

    Example:
        >>> compute_p(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0]]))
        tensor([[1., 3.]])
    """
    return torch.matmul(q, matrix.mT)


def compute_q(matrix: Tensor, p: Tensor) -> Tensor:
    """Multiply the transposes of a batch of matrices with the orthonormal factor P.

    Args:
        matrix: Shape ``(..., n, m)``, any floating dtype.
        p: Shape ``(..., r, n)``, same dtype.

    Returns:
        Q, shape ``(..., r, m)``.

    References:
        Line 6 of Algorithm 1 of Vogels et al. (2019), arXiv:1905.13727.

    Example:
        >>> compute_q(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0]]))
        tensor([[1., 2.]])
    """
    return torch.matmul(p, matrix)


def reconstruct(p: Tensor, q: Tensor) -> Tensor:
    """Multiply the two factors out.

    Args:
        p: Shape ``(..., r, n)``, any floating dtype.
        q: Shape ``(..., r, m)``, same dtype.

    Returns:
        The matrices of rank ``r``, shape ``(..., n, m)``.

    References:
        ``DECOMPRESS`` in Algorithm 1 of Vogels et al. (2019), arXiv:1905.13727.

    Example:
        >>> reconstruct(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))
        tensor([[3., 4.],
                [6., 8.]])
    """
    return torch.matmul(p.mT, q)


def residual(matrix: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Compute what the factors leave out, the error that this rank feeds back into its next step.

    With this rank's own Q, before the all-reduce, it is the projection error of the rank's own
    matrix: never larger than the matrix, and with the same mean over ranks as the error of the sum.

    Args:
        matrix: Shape ``(..., n, m)``, any floating dtype.
        p: The orthonormal factor, shape ``(..., r, n)``, same dtype.
        q: This rank's own factor, shape ``(..., r, m)``, same dtype.

    Returns:
        ``matrix - reconstruct(p, q)``, shape ``(..., n, m)``.

    References:
        Line 9 of Algorithm 2 (error feedback) of Vogels et al. (2019), arXiv:1905.13727.

    Example:
        >>> residual(torch.eye(2), torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0]]))
        tensor([[0., 0.],
                [0., 1.]])
    """
    return matrix - torch.matmul(p.mT, q)


def replace_zero_rows(factor: Tensor, replacement: Tensor) -> Tensor:
    """Put another row where a row of a factor is zero.

    A zero row of Q multiplies every later gradient to zero: a subspace that died once would stay
    dead. NaN rows are not zero and stay.

    Args:
        factor: Shape ``(..., r, m)``, any floating dtype.
        replacement: Shape and dtype of ``factor``.

    Returns:
        Shape, dtype and device of ``factor``.

    Example:
        >>> replace_zero_rows(torch.tensor([[0.0, 0.0], [3.0, 0.0]]), torch.ones(2, 2))
        tensor([[1., 1.],
                [3., 0.]])
    """
    return torch.where((factor == 0).all(dim=-1, keepdim=True), replacement, factor)


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
    if residual is not None:
        gradient.add_(residual)
    return torch.matmul(q, gradient.mT)


def _should_update(matrix: Tensor, rank: int) -> bool:
    # Whether rank-one updates beat a matrix product. Measured on CPU, where small products crawl
    # if the rows lie whole pages apart.
    is_paged = matrix.stride(-2) * matrix.element_size() % 4096 == 0
    return rank <= 3 or (rank <= 6 and is_paged)


def _residual_out(matrix: Tensor, p: Tensor, q: Tensor, out: Tensor) -> None:
    if not _should_update(matrix, p.size(-2)):
        torch.baddbmm(matrix, p.mT, q, alpha=-1, out=out)
        return
    for i in range(p.size(-2)):
        base = matrix if i == 0 else out
        torch.addcmul(base, p[:, i].unsqueeze(-1), q[:, i].unsqueeze(-2), value=-1, out=out)


def _reconstruct_out(p: Tensor, q: Tensor, out: Tensor) -> None:
    if not _should_update(out, p.size(-2)):
        torch.bmm(p.mT, q, out=out)
        return
    torch.mul(p[:, 0].unsqueeze(-1), q[:, 0].unsqueeze(-2), out=out)
    for i in range(1, p.size(-2)):
        out.addcmul_(p[:, i].unsqueeze(-1), q[:, i].unsqueeze(-2))


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
    # In tiles that stay in the cache while they are updated; the size is measured on CPU.
    tile_numel = 1 << 19
    count, rows, columns = matrix.shape
    step = max(1, tile_numel // (rows * columns))
    row_step = rows if step > 1 else max(1, tile_numel // columns)
    for i in range(0, count, step):
        for j in range(0, rows, row_step):
            tile, p_tile = (
                matrix[i : i + step, j : j + row_step],
                p[i : i + step, :, j : j + row_step],
            )
            if residual is not None:
                _residual_out(
                    tile, p_tile, q_local[i : i + step], residual[i : i + step, j : j + row_step]
                )
            _reconstruct_out(p_tile, q[i : i + step], tile)


class Steps(NamedTuple):
    """One implementation of every step: the seam through which compiled forms come in.

    All implementations have the signatures of this module's functions of the same names and give
    the same results to rounding.
    """

    compute_p: Callable[[Tensor, Tensor], Tensor]
    orthogonalize_all: Callable[[list[Tensor], float], list[Tensor]]
    compute_q: Callable[[Tensor, Tensor], Tensor]
    reconstruct: Callable[[Tensor, Tensor], Tensor]
    residual: Callable[[Tensor, Tensor, Tensor], Tensor]
    compress_: Callable[[Tensor, Tensor | None, Tensor], Tensor]
    decompress_: Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor], None]


EAGER = Steps(
    compute_p, orthogonalize_all, compute_q, reconstruct, residual, compress_, decompress_
)

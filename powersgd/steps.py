r"""The steps of PowerSGD: pure tensor functions, no state and no collectives.

One matrix ``M`` of shape ``(n, m)`` is sent as two thin factors. In the order of Algorithm 1 of
Vogels et al. (2019), arXiv:1905.13727::

    P = M Q                  compute_p, then all-reduce P
    P = orthogonalize(P)     orthogonalize
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


def _dependence_rtol(factor: Tensor) -> float:
    # A few hundred times the rounding of a long sum in that dtype; half precision adds the
    # rounding of the stored entries themselves.
    if factor.dtype == torch.float64:
        return 1e-7  # Gram matrices in float64 resolve no less
    if factor.dtype == torch.float32:
        return 1e-5
    return 1e-2 if factor.dtype == torch.float16 else 3e-2


def _orthonormalizer(gram: Tensor, rtol: float) -> tuple[Tensor, Tensor]:
    # Gram-Schmidt on the r x r Gram matrix instead of on the long rows: eliminate the Gram matrix
    # row by row and apply the same row operations to the identity.
    identity = torch.eye(gram.size(-1), dtype=gram.dtype, device=gram.device)
    norm = (gram * identity).sum(dim=-1).sqrt()
    scale = torch.where(norm == 0, torch.ones_like(norm), norm).reciprocal().unsqueeze(-1)
    rows = torch.cat([gram * scale * scale.mT, identity * scale], dim=-1)
    units: list[Tensor] = []
    remainders: list[Tensor] = []
    rank = gram.size(-1)
    for i in range(rank):
        square = rows[..., :1, i : i + 1]  # of the row's norm once earlier rows are projected out
        dependent = square <= rtol * rtol  # `<=`: NaN must not count as dependent
        inverse = torch.where(dependent, torch.ones_like(square), square).rsqrt()
        inverse = torch.where(dependent, torch.zeros_like(inverse), inverse)
        unit = rows[..., :1, :] * inverse
        rows = rows[..., 1:, :]
        rows = rows - rows[..., i : i + 1] * inverse * unit
        units.append(unit[..., rank:])
        remainders.append(square * inverse)
    remainder = torch.cat(remainders, dim=-2)
    return torch.cat(units, dim=-2), remainder * norm.unsqueeze(-1)


def _gram(work: Tensor, rank: int) -> Tensor:
    gram = torch.matmul(work, work.mT)
    missing = rank - work.size(-2)
    return torch.nn.functional.pad(gram, [0, missing, 0, missing]) if missing > 0 else gram


def orthogonalize_all(
    factors: list[Tensor], epsilon: float = 0.0, rtol: float | None = None
) -> list[Tensor]:
    """Orthonormalize the rows of several batches of factors, as `orthogonalize` does for one.

    Long rows are read per batch; the small remainder of the work is done for all batches at once,
    so that a model with many shapes does not pay for it once per shape.

    Args:
        factors: Shapes ``(b_i, r_i, n_i)`` with ``r_i <= n_i``, one floating dtype.
        epsilon: See `orthogonalize`.
        rtol: See `orthogonalize`.

    Returns:
        One factor per input, as `orthogonalize` returns it.

    Raises:
        ValueError: If ``r_i > n_i``.
    """
    for factor in factors:
        if factor.size(-2) > factor.size(-1):
            raise ValueError(
                f"orthogonalize expects r <= n, got r = {factor.size(-2)}, n = {factor.size(-1)}"
            )
    dtype = factors[0].dtype
    tolerance = _dependence_rtol(factors[0]) if rtol is None else rtol
    counts = [factor.size(0) for factor in factors]
    ranks = [factor.size(-2) for factor in factors]
    works = [factor.to(torch.float64) for factor in factors]
    # Rounding costs orthogonality the square of the condition number: for float64, do it twice.
    passes = 2 if dtype == torch.float64 else 1
    shrink: Tensor | None = None
    for i in range(passes):
        grams = torch.cat([_gram(work, max(ranks)) for work in works])
        transform, norm = _orthonormalizer(grams, tolerance)
        if i == 0 and epsilon > 0:
            shrink = norm / (norm + epsilon)
        if i == passes - 1 and shrink is not None:
            transform = transform * shrink
        parts = [
            part[:, :r, :r] for part, r in zip(torch.split(transform, counts), ranks, strict=True)
        ]
        works = [torch.matmul(part, work) for part, work in zip(parts, works, strict=True)]
    return [work.to(dtype) for work in works]


def orthogonalize(factor: Tensor, epsilon: float = 0.0, rtol: float | None = None) -> Tensor:
    r"""Orthonormalize the rows of a batch of factors, as Gram-Schmidt does.

    It works on the ``r x r`` Gram matrices in float64 (Cholesky QR, with dependent rows dropped),
    so that a long factor is read twice, whatever its rank. Never changes its input.

    Args:
        factor: Shape ``(..., r, n)`` with ``r <= n``, any floating dtype.
        epsilon: Added to each row's norm before the division, like torch's
            ``orthogonalization_epsilon``; rows then come out shorter than 1.
        rtol: A row whose norm falls to ``rtol`` times its own once the earlier rows are
            projected out counts as dependent. Dimensionless; by default it follows the dtype.

    Returns:
        Shape, dtype and device of ``factor``. Dependent rows are zero, so a zero factor gives
        zeros; the others are orthonormal, whatever the scale of the input (of float64 entries
        the squares must be float64 numbers too). NaN stays NaN.

    Raises:
        ValueError: If ``r > n``.

    References:
        ``ORTHOGONALIZE`` in Algorithm 1 of Vogels et al. (2019), arXiv:1905.13727.
        Yamamoto et al. (2015), "Roundoff error analysis of the CholeskyQR2 algorithm".

    Example:
        >>> u = orthogonalize(torch.tensor([[3.0, 4.0], [1.0, 1.0]]))
        >>> torch.allclose(u @ u.mT, torch.eye(2), atol=1e-6)
        True
    """
    shape = factor.shape
    batch = factor.reshape([-1, factor.size(-2), factor.size(-1)])
    return orthogonalize_all([batch], epsilon, rtol)[0].reshape(shape)


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

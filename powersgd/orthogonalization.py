"""Orthonormal factors: Gram-Schmidt on Gram matrices, safe for zero and dependent rows."""

import torch
from torch import Tensor


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

"""The phases as plain tensor programs, for compilers and for exported files.

They have the signatures and results of `powersgd.phases`. There, operations are ordered by hand for
a CPU that runs them one by one. Here, the phases that write matrices have two forms: products of
the factors, for whatever runs a program as it is, and ``..._at_once_``, which a compiler fuses into
one pass over memory, and which is slow without one.
"""

import torch
from torch import Tensor

from powersgd.steps import compute_p, compute_q, reconstruct
from powersgd.steps import residual as compute_residual


def compress_(gradient: Tensor, residual: Tensor | None, q: Tensor) -> Tensor:
    """Add the residual to the gradients, in place, and compute P of the sums.

    Args:
        gradient: Shape ``(b, n, m)``; becomes ``gradient + residual``.
        residual: Shape ``(b, n, m)``, or None without error feedback. Not changed.
        q: Shape ``(b, r, m)``. Not changed.

    Returns:
        P, shape ``(b, r, n)``.
    """
    if residual is not None:
        gradient.add_(residual)
    return compute_p(gradient, q)


def compress_at_once_(gradient: Tensor, residual: Tensor, q: Tensor) -> Tensor:
    """Do as `compress_`, in a form that Inductor makes one pass of, on CPU and for small ranks.

    Args:
        gradient: Shape ``(b, n, m)``; becomes ``gradient + residual``.
        residual: Shape ``(b, n, m)``. Not changed.
        q: Shape ``(b, r, m)``. Not changed.

    Returns:
        P, shape ``(b, r, n)``.
    """
    # Inductor joins reductions only with loops of the same nesting, over a buffer: a condition on
    # batch and rows that always holds keeps the loops apart, and `as_strided` makes the sum a
    # buffer. Else each column of P is a pass of its own.
    b, n, _ = gradient.shape
    rows = torch.arange(n, device=gradient.device).view(1, n, 1)
    always = torch.arange(b, device=gradient.device).view(b, 1, 1) + rows >= 0
    total = torch.where(always, gradient + residual, 0.0)
    total = total.as_strided(total.shape, total.stride())
    gradient.copy_(torch.where(always, total, 0.0))
    return torch.stack([(total * q[:, i].unsqueeze(-2)).sum(-1) for i in range(q.size(1))], 1)


def project(matrix: Tensor, p: Tensor) -> Tensor:
    """Compute Q of a batch of matrices.

    Args:
        matrix: Shape ``(b, n, m)``. Not changed.
        p: The orthonormal factor, shape ``(b, r, n)``. Not changed.

    Returns:
        Q, shape ``(b, r, m)``.
    """
    return compute_q(matrix, p)


def decompress_(
    matrix: Tensor, residual: Tensor | None, p: Tensor, q_local: Tensor, q: Tensor
) -> None:
    """Write the new residual, then the averaged gradient over the matrices, both in place.

    Args:
        matrix: Gradient plus old residual, shape ``(b, n, m)``; becomes ``reconstruct(p, q)``.
        residual: Shape ``(b, n, m)``, or None without error feedback; becomes
            ``matrix - reconstruct(p, q_local)``.
        p: The orthonormal factor, shape ``(b, r, n)``. Not changed.
        q_local: This rank's own factor, shape ``(b, r, m)``. Not changed.
        q: The factor's mean over ranks, shape ``(b, r, m)``. Not changed.
    """
    if residual is not None:
        residual.copy_(compute_residual(matrix, p, q_local))
    matrix.copy_(reconstruct(p, q))


def decompress_at_once_(
    matrix: Tensor, residual: Tensor | None, p: Tensor, q_local: Tensor, q: Tensor
) -> None:
    """Do as `decompress_`, in a form that compilers make one pass of, for small ranks.

    Args:
        matrix: Gradient plus old residual, shape ``(b, n, m)``; becomes ``reconstruct(p, q)``.
        residual: Shape ``(b, n, m)``, or None without error feedback; becomes
            ``matrix - reconstruct(p, q_local)``.
        p: The orthonormal factor, shape ``(b, r, n)``. Not changed.
        q_local: This rank's own factor, shape ``(b, r, m)``. Not changed.
        q: The factor's mean over ranks, shape ``(b, r, m)``. Not changed.
    """
    rank = p.size(1)
    columns = [p[:, i].unsqueeze(-1) for i in range(rank)]
    if residual is not None:
        left = matrix
        for i in range(rank):
            left = left - columns[i] * q_local[:, i].unsqueeze(-2)
        residual.copy_(left)
    total = columns[0] * q[:, 0].unsqueeze(-2)
    for i in range(1, rank):
        total = total + columns[i] * q[:, i].unsqueeze(-2)
    matrix.copy_(total)

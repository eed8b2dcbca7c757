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

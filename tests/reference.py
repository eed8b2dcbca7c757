"""PowerSGD with error feedback for W workers and one matrix, as the paper writes it.

Float64, plain loops, nothing of ours imported: the oracle. Vogels et al. (2019),
arXiv:1905.13727, Algorithms 1 and 2, with one choice that the paper leaves open: a worker keeps
the projection error of its own matrix, ``M_w - P Q_w^T``; its mean over workers is the paper's.
"""

import torch
from torch import Tensor


def gram_schmidt(matrix: Tensor) -> Tensor:
    """Orthonormalize the columns of a matrix; a column that vanishes becomes zero."""
    columns: list[Tensor] = []
    for j in range(matrix.shape[1]):
        column = matrix[:, j].clone()
        size = float(column.norm())
        for _ in range(2):
            for other in columns:
                column = column - torch.dot(other, column) * other
        norm = float(column.norm())
        columns.append(column / norm if norm > 1e-7 * size else torch.zeros_like(column))
    return torch.stack(columns, dim=1)


class Reference:
    """W workers that average one ``n x m`` matrix per step.

    Attributes:
        q: The paper's Q, ``m x r``.
        residuals: One ``n x m`` matrix per worker.
    """

    def __init__(
        self, q: Tensor, world_size: int, n: int, error_feedback: bool = True, warm: bool = True
    ) -> None:
        self.q = q.double().clone()
        self.residuals = [
            torch.zeros(n, q.shape[0], dtype=torch.float64) for _ in range(world_size)
        ]
        self.error_feedback = error_feedback
        self.warm = warm

    def step(self, gradients: list[Tensor], q: Tensor | None = None) -> Tensor:
        """Average one gradient per worker; ``q`` replaces Q where there is no warm start."""
        world_size = len(gradients)
        if q is not None:
            self.q = q.double().clone()
        inputs = []
        for gradient, residual in zip(gradients, self.residuals, strict=True):
            inputs.append(gradient.double() + (residual if self.error_feedback else 0))
        start = gram_schmidt(self.q)
        p = torch.zeros(inputs[0].shape[0], start.shape[1], dtype=torch.float64)
        for matrix in inputs:
            p = p + matrix @ start / world_size
        p = gram_schmidt(p)
        mean_q = torch.zeros_like(start)
        for w, matrix in enumerate(inputs):
            own_q = matrix.T @ p
            mean_q = mean_q + own_q / world_size
            self.residuals[w] = matrix - p @ own_q.T
        if self.warm:
            self.q = mean_q
        return p @ mean_q.T

"""One table of tolerances by dtype, relative to the largest number involved."""

import torch

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
RTOL = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> None:
    """Compare to rounding in ``actual``'s dtype, relative to the largest entry."""
    largest = max(float(expected.abs().max()), 1e-300) if expected.numel() else 1.0
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=0, atol=scale * RTOL[actual.dtype] * largest
    )

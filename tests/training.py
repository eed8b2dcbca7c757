"""A small model in training, as a user would set it up."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import powersgd

SETTINGS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 3, "min_compression_rate": 0.5}


class Run:
    """A model in training; its batches depend on rank and step alone."""

    def __init__(
        self, bucket_cap_mb: float = 0.002, dtype: torch.dtype = torch.float32, **settings: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 9)
        )
        self.model.append(nn.Linear(9, 9))
        self.model.to(dtype)
        self.dtype, self.bucket_cap_mb = dtype, bucket_cap_mb
        self.wrap(powersgd.PowerSGDState(None, **(SETTINGS | settings)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def wrap(self, state: Any) -> "Run":
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=self.bucket_cap_mb)
        self.state = state
        self.ddp.register_comm_hook(self.state, powersgd.powerSGD_hook)
        return self

    def train(self, start: int, stop: int) -> "Run":
        for step in range(start, stop):
            generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            inputs = torch.randn(16, 24, generator=generator, dtype=self.dtype)
            self.optimizer.zero_grad()
            self.ddp(inputs).square().mean().backward()
            self.optimizer.step()
        return self

    def save(self, path: Path, powersgd_state: Any) -> None:
        everything = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "powersgd": powersgd_state,
        }
        torch.save(everything, path)

    def load(self, path: Path) -> "Run":
        saved = torch.load(path)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.state.load_state_dict(saved["powersgd"], self.ddp)
        return self

    def outcome(self) -> dict[str, Any]:
        return {
            "parameters": [p.detach().clone() for p in self.model.parameters()],
            "iter": self.state.iter,
            "stats": self.state.compression_stats(),
            "residuals": [self.state.residual(p) for p in self.model.parameters()],
        }


def assert_same(actual: dict[str, Any], expected: dict[str, Any], tolerance: float = 0.0) -> None:
    """Assert that two outcomes of `Run` are the same."""
    assert actual["iter"] == expected["iter"]
    assert actual["stats"] == expected["stats"]
    for name in ("parameters", "residuals"):
        for one, other in zip(actual[name], expected[name], strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert (one - other).norm() <= tolerance * other.norm()

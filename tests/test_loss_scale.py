"""Residuals follow the loss scale: a scaled run ends where the unscaled one ends."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import powersgd

from .ranks import run_ranks

STEPS = 40
BAD = (9, 10, 23)  # the second one meets the first one's smaller scale
SWITCH = 30  # from here on matrices are compressed no longer: their residuals are owed


def _train(
    rank: int, is_scaled: bool, is_told: bool, hook: str, options: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor], list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 24), nn.Linear(24, 8))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.002, **options)
    state = powersgd.PowerSGDState(None, 1, start_powerSGD_iter=3, min_compression_rate=0.5)
    ddp.register_comm_hook(state, getattr(powersgd, hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4, enabled=is_scaled)
    scales = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(16, 24, generator=generator)
        if step == SWITCH:
            state.min_compression_rate = 3
        scales.append(scaler.get_scale())
        if is_told:
            state.loss_scale = scaler.get_scale()
        optimizer.zero_grad()
        loss = ddp(inputs).square().mean()
        bad = step in BAD and rank == dist.get_world_size() - 1
        scaler.scale(loss * (torch.inf if bad else 1)).backward()
        if is_scaled:
            scaler.step(optimizer)
            scaler.update()
        elif step not in BAD:
            optimizer.step()
    residuals = [state.residual(p) for p in model.parameters()]
    left = [r / state.loss_scale for r in residuals if r is not None]
    return [p.detach() for p in model.parameters()], left, scales


@pytest.mark.parametrize("hook", ["powerSGD_hook", "batched_powerSGD_hook"])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["", "unused"])
@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_a_scaled_run_ends_where_the_unscaled_one_ends(hook: str, options: dict[str, Any]) -> None:
    plain = run_ranks(_train, 2, False, False, hook, options)
    scaled = run_ranks(_train, 2, True, True, hook, options)
    for (p, r, _), (q, s, scales) in zip(plain, scaled, strict=True):
        changes = [b - a for a, b in itertools.pairwise(scales)]
        assert min(changes) < 0 < max(changes)
        for one, other in zip(p + r, q + s, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_a_state_that_is_not_told_the_scale_goes_astray() -> None:
    """The comparison above notices a scale that is left out."""
    options: dict[str, Any] = {}
    plain = run_ranks(_train, 2, False, False, "powerSGD_hook", options)
    scaled = run_ranks(_train, 2, True, False, "powerSGD_hook", options)
    worst = max(
        float((a - b).norm() / b.norm()) for a, b in zip(scaled[0][0], plain[0][0], strict=True)
    )
    assert worst > 1e-3


def test_a_loss_scale_that_is_none_is_refused() -> None:
    state = powersgd.PowerSGDState(None)
    for value in (0, -1, 1e-320, 1e39, torch.inf, "2"):
        with pytest.raises(
            ValueError, match=r"loss_scale is .*, but must be a finite number > 1e-38"
        ):
            state.loss_scale = value
    assert state.loss_scale == 1

"""The hooks against what they must equal: the paper, torch's own hook, the truncated SVD."""

import weakref
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel

import powersgd
from powersgd.allocation import draw_q
from powersgd.memory import BucketState

from .ranks import run_ranks
from .reference import Reference

SHAPES = ((12, 20), (20,), (12, 20), (30, 8), (6, 5, 2), (12, 20), (3,))
START = 2
STEPS = 20


class Linear(nn.Module):
    """A model whose gradient is whatever it is called with."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]
        )

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        return sum((w * g).sum() for w, g in zip(self.weights, gradients, strict=True))


_GENERATORS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _torch_draws(state: Any, bucket: BucketState, like: Tensor) -> Tensor:
    """The random Q that torch's hook draws."""
    rng = _GENERATORS.setdefault(state, np.random.RandomState(state.random_seed))
    torch.manual_seed(rng.randint(1_000_000_000))
    factors = [  # torch's hook, too, goes through the matrices shape by shape
        torch.stack([torch.randn(g.m, g.rank, dtype=like.dtype).T for _ in g.members])
        for g in bucket.plan.groups
    ]
    return torch.cat([f.flatten() for f in state.steps.orthogonalize_all(factors, 0.0)])


def _gradients(rank: int, step: int, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def _train(
    state: Any, hook: Any, batches: Sequence[Sequence[Tensor]], bucket_cap_mb: float = 100
) -> list[list[Tensor]]:
    model = DistributedDataParallel(
        Linear([tuple(g.shape) for g in batches[0]]), bucket_cap_mb=bucket_cap_mb
    )
    model.register_comm_hook(state, hook)
    outputs = []
    for gradients in batches:
        model.zero_grad()
        model(gradients).backward()
        outputs.append([p.grad.clone() for p in model.parameters()])
    return outputs


def _against_torch(rank: int, r: int, error_feedback: bool, warm_start: bool) -> float:
    batches = [_gradients(rank, step, SHAPES) for step in range(START + STEPS)]
    settings = {
        "matrix_approximation_rank": r,
        "start_powerSGD_iter": START,
        "min_compression_rate": 1,  # below, torch compresses vectors, too
        "use_error_feedback": error_feedback,
        "warm_start": warm_start,
    }
    expected = _train(theirs.PowerSGDState(None, **settings), theirs.powerSGD_hook, batches)
    with (
        mock.patch("powersgd.allocation.draw_q", _torch_draws),
        mock.patch("powersgd.compression.draw_q", _torch_draws),
    ):
        actual = _train(powersgd.PowerSGDState(None, **settings), powersgd.powerSGD_hook, batches)
    worst = 0.0
    for a, e in zip(actual, expected, strict=True):
        for x, y in zip(a, e, strict=True):
            worst = max(worst, float((x - y).norm() / y.norm()))
    return worst


def _against_paper(
    rank: int, world_size: int, r: int, error_feedback: bool, bucket_cap_mb: float
) -> tuple[float, float]:
    shapes = [(15, 9), (9, 15), (15, 9)]
    batches = [[_gradients(w, step, shapes) for w in range(world_size)] for step in range(12)]
    state = powersgd.PowerSGDState(
        None, r, start_powerSGD_iter=START, use_error_feedback=error_feedback,
        min_compression_rate=0.1,
    )  # fmt: skip
    model = DistributedDataParallel(Linear(shapes), bucket_cap_mb=bucket_cap_mb)
    model.register_comm_hook(state, powersgd.powerSGD_hook)
    references: list[Reference] = []
    worst = worst_residual = 0.0
    for step, gradients in enumerate(batches):
        model.zero_grad()
        if step == START:  # the state draws its first Q in this step, from its step and positions
            state.iter = START
            references = [
                Reference(_first_q(state, p, r), world_size, p.shape[0], error_feedback)
                for p in model.parameters()
            ]
        model(gradients[rank]).backward()
        for i, (p, reference) in enumerate(zip(model.parameters(), references, strict=False)):
            expected = reference.step([gradients[w][i] for w in range(world_size)])
            worst = max(worst, float((p.grad - expected).norm() / expected.norm()))
            if error_feedback:
                left = reference.residuals[rank]
                difference = state.residual(p) - left
                worst_residual = max(worst_residual, float(difference.norm() / left.norm()))
    return worst, worst_residual


def _first_q(state: powersgd.PowerSGDState, parameter: Tensor, r: int) -> Tensor:
    bucket = state._buckets[parameter]
    q = draw_q(state, bucket, parameter.detach())
    for group in bucket.plan.groups:
        for i, member in enumerate(group.members):
            if bucket.parameters[member] is parameter:
                return group.q_block(q)[i].T
    raise AssertionError("not compressed")


def _svd(rank: int, r: int) -> float:
    generator = torch.Generator().manual_seed(7)
    left = torch.linalg.qr(torch.randn(24, 12, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(30, 12, generator=generator, dtype=torch.float64)).Q
    mean = left @ torch.diag(2.0 ** -torch.arange(12.0, dtype=torch.float64)) @ right.T
    own = mean + (1 if rank == 0 else -1) * torch.randn(
        24, 30, generator=torch.Generator().manual_seed(8), dtype=torch.float64
    )
    state = powersgd.PowerSGDState(
        None, r, start_powerSGD_iter=START, use_error_feedback=False, min_compression_rate=0.1
    )
    outputs = _train(state, powersgd.powerSGD_hook, [[own]] * 60)
    u, s, vh = torch.linalg.svd(mean)
    best = u[:, :r] @ torch.diag(s[:r]) @ vh[:r]
    return float((outputs[-1][0] - best).norm() / best.norm())


TORCH_CASES = [(r, ef, ws) for r in (1, 2, 4) for ef in (True, False) for ws in (True, False)]
PAPER_CASES = [(r, ef, cap) for r in (1, 3) for ef in (True, False) for cap in (100, 0.0001)]


def _all(rank: int, world_size: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for case in TORCH_CASES if world_size == 2 else ():
        results[case] = _against_torch(rank, *case)
    for case in PAPER_CASES:
        results[("paper", *case)] = _against_paper(rank, world_size, *case)
    for r in (1, 2, 4) if world_size == 2 else ():
        results["svd", r] = _svd(rank, r)
    return results


@pytest.fixture(scope="module")
def results() -> dict[int, list[dict[Any, Any]]]:
    return {w: run_ranks(_all, w, w) for w in (2, 3)}


@pytest.mark.parametrize(("r", "error_feedback", "warm_start"), TORCH_CASES)
def test_equals_torchs_hook(results: Any, r: int, error_feedback: bool, warm_start: bool) -> None:
    for rank in results[2]:
        assert rank[r, error_feedback, warm_start] < 1e-10


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("r", "error_feedback", "bucket_cap_mb"), PAPER_CASES)
def test_equals_the_paper(
    results: Any, world_size: int, r: int, error_feedback: bool, bucket_cap_mb: float
) -> None:
    for rank in results[world_size]:
        output, left = rank["paper", r, error_feedback, bucket_cap_mb]
        assert output < 1e-10
        assert left < 1e-10


@pytest.mark.parametrize("r", [1, 2, 4])
def test_converges_to_the_truncated_svd_of_the_mean(results: Any, r: int) -> None:
    for rank in results[2]:
        assert rank["svd", r] < 1e-10

"""Settings that change in mid-run, and what one rank alone finds wrong: all ranks act alike."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel

import powersgd
from powersgd import PowerSGDState

from .ranks import run_ranks
from .tolerances import assert_close

SHAPES = [(30, 20), (20,), (30, 20), (12, 40)]
START = 3


class _Loop:
    """Hands buckets to the hook as DDP does, so that an error in one step does not end the run."""

    def __init__(self, rank: int, seed: int = 0, **options: Any) -> None:
        self.model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])
        self.ddp = DistributedDataParallel(
            self.model, bucket_cap_mb=0.001, find_unused_parameters=True
        )
        self.buckets = self.ddp.reducer._get_zeros_like_grad_buckets()
        assert len(self.buckets) >= 3
        options = {"start_powerSGD_iter": START, "min_compression_rate": 0.5} | options
        self.state = PowerSGDState(None, 2, **options)
        self.generator = torch.Generator().manual_seed(100 * seed + rank)
        self.index = {id(p): i for i, p in enumerate(self.model)}

    def step(self) -> list[tuple[Tensor, Tensor]]:
        """By parameter, this rank's gradient and the average."""
        gradients = [torch.randn(shape, generator=self.generator) for shape in SHAPES]
        for bucket in self.buckets:
            for view, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
                view.copy_(gradients[self.index[id(parameter)]])
        futures = [powersgd.powerSGD_hook(self.state, bucket) for bucket in self.buckets]
        averages = [torch.empty(0)] * len(SHAPES)
        for bucket, future in zip(self.buckets, futures, strict=True):
            future.wait()
            for view, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
                averages[self.index[id(parameter)]] = view.clone()
        return list(zip(gradients, averages, strict=True))

    def residuals(self) -> list[Tensor | None]:
        return [self.state.residual(parameter) for parameter in self.model]


def _error(function: Any) -> str | None:
    try:
        function()
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


CHANGES: dict[str, Any] = {
    "matrix_approximation_rank": 3,
    "start_powerSGD_iter": 7,
    "min_compression_rate": 4.0,
    "use_error_feedback": False,
    "warm_start": False,
    "orthogonalization_epsilon": 1e-3,
    "random_seed": 5,
    "batch_tensors_with_same_shape": True,
    "iter": 20,
}


def _change_on_one(rank: int, after: int) -> dict[str, Any]:
    found = {}
    for name, value in CHANGES.items():
        loop = _Loop(rank)
        for _ in range(after):
            loop.step()
        before = getattr(loop.state, name)
        if rank == 1:
            setattr(loop.state, name, value)
        loop.step()  # all still go by what they agreed on
        kept = loop.residuals()
        errors = [_error(loop.step), _error(loop.step)]
        same = all(
            (a is b) or torch.equal(a, b) for a, b in zip(kept, loop.residuals(), strict=True)
        )
        if rank == 1:
            setattr(loop.state, name, before + 1 if name == "iter" else before)
        averages = [average for _ in range(4) for _, average in loop.step()]
        found[name] = (errors, same, averages)
    return found


@pytest.mark.parametrize("after", [1, 6], ids=["in the warm-up", "while compressing"])
def test_a_setting_changed_on_one_rank_is_one_error_on_all(after: int) -> None:
    ranks = run_ranks(_change_on_one, 2, after)
    for name in CHANGES:
        errors, same, averages = ranks[0][name]
        assert errors[0] == errors[1]
        assert errors[0].startswith(f"ValueError: ranks disagree on {name}: rank 0 has "), name
        assert same
        assert ranks[1][name][:2] == (errors, same)
        assert all(map(torch.equal, averages, ranks[1][name][2]))
        assert all(average.isfinite().all() for average in averages)


def _change_on_all(rank: int, name: str, value: Any) -> tuple[list[Any], list[Any], list[bool]]:
    """What went in, what came out and is left, and whether each parameter has a residual."""
    loop = _Loop(rank)
    steps = [loop.step() for _ in range(6)]
    before = getattr(loop.state, name)
    setattr(loop.state, name, value)
    steps += [loop.step() for _ in range(4)]
    has_residual = [residual is not None for residual in loop.residuals()]
    setattr(loop.state, name, before)
    steps += [loop.step() for _ in range(4)]
    ranks = [torch.linalg.matrix_rank(step[0][1], rtol=1e-3).item() for step in steps]
    total_in = [sum(step[i][0] for step in steps) for i in range(len(SHAPES))]
    total_out = [sum(step[i][1] for step in steps) for i in range(len(SHAPES))]
    left = [0 if residual is None else residual for residual in loop.residuals()]
    return [total_in, total_out, left], ranks, has_residual


@pytest.mark.parametrize(
    ("name", "value", "rank"),
    [
        ("matrix_approximation_rank", 4, 4),
        ("matrix_approximation_rank", 30, 20),  # nothing is worth compressing
        ("min_compression_rate", 7.0, 20),  # likewise
        ("batch_tensors_with_same_shape", True, 2),
        ("orthogonalization_epsilon", 1e-9, 2),
        ("start_powerSGD_iter", 100, 20),
    ],
)
def test_a_setting_changed_on_all_ranks_counts_from_the_second_step_on(
    name: str, value: Any, rank: int
) -> None:
    results = run_ranks(_change_on_all, 2, name, value)
    assert [ranks for _, ranks, _ in results] == [[20] * 3 + [2] * 4 + [rank] * 4 + [2] * 3] * 2
    sums = [totals for totals, _, _ in results]
    for i in range(len(SHAPES)):  # nothing is lost on the way
        given = (sums[0][0][i] + sums[1][0][i]) / 2
        left = (sums[0][2][i] + sums[1][2][i]) / 2
        assert_close(sums[0][1][i] + left, given, scale=20)
        assert torch.equal(sums[0][1][i], sums[1][1][i])


@pytest.mark.parametrize("name", ["use_error_feedback", "warm_start"])
def test_memory_can_be_switched_off_and_on_again(name: str) -> None:
    for _, ranks, has_residual in run_ranks(_change_on_all, 2, name, False):
        assert ranks == [20] * 3 + [2] * 11
        assert has_residual == [name == "warm_start", False] + [name == "warm_start"] * 2


def _alone(rank: int) -> dict[str, Any]:
    """Each case is wrong on rank 1 only."""
    errors: dict[str, Any] = {}
    loop = _Loop(rank)
    loop.step()
    loop.state.matrix_approximation_rank = -1 if rank == 1 else 2
    loop.step()
    errors["a value"] = _error(loop.step)
    own, other = _Loop(rank), _Loop(rank)
    own.step()
    if rank == 1:
        other.state = own.state
    errors["a state used twice"] = _error(other.step)
    pair = dist.new_group([0, 1])
    loop = _Loop(rank)
    loop.state.process_group = [None, pair, None][rank]
    errors["a group"] = _error(loop.step)
    loop = _Loop(rank)
    if rank == 1:
        loop.state = theirs.PowerSGDState(None)
    errors["torch's state"] = _error(loop.step)
    return errors


def test_what_one_rank_finds_wrong_all_ranks_raise() -> None:
    ranks = run_ranks(_alone, 3, timeout_s=60)
    expected = {
        "a value": "matrix_approximation_rank is -1, but must be an integer >= 1",
        "a state used twice": "one PowerSGDState serves one model: it serves one of",
        "a group": "the state's process group has the ranks [0, 1], but DDP averages over the",
        "torch's state": "the hook's state must be a powersgd.PowerSGDState, got",
    }
    for case, sentence in expected.items():
        kind = "TypeError" if case == "torch's state" else "ValueError"
        assert ranks[1][case].startswith(f"{kind}: {sentence}")
        for rank in (0, 2):
            told = f"ValueError: rank 1 of the group stopped: {sentence}"
            assert ranks[rank][case].startswith(told)

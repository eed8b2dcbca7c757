"""The whole step compiled: the hook inside the backward graph, and DDPOptimizer."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import powersgd
from compiled.train import START, Mode, Run, train

from .ranks import run_ranks
from .tolerances import assert_close

BAD = 6
RUNS: dict[str, dict[str, Any]] = {
    "eager": {"mode": Mode.EAGER},
    "ddp_optimizer": {"mode": Mode.DDP_OPTIMIZER},
    "python_reducer": {"mode": Mode.PYTHON_REDUCER},
    "bucketing": {"mode": Mode.PYTHON_REDUCER, "is_bucketing": True},
    "no error feedback": {
        "mode": Mode.PYTHON_REDUCER,
        "options": {"use_error_feedback": False},
        "steps": START + 2,
    },
    "before": {"mode": Mode.PYTHON_REDUCER, "steps": BAD},
    "bad": {"mode": Mode.PYTHON_REDUCER, "steps": BAD + 1, "bad_step": BAD},
}
COMPILED = ["ddp_optimizer", "python_reducer", "bucketing"]


def _run_all(rank: int) -> dict[str, Run]:
    return {name: train(rank, **arguments) for name, arguments in RUNS.items()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Run]]:
    return run_ranks(_run_all, 2, timeout_s=280)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_training_equals_eager(ranks: list[dict[str, Run]], name: str) -> None:
    for rank in ranks:
        compiled, eager = rank[name], rank["eager"]
        assert compiled.iterations == eager.iterations == len(eager.losses) == 20
        assert compiled.stats == eager.stats
        assert compiled.losses == pytest.approx(eager.losses, rel=1e-4)
        for mine, theirs in zip(compiled.parameters, eager.parameters, strict=True):
            assert_close(mine, theirs, scale=10)
        for left, expected in zip(compiled.residuals, eager.residuals, strict=True):
            assert (left is None) == (expected is None)
            if left is not None and expected is not None:
                assert left.stride() == expected.stride()
                assert_close(left, expected, scale=100)
    assert sum(residual is not None for residual in ranks[0][name].residuals) == 3


@pytest.mark.parametrize("name", list(RUNS))
def test_ranks_hold_the_same_parameters_to_the_bit(ranks: list[dict[str, Run]], name: str) -> None:
    for mine, theirs in zip(ranks[0][name].parameters, ranks[1][name].parameters, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["python_reducer", "bucketing"])
def test_one_backward_graph_for_the_warm_up_and_one_after(
    ranks: list[dict[str, Run]], name: str
) -> None:
    """With the forward graph that makes three: no break of ours, no recompile per step."""
    assert [rank[name].graphs for rank in ranks] == [3, 3]


def test_collectives_are_two_per_matrix_and_inductor_merges_them(
    ranks: list[dict[str, Run]],
) -> None:
    for rank in ranks:
        assert rank["python_reducer"].collectives == 3 * 2 + 3  # three weights, three biases
        assert rank["bucketing"].collectives < 9


def test_a_bad_step_is_nan_everywhere_and_leaves_the_state(ranks: list[dict[str, Run]]) -> None:
    for rank in ranks:
        before, after = rank["before"], rank["bad"]
        assert before.are_nan == [False] * 6
        assert after.are_nan == [True] * 6
        for mine, theirs in zip(before.parameters, after.parameters, strict=True):
            assert torch.equal(mine, theirs)
        for mine, theirs in zip(before.residuals, after.residuals, strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or theirs is None or torch.equal(mine, theirs)
    assert math.isnan(ranks[1]["bad"].losses[-1])


@pytest.fixture
def _python_reducer(tmp_path: Path) -> Iterator[None]:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@pytest.mark.usefixtures("_python_reducer")
@pytest.mark.parametrize(
    ("hook", "options", "error", "message"),
    [
        ("powerSGD_hook", {}, RuntimeError, "outside of torch.compile; set .*compiled_autograd"),
        ("powerSGD_hook", {"warm_start": False}, ValueError, "warm_start is False, but must be"),
        ("batched_powerSGD_hook", {}, RuntimeError, "needs DDP's buckets"),
    ],
)
def test_what_cannot_be_traced_is_an_error(
    hook: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    ddp = DistributedDataParallel(nn.Linear(3, 4))
    state = powersgd.PowerSGDState(None, start_powerSGD_iter=2, **options)
    ddp.register_comm_hook(state, getattr(powersgd, hook))
    with pytest.raises(error, match=message):
        ddp(torch.randn(2, 3)).sum().backward()


class _Kinds(nn.Module):
    """Parameters of every kind that a compiled backward takes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator).to(dtype) / 8)

        self.plain = draw(12, 16)
        self.transposed = nn.Parameter(draw(16, 12).detach().mT)
        self.complex = draw(12, 16, dtype=torch.complex64)
        self.low = draw(12, 16, dtype=torch.bfloat16)
        self.scalar, self.empty, self.frozen = draw(), draw(0, 3), draw(4)
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, batch: Tensor) -> Tensor:
        weights = self.plain + self.transposed + self.complex.real + 2 * self.complex.imag
        result = batch @ (weights + self.low).mT * self.scalar
        return result + self.empty.sum() + self.frozen.sum()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _train_kinds(compiled: bool) -> list[Tensor]:
    torch._dynamo.reset()
    models = [_Kinds(), _Kinds()]  # two states in one backward graph
    ddps = [DistributedDataParallel(model) for model in models]
    states = [
        powersgd.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=0.5)
        for _ in ddps
    ]
    for ddp, state in zip(ddps, states, strict=True):
        ddp.register_comm_hook(state, powersgd.powerSGD_hook)

    def step(batch: Tensor) -> None:
        sum(ddp(batch).square().mean() for ddp in ddps).backward()

    parameters = [p for model in models for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    run = torch.compile(step, backend="aot_eager") if compiled else step
    for seed in range(6):
        run(torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)))
        optimizer.step()
        optimizer.zero_grad()
    assert [state.iter for state in states] == [6, 6]
    return [p.detach().clone() for p in parameters]


@pytest.mark.usefixtures("_python_reducer")
def test_every_kind_of_parameter_and_two_states_in_one_graph() -> None:
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = _train_kinds(compiled=True)
    with torch._dynamo.config.patch(optimize_ddp=False):
        eager = _train_kinds(compiled=False)
    for mine, right in zip(compiled, eager, strict=True):
        assert_close(_real(mine), _real(right), scale=10)

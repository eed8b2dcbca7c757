"""The whole step compiled: the hook inside the backward graph, and DDPOptimizer."""

import copy
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
    ("hook", "message"),
    [
        ("powerSGD_hook", "outside of torch.compile; set .*compiled_autograd"),
        ("batched_powerSGD_hook", "needs DDP's buckets"),
    ],
)
def test_what_is_not_traced_is_an_error(hook: str, message: str) -> None:
    ddp = DistributedDataParallel(nn.Linear(3, 4))
    state = powersgd.PowerSGDState(None, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, getattr(powersgd, hook))
    with pytest.raises(RuntimeError, match=message):
        ddp(torch.randn(2, 3)).sum().backward()


class _Compiled:
    """A small model whose whole step is compiled, with a PowerSGD state."""

    def __init__(self, state: Any = None, hook: Any = powersgd.powerSGD_hook, **options: Any):
        self.first, self.second = nn.Linear(40, 40), nn.Linear(40, 30)
        self.ddp = DistributedDataParallel(nn.Sequential(self.first, nn.Tanh(), self.second))
        settings = {"start_powerSGD_iter": 3, "min_compression_rate": 0.5} | options
        self.state = state or powersgd.PowerSGDState(None, **settings)
        self.ddp.register_comm_hook(self.state, hook)
        self.step = torch.compile(self._step, backend="aot_eager")

    def _step(self, batch: Tensor) -> None:
        self.ddp(batch).square().mean().backward()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step(torch.randn(4, 40))


@pytest.fixture
def _compiled_autograd(_python_reducer: None) -> Iterator[None]:
    with torch._dynamo.config.patch(compiled_autograd=True):
        yield


def _breaking_hook(state, bucket):  # type: ignore[no-untyped-def]
    if bucket[1].dim() == 1:
        torch._dynamo.graph_break()
    return powersgd.powerSGD_hook(state, bucket)


@pytest.mark.usefixtures("_compiled_autograd")
def test_a_backward_in_several_graphs_counts_as_one_step() -> None:
    run = _Compiled(hook=_breaking_hook)
    run.train(6)
    assert run.state.iter == 6
    _, before, after = run.state.compression_stats()
    assert before == 3 * (40 * 40 + 40 + 40 * 30 + 30)
    assert after == 3 * (80 + 40 + 70 + 30)


@pytest.mark.usefixtures("_compiled_autograd")
def test_a_parameter_may_be_unfrozen_later() -> None:
    run = _Compiled()
    run.first.weight.requires_grad_(requires_grad=False)
    run.train(4)
    assert run.state.residual(run.second.weight).abs().max() > 0
    assert run.state.residual(run.first.weight) is None
    run.first.weight.requires_grad_(requires_grad=True)
    run.train(2)
    assert run.state.iter == 6
    assert run.state.residual(run.first.weight).abs().max() > 0


@pytest.mark.usefixtures("_compiled_autograd")
def test_settings_changed_after_compiling_warn_and_have_no_effect() -> None:
    run = _Compiled()
    run.train(4)
    run.state.matrix_approximation_rank, run.state.iter = 2, 0
    with pytest.warns(UserWarning, match="have changed since its backward was compiled") as caught:
        run.train(3)
    assert len([w for w in caught if "PowerSGDState" in str(w.message)]) == 1
    _, _, after = run.state.compression_stats()
    assert after == 4 * (80 + 40 + 70 + 30)


@pytest.mark.usefixtures("_compiled_autograd")
def test_residuals_follow_the_loss_scale_without_a_new_graph() -> None:
    scales, bad = [1.0, 1.0, 1.0, 4.0, 4.0, 64.0, 8.0, 8.0, 0.5], 5
    runs = [_Compiled(), _Compiled()]
    runs[1].ddp.load_state_dict(runs[0].ddp.state_dict())

    @torch.compile(backend="aot_eager")
    def step(ddp: nn.Module, batch: Tensor, scale: Tensor) -> None:
        (ddp(batch).square().mean() * scale).backward()

    for i, scale in enumerate(scales):
        batch = torch.randn(4, 40)
        with torch.compiler.set_stance("fail_on_recompile" if i > 3 else "default"):
            for run, factor in zip(runs, (1.0, scale), strict=True):
                run.ddp.zero_grad()
                run.state.loss_scale = factor
                step(run.ddp, batch, torch.tensor(math.inf if i == bad else factor))
        for plain, scaled in zip(*(run.ddp.parameters() for run in runs), strict=True):
            assert i == bad or torch.equal(plain.grad * scale, scaled.grad)
            left, scaled_left = (
                r.state.residual(p) for r, p in zip(runs, (plain, scaled), strict=True)
            )
            assert (left is None) == (scaled_left is None) == (plain.dim() == 1)
            assert left is None or torch.equal(left * scale, scaled_left)
    assert all(run.state.residual(run.first.weight).any() for run in runs)


@pytest.mark.usefixtures("_compiled_autograd")
def test_a_graph_takes_up_what_was_loaded_or_copied() -> None:
    run = _Compiled()
    run.train(5)
    loaded, copied = _Compiled(), _Compiled(copy.deepcopy(run.state))
    loaded.state.load_state_dict(run.state.state_dict(run.ddp), loaded.ddp)
    runs = (run, loaded, copied)
    for each in runs:
        each.ddp.load_state_dict(run.ddp.state_dict())
        each.ddp.zero_grad()
        torch.manual_seed(1)
        each.train(1)
        assert each.state.iter == 6
        expected = run.state.residual(run.first.weight)
        assert torch.equal(each.state.residual(each.first.weight), expected)


@pytest.mark.usefixtures("_compiled_autograd")
def test_a_graph_refuses_what_belongs_to_another_model_or_rank() -> None:
    run = _Compiled()
    run.train(4)
    saved = run.state.state_dict(run.ddp)
    other, foreign = _Compiled(), _Compiled()
    other.state.load_state_dict(saved, run.ddp)
    foreign.state.load_state_dict(saved | {"rank": 1}, foreign.ddp)
    for each, message in ((other, "serves one model"), (foreign, "holds the residuals of rank 1")):
        with pytest.raises(torch._dynamo.exc.InternalTorchDynamoError, match=message):
            each.train(1)


@pytest.mark.usefixtures("_compiled_autograd")
def test_wrong_use_is_named_while_compiling() -> None:
    first = _Compiled()
    first.train(1)
    for run, message in (
        (_Compiled(first.state), "one PowerSGDState serves one model: it is registered with 2"),
        (_Compiled(warm_start=False), "warm_start is False, but must be True"),
    ):
        with pytest.raises(torch._dynamo.exc.InternalTorchDynamoError, match=message):
            run.train(1)
    assert first.state.iter == 1


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

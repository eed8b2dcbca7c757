"""States that outlive their process: a resumed run is the run that never stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import powersgd

from .ranks import run_ranks
from .training import Run, assert_same

STOP, STEPS = 7, 37


def _whole(rank: int, buckets: float, dtype: torch.dtype) -> dict[str, Any]:
    del rank
    return Run(buckets, dtype).train(0, STEPS).outcome()


def _first(rank: int, directory: Path, buckets: float, dtype: torch.dtype, stop: int) -> None:
    run = Run(buckets, dtype).train(0, stop)
    run.save(directory / f"{rank}.pt", run.state.state_dict(run.ddp))


def _second(
    rank: int, directory: Path, buckets: float, dtype: torch.dtype, stop: int
) -> dict[str, Any]:
    return Run(buckets, dtype).load(directory / f"{rank}.pt").train(stop, STEPS).outcome()


@pytest.mark.parametrize(
    ("world_size", "first", "second", "stop"),
    [
        (2, 0.002, 0.002, STOP),
        (2, 0.002, 25, STOP),
        (2, 25, 0.002, STOP),
        (2, 0.002, 0.002, 2),  # in the middle of the warm-up
        (3, 0.002, 25, STOP),
    ],
)
def test_a_resumed_run_is_the_run_that_never_stopped(
    tmp_path: Path, world_size: int, first: float, second: float, stop: int
) -> None:
    # With three ranks, gloo's order of summation follows the split into buckets, and DDP's is
    # another one in its first step. In float64, what training makes of that stays small.
    dtype, tolerance = (torch.float32, 0.0) if world_size == 2 else (torch.float64, 1e-9)
    expected = run_ranks(_whole, world_size, first, dtype)
    run_ranks(_first, world_size, tmp_path, first, dtype, stop)
    actual = run_ranks(_second, world_size, tmp_path, second, dtype, stop)
    for a, e in zip(actual, expected, strict=True):
        assert_same(a, e, tolerance)


class _TwoDtypes(nn.Module):
    """DDP's first step has two buckets, also with a static graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(24, 32), nn.Linear(32, 32).double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(inputs)).double())


def _static(state: Any = None, **options: Any) -> tuple[nn.Module, Any, nn.Module]:
    model = _TwoDtypes()
    state = state or powersgd.PowerSGDState(None, **({"start_powerSGD_iter": 3} | options))
    ddp = DistributedDataParallel(model, static_graph=True)
    ddp.register_comm_hook(state, powersgd.powerSGD_hook)
    return model, state, ddp


def _steps(rank: int, ddp: nn.Module, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 * step + rank)
        ddp.zero_grad()
        ddp(torch.randn(8, 24, generator=generator)).square().mean().backward()
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter -= 0.1 * parameter.grad


def _resume_static(rank: int) -> list[bool]:
    found = []
    for options in ({}, {"warm_start": False}):
        whole, state, ddp = _static(**options)
        _steps(rank, ddp, 0, 12)
        assert state.iter == 12
        for stop in (1, 2, 6):
            half, before, ddp = _static(**options)
            _steps(rank, ddp, 0, stop)
            model, after, other = _static(**options)
            model.load_state_dict(half.state_dict())
            after.load_state_dict(before.state_dict(half), model)
            _steps(rank, other, stop, 12)
            found.append(after.iter == 12)
            pairs = zip(model.parameters(), whole.parameters(), strict=True)
            found += [torch.equal(mine, theirs_) for mine, theirs_ in pairs]
    return found


def _bad_after_loading(rank: int) -> list[bool]:
    found = []
    model, state, ddp = _static()
    _steps(rank, ddp, 0, 6)
    saved = state.state_dict(model)
    for other, loaded, wrapped in ((model, state, ddp), _static()):
        loaded.load_state_dict(saved, other)
        before = [loaded.residual(p) for p in other.parameters()]
        wrapped.zero_grad()
        loss = wrapped(torch.ones(8, 24))
        (
            loss.square().mean() + other.first.weight.sum() * (torch.inf if rank == 0 else 1)
        ).backward()
        for p, left in zip(other.parameters(), before, strict=True):
            if left is not None:
                found += [bool(p.grad.isnan().all()), torch.equal(left, loaded.residual(p))]
    return found


def test_a_static_graph_of_two_buckets_resumes_and_its_first_step_is_one_step() -> None:
    assert all(all(found) and len(found) == 30 for found in run_ranks(_resume_static, 2))
    assert all(all(found) and len(found) == 8 for found in run_ranks(_bad_after_loading, 2))


@pytest.mark.usefixtures("group")
def test_an_older_ddp_is_not_taken_for_the_models_after_loading() -> None:
    _, state, old = _convolutions()
    for _ in range(4):
        _step(old)
    weight = old.module._orig_mod.weight
    new = DistributedDataParallel(old.module, find_unused_parameters=True)
    new.register_comm_hook(state, powersgd.powerSGD_hook)
    _step(new)
    for _ in range(2):
        state.load_state_dict(state.state_dict(new), new)
        assert state.owner.find() is new
        _step(new)
    assert state.residual(weight).any()


class _Convolutions(nn.Module):
    """Models that have the names which torch.compile gives, and what it does give."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self._orig_mod = nn.Conv2d(8, 16, 3)
        self.submod = nn.ModuleDict({"_orig_mod": nn.Conv2d(1, 1, 1, bias=False)})
        self.mod = torch.compile(nn.Identity())
        self.submod.requires_grad_(requires_grad=False)
        self.pre_orig_mod = torch.compile(nn.Sequential(torch.compile(nn.Conv2d(16, 16, 3))))

    def forward(self, images: Tensor) -> Tensor:
        first, second = self._orig_mod, self.pre_orig_mod._orig_mod[0]._orig_mod
        return second(first(images))


def _convolutions(**settings: Any) -> tuple[nn.Module, Any, Any]:
    model = _Convolutions()
    state = powersgd.PowerSGDState(None, 2, 3, 0.5, **settings)
    return model, state, _wrap(model, state)


def _wrap(model: nn.Module, state: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, powersgd.powerSGD_hook)
    return ddp


def _step(ddp: nn.Module) -> None:
    ddp(torch.randn(2, 8, 7, 7)).square().mean().backward()


@pytest.mark.usefixtures("group")
def test_names_are_the_models_own() -> None:
    model, state, ddp = _convolutions()
    saved = state.state_dict(torch.compile(ddp))
    names = ["_orig_mod.weight", "_orig_mod.bias", "submod._orig_mod.weight"]
    names += ["pre_orig_mod.0.weight", "pre_orig_mod.0.bias"]
    assert list(saved["parameters"]) == names
    state.load_state_dict(saved, model)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("is_rewrapped", [False, True])
@pytest.mark.filterwarnings("ignore:Grad strides do not match")
def test_another_memory_format_scrambles_no_residual(is_rewrapped: bool) -> None:
    _, state, ddp = _convolutions()
    for _ in range(5):
        _step(ddp)
    model, loaded, other = _convolutions()
    loaded.load_state_dict(state.state_dict(ddp), model)
    weights = [p for p in model.parameters() if p.dim() == 4 and p.requires_grad]
    if not is_rewrapped:
        _step(other)  # after the first step DDP builds its buckets anew
    model.to(memory_format=torch.channels_last)
    if is_rewrapped:
        other = _wrap(model, loaded)
    for _ in range(3):
        images = torch.randn(2, 8, 7, 7)
        raw = torch.autograd.grad(model(images).square().mean(), weights)
        before = [loaded.residual(weight) for weight in weights]
        other.zero_grad()
        other(images).square().mean().backward()
        for weight, gradient, left in zip(weights, raw, before, strict=True):
            assert left.any()
            torch.testing.assert_close(weight.grad + loaded.residual(weight), gradient + left)


@pytest.mark.usefixtures("group")
def test_error_feedback_switched_off_after_loading_drops_all_of_it() -> None:
    run = Run().train(0, STOP)
    saved = run.state.state_dict(run.ddp)
    saved["settings"]["min_compression_rate"] = 5
    owed = saved["parameters"]["5.weight"]
    owed |= {"is_owed": 1, "tensors": "residual"}
    del owed["q"], owed["spare"]
    other = Run(min_compression_rate=5.0)
    other.state.load_state_dict(saved, other.ddp)
    other.state.use_error_feedback = other.state.warm_start = False
    other.train(STOP, STOP + 1)
    assert all(residual is None for residual in other.outcome()["residuals"])
    entries = other.state.state_dict(other.ddp)["parameters"].values()
    assert not any(entry["tensors"] or entry["is_owed"] for entry in entries)


@pytest.mark.usefixtures("group")
def test_a_state_takes_up_what_it_saved_before_the_dtype_changed() -> None:
    _, state, ddp = _convolutions()
    _step(ddp)
    ddp.to(torch.float64)
    ddp = _wrap(ddp.module, state)
    for _ in range(5):
        ddp(torch.randn(2, 8, 7, 7, dtype=torch.float64)).square().mean().backward()
    saved = state.state_dict(ddp)
    state.load_state_dict(saved, ddp)
    assert state.iter == 6


@pytest.mark.usefixtures("group")
def test_parameters_that_come_later_are_the_same_models() -> None:
    def train(run: Any, ddp: nn.Module, branches: list[int]) -> None:
        for branch in branches:
            run.zero_grad()
            ddp(torch.randn(4, 16), branch).square().mean().backward()

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))
            self.branches[2].requires_grad_(requires_grad=False)

        def forward(self, inputs: Tensor, branch: int) -> Tensor:
            return self.branches[branch](self.branches[2](inputs))

    def wrap(model: nn.Module, state: Any) -> nn.Module:
        options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.0001, **options)
        ddp.register_comm_hook(state, powersgd.powerSGD_hook)
        return ddp

    model = Branches()
    state = powersgd.PowerSGDState(None, 1, 2, 0.5)
    train(model, wrap(model, state), [0] * 4)
    saved = state.state_dict(model)
    assert saved["parameters"]["branches.1.weight"]["position"] == -1

    other, loaded = Branches(), powersgd.PowerSGDState(None, 1, 2, 0.5)
    loaded.load_state_dict(saved, other)
    ddp = wrap(other, loaded)
    train(other, ddp, [0, 1, 0, 1])
    weights = [branch.weight for branch in other.branches]
    assert [loaded.residual(weight) is not None for weight in weights] == [True, True, False]
    other.branches[2].requires_grad_(requires_grad=True)
    train(other, wrap(other, loaded), [0, 1])
    assert all(loaded.residual(weight) is not None for weight in weights)
    with pytest.raises(ValueError, match="one PowerSGDState serves one model"):
        train(other, wrap(Branches(), loaded), [0])


@pytest.mark.usefixtures("group")
def test_a_file_loads_whatever_the_model_is_wrapped_in(tmp_path: Path) -> None:
    run = Run().train(0, STOP)
    names = set(run.state.state_dict(run.ddp)["parameters"])
    assert names == set(dict(run.model.named_parameters()))
    compiled = torch.compile(run.ddp)
    torch.save(run.state.state_dict(compiled), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    assert set(saved["parameters"]) == names
    run.state.load_state_dict(saved, run.model)
    run.train(STOP, STOP + 2)
    truncated = (tmp_path / "state.pt").read_bytes()[:-1000]
    (tmp_path / "state.pt").write_bytes(truncated)
    with pytest.raises((RuntimeError, OSError)):
        torch.load(tmp_path / "state.pt")


@pytest.mark.usefixtures("group")
def test_a_model_that_the_state_does_not_serve_is_refused() -> None:
    run = Run().train(0, STOP)
    with pytest.raises(ValueError, match="the state serves 8 parameters that this module"):
        run.state.state_dict(nn.Linear(2, 2))


def _odd_model() -> nn.ParameterList:
    torch.manual_seed(0)
    return nn.ParameterList(
        [
            nn.Parameter(torch.randn(20, 30).t()),
            nn.Parameter(torch.randn(16, 8, 3, 3).to(memory_format=torch.channels_last)),
            nn.Parameter(torch.randn(20, 15, dtype=torch.complex64)),
            nn.Parameter(torch.randn(24, 24, dtype=torch.bfloat16)),
            nn.Parameter(torch.randn(40, 9)),  # compressed no longer, once the rate is 5
        ]
    )


@pytest.mark.usefixtures("group")
def test_parameters_of_every_kind_go_through_a_file(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = _odd_model()

        def forward(self) -> Tensor:
            return sum(w.abs().float().square().sum() for w in self.weights)

    def wrap(rate: float) -> tuple[Odd, Any, Any]:
        model = Odd()
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.002)
        state = powersgd.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=rate)
        ddp.register_comm_hook(state, powersgd.powerSGD_hook)
        return model, ddp, state

    model, ddp, state = wrap(1.0)
    for _ in range(4):
        ddp().backward()
    state.min_compression_rate = 5
    ddp().backward()
    (ddp() * torch.inf).backward()  # a bad step: what is owed is not paid
    saved = state.state_dict(ddp)
    assert [entry["is_owed"] for entry in saved["parameters"].values()] == [0, 0, 0, 0, 1]
    torch.save(saved, tmp_path / "state.pt")

    other, _, loaded = wrap(5.0)
    loaded.load_state_dict(torch.load(tmp_path / "state.pt"), other)
    for mine, theirs_ in zip(other.weights, model.weights, strict=True):
        left, right = loaded.residual(mine), state.residual(theirs_)
        assert left is not None
        assert right is not None
        assert right.any()
        assert torch.equal(left, right)
        assert left.stride() == right.stride()


def _train_batched(run: Any, start: int, stop: int) -> Any:
    model, _, ddp = run
    for step in range(start, stop):
        generator = torch.Generator().manual_seed(step)
        model.zero_grad()
        ddp(torch.randn(16, 24, generator=generator)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return run


def _batched() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 9))
    state = powersgd.PowerSGDState(None, 2, 3)
    ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    ddp.register_comm_hook(state, powersgd.batched_powerSGD_hook)
    return model, state, ddp


@pytest.mark.usefixtures("group")
def test_a_run_with_the_batched_hook_goes_on_exactly_with_the_same_buckets() -> None:
    """The padding of the square matrix carries nothing over that a checkpoint would not have."""
    whole = _train_batched(_batched(), 0, 12)
    stopped, other = _train_batched(_batched(), 0, 7), _batched()
    other[0].load_state_dict(stopped[0].state_dict())
    other[1].load_state_dict(stopped[1].state_dict(stopped[0]), other[0])
    _train_batched(other, 7, 12)
    for one, expected in zip(other[0].parameters(), whole[0].parameters(), strict=True):
        assert torch.equal(one, expected)

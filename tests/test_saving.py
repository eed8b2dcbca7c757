"""States that outlive their process: a resumed run is the run that never stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel

import powersgd

from .ranks import RankError, run_ranks
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


def _load_all(rank: int, directory: Path, file: str, steps: int) -> Any:
    """Load a file on every rank; the error, or residuals at first and what happens afterwards."""
    run = Run()
    try:
        run.load(directory / file.format(rank=rank))
        loaded = run.outcome()
        run.train(STOP, STOP + steps)
    except ValueError as error:
        return str(error)
    return loaded, run.outcome()


def _mean_residuals(outcomes: list[Any]) -> list[Tensor]:
    columns = zip(*(outcome["residuals"] for outcome in outcomes), strict=True)
    return [torch.stack(column).mean(0) for column in columns if column[0] is not None]


def _outcome_and_save(rank: int, directory: Path) -> dict[str, Any]:
    run = Run().train(0, STOP)
    run.save(directory / "shared.pt", powersgd.shared_state_dict(run.state, run.ddp))
    run.save(directory / f"{rank}.pt", run.state.state_dict(run.ddp))
    return run.outcome()


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 5)])
def test_a_shared_file_fits_any_number_of_ranks(tmp_path: Path, before: int, after: int) -> None:
    mean = _mean_residuals(run_ranks(_outcome_and_save, before, tmp_path))
    results = run_ranks(_load_all, after, tmp_path, "shared.pt", 2)
    for loaded, _ in results:
        residuals = [residual for residual in loaded["residuals"] if residual is not None]
        for residual, expected in zip(residuals, mean, strict=True):
            torch.testing.assert_close(residual, expected, rtol=1e-5, atol=1e-8)
    for _, last in results[1:]:
        assert all(
            torch.equal(a, b)
            for a, b in zip(last["parameters"], results[0][1]["parameters"], strict=True)
        )


def test_the_mean_residual_gives_the_same_next_update(tmp_path: Path) -> None:
    run_ranks(_outcome_and_save, 2, tmp_path)
    own = run_ranks(_load_all, 2, tmp_path, "{rank}.pt", 1)
    mean = run_ranks(_load_all, 2, tmp_path, "shared.pt", 1)
    for (_, a), (_, b) in zip(own, mean, strict=True):
        for one, other in zip(a["parameters"], b["parameters"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_one_ranks_file_is_refused_on_the_others_and_in_another_world(tmp_path: Path) -> None:
    run_ranks(_outcome_and_save, 2, tmp_path)
    same = run_ranks(_load_all, 2, tmp_path, "0.pt", 1)
    assert (
        "holds the residuals of rank 0 in a group of 2, but this is rank 1 in a group of 2"
        in same[1]
    )
    assert "rank 1 of the group stopped: the state holds the residuals" in same[0]
    assert all(
        "rank 0 in a group of 2" in text for text in run_ranks(_load_all, 3, tmp_path, "0.pt", 1)
    )


def _load_mixed(rank: int, directory: Path) -> list[str]:
    errors, run = [], Run().load(directory / ("shared.pt" if rank == 0 else "1.pt"))
    with pytest.raises(ValueError, match="ranks disagree") as error:
        run.train(STOP, STOP + 1)
    errors.append(str(error.value))
    with pytest.raises(ValueError, match="ranks disagree on whether each rank has loaded its own"):
        powersgd.shared_state_dict(run.state, run.ddp)
    run.load(directory / "0.pt")
    with pytest.raises(ValueError, match="holds the residuals of rank 0") as error:
        powersgd.shared_state_dict(run.state, run.ddp)
    return [*errors, str(error.value)]


def test_own_and_shared_or_foreign_residuals_are_not_mixed(tmp_path: Path) -> None:
    run_ranks(_outcome_and_save, 2, tmp_path)
    for mixed, _ in run_ranks(_load_mixed, 2, tmp_path):
        assert "loaded its own residuals: rank 0 has False, rank 1 has True" in mixed


def _dcp(rank: int, directory: Path, how: str) -> dict[str, Any]:
    del rank
    run, shared = Run(), how == "shared"
    run.train(0, STOP)
    checkpoint = powersgd.Checkpoint(run.state, run.ddp, shared=shared)
    everything = {"model": run.model, "powersgd": checkpoint}
    if how == "async":
        # Its collectives run beside those of the training: they need a group of their own.
        group = dist.new_group()
        future = dcp.async_save(everything, checkpoint_id=directory, process_group=group)
        run.train(STOP, STOP + 2)  # what is saved is of the moment of the call
        future.result()
    else:
        dcp.save(everything, checkpoint_id=directory)
    return run.outcome()


def _dcp_load(rank: int, directory: Path, shared: bool) -> Any:
    del rank
    run = Run()
    checkpoint = powersgd.Checkpoint(run.state, run.ddp, shared=shared)
    dcp.load({"model": run.model, "powersgd": checkpoint}, checkpoint_id=directory)
    return run.outcome()


def _whole_until_stop(rank: int) -> dict[str, Any]:
    del rank
    return Run().train(0, STOP).outcome()


@pytest.mark.parametrize("how", ["plain", "async", "shared"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_dcp_saves_and_loads_the_state(tmp_path: Path, how: str) -> None:
    run_ranks(_dcp, 2, tmp_path, how)
    expected = run_ranks(_whole_until_stop, 2)
    actual = run_ranks(_dcp_load, 2, tmp_path, how == "shared")
    mean = _mean_residuals(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a["iter"] == e["iter"]
        held = [residual for residual in a["residuals"] if residual is not None]
        own = [residual for residual in e["residuals"] if residual is not None]
        for one, other in zip(held, mean if how == "shared" else own, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    if how == "plain":
        with pytest.raises(RankError, match=r"Missing key.*rank2"):
            run_ranks(_dcp_load, 3, tmp_path, False)


def _dcp_groups(rank: int, directory: Path, shared: bool) -> tuple[Any, Any]:
    """Two models in one world, each trained by a group of its own."""
    groups = [dist.new_group([i]) for i in range(2)]
    runs = [_on(groups[rank]).train(0, STOP), _on(groups[rank])]
    for run, function in zip(runs, (dcp.save, dcp.load), strict=True):
        checkpoint = powersgd.Checkpoint(run.state, run.ddp, shared=shared)
        function({"powersgd": checkpoint}, checkpoint_id=directory)
    return tuple(run.outcome() for run in runs)


def _on(group: Any) -> Run:
    run = Run()
    run.ddp = DistributedDataParallel(run.model, process_group=group)
    run.state.process_group = group
    run.ddp.register_comm_hook(run.state, powersgd.powerSGD_hook)
    return run


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_dcp_keeps_the_states_of_two_groups_apart(tmp_path: Path, shared: bool) -> None:
    outcomes = run_ranks(_dcp_groups, 2, tmp_path, shared)
    for saved, loaded in outcomes:
        for one, other in zip(loaded["residuals"], saved["residuals"], strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)
    assert not torch.equal(outcomes[0][1]["residuals"][0], outcomes[1][1]["residuals"][0])


def _damage(saved: dict[str, Any]) -> list[str]:
    """Damage a saved state in every way; what the error must name."""
    entries = saved["parameters"]
    entries["4.residual"] = entries.pop("4.weight")
    del entries["0.weight"]["q"]
    entries["2.weight"]["residual"] = entries["2.weight"]["residual"][:5]
    entries["2.weight"]["spare"] = entries["2.weight"]["spare"].double()
    entries["2.weight"]["q"] = entries["2.weight"]["q"][:1]
    entries["2.weight"]["more"] = 1
    entries["0.bias"]["loss_scale"] = 0.0
    entries["2.bias"] = 3
    entries["4.bias"]["position"] = "first"
    entries["5.weight"]["residual"][0, 0] = torch.nan
    return [
        "unexpected 4.residual",
        "missing 4.weight",
        "missing 0.weight.q",
        "2.weight.residual has the shape (5, 32), expected (32, 32)",
        "2.weight.spare is torch.float64, expected torch.float32",
        "2.weight.q has the shape (1, 32), expected (2, 32)",
        "0.bias.loss_scale is 0.0",
        "2.bias is <class 'int'>",
        "4.bias.position is 'first'",
        "unexpected 2.weight.more",
        "5.weight.residual is not finite",
    ]


@pytest.mark.usefixtures("group")
def test_all_that_is_wrong_is_named_and_nothing_is_loaded() -> None:
    run = Run().train(0, STOP)
    before = run.outcome()
    saved = run.state.state_dict(run.ddp)
    expected = _damage(saved)
    saved["settings"]["warm_start"] = False
    del saved["settings"]["matrix_approximation_rank"]
    with pytest.raises(ValueError, match="cannot load") as error:
        run.state.load_state_dict(saved, run.ddp)
    missing = "matrix_approximation_rank was None when it was saved and is 2 now"
    for clause in [*expected, missing, "warm_start was False when it was saved and is True now"]:
        assert clause in str(error.value)
    after = run.outcome()
    assert after["iter"] == before["iter"]
    for a, b in zip(after["residuals"], before["residuals"], strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    run.train(STOP, STOP + 2)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("name", "value"), [("iter", -1), ("iter", 2**70), ("rank", -7), ("world_size", 0)]
)
def test_a_number_out_of_range_loads_nothing(name: str, value: int) -> None:
    run = Run().train(0, STOP)
    saved = run.state.state_dict(run.ddp) | {name: value}
    with pytest.raises(ValueError, match=f"cannot load this PowerSGDState: {name} is {value}"):
        run.state.load_state_dict(saved, run.ddp)
    assert run.state.iter == STOP
    assert run.state.residual(run.model[0].weight) is not None


@pytest.mark.usefixtures("group")
def test_another_rank_of_approximation_is_refused() -> None:
    run = Run().train(0, STOP)
    with pytest.raises(ValueError, match=r"matrix_approximation_rank was 2 .* and is 4 now"):
        Run(matrix_approximation_rank=4).state.load_state_dict(
            run.state.state_dict(run.ddp), run.model
        )


@pytest.mark.usefixtures("group")
def test_a_state_of_torchs_class_is_refused() -> None:
    other = theirs.PowerSGDState(None)
    for saved in (other, other.__getstate__(), {}, None):
        with pytest.raises(ValueError, match=r"start with a new powersgd.PowerSGDState"):
            Run().state.load_state_dict(saved, nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"start with a new powersgd.PowerSGDState"):
        powersgd.PowerSGDState(None).__setstate__(other.__getstate__())


def _damage_numbers(saved: dict[str, Any]) -> list[str]:
    """Damage what is of the right type; what the error must name."""
    entries = saved["parameters"]
    first, second, third = (entries[name] for name in ("0.weight", "2.weight", "4.weight"))
    entries["0.bias"] |= {"tensors": "residual", "residual": torch.zeros(32)}
    first["is_owed"], first["is_square"], first["loss_scale"] = 1, 2, 1e-320
    second["residual"] = second["residual"].to_sparse()
    second["q"] = second["q"].to("meta")
    third["tensors"] = "residual q"
    del third["spare"]
    entries["2.bias"] |= {"kind": "junk"}
    entries["4.bias"] |= {"position": -2}
    entries["5.bias"] |= {"position": entries["5.weight"]["position"]}
    saved["settings"] = saved["settings"] | {"warm_start": torch.ones(2)}
    return [
        "unexpected 0.bias.residual: a parameter of its shape is not compressed",
        "unexpected 0.weight.q: it is owed, so no longer compressed",
        "0.weight.is_square is 2",
        "0.weight.loss_scale is 1e-320",
        "2.weight.residual is not a dense tensor",
        "2.weight.q is a meta tensor",
        "4.weight has one of q and spare, expected both or none",
        "2.bias.kind is 'junk' and its position 4",
        "4.bias.position is -2",
        f"several parameters have the position torch.float32 {entries['5.bias']['position']}",
        "warm_start was tensor([1., 1.]) when it was saved and is True now",
    ]


@pytest.mark.usefixtures("group")
def test_numbers_that_cannot_be_are_named() -> None:
    run = Run().train(0, STOP)
    saved = run.state.state_dict(run.ddp)
    expected = _damage_numbers(saved)
    with pytest.raises(ValueError, match="cannot load") as error:
        run.state.load_state_dict(saved, run.ddp)
    assert [clause for clause in expected if clause not in str(error.value)] == []
    assert str(error.value).count(";") == len(expected) - 1
    with pytest.raises(ValueError, match=r"missing 0.weight; missing 0.bias; missing 2.weight"):
        run.state.load_state_dict(saved | {"parameters": {}}, run.ddp)


class _Convolutions(nn.Module):
    """Models that have the names which torch.compile gives, and what it does give."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self._orig_mod = nn.Conv2d(8, 16, 3)
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
    names = [
        f"{part}.{kind}" for part in ("_orig_mod", "pre_orig_mod.0") for kind in ("weight", "bias")
    ]
    assert list(saved["parameters"]) == names
    state.load_state_dict(saved, model)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("is_rewrapped", [False, True])
@pytest.mark.filterwarnings("ignore:Grad strides do not match")
def test_another_memory_format_scrambles_no_residual(is_rewrapped: bool) -> None:
    _, state, ddp = _convolutions()
    for _ in range(5):
        _step(ddp)
    saved, weights = state.state_dict(ddp), [p for p in ddp.parameters() if p.dim() == 4]
    expected = [state.residual(weight).contiguous() for weight in weights]

    model, loaded, other = _convolutions()
    loaded.load_state_dict(saved, model)
    loaded.start_powerSGD_iter = 1000  # plain steps leave residuals alone
    if not is_rewrapped:
        _step(other)
    model.to(memory_format=torch.channels_last)
    if is_rewrapped:
        other = _wrap(model, loaded)
    for step in range(3):
        actual = [loaded.residual(p) for p in model.parameters() if p.dim() == 4]
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
        loaded.min_compression_rate = 0.5 - 0.1 * step  # asks for new plans
        _step(other)
    state_strides = [loaded.spec(p).stride for p in model.parameters() if p.dim() == 4]
    assert [s[1] == 1 for s in state_strides] == [is_rewrapped] * 2


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

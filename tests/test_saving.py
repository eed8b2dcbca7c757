"""States that outlive their process: a resumed run is the run that never stopped."""

import copy
import pickle
from collections.abc import Callable, Iterator
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

STOP, STEPS = 7, 37
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
        self.model.append(nn.Linear(9, 9))  # its matrix is too small to compress at rank 4
        self.model.to(dtype)
        self.dtype = dtype
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=bucket_cap_mb)
        self.state = powersgd.PowerSGDState(None, **(SETTINGS | settings))
        self.ddp.register_comm_hook(self.state, powersgd.powerSGD_hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

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
        assert a["iter"] == e["iter"]
        assert a["stats"] == e["stats"]
        for name in ("parameters", "residuals"):
            for one, other in zip(a[name], e[name], strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    assert (one - other).norm() <= tolerance * other.norm()


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
    assert "holds the residuals of rank 0 of 2, but this is rank 1 of 2" in same[1]
    assert "rank 1 of the group stopped: the state holds the residuals" in same[0]
    assert all("rank 0 of 2" in text for text in run_ranks(_load_all, 3, tmp_path, "0.pt", 1))


def _load_mixed(rank: int, directory: Path) -> list[str]:
    errors, run = [], Run().load(directory / ("shared.pt" if rank == 0 else "1.pt"))
    with pytest.raises(ValueError, match="ranks disagree") as error:
        run.train(STOP, STOP + 1)
    errors.append(str(error.value))
    run.load(directory / "0.pt")
    with pytest.raises(ValueError, match="holds the residuals of rank 0") as error:
        powersgd.shared_state_dict(run.state, run.ddp)
    return [*errors, str(error.value)]


def test_own_and_shared_or_foreign_residuals_are_not_mixed(tmp_path: Path) -> None:
    run_ranks(_outcome_and_save, 2, tmp_path)
    for mixed, _ in run_ranks(_load_mixed, 2, tmp_path):
        assert "loaded its own residuals: rank 0 has False, rank 1 has True" in mixed


def _copies(rank: int, how: str) -> tuple[Any, Any]:
    run = Run().train(0, STOP)
    copied: Callable[[Any], Any] = copy.deepcopy
    if how == "pickle":

        def copied(state: Any) -> Any:
            return pickle.loads(pickle.dumps(state))

    other = Run()
    other.state = copied(run.state)
    other.model.load_state_dict(run.model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    other.ddp = DistributedDataParallel(other.model, bucket_cap_mb=0.002)
    other.ddp.register_comm_hook(other.state, powersgd.powerSGD_hook)
    return run.train(STOP, STEPS).outcome(), other.train(STOP, STEPS).outcome()


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_a_copied_state_goes_on_like_its_original(how: str) -> None:
    for original, copied in run_ranks(_copies, 2, how):
        assert original["iter"] == copied["iter"]
        assert original["stats"] == copied["stats"]
        for name in ("parameters", "residuals"):
            for a, b in zip(original[name], copied[name], strict=True):
                assert (a is None and b is None) or torch.equal(a, b)


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


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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
def test_an_unpickled_state_is_not_saved_before_it_has_its_memory() -> None:
    run = Run().train(0, STOP)
    with pytest.raises(ValueError, match="takes up its memory in its first step"):
        copy.deepcopy(run.state).state_dict(run.ddp)


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

"""Residuals of several ranks: one file for each, one for all, torch.distributed.checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import powersgd

from .ranks import RankError, run_ranks
from .training import Run

STOP = 7


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
    assert "holds the residuals of rank 0, in a group of 2, but this is rank 1 of" in same[1]
    assert "rank 1 of the group stopped: the state holds the residuals" in same[0]
    other = run_ranks(_load_all, 3, tmp_path, "0.pt", 1)
    assert all("rank 0, in a group of 2" in text for text in other)


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


def _share_wrongly(rank: int) -> list[str]:
    run, errors = Run().train(0, STOP), []
    with pytest.raises(ValueError, match="module is None") as error:
        powersgd.shared_state_dict(run.state, None if rank == 0 else run.ddp)  # type: ignore[arg-type]
    errors.append(str(error.value))
    saved = run.state.state_dict(run.ddp)
    saved["rank"] = -1
    saved["parameters"]["4.weight"]["loss_scale"] = 1.0 + rank
    run.state.load_state_dict(saved, run.ddp)
    with pytest.raises(ValueError, match="ranks disagree") as error:
        powersgd.shared_state_dict(run.state, run.ddp)
    return [*errors, str(error.value)]


def test_a_wrong_module_on_one_rank_is_an_error_on_all() -> None:
    first, second = run_ranks(_share_wrongly, 2)
    assert first[0].startswith("module is None")
    assert second[0].startswith("rank 0 of the group stopped: module is None")
    # Of long tables only what differs.
    assert first[1] == second[1]
    assert "the saved parameters: 4.weight: rank 0 has" in first[1]
    assert len(first[1]) < 500


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


def _dcp_everything(rank: int, directory: Path, shared: bool) -> tuple[Any, Any]:
    """Save model, optimizer and state as DCP's users do, load them into new ones; both go on."""
    runs = [Run().train(0, STOP), Run()]
    for run, function in zip(runs, (dcp.save, dcp.load), strict=True):
        model, optimizer = get_state_dict(run.ddp, run.optimizer)
        checkpoint = powersgd.Checkpoint(run.state, run.ddp, shared=shared)
        everything = {"model": model, "optimizer": optimizer, "powersgd": checkpoint}
        function(everything, checkpoint_id=directory)
    parts = {"model_state_dict": model, "optim_state_dict": optimizer}
    set_state_dict(run.ddp, run.optimizer, **parts)
    return tuple(run.train(STOP, STOP + 13).outcome() for run in runs)


@pytest.mark.parametrize(("shared", "tolerance"), [(False, 0.0), (True, 1e-5)])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_dcp_resumes_the_run_beside_model_and_optimizer(
    tmp_path: Path, shared: bool, tolerance: float
) -> None:
    for whole, resumed in run_ranks(_dcp_everything, 2, tmp_path, shared):
        assert (resumed["iter"], resumed["stats"]) == (whole["iter"], whole["stats"])
        for one, other in zip(resumed["parameters"], whole["parameters"], strict=True):
            assert (one - other).norm() <= tolerance * other.norm()


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


def _recover_by_dcp(rank: int, directory: Path) -> dict[str, Any]:
    run = Run().train(0, STOP)
    checkpoint = {"powersgd": powersgd.Checkpoint(run.state, run.ddp, shared=True)}
    dcp.save(checkpoint, checkpoint_id=directory)
    expected = _mean_residuals(_gather(run.outcome()))
    run.state.iter += rank  # as if one rank had ended a step that the other has not
    run.state.reset()
    dcp.load(checkpoint, checkpoint_id=directory)
    assert run.state.iter == STOP
    held = [residual for residual in run.outcome()["residuals"] if residual is not None]
    for one, other in zip(held, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    return run.train(STOP, STOP + 1).outcome()


def _gather(outcome: dict[str, Any]) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, outcome)
    return every


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_dcp_loads_into_states_that_differ_once_they_are_reset(tmp_path: Path) -> None:
    first, second = run_ranks(_recover_by_dcp, 2, tmp_path)
    assert all(map(torch.equal, first["parameters"], second["parameters"]))


def _share_halves(rank: int) -> dict[str, Any]:
    run = Run()
    hook = fp16_compress_wrapper(powersgd.powerSGD_hook)
    run.ddp = DistributedDataParallel(run.model, bucket_cap_mb=0.002)
    run.ddp.register_comm_hook(run.state, hook)
    run.train(0, STOP)
    assert run.state.residual(run.model[0].weight).dtype == torch.float16
    return powersgd.shared_state_dict(run.state, run.ddp)


def test_the_mean_of_halves_is_not_rounded() -> None:
    first, second = run_ranks(_share_halves, 2)
    for name, entry in first["parameters"].items():
        if "residual" in entry:
            assert entry["residual"].dtype == torch.float32
            assert torch.equal(entry["residual"], second["parameters"][name]["residual"])

"""Copied and pickled states: their next model takes up the memory, parameter by parameter."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import powersgd

from .ranks import run_ranks
from .training import Run, assert_same

STOP, STEPS = 7, 37


def _pickled(state: Any) -> Any:
    return pickle.loads(pickle.dumps(state))


COPIES: dict[str, Callable[[Any], Any]] = {"pickle": _pickled, "deepcopy": copy.deepcopy}


def _beside(run: Run, state: Any) -> Run:
    """A second run that stands where the first one stands, with a state of its own."""
    other = Run()
    other.model.load_state_dict(run.model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    return other.wrap(state)


def _copies(rank: int, how: str) -> tuple[Any, Any]:
    del rank
    run = Run().train(0, STOP)
    other = _beside(run, COPIES[how](run.state))
    return run.train(STOP, STEPS).outcome(), other.train(STOP, STEPS).outcome()


@pytest.mark.parametrize("how", list(COPIES))
def test_a_copied_state_goes_on_like_its_original(how: str) -> None:
    for original, copied in run_ranks(_copies, 2, how):
        assert_same(copied, original)


def _freeze_a_layer(rank: int, at_first: bool) -> tuple[Any, Any]:
    del rank
    run = Run()
    run.model[2].requires_grad_(not at_first)
    run.wrap(run.state).train(0, STOP)
    other = _beside(run, copy.deepcopy(run.state))
    loaded = _beside(run, Run().state)
    loaded.state.load_state_dict(run.state.state_dict(run.ddp), loaded.ddp)
    for each in (run, other, loaded):
        each.model[2].requires_grad_(at_first)
        each.wrap(each.state).train(STOP, STOP + 3)
    return tuple(each.outcome() for each in (run, other, loaded))


@pytest.mark.parametrize("at_first", [True, False])
def test_a_frozen_layer_moves_no_residual_to_another_parameter(at_first: bool) -> None:
    for original, copied, loaded in run_ranks(_freeze_a_layer, 2, at_first):
        assert original["residuals"][4].any()
        assert_same(copied, original)
        assert_same(loaded, original)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("how", list(COPIES))
def test_a_copied_state_is_saved_like_its_original(how: str) -> None:
    run = Run().train(0, STOP)
    expected, copied = run.state.state_dict(run.ddp), COPIES[how](COPIES[how](run.state))
    saved = copied.state_dict(_beside(run, copied).model)
    assert {**saved, "parameters": None} == {**expected, "parameters": None}
    for name, entry in expected["parameters"].items():
        assert list(entry) == list(saved["parameters"][name])
        for key, value in entry.items():
            assert torch.as_tensor(saved["parameters"][name][key] == value).all()


@pytest.mark.usefixtures("group")
def test_a_copied_state_is_copied_before_its_first_step() -> None:
    fresh = copy.deepcopy(Run().state)
    assert fresh.steps == powersgd.EAGER
    assert Run().wrap(fresh).train(0, STOP).state.iter == STOP


@pytest.mark.usefixtures("group")
def test_a_copy_is_named_by_its_ddp_model_whatever_was_saved() -> None:
    run = Run().train(0, STOP)
    run.state.state_dict(nn.ModuleDict({"outer": run.ddp}))
    other = _beside(run, copy.deepcopy(run.state))
    assert_same(other.train(STOP, STOP + 2).outcome(), run.train(STOP, STOP + 2).outcome())


@pytest.mark.usefixtures("group")
def test_a_copy_has_the_dtype_that_the_model_has_come_to_have() -> None:
    run = Run().train(0, STOP)
    run.model.to(torch.float64)
    copied = copy.deepcopy(run.state)
    run.state.load_state_dict(run.state.state_dict(run.ddp), run.ddp)
    other = Run(dtype=torch.float64)
    other.model.load_state_dict(run.model.state_dict())
    other.wrap(copied)
    run.dtype = torch.float64
    run.wrap(run.state)
    for each in (run, other):
        each.optimizer = torch.optim.SGD(each.model.parameters(), lr=0.1)
        each.train(STOP, STOP + 2)
    assert_same(other.outcome(), run.outcome())


@pytest.mark.usefixtures("group")
def test_another_model_is_refused_and_the_copy_stays_whole() -> None:
    run = Run().train(0, STOP)
    copied = copy.deepcopy(run.state)
    other = Run()
    other.model[2] = nn.Linear(32, 32, bias=False)
    other.model[4], other.model[5] = nn.Linear(32, 10), nn.Linear(10, 9)
    other.wrap(copied)
    with pytest.raises(ValueError, match="copied or pickled and does not fit the model") as error:
        other.train(STOP, STOP + 1)
    assert "unexpected 2.bias" in str(error.value)
    assert "4.weight.residual has the shape (9, 32), expected (10, 32)" in str(error.value)
    expected = run.train(STOP, STOP + 2).outcome()
    del other
    again = Run().train(0, STOP)
    assert_same(_beside(again, copied).train(STOP, STOP + 2).outcome(), expected)


@pytest.mark.usefixtures("group")
def test_a_state_without_a_known_model_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    run, copied = Run(), copy.deepcopy(Run().train(0, STOP).state)
    monkeypatch.setattr("powersgd.ddp.find_new_ddp", lambda *_: None)
    run.train(0, STOP)
    with pytest.raises(ValueError, match=r"has not found its DDP model .* use state_dict"):
        pickle.dumps(run.state)
    other = Run().wrap(copied)
    with pytest.raises(ValueError, match="its DDP model is not among Python's objects"):
        other.train(STOP, STOP + 1)


@pytest.mark.usefixtures("group")
def test_dcp_loads_into_a_copied_state(tmp_path: Path) -> None:
    run = Run().train(0, STOP)
    checkpoint = powersgd.Checkpoint(run.state, run.ddp)
    dcp.save({"powersgd": checkpoint}, checkpoint_id=tmp_path)
    expected = run.outcome()["residuals"]
    other = _beside(run, copy.deepcopy(run.train(STOP, STOP + 3).state))
    dcp.load({"powersgd": powersgd.Checkpoint(other.state, other.ddp)}, checkpoint_id=tmp_path)
    assert other.state.iter == STOP
    for actual, wanted in zip(other.outcome()["residuals"], expected, strict=True):
        assert (actual is None) == (wanted is None)
        assert actual is None or torch.equal(actual, wanted)

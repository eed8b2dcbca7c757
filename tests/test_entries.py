"""Files that do not fit: all that is wrong is named, and nothing is loaded."""

import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

import powersgd
from powersgd import saving

from .training import Run, assert_same

STOP = 7


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
        "2.bias has the kind 'junk' and the position 4",
        "4.bias has the kind 'torch.float32' and the position -2",
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


@pytest.mark.usefixtures("group")
def test_bytes_that_cannot_be_read_and_what_is_no_module_are_named() -> None:
    run = Run().train(0, STOP)
    checkpoint = powersgd.Checkpoint(run.state, run.ddp)
    whole = checkpoint.state_dict()["rank0"]
    for damaged in (b"", b"junk", whole[:-900], whole[:40]):
        with pytest.raises(ValueError, match="the bytes of rank0 cannot be read"):
            checkpoint.load_state_dict({"rank0": damaged})
    with pytest.raises(ValueError, match=r"module is .*, but must be a torch\.nn\.Module"):
        run.state.load_state_dict(run.ddp, run.state.state_dict(run.ddp))  # the wrong way round
    saved = run.state.state_dict(run.ddp)
    saved["parameters"]["0.weight"]["position"] = torch.zeros(100, 100)
    with pytest.raises(ValueError, match=r"0.weight.position is tensor") as error:
        run.state.load_state_dict(saved, run.ddp)
    assert len(str(error.value)) < 400
    assert run.state.iter == STOP


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("factor", [0.0, 1e-44, 3e38])
def test_factors_that_would_end_compression_are_refused(factor: float) -> None:
    run = Run().train(0, STOP)
    saved = run.state.state_dict(run.ddp)
    saved["parameters"]["2.weight"]["q"][1] = factor
    with pytest.raises(ValueError, match=r"2.weight.q has rows that are not of unit length$"):
        run.state.load_state_dict(saved, run.ddp)


@pytest.mark.usefixtures("group")
def test_keys_that_are_missing_or_unexpected_are_named() -> None:
    run = Run().train(0, STOP)
    saved = run.state.state_dict(run.ddp)
    without = {name: value for name, value in saved.items() if name not in ("iter", "rank")}
    with pytest.raises(ValueError, match=r"State: missing iter; missing rank; unexpected more$"):
        run.state.load_state_dict(without | {"more": 1}, run.ddp)
    settings = saved["settings"] | {"more": 1}
    del settings["random_seed"]
    match = r"State: missing settings.random_seed; unexpected settings.more$"
    with pytest.raises(ValueError, match=match):
        run.state.load_state_dict(saved | {"settings": settings}, run.ddp)
    with pytest.raises(ValueError, match=r"but it is 'a dict of something else'$"):
        run.state.load_state_dict({"powersgd": saved}, run.ddp)
    with pytest.raises(ValueError, match=r"0.weight is a meta parameter"):
        run.state.load_state_dict(saved, Run().model.to("meta"))


@pytest.mark.usefixtures("group")
def test_statistics_that_are_never_logged_can_be_loaded() -> None:
    run = Run(compression_stats_logging_frequency=sys.maxsize).train(0, STOP)
    other = Run().state
    other.load_state_dict(run.state.state_dict(run.ddp), run.model)
    assert other.next_stats_report == run.state.next_stats_report > sys.maxsize


@pytest.mark.usefixtures("group")
def test_memory_that_runs_out_while_loading_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run().train(0, STOP)
    saved, before, left = run.state.state_dict(run.ddp), run.outcome(), iter(range(3))

    def unpack(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise MemoryError
        return powersgd.entries.unpack(*arguments)

    monkeypatch.setattr(saving, "unpack", unpack)
    with pytest.raises(MemoryError):
        run.state.load_state_dict(saved, run.ddp)
    assert_same(run.outcome(), before)
    run.train(STOP, STOP + 1)

"""Wrong use: one clear sentence, on every rank alike, and never a hang."""

import functools
import math
from decimal import Decimal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel

import powersgd
from powersgd import PowerSGDState
from powersgd.calibration import make_bucket

from .ranks import run_ranks

WRONG_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"matrix_approximation_rank": 0}, "matrix_approximation_rank is 0.*>= 1"),
    ({"matrix_approximation_rank": -1}, "matrix_approximation_rank is -1.*>= 1"),
    ({"matrix_approximation_rank": 1.5}, r"matrix_approximation_rank is 1\.5.*integer"),
    ({"matrix_approximation_rank": True}, "matrix_approximation_rank is True.*integer"),
    ({"start_powerSGD_iter": -3}, "start_powerSGD_iter is -3.*>= 0"),
    ({"start_powerSGD_iter": 1}, "start_powerSGD_iter is 1.*>= 2"),
    ({"start_powerSGD_iter": 0, "warm_start": False}, "start_powerSGD_iter is 0.*>= 2"),
    ({"start_powerSGD_iter": 1, "use_error_feedback": False}, "start_powerSGD_iter is 1.*>= 2"),
    ({"min_compression_rate": 0}, "min_compression_rate is 0.*> 0"),
    ({"min_compression_rate": -2.5}, r"min_compression_rate is -2\.5.*> 0"),
    ({"min_compression_rate": math.nan}, "min_compression_rate is nan.*> 0"),
    ({"min_compression_rate": "2"}, "min_compression_rate is '2'.*> 0"),
    ({"orthogonalization_epsilon": -1e-8}, "orthogonalization_epsilon is -1e-08.*>= 0"),
    ({"orthogonalization_epsilon": math.inf}, "orthogonalization_epsilon is inf.*>= 0"),
    ({"use_error_feedback": "no"}, "use_error_feedback is 'no'.*True or False"),
    ({"warm_start": None}, "warm_start is None.*True or False"),
    ({"random_seed": 0.5}, r"random_seed is 0\.5.*integer"),
    ({"compression_stats_logging_frequency": "often"}, "frequency is 'often'.*integer"),
    ({"process_group": "gloo"}, "process_group is 'gloo'.*process group"),
    ({"process_group": dist.GroupMember.NON_GROUP_MEMBER}, "process_group is .*this rank in it"),
    ({"process_group": torch.ones(2)}, r"process_group is tensor\(.*process group"),
    ({"steps": None}, "steps is None.*EAGER"),
    ({"matrix_approximation_rank": torch.tensor(True)}, r"rank is tensor\(True\).*integer"),
    ({"matrix_approximation_rank": torch.ones(2)}, r"rank is tensor\(.*integer"),
    ({"random_seed": 10**5000}, "random_seed is too large to print.*64 bits"),
    ({"min_compression_rate": 10**400}, "min_compression_rate is 1000.*finite number > 0"),
    ({"min_compression_rate": Decimal("sNaN")}, "min_compression_rate is .*sNaN.*> 0"),
    ({"min_compression_rate": torch.ones(3)}, "min_compression_rate is tensor.*> 0"),
    ({"use_error_feedback": torch.ones(2)}, "use_error_feedback is tensor.*True or False"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_ARGUMENTS)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PowerSGDState(**{"process_group": None, **arguments})


def test_compression_may_start_at_once_without_memory() -> None:
    state = PowerSGDState(None, 1, 0, use_error_feedback=False, warm_start=False)
    assert state.start_powerSGD_iter == 0


def test_hook_without_a_process_group(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    bucket = make_bucket([(4, 5)])
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="init_process_group"):
        powersgd.powerSGD_hook(PowerSGDState(None), bucket)


def _model(seed: int = 0, width: int = 40) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 4))


def _ddp(state: Any, hook: Any = powersgd.powerSGD_hook, **options: Any) -> nn.Module:
    ddp = DistributedDataParallel(_model(), bucket_cap_mb=0.001, **options)
    ddp.register_comm_hook(state, hook)
    return ddp


def _error(function: Any) -> tuple[str, str] | None:
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def _step(ddp: nn.Module, rank: int) -> None:
    ddp.zero_grad()
    ddp(torch.full((2, 40), rank + 1.0)).sum().backward()


SETTINGS: dict[str, tuple[Any, Any]] = {
    "matrix_approximation_rank": (1, 2),
    "start_powerSGD_iter": (2, 3),
    "min_compression_rate": (2.0, 1.5),
    "use_error_feedback": (True, False),
    "warm_start": (True, False),
    "orthogonalization_epsilon": (0.0, 1e-8),
    "random_seed": (0, 1),
    "batch_tensors_with_same_shape": (False, True),
}


def _disagree(rank: int) -> dict[str, Any]:
    errors: dict[str, Any] = {}
    for name, values in SETTINGS.items():
        settings = {"start_powerSGD_iter": 2, name: values[min(rank, 1)]}
        ddp = _ddp(PowerSGDState(None, **settings))
        errors[name] = _error(functools.partial(_step, ddp, rank))
    hooks = (powersgd.powerSGD_hook, powersgd.batched_powerSGD_hook)
    ddp = _ddp(PowerSGDState(None), hooks[min(rank, 1)])
    errors["the hook"] = _error(lambda: _step(ddp, rank))
    state = PowerSGDState(None, start_powerSGD_iter=2)
    state.iter = 5 * rank
    ddp = _ddp(state)
    errors["iter"] = _error(lambda: _step(ddp, rank))
    return errors


def test_ranks_that_disagree_all_raise_the_same_sentence() -> None:
    results = run_ranks(_disagree, 3)
    for name in [*SETTINGS, "the hook", "iter"]:
        errors = [result[name] for result in results]
        assert errors[0] is not None, name
        assert errors.count(errors[0]) == 3, name
        kind, message = errors[0]
        assert kind == "ValueError"
        assert message.startswith(f"ranks disagree on {name}: rank 0 has ")
        if name in SETTINGS:
            first, second = SETTINGS[name]
            assert f"rank 0 has {first!r}, rank 1 has {second!r}, rank 2 has" in message
        assert len(message.splitlines()) == 1


def _misuse(rank: int) -> dict[str, Any]:
    errors: dict[str, Any] = {}
    state = PowerSGDState(None, start_powerSGD_iter=2)
    first, second = _ddp(state), _ddp(state)
    _step(first, rank)
    errors["two models, one after the other"] = _error(lambda: _step(second, rank))
    for _ in range(3):
        _step(first, rank)  # the first model is none the worse for it
    state = PowerSGDState(None, start_powerSGD_iter=2)
    first, second = _ddp(state), _ddp(state)
    inputs = torch.ones(2, 40)
    errors["two models at once"] = _error(
        lambda: (first(inputs).sum() + second(inputs).sum()).backward()
    )
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    ddp = _ddp(PowerSGDState(groups[rank // 2]))
    errors["another group"] = _error(lambda: _step(ddp, rank))
    if rank < 2:
        smaller = _ddp(PowerSGDState(None), process_group=groups[0])
        errors["the world, DDP on a part"] = _error(lambda: _step(smaller, rank))
    wrong = _ddp(theirs.PowerSGDState(None))
    errors["torch's state"] = _error(lambda: _step(wrong, rank))
    return errors


def test_misuse() -> None:
    results = run_ranks(_misuse, 3)
    for result in results:
        for case in ("two models, one after the other", "two models at once"):
            assert result[case][0] == "ValueError", case
            assert "one PowerSGDState serves one model" in result[case][1]
        assert result["torch's state"][0] == "TypeError"
        assert "powersgd.PowerSGDState" in result["torch's state"][1]
    for rank, result in enumerate(results):
        assert result["another group"][0] == "ValueError"
        assert str([0, 1] if rank < 2 else [2]) in result["another group"][1]
        assert "[0, 1, 2]" in result["another group"][1]
    for result in results[:2]:
        kind, message = result["the world, DDP on a part"]
        assert kind == "ValueError"
        assert message.index("[0, 1, 2]") < message.index("[0, 1];")


def _same_group_twice(rank: int) -> None:
    """Two groups of the same ranks average the same."""
    ddp = _ddp(PowerSGDState(dist.new_group([0, 1]), start_powerSGD_iter=2))
    for _ in range(4):
        _step(ddp, rank)


def test_another_group_of_the_same_ranks_is_fine() -> None:
    run_ranks(_same_group_twice, 2)


def _stale(rank: int) -> None:
    """An older DDP of another group around the same module is not the one that counts."""
    model = _model()
    stale = DistributedDataParallel(
        model, process_group=[dist.new_group([r]) for r in (0, 1)][rank]
    )
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2), powersgd.powerSGD_hook)
    for _ in range(4):
        _step(ddp, rank)
    assert stale.process_group.size() == 1


def test_a_stale_ddp_does_not_count() -> None:
    run_ranks(_stale, 2)


def _residuals(state: PowerSGDState, ddp: nn.Module) -> list[torch.Tensor]:
    residuals = [state.residual(parameter) for parameter in ddp.parameters()]
    return [residual for residual in residuals if residual is not None]


def _abort(rank: int) -> None:
    state = PowerSGDState(None, start_powerSGD_iter=2)
    ddp = _ddp(state, find_unused_parameters=True)
    for _ in range(3):
        _step(ddp, rank)
    before = _residuals(state, ddp)
    handle = ddp.module[0].weight.register_hook(_raise)
    with pytest.raises(ZeroDivisionError):
        _step(ddp, rank)
    handle.remove()
    assert state.in_flight  # P of the later layers was on its way
    assert len(before) == 3
    assert all(map(torch.equal, before, _residuals(state, ddp)))
    dist.barrier()


def _raise(gradient: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError


def test_an_error_in_the_users_backward_leaves_the_state_as_it_was() -> None:
    run_ranks(_abort, 2, timeout_s=60, group_timeout_s=10)

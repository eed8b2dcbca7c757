"""`powersgd.register`: state, steps and hook in one line."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import powersgd
from powersgd import compilation

pytestmark = pytest.mark.usefixtures("group")


def _ddp() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(20, 30))


def test_it_registers_a_state_that_compresses_with_compiled_steps() -> None:
    ddp = _ddp()
    state = powersgd.register(ddp, rank=2, start_powerSGD_iter=2, min_compression_rate=1)
    assert state.steps != powersgd.EAGER
    assert state.process_group is ddp.process_group
    assert state.matrix_approximation_rank == 2
    for _ in range(4):
        ddp(torch.randn(5, 20)).square().sum().backward()
    assert state.compression_stats() == (630 / 130, 2 * 630, 2 * 130)
    with pytest.raises(RuntimeError, match="register_comm_hook"):
        powersgd.register(ddp)


def test_it_takes_other_steps_and_hooks_and_every_setting() -> None:
    ddp = _ddp()
    state = powersgd.register(
        ddp,
        hook=powersgd.batched_powerSGD_hook,
        steps=powersgd.EAGER,
        start_powerSGD_iter=0,
        use_error_feedback=False,
        warm_start=False,
    )
    assert state.steps == powersgd.EAGER
    ddp(torch.randn(5, 20)).sum().backward()
    assert state.compression_stats()[1:] == (630, 26 + 26 + 2)  # one square, two parameters


def test_without_a_compiler_the_steps_are_eager_and_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: Any) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compilation._Compiled, "try_out", fail)
    assert powersgd.register(_ddp()).steps == powersgd.EAGER


def test_wrong_use_is_named() -> None:
    with pytest.raises(TypeError, match=r"ddp_model is .*Linear.*average_gradients"):
        powersgd.register(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="start_iter"):
        powersgd.register(_ddp(), start_iter=3)
    with pytest.raises(ValueError, match="matrix_approximation_rank is 0"):
        powersgd.register(_ddp(), rank=0)

"""Training that goes on after something went wrong, and modes of DDP that meet in odd ways."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import powersgd

from .ranks import run_ranks
from .tolerances import assert_close


class _Boom(torch.autograd.Function):
    """Raises in backward, after the last layer's bucket has been handed to the hook."""

    is_on = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if _Boom.is_on:
            raise ValueError("boom")
        return gradient


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(50, 50), nn.Linear(50, 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(_Boom.apply(self.first(x)).tanh())


def _go_on_after_an_error(rank: int, options: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    model = _Net()
    state = powersgd.PowerSGDState(None, 2, start_powerSGD_iter=2)

    def wrap() -> DistributedDataParallel:
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.009, **options)
        ddp.register_comm_hook(state, powersgd.powerSGD_hook)
        return ddp

    ddp, weight = wrap(), model.last.weight
    given, out = torch.zeros(50, 50), torch.zeros(50, 50)
    torch.manual_seed(1 + rank)
    for step in range(6):
        model.zero_grad()
        x = torch.randn(4, 50)
        if step == 2:
            _Boom.is_on = True
            with pytest.raises(ValueError, match="boom"):
                ddp(x).square().mean().backward()
            _Boom.is_on = False
            ddp = wrap()
            continue
        given += torch.autograd.grad(model(x).square().mean(), weight)[0]
        ddp(x).square().mean().backward()
        out += weight.grad
    left = state.residual(weight)
    # Three compressed steps of the whole model: what the aborted one left behind is not among them.
    assert state.compression_stats()[1] == 3 * sum(p.numel() for p in model.parameters())
    return [given, out, left]


@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=["", "static"])
def test_nothing_is_lost_after_an_error_in_backward(options: dict[str, Any]) -> None:
    ranks = run_ranks(_go_on_after_an_error, 2, options)
    given, out, left = (torch.stack(column).mean(0) for column in zip(*ranks, strict=True))
    assert left.any()
    assert_close(out + left, given, scale=20)


class _Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main, self.branch = nn.Linear(20, 20), nn.Linear(20, 20)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        y = self.main(x)
        return y + self.branch(y) if use else y


def _leave_a_branch(rank: int, error_feedback: bool) -> Tensor:
    torch.manual_seed(0)
    model = _Branch()
    ddp = DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=True)
    state = powersgd.PowerSGDState(
        None, 2, start_powerSGD_iter=2, use_error_feedback=error_feedback
    )
    ddp.register_comm_hook(state, powersgd.batched_powerSGD_hook)
    torch.manual_seed(rank)
    for step in range(5):
        model.zero_grad(set_to_none=False)
        ddp(torch.randn(4, 20), step < 4).square().mean().backward()
    assert model.main.weight.grad.any()
    return model.branch.weight.grad.clone()


@pytest.mark.parametrize("error_feedback", [True, False])
def test_what_nobody_used_gets_nothing_where_the_gradient_is_the_bucket(
    error_feedback: bool,
) -> None:
    for gradient in run_ranks(_leave_a_branch, 2, error_feedback):
        assert not gradient.any()

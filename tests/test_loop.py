"""The plain loop: all gradients at once, of modules and of functions, over any backend."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, grad

import powersgd
from powersgd.collectives import Collectives, ProcessGroupCollectives

from .ranks import run_ranks
from .tolerances import assert_close
from .training import SETTINGS, Run


def _inputs(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, 24, generator=generator, dtype=torch.float64)


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 9)).double()
    return model.append(nn.Linear(9, 9).double())


def _state(**settings: Any) -> powersgd.PowerSGDState:
    return powersgd.PowerSGDState(settings.pop("process_group", None), **(SETTINGS | settings))


def _train(model: nn.Module, average: Callable[[], Any], rank: int, start: int, stop: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(start, stop):
        optimizer.zero_grad()
        model(_inputs(step, rank)).square().mean().backward()
        average()
        optimizer.step()


def _equals_ddp(rank: int) -> None:
    run = Run(bucket_cap_mb=25, dtype=torch.float64)
    model, state = copy.deepcopy(run.model), _state()
    _train(model, lambda: powersgd.average_gradients(model, state), rank, 0, 10)
    run.train(0, 10)
    assert state.iter == 10
    assert state.compression_stats() == run.state.compression_stats()
    assert state.compression_stats()[0] > 1.5
    for mine, theirs in zip(model.parameters(), run.model.parameters(), strict=True):
        assert_close(mine.detach(), theirs.detach(), scale=100)
        left, right = state.residual(mine), run.state.residual(theirs)
        assert (left is None) == (right is None)
        if left is not None and right is not None:
            assert right.abs().max() > 1e-6
            assert_close(left, right, scale=1e4)


def _counts_collectives(rank: int) -> list[int]:
    model, state, sent = _model(), _state(), []
    start = ProcessGroupCollectives.start_mean_

    def count(collectives: ProcessGroupCollectives, tensor: Tensor) -> dist.Work:
        sent.append(tensor.numel())
        return start(collectives, tensor)

    _train(model, lambda: powersgd.average_gradients(model, state), rank, 0, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessGroupCollectives, "start_mean_", count)
        _train(model, lambda: powersgd.average_gradients(model, state), rank, 5, 6)
    assert sum(sent) < sum(p.numel() for p in model.parameters()) / 1.5
    return sent


def _functional(rank: int) -> dict[str, Tensor]:
    """Train without a module's state; resume in the middle; equal to the module's loop."""
    model, state = _model(), _state()
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], inputs: Tensor) -> Tensor:
        return functional_call(model, parameters, (inputs,)).square().mean()

    velocity = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for step in range(9):
        if step == 6:
            saved, state = state.state_dict(parameters), _state()
            state.load_state_dict(saved, parameters)
        gradients = grad(loss)(parameters, _inputs(step, rank))
        before = {name: gradient.clone() for name, gradient in gradients.items()}
        averages = powersgd.average_gradients(gradients, state)
        assert list(averages) == list(gradients)
        assert all(torch.equal(gradients[name], before[name]) for name in before)
        velocity = {name: 0.9 * velocity[name] + averages[name] for name in averages}
        parameters = {name: p - 0.1 * velocity[name] for name, p in parameters.items()}
    other = _state()
    with pytest.raises(ValueError, match=r"unexpected 0\.bias"):
        other.load_state_dict(saved, {"0.weight": parameters["0.weight"]})
    _train(model, lambda: powersgd.average_gradients(model, other), rank, 0, 9)
    for name, parameter in model.named_parameters():
        assert_close(parameters[name], parameter.detach(), scale=100)
    return parameters


class _Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 5, sparse=True)
        self.used = nn.Parameter(torch.randn(30, 20).t())  # columns are outermost in memory
        self.sometimes = nn.Parameter(torch.randn(20, 30))
        self.small = nn.Parameter(torch.randn(16, 16).bfloat16())
        self.waves = nn.Parameter(torch.randn(12, 12, dtype=torch.complex64))
        self.never = nn.Parameter(torch.randn(20, 30))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.scalar = nn.Parameter(torch.ones(()))


def _every_kind(rank: int) -> list[list[Tensor]]:
    """Gradients of rank 1, the same matrix scaled by the rank: averages are exact."""
    model = _Kinds()
    state = _state(matrix_approximation_rank=1)
    seen = []
    for step in range(6):
        model.zero_grad()
        share = (rank + 1.0) if step % 2 else (3.0 * rank)  # means 1.5 for two ranks
        left, right = torch.arange(1.0, 21), torch.arange(1.0, 31)
        loss = share * ((model.used @ right) @ left) + share * model.scalar
        loss = loss + share * (model.small.float() @ torch.ones(16)).sum()
        loss = loss + share * (model.waves @ torch.ones(12, dtype=torch.complex64)).sum().real
        if rank == 1 or step < 2:
            loss = loss + share * ((model.sometimes @ right) @ left)
            loss = loss + share * model.table(torch.tensor([2])).sum()
        loss.backward()
        powersgd.average_gradients(iter(list(model.parameters())), state)
        assert_close(model.used.grad, 1.5 * torch.outer(left, right))
        assert_close(model.small.grad, 1.5 * torch.ones(16, 16))
        assert_close(torch.view_as_real(model.waves.grad)[..., 0], 1.5 * torch.ones(12, 12))
        by_one = 1.0 if step % 2 else 1.5  # what rank 1 alone brings to the mean
        expected = 1.5 if step == 1 else by_one
        assert_close(model.sometimes.grad, expected * torch.outer(left, right))
        assert_close(model.table.weight.grad.to_dense()[2], expected * torch.ones(5))
        assert not model.never.grad.any()
        assert model.frozen.grad is None
        assert model.scalar.grad == 1.5
        seen.append([p.grad.to_dense() for p in model.parameters() if p.grad is not None])
    return seen


def _errors(rank: int) -> None:
    model, state = _model(), _state()
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="no gradient to average"):
        powersgd.average_gradients(frozen, state)
    with pytest.raises(TypeError, match=r"must be a powersgd\.PowerSGDState"):
        powersgd.average_gradients(model, None)  # type: ignore[call-overload]
    _train(model, lambda: powersgd.average_gradients(model, state), rank, 0, 4)
    before = state.iter, state.residual(model[0].weight)
    other = nn.Linear(24, 9).double()
    with pytest.raises(ValueError, match="one PowerSGDState serves one model"):
        _train(other, lambda: powersgd.average_gradients(other, state), rank, 0, 1)
    assert state.iter == before[0]
    assert torch.equal(state.residual(model[0].weight), before[1])
    unlike = _state(matrix_approximation_rank=1 + rank)
    with pytest.raises(ValueError, match=r"disagree on matrix_.*rank 0 has 1, rank 1 has 2"):
        _train(model, lambda: powersgd.average_gradients(model, unlike), rank, 0, 1)


def _all_cases(rank: int) -> dict[str, Any]:
    _equals_ddp(rank)
    _errors(rank)
    return {
        "collectives": _counts_collectives(rank),
        "functional": _functional(rank),
        "kinds": _every_kind(rank),
    }


def test_the_loop_equals_ddp_with_one_bucket_and_serves_functions_and_every_kind() -> None:
    first, second = run_ranks(_all_cases, 2)
    assert len(first["collectives"]) == 2
    assert first["collectives"] == second["collectives"]
    for name in ("functional", "kinds"):  # equal on the ranks to the bit
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=0)


class _Threads(Collectives):
    """Members are threads of one process: a backend of a few lines."""

    name = "threads"

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self._rank, self._slots, self._barrier = rank, slots, barrier

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self._slots)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._slots[self._rank] = tensor.clone()
        self._barrier.wait()
        every = list(self._slots)
        self._barrier.wait()
        return every

    def start_mean_(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self.all_gather(tensor)).mean(dim=0))


def _trained(
    rank: int, collectives: Collectives | None = None, model: nn.Module | None = None
) -> list[Tensor]:
    model = model or _model()
    state = _state(process_group=collectives)
    _train(model, lambda: powersgd.average_gradients(model, state), rank, 0, 8)
    saved = powersgd.shared_state_dict(state, model)
    return [*(p.detach() for p in model.parameters()), saved["parameters"]["0.weight"]["residual"]]


def test_another_backend_is_an_object_of_a_few_lines() -> None:
    slots: list[Any] = [None] * 3
    barrier = threading.Barrier(3, timeout=60)
    members = [_Threads(rank, slots, barrier) for rank in range(3)]
    models = [_model() for _ in range(3)]  # here, because a seed is for all threads
    with ThreadPoolExecutor(3) as pool:
        by_threads = list(pool.map(_trained, range(3), members, models, timeout=100))
    by_gloo = run_ranks(_trained, 3)
    for mine, theirs in zip(by_threads, by_gloo, strict=True):
        for one, other, first in zip(mine, theirs, by_threads[0], strict=True):
            assert torch.equal(one, first)
            assert_close(one, other, scale=1e6)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrong", [3, torch.ones(2, 2), {"a": {"b": torch.ones(2)}}, [{}], ["a"]])
def test_what_holds_no_gradients_is_named(wrong: Any) -> None:
    state = _state()
    with pytest.raises(TypeError, match="gradients must be a module, its parameters or tensors"):
        powersgd.average_gradients(wrong, state)
    assert state.iter == 0

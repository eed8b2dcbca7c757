"""Ranks that are lost, and training that goes on after something went wrong."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import powersgd
from powersgd import reduction
from powersgd.collectives import ProcessGroupCollectives

from .ranks import run_ranks
from .tolerances import assert_close

TIMEOUT_S = 10


class _Heavy(nn.Module):
    """Takes a while to send: megabytes with P, and as much as Q."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 200_000) / 100)
        self.bias = nn.Parameter(torch.zeros(1_000_000))
        self.last = nn.Linear(30, 30)

    def forward(self, x: Tensor) -> Tensor:
        terms = self.last(x), x[:, :4] @ self.first, self.bias - x[0, 0]
        return torch.stack([term.square().mean() for term in terms]).sum()


class _Job:
    """A model in training, whose process group may fail."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = _Heavy()
        self.state = powersgd.PowerSGDState(
            None, start_powerSGD_iter=2, min_compression_rate=1, random_seed=5
        )
        self.wrap()

    def wrap(self) -> None:
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=1)
        self.ddp.register_comm_hook(self.state, powersgd.powerSGD_hook)

    def step(self, rank: int) -> None:
        self.model.zero_grad()
        self.ddp(self.inputs(rank)).backward()

    def inputs(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * self.state.iter + rank)
        return torch.randn(4, 30, generator=generator)

    def residuals(self) -> list[Tensor]:
        return [r for p in self.model.parameters() if (r := self.state.residual(p)) is not None]


def _rebuild_group(directory: Path, rank: int, world_size: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    store = f"file://{directory}/again"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)


def _kill(*args: Any) -> NoReturn:
    del args
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@contextmanager
def _killed(where: str, job: _Job) -> Iterator[None]:
    start, sent = ProcessGroupCollectives.start_mean_, []

    def start_and_die(collectives: ProcessGroupCollectives, message: Tensor) -> dist.Work:
        sent.append(message)
        work = start(collectives, message)
        n = len(_buckets(job))
        if len(sent) == {"P": n, "Q": n + 1, "warm-up": 2}.get(where):
            _kill()
        return work

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessGroupCollectives, "start_mean_", start_and_die)
        if where == "between":
            patch.setattr(reduction, "project", _kill)
        if where == "backward":  # P of the layers before it is on its way
            job.model.first.register_hook(_kill)
        if where == "idle":
            _kill()
        yield


def _buckets(job: _Job) -> set[int]:
    return {id(bucket) for bucket in job.state._buckets.values()}


def _lose_a_rank(rank: int, where: str, directory: Path) -> list[Tensor] | None:
    job = _Job()
    for _ in range(1 if where == "warm-up" else 4):
        job.step(rank)
    assert where == "warm-up" or len(_buckets(job)) == 3
    before = job.residuals()
    start = time.monotonic()
    if rank == 1:
        with _killed(where, job):
            job.step(rank)
    with pytest.raises(RuntimeError, match=r"PowerSGD has failed.*Load the last checkpoint"):
        job.step(rank)
    assert time.monotonic() - start < TIMEOUT_S + 5
    assert len(before) == (0 if where == "warm-up" else 2)
    assert all(map(torch.equal, before, job.residuals()))
    assert not job.state.in_flight
    # The others go on in a group of two.
    _rebuild_group(directory, rank // 2, 2)
    job.wrap()
    (gradient,) = torch.autograd.grad(job.model(job.inputs(rank)), job.model.first)
    job.step(rank)
    assert job.model.first.grad is not None
    given = gradient + (before[0] if before else 0)
    left = job.residuals()
    return [given, job.model.first.grad, left[0] if left else torch.zeros(())]


@pytest.mark.parametrize("where", ["warm-up", "idle", "backward", "P", "between", "Q"])
def test_a_lost_rank_is_an_error_on_every_other_and_the_state_as_it_was(
    where: str, tmp_path: Path
) -> None:
    first, _, last = run_ranks(
        _lose_a_rank, 3, where, tmp_path, timeout_s=90, group_timeout_s=TIMEOUT_S, mortal=[1]
    )
    assert torch.equal(first[1], last[1])
    given, out, left = (torch.stack(pair).mean(0) for pair in zip(first, last, strict=True))
    assert_close(out + left, given)


def _leave_a_group_at_work(rank: int, directory: Path) -> None:
    job = _Job()
    for _ in range(4):
        job.step(rank)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    called = work.get_future().then(lambda _: time.sleep(2))  # in a thread of the group
    _rebuild_group(directory, rank, 2)
    job.wrap()
    job.step(rank)
    assert job.state.iter == 5
    called.wait()


def test_a_group_that_is_still_at_work_may_be_replaced(tmp_path: Path) -> None:
    run_ranks(_leave_a_group_at_work, 2, tmp_path, timeout_s=60, group_timeout_s=TIMEOUT_S)


def _end_a_step_alone(rank: int, directory: Path) -> None:
    job = _Job()
    for _ in range(4):
        job.step(rank)
    saved = powersgd.shared_state_dict(job.state, job.model)
    if rank == 0:
        job.step(rank)
    else:  # the answer of Q's all-reduce has reached rank 0 alone
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reduction, "decompress_if_", _lose_answer)
            with pytest.raises(RuntimeError, match="no answer"):
                job.step(rank)
    _rebuild_group(directory, rank, 2)
    job.wrap()
    with pytest.raises(ValueError, match=r"on iter: rank 0 has 5, rank 1 has 4.*same checkpoint"):
        job.step(rank)
    job.state.load_state_dict(saved, job.model)
    job.wrap()
    job.step(rank)
    assert job.state.iter == 5


def _lose_answer(*args: Any) -> NoReturn:
    del args
    raise RuntimeError("no answer")


def test_a_rank_that_is_a_step_ahead_is_told_to_load_a_checkpoint(tmp_path: Path) -> None:
    run_ranks(_end_a_step_alone, 2, tmp_path, timeout_s=90, group_timeout_s=TIMEOUT_S)


def _lose_the_group(rank: int, directory: Path) -> Tensor:
    job = _Job()
    for _ in range(4):
        job.step(rank)
    before = job.residuals()
    if rank == 1:
        threading.Timer(0.5, dist.distributed_c10d._abort_process_group).start()
        time.sleep(1)
    with pytest.raises(RuntimeError, match=r"PowerSGD has failed|process group: call"):
        job.step(rank)
    assert all(map(torch.equal, before, job.residuals()))
    _rebuild_group(directory, rank, 2)
    job.wrap()
    job.step(rank)
    assert job.model.first.grad is not None
    return job.model.first.grad


def test_a_group_that_was_aborted_is_an_error_and_a_new_one_works(tmp_path: Path) -> None:
    first, second = run_ranks(_lose_the_group, 2, tmp_path, group_timeout_s=TIMEOUT_S)
    assert torch.equal(first, second)


def _load_a_damaged_file(rank: int) -> None:
    job = _Job()
    saved = job.state.state_dict(job.model)
    if rank == 1:
        del saved["parameters"]["first"]
        with pytest.raises(ValueError, match=r"cannot load .* missing first"):
            job.state.load_state_dict(saved, job.model)
        _kill()  # as a script would end that does not catch it
    job.state.load_state_dict(saved, job.model)
    with pytest.raises(RuntimeError, match="collective of PowerSGD has failed"):
        job.step(rank)


def test_a_rank_that_cannot_load_its_file_is_an_error_on_the_others() -> None:
    run_ranks(_load_a_damaged_file, 2, group_timeout_s=TIMEOUT_S, mortal=[1])


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

"""Settings that change in mid-run, and what one rank alone finds wrong: all ranks act alike."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel

import powersgd
from powersgd import PowerSGDState

from .ranks import run_ranks
from .tolerances import assert_close

SHAPES = [(30, 20), (20,), (30, 20), (12, 40)]
START = 3


class _Loop:
    """Hands buckets to the hook as DDP does, so that an error in one step does not end the run."""

    def __init__(self, rank: int, seed: int = 0, **options: Any) -> None:
        self.model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])
        self.ddp = DistributedDataParallel(
            self.model, bucket_cap_mb=0.001, find_unused_parameters=True
        )
        self.buckets = self.ddp.reducer._get_zeros_like_grad_buckets()
        assert len(self.buckets) >= 3
        options = {"start_powerSGD_iter": START, "min_compression_rate": 0.5} | options
        self.state = PowerSGDState(None, 2, **options)
        self.generator = torch.Generator().manual_seed(100 * seed + rank)
        self.index = {id(p): i for i, p in enumerate(self.model)}

    def step(self, *, is_bad: bool = False) -> list[tuple[Tensor, Tensor]]:
        """By parameter, this rank's gradient and the average; the last parameter's may be bad."""
        gradients = [torch.randn(shape, generator=self.generator) for shape in SHAPES]
        if is_bad:
            gradients[-1][0, 0] = torch.inf
        for bucket in self.buckets:
            for view, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
                view.copy_(gradients[self.index[id(parameter)]])
        futures = [powersgd.powerSGD_hook(self.state, bucket) for bucket in self.buckets]
        averages = [torch.empty(0)] * len(SHAPES)
        for bucket, future in zip(self.buckets, futures, strict=True):
            future.wait()
            for view, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
                averages[self.index[id(parameter)]] = view.clone()
        return list(zip(gradients, averages, strict=True))

    def residuals(self) -> list[Tensor | None]:
        return [self.state.residual(parameter) for parameter in self.model]


def _error(function: Any) -> str | None:
    try:
        function()
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


CHANGES: dict[str, Any] = {
    "matrix_approximation_rank": 3,
    "start_powerSGD_iter": 7,
    "min_compression_rate": 4.0,
    "use_error_feedback": False,
    "warm_start": False,
    "orthogonalization_epsilon": 1e-3,
    "random_seed": 5,
    "batch_tensors_with_same_shape": True,
    "iter": 20,
}


def _change_on_one(rank: int, after: int) -> dict[str, Any]:
    found = {}
    for name, value in CHANGES.items():
        loop = _Loop(rank)
        for _ in range(after):
            loop.step()
        before = getattr(loop.state, name)
        if rank == 1:
            setattr(loop.state, name, value)
        loop.step()  # all still go by what they agreed on
        kept = loop.residuals()
        errors = [_error(loop.step), _error(loop.step)]
        same = all(
            (a is b) or torch.equal(a, b) for a, b in zip(kept, loop.residuals(), strict=True)
        )
        if rank == 1:
            setattr(loop.state, name, before + 1 if name == "iter" else before)
        averages = [average for _ in range(4) for _, average in loop.step()]
        found[name] = (errors, same, averages)
    return found


@pytest.mark.parametrize("after", [1, 6], ids=["in the warm-up", "while compressing"])
def test_a_setting_changed_on_one_rank_is_one_error_on_all(after: int) -> None:
    ranks = run_ranks(_change_on_one, 2, after)
    for name in CHANGES:
        errors, same, averages = ranks[0][name]
        assert errors[0] == errors[1]
        assert errors[0].startswith(f"ValueError: ranks disagree on {name}: rank 0 has "), name
        assert same
        assert ranks[1][name][:2] == (errors, same)
        assert all(map(torch.equal, averages, ranks[1][name][2]))
        assert all(average.isfinite().all() for average in averages)


def _change_on_all(rank: int, name: str, value: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Sums in and out and what is left; ranks by step; what was in force and kept after each step.

    Changed after the sixth step and back after the tenth.
    """
    loop = _Loop(rank)
    before = getattr(loop.state, name)
    steps, memory = [], []
    for i in range(14):
        if i in (6, 10):
            setattr(loop.state, name, value if i == 6 else before)
        steps.append(loop.step())
        bucket = loop.state._buckets[loop.model[0]]
        kept = [bucket.residual is not None, bucket.q is not None]
        memory.append((getattr(loop.state.in_force, name), *kept))
    ranks = [torch.linalg.matrix_rank(step[0][1], rtol=1e-3).item() for step in steps]
    total_in = [sum(step[i][0] for step in steps) for i in range(len(SHAPES))]
    total_out = [sum(step[i][1] for step in steps) for i in range(len(SHAPES))]
    left = [0 if residual is None else residual for residual in loop.residuals()]
    return [total_in, total_out, left], ranks, memory


@pytest.mark.parametrize(
    ("name", "value", "rank"),
    [
        ("matrix_approximation_rank", 4, 4),
        ("matrix_approximation_rank", 30, 20),
        ("min_compression_rate", 7.0, 20),  # nothing is worth compressing
        ("batch_tensors_with_same_shape", True, 2),
        ("orthogonalization_epsilon", 1e-9, 2),
        ("start_powerSGD_iter", 100, 20),
    ],
)
def test_a_setting_changed_on_all_ranks_counts_from_the_second_step_on(
    name: str, value: Any, rank: int
) -> None:
    results = run_ranks(_change_on_all, 2, name, value)
    for _, _, memory in results:
        before = memory[0][0]
        assert [seen for seen, *_ in memory] == [before] * 7 + [value] * 4 + [before] * 3
    assert [ranks for _, ranks, _ in results] == [[20] * 3 + [2] * 4 + [rank] * 4 + [2] * 3] * 2
    sums = [totals for totals, _, _ in results]
    for i in range(len(SHAPES)):  # nothing is lost on the way
        given = (sums[0][0][i] + sums[1][0][i]) / 2
        left = (sums[0][2][i] + sums[1][2][i]) / 2
        assert_close(sums[0][1][i] + left, given, scale=20)
        assert torch.equal(sums[0][1][i], sums[1][1][i])


@pytest.mark.parametrize("name", ["use_error_feedback", "warm_start"])
def test_memory_can_be_switched_off_and_on_again(name: str) -> None:
    on, off = (True, True), (name == "warm_start", name == "use_error_feedback")
    for _, ranks, memory in run_ranks(_change_on_all, 2, name, False):
        assert ranks == [20] * 3 + [2] * 11
        kept = [tuple(pair) for _, *pair in memory]
        assert kept == [(False, False)] * 3 + [on] * 4 + [off] * 4 + [on] * 3


def _alone(rank: int) -> dict[str, Any]:
    """Each case is wrong on rank 1 only."""
    errors: dict[str, Any] = {}
    own, other = _Loop(rank), _Loop(rank)
    own.step()
    if rank == 1:
        other.state = own.state
    errors["a state used twice"] = _error(other.step)
    pair, gone = dist.new_group([0, 1]), dist.new_group([1])
    if rank == 1:
        dist.destroy_process_group(gone)
    loop = _Loop(rank)
    loop.state.process_group = [None, pair, None][rank]
    errors["a group"] = _error(loop.step)
    loop = _Loop(rank)
    loop.step()
    loop.state.process_group = [None, gone, None][rank]
    loop.step()
    errors["a group that is gone"] = _error(loop.step)
    loop = _Loop(rank)
    if rank == 1:
        loop.state = theirs.PowerSGDState(None)
    errors["torch's state"] = _error(loop.step)
    return errors


def test_what_one_rank_finds_wrong_all_ranks_raise() -> None:
    ranks = run_ranks(_alone, 3, timeout_s=60)
    expected = {
        "a state used twice": "one PowerSGDState serves one model: it serves one of",
        "a group": "the state's process group has the ranks [0, 1], but DDP averages over the",
        "a group that is gone": "the state's process group has been destroyed",
        "torch's state": "the hook's state must be a powersgd.PowerSGDState, got",
    }
    for case, sentence in expected.items():
        kind = "TypeError" if case == "torch's state" else "ValueError"
        assert ranks[1][case].startswith(f"{kind}: {sentence}")
        for rank in (0, 2):
            told = f"ValueError: rank 1 of the group stopped: {sentence}"
            assert ranks[rank][case].startswith(told)


class _TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(30, 20), nn.Linear(30, 20)

    def forward(self, batch: Tensor, *, both: bool = True) -> Tensor:
        result = self.second(batch).square().mean()
        return result + self.first(batch).square().mean() if both else result


class _Rebuilt:
    """One module and one state, and one DDP after the other around them."""

    def __init__(self, rank: int, model: nn.Module | None = None) -> None:
        self.model: Any = model or _TwoLayers()
        self.state = PowerSGDState(None, 1, 2, 0.5)
        self.generator = torch.Generator().manual_seed(rank)
        self.ddps: list[Any] = []

    def wrap(self, hook: Any = powersgd.powerSGD_hook, **options: Any) -> None:
        ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.001, **options)
        ddp.register_comm_hook(self.state, hook)
        self.ddps.append(ddp)

    def train(self, steps: int, **options: Any) -> list[Tensor]:
        """Return the averages of the last step."""
        for _ in range(steps):
            self.ddps[-1].zero_grad()
            batch = torch.randn(8, 30, generator=self.generator)
            self.ddps[-1](batch, **options).backward()
        gradients = [parameter.grad for parameter in self.model.parameters()]
        return [gradient for gradient in gradients if gradient is not None]


def _rebuild(rank: int, is_alive: bool) -> dict[str, Any]:
    """A second DDP around the same module goes on with the same state."""
    run, found = _Rebuilt(rank), {}
    run.wrap()
    averages = run.train(4)
    if not is_alive:
        run.ddps.clear()
        gc.collect()
    run.wrap(find_unused_parameters=True)
    averages += run.train(1)
    before = run.state.residual(run.model.first.weight)
    averages += run.train(1, both=False)
    assert before is not None
    assert before.any()
    found["is_kept"] = torch.equal(before, run.state.residual(run.model.first.weight))
    run.wrap(find_unused_parameters=True, skip_all_reduce_unused_params=True)
    averages += run.train(3, both=False)
    run.wrap(static_graph=True)
    averages += run.train(3)
    found["averages"], found["iter"] = averages, run.state.iter
    run.wrap(process_group=[dist.new_group([0]), dist.new_group([1])][rank])
    found["error"] = _error(lambda: run.train(1))
    return found


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_new_ddp_around_the_same_module_is_noticed(is_alive: bool) -> None:
    ranks = run_ranks(_rebuild, 2, is_alive, timeout_s=60, group_timeout_s=20)
    assert all(map(torch.equal, ranks[0]["averages"], ranks[1]["averages"]))
    for found in ranks:
        assert found["is_kept"]
        assert found["iter"] == 12
        assert "the state's process group has the ranks [0, 1], but DDP" in found["error"]


class _TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(30, 20), nn.Linear(30, 20).double()

    def forward(self, batch: Tensor) -> Tensor:
        result: Tensor = self.first(batch).double().square().mean()
        return result + self.second(batch.double()).square().mean()


def _rebuild_static(rank: int) -> tuple[int, list[Tensor]]:
    run = _Rebuilt(rank, _TwoDtypes())
    run.wrap()
    averages = run.train(4)
    run.wrap(static_graph=True)  # two buckets in its first step, both the first and none the last
    averages += run.train(1) + run.train(3)
    return run.state.iter, averages


def test_a_new_static_graph_of_several_buckets_goes_on() -> None:
    ranks = run_ranks(_rebuild_static, 2, timeout_s=60, group_timeout_s=20)
    assert [count for count, _ in ranks] == [8, 8]  # each step once
    assert all(map(torch.equal, ranks[0][1], ranks[1][1]))


class _Alone(nn.Linear):
    """One bucket, which a new DDP hands in unchanged."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(30, 20, bias=False)

    def forward(self, batch: Tensor) -> Tensor:
        return super().forward(batch).square().mean()


def _rebuild_on_one_wrong_group(rank: int) -> list[str | None]:
    groups = [dist.new_group([0, 1]), dist.new_group([0]), dist.new_group([1])]
    errors = []
    for group in (groups[0], groups[2]):  # the same ranks, and others
        run = _Rebuilt(rank, _Alone())
        run.wrap()
        run.train(4)
        run.state.process_group = group if rank == 1 else None
        run.wrap()
        errors.append(_error(lambda run=run: run.train(1)))
    return errors


def test_a_wrong_group_on_one_rank_of_a_new_ddp_is_an_error_on_all() -> None:
    ranks = run_ranks(_rebuild_on_one_wrong_group, 2, timeout_s=60, group_timeout_s=20)
    assert ranks[0][0] == ranks[1][0]
    assert ranks[0][0].startswith("ValueError: ranks disagree on the process group: rank 0 has ")
    assert ranks[1][1].startswith("ValueError: the state's process group has the ranks [1], but")
    assert ranks[0][1].startswith("ValueError: rank 1 of the group stopped: the state's process")


def _skip_at_first(rank: int) -> tuple[int, list[Tensor], list[Tensor]]:
    """DDP leaves out the last bucket in the first step, later under autocast."""
    run, plain = _Rebuilt(rank), _Rebuilt(rank)
    run.wrap(find_unused_parameters=True, skip_all_reduce_unused_params=True)
    plain.wrap(find_unused_parameters=True)
    sums = []
    for each in (run, plain):
        averages = each.train(1, both=False) + each.train(4)
        for _ in range(3):
            each.ddps[-1].zero_grad()
            loss = each.ddps[-1](torch.randn(8, 30, generator=each.generator), both=False)
            with torch.autocast("cpu", torch.bfloat16):
                loss.backward()
            averages += [parameter.grad for parameter in each.model.second.parameters()]
        sums.append(averages)
    return run.state.iter, *sums


def test_a_bucket_skipped_at_first_may_come_later_and_autocast_changes_nothing() -> None:
    ranks = run_ranks(_skip_at_first, 2, timeout_s=60, group_timeout_s=20)
    for count, skipping, plain in ranks:
        assert count == 8
        for mine, right in zip(skipping, plain, strict=True):
            assert_close(mine, right, scale=10)


def _group_of_one_rank_alone(rank: int) -> list[str | None]:
    same = dist.new_group([0, 1])
    first, second = _Loop(rank), _Loop(rank)
    if rank == 1:
        first.state.process_group = same
    second.step()
    if rank == 1:
        second.state.process_group = same
    second.step()
    return [_error(first.step), _error(second.step)]


def test_another_group_on_one_rank_is_an_error_although_it_has_the_same_ranks() -> None:
    ranks = run_ranks(_group_of_one_rank_alone, 2, timeout_s=60, group_timeout_s=20)
    assert ranks[0] == ranks[1]
    for error in ranks[0]:
        assert error.startswith("ValueError: ranks disagree on the process group: rank 0 has ")


def _owe_through_bad_steps(rank: int) -> list[list[Tensor]]:
    loop = _Loop(rank)
    sums = [torch.zeros(SHAPES[0]), torch.zeros(SHAPES[0])]

    def step(*, is_bad: bool = False) -> bool:
        gradient, average = loop.step(is_bad=is_bad)[0]
        if average.isfinite().all():
            sums[0] += gradient
            sums[1] += average
        return bool(average.isfinite().all())

    for _ in range(5):
        step()
    loop.state.min_compression_rate = 7.0  # nothing is worth compressing
    step()
    results = [step(is_bad=i < 3) for i in range(6)]
    assert results == [False] * 3 + [True] * 3
    assert loop.state.residual(loop.model[0]) is None  # all is paid
    return sums


def test_a_bad_step_does_not_pay_what_is_owed() -> None:
    ranks = run_ranks(_owe_through_bad_steps, 2)
    assert_close(ranks[0][1], (ranks[0][0] + ranks[1][0]) / 2, scale=20)
    assert torch.equal(ranks[0][1], ranks[1][1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("matrix_approximation_rank", -1),
        ("iter", None),
        ("start_powerSGD_iter", "2"),
        ("min_compression_rate", float("nan")),
        ("compression_stats_logging_frequency", None),
        ("process_group", "gloo"),
    ],
)
def test_a_setting_is_checked_when_it_is_set(name: str, value: Any) -> None:
    state = PowerSGDState(None)
    before = getattr(state, name)
    with pytest.raises(ValueError, match=f"{name} is .*, but must be "):
        setattr(state, name, value)
    assert getattr(state, name) is before


def test_a_setting_that_is_misspelt_is_an_error() -> None:
    state = powersgd.PowerSGDState(None)
    with pytest.raises(AttributeError, match="no attribute 'matrix_aproximation_rank' to set"):
        state.matrix_aproximation_rank = 4


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1])
def test_any_integer_of_64_bits_is_a_seed(seed: int) -> None:
    assert powersgd.PowerSGDState(None, random_seed=seed).random_seed == seed


@pytest.mark.parametrize("is_last", [False, True])
def test_the_last_bucket_counts_a_step(is_last: bool) -> None:
    state = PowerSGDState(None)
    state.maybe_increase_iter(SimpleNamespace(is_last=lambda: is_last))
    assert state.iter == is_last


def test_a_setting_is_kept_as_a_plain_number() -> None:
    state = PowerSGDState(None)
    state.iter = torch.tensor(5)
    assert type(state.iter) is int

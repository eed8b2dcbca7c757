"""Zero, deficient, cancelling, tiny, huge, inf and NaN gradients; 400 steps that lose nothing.

What a step with an inf or a NaN must do: its averages are non-finite on all ranks, and training
continues as if it had not been. Bit equality with a run without the bad step says both.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel

import powersgd

from .models import (
    MANY_BUCKETS,
    ONE_BUCKET,
    Batch,
    Case,
    Outcome,
    Spec,
    assert_conserved,
    assert_equal_on_ranks,
    assert_exact,
    by_case,
    for_each,
    is_same,
    mean_input,
    peak,
    ranks_of,
    real,
    run_cases,
)
from .ranks import run_ranks
from .tolerances import RTOL

START = 3
OPTIONS = {
    "matrix_approximation_rank": 2,
    "start_powerSGD_iter": START,
    "min_compression_rate": 1,
}
HOOKS = ("powerSGD_hook", "batched_powerSGD_hook")
WIDE_RANGE = (torch.float32, torch.float64, torch.bfloat16)

BASE = {
    "first": Spec((24, 20)),
    "bias": Spec((24,)),
    "second": Spec((24, 20)),
    "conv": Spec((16, 4, 3, 3)),
}
KINDS = BASE | {
    "short": Spec((24, 20), torch.bfloat16),
    "complex": Spec((20, 16), torch.complex64),
    "embedding": Spec((12, 6), kind="sparse"),
}
THIN = {"column": Spec((24, 1)), "row": Spec((1, 24)), "one": Spec((1, 1))}


def _by_dtype(dtypes: Sequence[torch.dtype]) -> dict[str, Spec]:
    shapes = {"matrix": (24, 20), "bias": (24,)}
    return {
        f"{name}_{dtype}".replace("torch.", ""): Spec(shape, dtype)
        for dtype in dtypes
        for name, shape in shapes.items()
    }


def _batches(*runs: tuple[str, int], scale: float = 1.0, zeros: tuple[str, ...] = ()) -> Any:
    kinds = [kind for kind, count in runs for _ in range(count)]
    return [Batch(seed, kind, scale, zeros=zeros) for seed, kind in enumerate(kinds)]


def _case(name: str, specs: dict[str, Spec], schedule: Sequence[Batch], **settings: Any) -> Case:
    options = OPTIONS | settings.pop("options", {})
    return Case(name, specs, schedule, options=options, **settings)


# Gradients that are hard but finite: averages are exact, and nothing gets lost.


def _degenerate() -> list[Case]:
    wide, half = _by_dtype(WIDE_RANGE), _by_dtype([torch.float16])
    rank4 = {"matrix_approximation_rank": 4}
    large = {"matrix_approximation_rank": 100, "min_compression_rate": 0.01}
    same_shape = {"batch_tensors_with_same_shape": True}
    dead = _batches(("rank2", 6), zeros=("first",)) + _batches(("rank2", 12))[6:]
    return [
        _case("zero", wide | half, _batches(("zero", 7), ("rank2", 4))),
        _case("zero later", wide | half, _batches(("rank2", 6), ("zero", 5), ("rank2", 4))),
        _case("one of two is dead", BASE, dead, ddp=ONE_BUCKET),
        _case("one of two is dead, batched", BASE, dead, ddp=ONE_BUCKET, options=same_shape),
        _case("deficient", wide | half, _batches(("rank1", 9)), options=rank4),
        _case("deficient, batched", BASE, _batches(("rank1", 9)), options=rank4 | same_shape),
        _case("cancelling", wide | half, _batches(("cancel", 6))),
        _case("1e-12", wide, _batches(("rank2", 9), scale=1e-12)),
        _case("1e12", wide, _batches(("rank2", 9), scale=1e12)),
        _case("1e-30", wide, _batches(("rank2", 9), scale=1e-30)),
        _case("1e30", wide, _batches(("rank2", 9), scale=1e30)),
        _case("1e-3 in half", half, _batches(("rank2", 9), scale=1e-3)),
        _case("1e3 in half", half, _batches(("rank2", 9), scale=1e3)),
        _case("rank 100", wide | half, _batches(("full", 9)), options=large),
        _case("rank 100, thin", THIN, _batches(("full", 9)), options=large),
        _case("rank 100, 1e-12", wide, _batches(("full", 9), scale=1e-12), options=large),
    ]


DEGENERATE = _degenerate()
BATCHED = [
    replace(case, name=f"batched hook: {case.name}", hook="batched_powerSGD_hook")
    for case in DEGENERATE
]

# A subspace that has to come back: the last steps are exact, whatever the first ones lose.


def _returning() -> list[Case]:
    right, rank3 = Batch(50, "right"), Batch(50, "rank3")
    wide = _by_dtype(WIDE_RANGE)
    rank1, rank4 = {"matrix_approximation_rank": 1}, {"matrix_approximation_rank": 4}
    return [
        _case("orthogonal", wide, _batches(("left", 8)) + [right] * 5, options=rank1),
        _case("orthogonal, rank 2", wide, _batches(("left", 8)) + [right] * 5),
        _case("rank 1 to rank 3", wide, _batches(("rank1", 25)) + [rank3] * 5, options=rank4),
        _case("zero to rank 3", wide, _batches(("zero", 25)) + [rank3] * 5, options=rank4),
    ]


RETURNING = _returning()

# Inf and NaN. The bad step comes between two good ones, unless said otherwise.

GOOD = _batches(("full", 11))
BAD_AT = 7


def _poisoned() -> list[tuple[Case, Case]]:
    """Pairs of a run with a bad step and the same run without."""
    same_shape = {"batch_tensors_with_same_shape": True}
    no_feedback = {"use_error_feedback": False}
    runs: list[tuple[str, dict[str, Any]]] = [
        ("", {"specs": KINDS}),
        ("one bucket, ", {"specs": KINDS, "ddp": ONE_BUCKET, "options": same_shape}),
        ("no feedback, ", {"specs": BASE, "options": no_feedback}),
        ("batched hook, ", {"specs": KINDS, "hook": "batched_powerSGD_hook"}),
    ]
    pairs = []
    for prefix, settings in runs:
        name = f"{prefix}good"
        good = _case(name, schedule=GOOD, **dict(settings))
        bad = [
            Batch(99, scale=scale, poison=(parameter, value))
            for parameter in settings["specs"]
            for value, scale in ((math.inf, 1), (math.nan, 1), (-math.inf, 1e30), (math.nan, 1e30))
            if prefix == "" or (value, parameter) in ((math.inf, "first"), (-math.inf, "bias"))
        ]
        pairs += [(_with_bad(good, [batch], _describe(batch)), good) for batch in bad]
    twice = [Batch(98, poison=("first", math.nan)), Batch(99, poison=("bias", math.inf))]
    good = pairs[0][1]
    pairs.append((_with_bad(good, twice, "two bad steps"), good))
    wrapped = _case("fp16 wrapper, good", BASE, GOOD, fp16=True)
    pairs.append((_with_bad(wrapped, [Batch(99, scale=1e6)], "overflow"), wrapped))
    return pairs


def _describe(batch: Batch) -> str:
    return f"{batch.poison[1]} in {batch.poison[0]} at {batch.scale:g}" if batch.poison else ""


def _with_bad(good: Case, bad: list[Batch], name: str) -> Case:
    schedule = [*good.schedule[:BAD_AT], *bad, *good.schedule[BAD_AT:]]
    return replace(good, name=good.name.replace("good", name), schedule=schedule)


PAIRS = _poisoned()
FIRST_STEP_BAD = _case(
    "bad at the first compressed step",
    BASE,
    [*_batches(("full", START)), Batch(99, poison=("second", math.nan)), *_batches(("rank2", 4))],
)
WARM_UP_BAD = _case(
    "bad while averaging plainly",
    BASE,
    [Batch(98), Batch(99, poison=("second", math.nan)), Batch(97), *_batches(("rank2", 4))],
)


def _near_overflow(name: str, dtype: torch.dtype, largest: float, **settings: Any) -> Case:
    """Build up a residual near the largest number of the dtype, then go on with small numbers."""
    specs = {"first": Spec((16, 200), dtype), "bias": Spec((24,), dtype)}
    scales = [largest * 2.0**-i for i in (5, 4, 3, 2, 1, 0, 0, 0) for _ in range(2)]
    schedule = [Batch(seed, "mean", size) for seed, size in enumerate([1.0] * START + scales)]
    return _case(name, specs, schedule + [Batch(seed) for seed in range(50, 56)], **settings)


NEAR_OVERFLOW = [
    _near_overflow("overflow in fp32", torch.float32, 1e38),
    _near_overflow("overflow in bf16", torch.bfloat16, 1e38),
    _near_overflow("overflow in fp16", torch.float16, 2e4),
    _near_overflow("overflow in the fp16 wrapper", torch.float32, 2e4, fp16=True),
]

# 400 steps.

ALL_DTYPES = (*WIDE_RANGE, torch.float16)
LONG = [
    _case(
        f"400 x {kind}, {hook}", _by_dtype(dtypes), _batches((kind, 400)), hook=hook, ddp=ONE_BUCKET
    )
    for kind, hook, dtypes in (
        ("mean", "powerSGD_hook", ALL_DTYPES),
        ("full", "powerSGD_hook", (torch.float32, torch.bfloat16)),
        ("mean", "batched_powerSGD_hook", ALL_DTYPES),
    )
]
SHORT = [*DEGENERATE, *BATCHED, *RETURNING, FIRST_STEP_BAD, WARM_UP_BAD, *NEAR_OVERFLOW]
SHORT += list({case.name: case for pair in PAIRS for case in pair}.values())
ON_THREE = [*DEGENERATE, *RETURNING, *PAIRS[0], PAIRS[6][0]]


def _run_all(rank: int, cases: list[Case]) -> tuple[dict[str, Any], dict[str, Any]]:
    return run_cases(rank, cases), {str(fp16): _train_scaled(fp16) for fp16 in (False, True)}


def _train_scaled(fp16: bool) -> dict[str, Any]:
    """A GradScaler loop: gradients overflow in the fp16 wrapper, or in fp32 itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    ddp = DistributedDataParallel(model, **MANY_BUCKETS)
    hook = powersgd.powerSGD_hook
    state = powersgd.PowerSGDState(None, **OPTIONS)
    ddp.register_comm_hook(state, fp16_compress_wrapper(hook) if fp16 else hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    init_scale = 2.0 ** (24 if fp16 else 127)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses, scales = [], []
    for _ in range(300):
        inputs = torch.randn(32, 16, generator=generator)
        loss = 32 * (ddp(inputs) - inputs.flip(1)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    parameters = [p.detach().clone() for p in model.parameters()]
    return {"losses": losses, "scales": scales, "parameters": parameters}


@pytest.fixture(scope="module")
def two() -> tuple[dict[str, Outcome], list[dict[str, Any]]]:
    results = run_ranks(_run_all, 2, [*SHORT, *LONG], timeout_s=280)
    return by_case([cases for cases, _ in results]), [scaled for _, scaled in results]


@pytest.fixture(scope="module")
def three() -> dict[str, Outcome]:
    return by_case(run_ranks(run_cases, 3, ON_THREE, timeout_s=280))


@pytest.fixture(params=[2, 3], ids=["2 ranks", "3 ranks"])
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    if request.param == 2:
        return request.getfixturevalue("two")[0]
    return request.getfixturevalue("three")


def _is_finite(tensors: Any) -> bool:
    return all(bool(real(t).isfinite().all()) for t in tensors if t is not None)


@for_each(DEGENERATE + BATCHED)
def test_hard_gradients_stay_finite_and_are_conserved(outcomes: Any, case: Case) -> None:
    ranks = ranks_of(outcomes, case)
    for steps in ranks:
        for i, step in enumerate(steps):
            assert _is_finite([*step.outputs.values(), *step.residuals.values()]), f"step {i}"
    assert_equal_on_ranks(case, ranks)
    assert_conserved(case, ranks)


# "zero later" gives back what rounding has left in the residual: conserved, but not zero.
@for_each([case for case in DEGENERATE if case.name != "zero later"])
def test_hard_gradients_are_exact(outcomes: Any, case: Case) -> None:
    assert_exact(case, ranks_of(outcomes, case), range(len(case.schedule)), scale=5)


@for_each(RETURNING)
def test_a_subspace_comes_back(outcomes: Any, case: Case) -> None:
    ranks = ranks_of(outcomes, case)
    last = len(case.schedule) - 1
    assert_exact(case, ranks, [last], scale=5)
    for name, spec in case.specs.items():
        left = [steps[last].residuals[name] for steps in ranks]
        if left[0] is not None:
            mean = sum(real(residual) for residual in left) / len(ranks)
            gradients = [g[name] for g in case.inputs(last, len(ranks))]
            assert peak([mean]) <= 5 * RTOL[spec.dtype] * peak(gradients), name


@pytest.mark.parametrize(("bad", "good"), PAIRS, ids=[bad.name for bad, _ in PAIRS])
def test_a_bad_step_is_seen_by_all_and_forgotten(outcomes: Any, bad: Case, good: Case) -> None:
    ranks, expected = ranks_of(outcomes, bad), ranks_of(outcomes, good)
    assert_equal_on_ranks(bad, ranks)
    count = len(bad.schedule) - len(good.schedule)
    for steps, without in zip(ranks, expected, strict=True):
        for i in range(BAD_AT, BAD_AT + count):
            batch = bad.schedule[i]
            hit = [batch.poison[0]] if batch.poison else list(bad.specs)
            assert not any(_is_finite([steps[i].outputs[name]]) for name in hit), f"step {i}"
            for name, residual in steps[i].residuals.items():  # of all compressed ones
                assert residual is None or bool(real(steps[i].outputs[name]).isnan().all()), name
            for name in bad.specs:
                before, after = steps[BAD_AT - 1].residuals[name], steps[i].residuals[name]
                assert is_same(before, after), f"residual of {name}"
        resumed = steps[:BAD_AT] + steps[BAD_AT + count :]
        for i, (step, other) in enumerate(zip(resumed, without, strict=True)):
            assert _is_finite(step.outputs.values())
            for name in bad.specs:
                assert is_same(step.outputs[name], other.outputs[name]), f"step {i}, {name}"
                assert is_same(step.residuals[name], other.residuals[name]), f"step {i}, {name}"


@for_each([FIRST_STEP_BAD, WARM_UP_BAD])
def test_a_bad_step_before_there_is_a_state(two: Any, case: Case) -> None:
    ranks = ranks_of(two[0], case)
    at = next(i for i, batch in enumerate(case.schedule) if batch.poison)
    assert not any(_is_finite([steps[at].outputs["second"]]) for steps in ranks)
    assert_exact(case, ranks, range(at + 1, len(case.schedule)), scale=5)
    assert_equal_on_ranks(case, ranks)


@for_each(NEAR_OVERFLOW)
def test_an_overflow_inside_is_a_bad_step_or_none(two: Any, case: Case) -> None:
    """Finite gradients whose sums may not be: dropped by all ranks, or averaged and conserved."""
    ranks = ranks_of(two[0], case)
    assert_equal_on_ranks(case, ranks)
    for i in range(START + 1, len(case.schedule)):
        is_good = _is_finite(ranks[0][i].outputs.values())
        before, after = ([steps[k].residuals["first"] for steps in ranks] for k in (i - 1, i))
        if not is_good:
            assert all(is_same(a, b) for a, b in zip(before, after, strict=True)), f"step {i}"
            continue
        mean = mean_input(case, case.inputs(i, 2), "first") + _mean(before)
        got = real(ranks[0][i].outputs["first"]) + _mean(after)
        bound = 5 * RTOL[case.dtype("first")] * peak([*before, mean])
        assert peak([got - mean]) <= bound, f"step {i}"


@for_each(NEAR_OVERFLOW)
def test_a_large_residual_does_not_stop_training(two: Any, case: Case) -> None:
    """A residual that stays, and overflows in every step from now on, would."""
    for steps in ranks_of(two[0], case):
        for i, step in enumerate(steps[-6:]):
            assert _is_finite(step.outputs.values()), f"small gradients, step {i}"


def _mean(tensors: list[Any]) -> torch.Tensor:
    return torch.stack([real(tensor) for tensor in tensors]).mean(dim=0)


@for_each(LONG)
def test_nothing_gets_lost_in_400_steps(two: Any, case: Case) -> None:
    ranks = ranks_of(two[0], case)
    assert_equal_on_ranks(case, ranks)
    assert_conserved(case, ranks)


@for_each(LONG)
def test_residuals_stay_bounded(two: Any, case: Case) -> None:
    for steps in ranks_of(two[0], case):
        for name in case.specs:
            sizes = [
                real(step.residuals[name]).norm()
                for step in steps[100:]
                if step.residuals[name] is not None
            ]
            if sizes:
                early, late = max(sizes[:100]), max(sizes[200:])
                assert 0 < late < 1.5 * early, name


@pytest.mark.parametrize("fp16", [False, True], ids=["fp32", "fp16 wrapper"])
def test_a_grad_scaler_loop_recovers_and_trains(two: Any, fp16: bool) -> None:
    ranks = [scaled[str(fp16)] for scaled in two[1]]
    scales = ranks[0]["scales"]
    backed_off = [i for i in range(1, len(scales)) if scales[i] < scales[i - 1]]
    assert len([i for i in backed_off if i > 100]) >= 2  # it met overflows while compressing
    assert min(scales[20:]) > 1  # and not one after the other for ever
    assert all(other["scales"] == scales for other in ranks)
    for mine, theirs in zip(ranks[0]["parameters"], ranks[1]["parameters"], strict=True):
        assert torch.equal(mine, theirs)
        assert mine.isfinite().all()
    losses = torch.tensor([other["losses"] for other in ranks]).mean(dim=0)
    assert losses[-20:].mean() < 0.1 * losses[:5].mean()

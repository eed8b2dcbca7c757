"""Everything DDP allows, with 2 and 3 gloo ranks: averages, conservation, equal ranks.

A case is one model, trained for a few steps: plain averaging, then gradients whose mean has rank 2
(the averages must be exact), then gradients of full rank (they cannot be; nothing may get lost).
"""

import inspect
import itertools
import logging
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import powersgd

from .models import (
    MANY_BUCKETS,
    ONE_BUCKET,
    Batch,
    Case,
    Dictated,
    Outcome,
    Spec,
    assert_conserved,
    assert_equal_on_ranks,
    assert_exact,
    backward,
    by_case,
    for_each,
    is_same,
    peak,
    ranks_of,
    run_cases,
)
from .ranks import run_ranks

WARM_UP, EXACT, STEPS = 3, 7, 13
KINDS = ["full"] * WARM_UP + ["rank2"] * (EXACT - WARM_UP) + ["full"] * (STEPS - EXACT)
SCHEDULE = [Batch(seed, kind) for seed, kind in enumerate(KINDS)]
OPTIONS = {
    "matrix_approximation_rank": 2,
    "start_powerSGD_iter": WARM_UP,
    "min_compression_rate": 1,
}
NO_MEMORY = {"start_powerSGD_iter": 0, "use_error_feedback": False, "warm_start": False}
HOOKS = ("powerSGD_hook", "batched_powerSGD_hook")
COMPRESSED = ("first", "second", "third", "conv")

BASE = {
    "first": Spec((24, 20)),
    "bias": Spec((24,)),
    "second": Spec((24, 20)),
    "third": Spec((30, 16)),
    "conv": Spec((16, 4, 3, 3)),
}
EVERY_KIND = {
    "scalar": Spec(()),
    "empty": Spec((0, 5)),
    "matrix": Spec((24, 20)),
    "no_columns": Spec((3, 0)),
    "vector": Spec((24,)),
    "complex": Spec((20, 16), torch.complex64),
    "complex_double": Spec((20, 16), torch.complex128),
    "complex_scalar": Spec((), torch.complex64),
    "embedding": Spec((12, 6), kind="sparse"),
    "transposed": Spec((20, 24), kind="transposed"),
    "channels_last": Spec((16, 4, 3, 3), kind="channels_last"),
    "strided": Spec((24, 20), kind="strided"),
    "cube": Spec((10, 5, 6)),
}
EVERY_DTYPE = {
    f"{name}_{dtype}".replace("torch.", ""): Spec(shape, dtype)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    for name, shape in {"matrix": (24, 20), "bias": (24,)}.items()
}
TIED_AND_FROZEN = BASE | {
    "second": Spec((24, 20), kind="tied"),
    "third": Spec((30, 16), kind="frozen"),
    "bias": Spec((24,), kind="tied"),
}


def _skip(rank: int | None) -> list[Batch]:
    """Leave out one matrix and the bias in some steps of each part, and one matrix in all."""
    never = ("conv",) if rank is None else ()
    return [
        Batch(
            batch.seed,
            batch.kind,
            skip=never + (("second", "bias") if i in (1, 5, 9, 10) else ()),
            skip_rank=rank,
        )
        for i, batch in enumerate(SCHEDULE)
    ]


def _skip_always(*names: str) -> list[Batch]:
    """Leave out the parameters of the first and the last bucket in every step."""
    return [Batch(batch.seed, batch.kind, skip=names) for batch in SCHEDULE]


def _case(name: str, specs: dict[str, Spec] | None = None, **settings: Any) -> Case:
    settings = {"schedule": SCHEDULE} | settings
    settings["options"] = OPTIONS | settings.get("options", {})
    return Case(name, specs or BASE, **settings)


def _features(hook: str) -> list[Case]:
    unused = {"find_unused_parameters": True, **MANY_BUCKETS}
    view = {"gradient_as_bucket_view": True, **MANY_BUCKETS}
    static = {"static_graph": True, **MANY_BUCKETS}
    skipping = {"skip_all_reduce_unused_params": True, **unused}
    resumed = SCHEDULE[WARM_UP:]
    cases = [
        _case("many buckets"),
        _case("one bucket", ddp=ONE_BUCKET),
        _case("default group", default_group=True),
        _case("default rate", options={"min_compression_rate": 2}),
        _case("start at 2", options={"start_powerSGD_iter": 2}, schedule=SCHEDULE[1:]),
        _case("no_sync", micro_batches=3),
        _case("join", uneven=2),
        _case("join, left before compression", EVERY_DTYPE, uneven=5),
        _case("static_graph", ddp=static),
        _case("static_graph, several buckets at first", EVERY_DTYPE, ddp=static),
        _case("static_graph, start at 0", EVERY_DTYPE, ddp=static, options=NO_MEMORY),
        _case("unused on one rank", ddp=unused, schedule=_skip(0)),
        _case("unused on all ranks, one bucket", ddp=unused | ONE_BUCKET, schedule=_skip(None)),
        _case("unused on all ranks", ddp=unused, schedule=_skip(None)),
        _case("unused on all ranks, not None", ddp=unused, schedule=_skip(None), set_to_none=False),
        _case("skipped buckets", ddp=skipping, schedule=_skip_always("first", "conv")),
        _case("static_graph, resumed", EVERY_DTYPE, ddp=static, schedule=resumed, resumed_at=10),
        _case("bucket view", ddp=view),
        _case("view, no_sync, unused", ddp=unused | view, schedule=_skip(1), micro_batches=2),
        _case("tied and frozen", TIED_AND_FROZEN),
        _case("every dtype", EVERY_DTYPE),
        _case("every kind", EVERY_KIND),
        _case("every kind, bucket view", EVERY_KIND, ddp=view),
        _case("every kind, one bucket", EVERY_KIND, ddp=ONE_BUCKET),
        _case("fp16 wrapper", fp16=True, ddp=ONE_BUCKET),
        _case("fp16 wrapper, many buckets", fp16=True),
    ]
    shapes = (True, False) if hook == "powerSGD_hook" else (False,)
    for feedback, warm, same_shape in itertools.product((True, False), (True, False), shapes):
        options = {
            "use_error_feedback": feedback,
            "warm_start": warm,
            "batch_tensors_with_same_shape": same_shape,
            "start_powerSGD_iter": WARM_UP if feedback or warm else 0,
        }
        name = f"feedback={feedback} warm={warm} same_shape={same_shape}"
        cases.append(_case(name, options=options, ddp=ONE_BUCKET))
    return [_rename(case, f"{hook}: {case.name}", hook) for case in cases]


def _squares() -> list[Case]:
    """390 numbers, a square of side 20 less 10; and 400 in two parameters."""
    exact = SCHEDULE[:3] + [Batch(seed, "square") for seed in range(3, 8)]
    settings: dict[str, Any] = {"hook": "batched_powerSGD_hook", "ddp": ONE_BUCKET}
    return [
        _case("square, exact", {"flat": Spec((390,))}, schedule=exact, **settings),
        _case("square, two", {"one": Spec((30, 11)), "two": Spec((70,))}, **settings),
    ]


def _rename(case: Case, name: str, hook: str | None) -> Case:
    return Case(**{**vars(case), "name": name, "hook": hook})


def _warm_up(hook: str | None) -> list[Case]:
    """Plain averaging only, to be compared with DDP without a hook."""
    unused = {"find_unused_parameters": True, **MANY_BUCKETS}
    settings: dict[str, Any] = {"options": {"start_powerSGD_iter": 1000}, "schedule": SCHEDULE[:5]}
    cases = [
        _case("base", **settings),
        _case("kinds", EVERY_KIND, **settings),
        _case("dtypes", EVERY_DTYPE, **settings),
        _case("no_sync", **settings, micro_batches=2),
        _case("join", **settings, uneven=1),
        _case("unused", **(settings | {"schedule": _skip(0)[:6]}), ddp=unused),
    ]
    return [_rename(case, f"warm-up {case.name}: {hook}", hook) for case in cases]


FEATURES = [case for hook in HOOKS for case in _features(hook)]
SQUARE, SQUARE_OF_TWO = _squares()
SUBGROUPS = [_rename(_case("", members=(0, 2)), f"{hook}: subgroup", hook) for hook in HOOKS]
PER_MATRIX = [case for case in FEATURES + SUBGROUPS if case.hook == "powerSGD_hook"]
PLAIN = _warm_up(None)
HOOKED = [case for hook in HOOKS for case in _warm_up(hook)]


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """Case to outcome, for all cases, from one set of processes."""
    cases = [*FEATURES, *PLAIN, *HOOKED, SQUARE, SQUARE_OF_TWO] + (
        SUBGROUPS if request.param == 3 else []
    )
    return by_case(run_ranks(run_cases, request.param, cases, timeout_s=280))


@for_each(FEATURES + SUBGROUPS)
def test_ranks_hold_the_same_averages_to_the_bit(outcomes: dict[str, Outcome], case: Case) -> None:
    assert_equal_on_ranks(case, ranks_of(outcomes, case))


@for_each(PER_MATRIX)
def test_gradients_of_low_rank_are_exact(outcomes: dict[str, Outcome], case: Case) -> None:
    start = case.options["start_powerSGD_iter"]
    steps = [i for i, batch in enumerate(case.schedule) if batch.kind == "rank2" or i < start]
    # Q, random or of another gradient, may be almost orthogonal to the rows of this one.
    assert_exact(case, ranks_of(outcomes, case), steps, scale=20)


@for_each([c for c in FEATURES + SUBGROUPS if c.options.get("use_error_feedback", True)])
def test_nothing_gets_lost(outcomes: dict[str, Outcome], case: Case) -> None:
    assert_conserved(case, ranks_of(outcomes, case))


@for_each([c for c in PER_MATRIX if c.specs is BASE and not c.fp16])
def test_compression_starts_on_time_and_has_the_rank(
    outcomes: dict[str, Outcome], case: Case
) -> None:
    for i, step in enumerate(ranks_of(outcomes, case)[0][:STEPS]):
        if case.schedule[i].kind != "full":
            continue
        compressed = i >= case.options["start_powerSGD_iter"]
        for name in COMPRESSED:
            output = step.outputs[name]
            if output is not None and output.any():
                sizes = torch.linalg.svdvals(output.flatten(1).double())
                assert (sizes[2] < 1e-4 * sizes[0]) == compressed, f"step {i}, {name}"


def test_batched_hook_sees_the_bucket_as_one_square(outcomes: dict[str, Outcome]) -> None:
    assert_exact(SQUARE, ranks_of(outcomes, SQUARE), range(len(SQUARE.schedule)), scale=5)
    assert_conserved(SQUARE_OF_TWO, ranks_of(outcomes, SQUARE_OF_TWO))
    for i, step in enumerate(ranks_of(outcomes, SQUARE_OF_TWO)[0]):
        parts = [step.outputs[name].flatten() for name in SQUARE_OF_TWO.specs]
        orders = [torch.cat(order) for order in (parts, parts[::-1])]
        sizes = [torch.linalg.svdvals(flat.view(20, 20).double()) for flat in orders]
        assert (min(s[2] / s[0] for s in sizes) < 1e-4) == (i >= WARM_UP), f"step {i}"


@for_each([case for case in FEATURES if "unused on all" in case.name])
def test_a_parameter_that_no_rank_uses_keeps_its_residual(
    outcomes: dict[str, Outcome], case: Case
) -> None:
    for steps in ranks_of(outcomes, case):
        for i in range(STEPS):
            for name in case.schedule[i].skip:
                assert peak([steps[i].outputs[name]]) == 0
                if i > WARM_UP:
                    before = steps[i - 1].residuals[name]
                    assert is_same(before, steps[i].residuals[name]), f"step {i}, {name}"
        assert peak([steps[8].residuals["second"]]) > 0.1  # there was something to keep


@for_each([case for case in FEATURES if not case.options.get("use_error_feedback", True)])
def test_without_error_feedback_nothing_is_added_later(
    outcomes: dict[str, Outcome], case: Case
) -> None:
    for step in ranks_of(outcomes, case)[0]:
        assert peak(step.residuals.values()) == 0


@for_each(HOOKED)
def test_warm_up_equals_ddp_without_a_hook_to_the_bit(
    outcomes: dict[str, Outcome], case: Case
) -> None:
    plain = next(c for c in PLAIN if c.name.split(":")[0] == case.name.split(":")[0])
    pairs = zip(ranks_of(outcomes, plain), ranks_of(outcomes, case), strict=True)
    for expected, actual in pairs:
        for i, (left, right) in enumerate(zip(expected, actual, strict=True)):
            for name in left.outputs:
                assert is_same(left.outputs[name], right.outputs[name]), f"step {i}, {name}"


def test_first_ten_arguments_are_torchs() -> None:
    def arguments(function: Any) -> list[tuple[str, Any]]:
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    assert arguments(powersgd.PowerSGDState) == arguments(theirs.PowerSGDState)
    for hook in HOOKS:
        ours = inspect.signature(getattr(powersgd, hook))
        assert list(ours.parameters) == ["state", "bucket"]
        assert ours.parameters["bucket"].annotation is dist.GradBucket


class Observed(logging.Handler):
    """What our loggers and `warnings` say while it is entered, and what the hook is asked."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []
        self.buckets = 0

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("powersgd"):
            self.messages.append(record.getMessage())

    def __enter__(self) -> "Observed":
        logging.getLogger().addHandler(self)
        logging.getLogger("powersgd").setLevel(logging.INFO)
        self.catcher = warnings.catch_warnings(record=True)
        self.warnings = self.catcher.__enter__()
        warnings.simplefilter("always")
        return self

    def __exit__(self, *exception: Any) -> None:
        self.catcher.__exit__(*exception)
        logging.getLogger().removeHandler(self)

    def counted(self, hook: Any) -> Any:
        def counting_hook(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
            self.buckets += 1
            return hook(state, bucket)

        return counting_hook


def _observe(rank: int, cases: list[Case]) -> dict[str, dict[str, Any]]:
    """Train each case once more; count buckets, collectives, log lines and warnings."""
    found = {}
    for case in cases:
        before = dist.group.WORLD._get_sequence_number_for_group()
        steps = []
        with Observed() as observed:
            ddp = DistributedDataParallel(Dictated(case.specs), **case.ddp)
            state = powersgd.PowerSGDState(None, **case.options)
            ddp.register_comm_hook(state, observed.counted(getattr(powersgd, case.hook)))
            for batch in case.schedule:
                observed.buckets = 0
                before = dist.group.WORLD._get_sequence_number_for_group()
                ddp.zero_grad(set_to_none=True)
                backward(ddp, batch.gradients(case.specs, rank, dist.get_world_size()))
                collectives = dist.group.WORLD._get_sequence_number_for_group() - before
                steps.append((observed.buckets, collectives, state.compression_stats()))
        ours = [str(w.message) for w in observed.warnings if "powersgd" in w.filename]
        found[case.name] = {"steps": steps, "messages": observed.messages, "warnings": ours}
    return found


OBSERVED = [
    _rename(case, f"{hook}: {case.name}", hook)
    for hook in HOOKS
    for case in (
        _case("many", options={"compression_stats_logging_frequency": 2}),
        _case("one", options={"compression_stats_logging_frequency": 2}, ddp=ONE_BUCKET),
        _case("kinds", EVERY_KIND),
        _case("kinds, one", EVERY_KIND, ddp=ONE_BUCKET),
    )
]


@pytest.fixture(scope="module")
def observations() -> dict[str, dict[str, Any]]:
    return run_ranks(_observe, 2, OBSERVED)[0]


@for_each(OBSERVED)
def test_at_most_two_collectives_per_bucket_and_step(observations: Any, case: Case) -> None:
    steps = observations[case.name]["steps"]
    for i, (buckets, collectives, _) in enumerate(steps[2:], start=2):  # DDP's own before
        if case.ddp is ONE_BUCKET:  # for each dtype, and for sparse gradients
            assert buckets == 1 or ("kinds" in case.name and buckets > 1)
        else:
            assert buckets >= 4
        most = 2 * buckets if i >= WARM_UP else buckets + 1  # or: have settings changed?
        assert 0 < collectives <= most, f"step {i}"


@pytest.mark.parametrize(
    ("name", "after"),
    [
        # (n + m) * 2 for four matrices, and the bias as it is
        ("powerSGD_hook: many", 88 + 88 + 92 + 104 + 24),
        ("powerSGD_hook: one", 88 + 88 + 92 + 104 + 24),
        # two factors of 46 rows: 46 ** 2 is the first square over 2040; and who used what
        ("batched_powerSGD_hook: one", 46 * 2 * 2 + 5),
    ],
)
def test_statistics_count_elements_over_all_compressed_steps(
    observations: Any, name: str, after: int
) -> None:
    for i, (_, _, stats) in enumerate(observations[name]["steps"]):
        count = max(0, i + 1 - WARM_UP)
        expected = (2040 / after if count else 0, 2040 * count, after * count)
        assert stats == pytest.approx(expected), f"step {i}"


@for_each([case for case in OBSERVED if "kinds" not in case.name])
def test_statistics_are_logged_at_their_frequency(observations: Any, case: Case) -> None:
    lines = [m for m in observations[case.name]["messages"] if "Compression stats" in m]
    steps = [int(line.split("iter ")[1].split(",")[0]) for line in lines]
    assert steps == list(range(WARM_UP, STEPS, 2))
    for line, step in zip(lines, steps, strict=True):
        rate, before, after = observations[case.name]["steps"][step][2]
        assert f"before compression {before}," in line
        assert f"after compression {after}," in line
        assert f"rate {rate}" in line


@for_each(OBSERVED)
def test_log_lines_and_warnings_come_once(observations: Any, case: Case) -> None:
    observed = observations[case.name]
    for texts in (observed["messages"], observed["warnings"]):
        assert len(texts) == len(set(texts))
    starts = [m for m in observed["messages"] if "Start to apply PowerSGD" in m]
    assert len(starts) == 1
    assert str(WARM_UP) in starts[0]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(("many", "one"), [("many", "one"), ("kinds", "kinds, one")])
def test_more_buckets_say_no_more(observations: Any, hook: str, many: str, one: str) -> None:
    several, single = observations[f"{hook}: {many}"], observations[f"{hook}: {one}"]
    assert len(several["messages"]) == len(single["messages"])
    assert len(several["warnings"]) == len(single["warnings"])

"""What the check of the planner computes; the check itself is `python -m profiling.prediction`."""

from dataclasses import replace

import pytest
import torch

from powersgd.costs import Costs
from powersgd.layout import ParameterSpec
from powersgd.models import Layer
from profiling.hooks import Hook
from profiling.network import Row
from profiling.prediction import average, check, draw, make_table

COSTS = Costs("a test", (1, 4), (1e-9, 3e-9), (0.0, 0.0), 0.0, 0.0, 0.0, 0.0)
LAYER = Layer("weight", ParameterSpec.of(torch.empty(1000, 1000, device="meta")))


def _row(hook: Hook, rank: int, median_s: float) -> Row:
    times = {"median_s": median_s, "low_s": median_s, "high_s": median_s}
    link = {"rate_bits_per_s": 8e6 / 0.95, "achieved_bits_per_s": 7e6, "latency_s": 1e-4}
    return Row(
        hook=hook, rank=rank, workers=2, compute_s=0.5, sent_bytes=1, steps=5, **times, **link
    )


def test_costs_of_several_processes_are_averaged() -> None:
    other = replace(COSTS, element_s=(3e-9, 5e-9), message_s=4.0)
    expected = replace(COSTS, element_s=(2e-9, 4e-9), message_s=2.0)
    mean = average([COSTS, other])
    assert mean.element_s == pytest.approx(expected.element_s)
    assert replace(mean, element_s=()) == replace(expected, element_s=())


def test_each_row_is_predicted_and_compared(tmp_path) -> None:
    # A megabyte per second: 4 MB after the only bucket is full, at the end of backward.
    checks = check([_row(Hook.NONE, 0, 5.0), _row(Hook.EAGER, 1, 1.0)], [LAYER], COSTS)
    plain, ours = checks
    assert plain.predicted_s == pytest.approx(0.5 + 4.0)
    assert plain.error == pytest.approx(-0.1)
    assert ours.predicted_s == pytest.approx(0.5 + 1e-3 + 4e-6 * 2001)
    assert make_table(checks).row_count == 2
    draw(checks, tmp_path / "check.svg")
    assert "<svg" in (tmp_path / "check.svg").read_text()

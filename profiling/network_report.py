"""What a slow link showed: break-even rates, a table and a plot."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from rich.box import SIMPLE
from rich.table import Table

from profiling.hooks import Hook
from profiling.plots import COLORS, label_lines, new_figure, save, style

BASELINES = (Hook.NONE, Hook.BF16)
LINES = ("-", "--", ":", "-.")  # by rank
ALWAYS, NEVER = "at every rate measured", "at no rate measured"


@dataclass(frozen=True)
class Row:
    """Whole training steps with one hook at one link rate; a step ends when the last rank's does.

    Attributes:
        rate_bits_per_s: The link's nominal rate, in each direction.
        hook: What averages the gradients.
        rank: Of the approximation; 0 where there is none.
        workers: Number of ranks.
        median_s: Of the steps' times.
        low_s: Their lower quartile.
        high_s: Their upper quartile.
        achieved_bits_per_s: What plain sockets got through at this rate, without headers, while
            every rank sent to the next one.
        compute_s: Median of steps of the same model without communication, taken in turn.
        latency_s: Median of an all-reduce of one element.
        sent_bytes: What one rank's interface sent in a step, with all headers.
        steps: How many were timed.
    """

    rate_bits_per_s: float
    hook: Hook
    rank: int
    workers: int
    median_s: float
    low_s: float
    high_s: float
    achieved_bits_per_s: float
    compute_s: float
    latency_s: float
    sent_bytes: int
    steps: int

    @property
    def name(self) -> str:
        """Name of the hook and its rank, for people."""
        return f"{self.hook.label}, rank {self.rank}" if self.rank else self.hook.label


def find_crossings(
    rates: Sequence[float], times: Sequence[float], baseline: Sequence[float]
) -> list[float]:
    """Find where one curve of time against rate crosses another.

    Args:
        rates: Ascending.
        times: Of one hook, at each rate.
        baseline: Of the other, at each rate.

    Returns:
        The rates, ascending, at which the faster one changes; between measured ones, logarithms of
        times are taken as linear in the logarithm of the rate.
    """
    crossings: list[float] = []
    last: tuple[float, float] | None = None
    equal_at: float | None = None
    for rate, time, other in zip(rates, times, baseline, strict=True):
        gap = math.log(time / other)
        if gap == 0:
            equal_at = equal_at or rate
            continue
        if last is not None and last[1] * gap < 0:
            share = last[1] / (last[1] - gap)
            crossings.append(equal_at or last[0] * (rate / last[0]) ** share)
        last, equal_at = (rate, gap), None
    return crossings


def describe_break_even(
    rates: Sequence[float], times: Sequence[float], baseline: Sequence[float]
) -> str:
    """Say at which rates one hook is faster than another.

    Args:
        rates: Ascending.
        times: Of the hook, at each rate.
        baseline: Of the other, at each rate.

    Returns:
        Such as "below 1.4 Gbit/s"; several rates where the curves cross several times.
    """
    first = next((t < b for t, b in zip(times, baseline, strict=True) if t != b), False)
    names = [format_rate(rate) for rate in find_crossings(rates, times, baseline)]
    if not names:
        return ALWAYS if first else NEVER
    sentence = f"{'below' if first else 'above'} {names[0]}"
    if len(names) == 1:
        return sentence
    return f"{sentence}, and the curves cross again at {', '.join(names[1:])}"


def format_rate(bits_per_s: float) -> str:
    """Return a rate for people.

    Args:
        bits_per_s: The rate.

    Returns:
        Three digits and a unit.
    """
    power = 9 if bits_per_s >= 0.9995e9 else 6
    return f"{bits_per_s / 10**power:.3g} {'G' if power == 9 else 'M'}bit/s"


Curves = dict[tuple[Hook, int], list[Row]]


def make_curves(rows: Iterable[Row]) -> Curves:
    """Sort rows into one curve for each hook and rank.

    Args:
        rows: In any order.

    Returns:
        Rows by hook and rank, with ascending rates.
    """
    curves: Curves = {}
    for row in sorted(rows, key=lambda row: row.rate_bits_per_s):
        curves.setdefault((row.hook, row.rank), []).append(row)
    return curves


def find_break_even(rows: Iterable[Row]) -> dict[str, dict[str, str]]:
    """Say at which rates each PowerSGD hook is faster than the plain all-reduces measured.

    Args:
        rows: Of every hook.

    Returns:
        `describe_break_even` by the name of the hook and of the plain one.
    """
    curves = make_curves(rows)
    plain = [curves[hook, 0] for hook in BASELINES if (hook, 0) in curves]
    return {
        curve[0].name: {
            other[0].name: describe_break_even(
                [row.rate_bits_per_s for row in curve],
                [row.median_s for row in curve],
                [row.median_s for row in other],
            )
            for other in plain
        }
        for (hook, _), curve in curves.items()
        if hook.is_low_rank
    }


def make_table(rows: Sequence[Row]) -> Table:
    """Lay out step times: a line for each hook, a column for each rate.

    Args:
        rows: Of every hook.

    Returns:
        The table.
    """
    curves = make_curves(rows)
    table = Table(
        box=SIMPLE,
        pad_edge=False,
        title="A training step, end to end: median and quartiles in ms",
        caption="link: the share of the nominal rate that plain sockets reach, without headers; "
        "tiny: an all-reduce of one element; compute: the same step without communication; "
        "sent: by one rank in a step",
    )
    lines = next(iter(curves.values()))
    table.add_column("", min_width=10)
    for row in lines:
        table.add_column(format_rate(row.rate_bits_per_s).replace(" ", "\n"), justify="right")
    table.add_column("sent\nMB", justify="right")
    reached = (f"{row.achieved_bits_per_s / row.rate_bits_per_s:.0%}" for row in lines)
    table.add_row("link", *reached)
    table.add_row("tiny", *(f"{1e3 * row.latency_s:.2f}" for row in lines))
    table.add_row("compute", *(f"{1e3 * row.compute_s:.0f}" for row in lines), end_section=True)
    for curve in curves.values():
        cells = [
            f"{1e3 * row.median_s:.0f}\n{1e3 * row.low_s:.0f}-{1e3 * row.high_s:.0f}"
            for row in curve
        ]
        table.add_row(curve[0].name, *cells, f"{curve[-1].sent_bytes / 1e6:.3g}")
    return table


def make_break_even_table(rows: Sequence[Row]) -> Table:
    """Lay out `find_break_even`.

    Args:
        rows: Of every hook.

    Returns:
        The table.
    """
    found = find_break_even(rows)
    table = Table(title="PowerSGD makes a step shorter")
    table.add_column("", min_width=10)
    for name in next(iter(found.values()), {}):
        table.add_column(f"than {name}")
    for name, sentences in found.items():
        table.add_row(name, *sentences.values())
    return table


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw step time against link rate.

    Args:
        rows: Of every hook.
        title: Of the plot.
        path: Ends in ``.png`` or ``.svg``.
    """
    figure, ((axes,),) = new_figure(width=8.5, height=5.2)
    curves = make_curves(rows)
    hooks = list(dict.fromkeys(hook for hook, _ in curves))
    ranks = sorted({rank for _, rank in curves if rank})
    labels = []
    for (hook, rank), curve in curves.items():
        color = COLORS[hooks.index(hook) % len(COLORS)]
        _draw(axes, curve, color, LINES[ranks.index(rank) % len(LINES)] if rank else "-")
        labels.append((curve[-1].rate_bits_per_s, curve[-1].median_s * 1e3, curve[0].name, color))
    first = next(iter(curves.values()))
    rates, compute_ms = [r.rate_bits_per_s for r in first], [1e3 * r.compute_s for r in first]
    axes.plot(rates, compute_ms, color="0.55", linewidth=3, zorder=1)
    labels.append((rates[-1], compute_ms[-1], "compute only", "0.45"))
    _scale(axes, rates)
    style(axes, "rate of the link, each direction", "time of a training step (ms)", title)
    figure.canvas.draw()  # the layout is settled only then, and labels are placed in pixels
    label_lines(axes, labels)
    save(figure, path)


def _draw(axes: Any, curve: list[Row], color: str, line: str) -> None:
    rates = [row.rate_bits_per_s for row in curve]
    quartiles = [[1e3 * row.low_s for row in curve], [1e3 * row.high_s for row in curve]]
    times = [1e3 * row.median_s for row in curve]
    axes.plot(rates, times, marker="o", linestyle=line, color=color, markersize=3.5)
    axes.fill_between(rates, *quartiles, color=color, alpha=0.1, linewidth=0)


def _scale(axes: Any, rates: list[float]) -> None:
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(rates, [format_rate(rate) for rate in rates])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_minor_locator(LogLocator(subs=()))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())

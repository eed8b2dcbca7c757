"""Pictures of a trace: what runs when in one step, and how much memory is allocated."""

import itertools
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from profiling.events import Collective, Events
from profiling.intervals import Interval, intersect, merge, subtract
from profiling.plots import COLORS, new_figure, save, style
from profiling.summary import summarize

_BLACK, _ORANGE, _BLUE, _GREEN, _PINK, _YELLOW, _SKY = COLORS
_WAITING, _FORWARD, _BACKWARD, _OPTIMIZER = "#F7C9BC", "#C4C4C4", "#7A7A7A", "#D8CBB0"
_QUEUED, _EXPOSED, _STARTING = "#F3DFA8", "#B0102A", "#5B2A86"
_PHASES = {
    "plan": _BLACK,
    "P": _ORANGE,
    "orthogonalization": _PINK,
    "Q": _BLUE,
    "reconstruction": _GREEN,
}
_CONTAINING_STARTS = "all-reduce of "  # the start shows in the row below
_LEGEND_COLUMNS = 6
_CHARACTER = 0.0068  # its width, in widths of the axes


class _Bar(NamedTuple):
    start: float
    end: float
    color: str
    name: str
    text: str = ""


class _Row(NamedTuple):
    label: str
    bars: list[_Bar]


def draw_step(events: Events, path: Path, title: str) -> None:
    """Draw the recorded step of median length: a row for the main thread, two for each bucket.

    Args:
        events: Of the whole recording.
        path: The picture, ``.png`` or ``.svg``.
        title: What was recorded.
    """
    length = statistics.median_low(end - start for start, end in events.steps)
    window = next(step for step in events.steps if step[1] - step[0] == length)
    step = events.within(window)
    rows = list(_rows(step))
    figure, ((axes,),) = new_figure(width=11, height=1.9 + 0.3 * len(rows))
    for y, row in enumerate(rows):
        for bar in row.bars:
            _draw_bar(axes, y, bar, window)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.set(xlim=(0, length), ylim=(len(rows) - 0.4, -0.6))
    style(axes, "time in the step, ms", "")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    names = {bar.name: bar.color for row in rows for bar in row.bars}
    patches = [Patch(color=color, label=name) for name, color in names.items()]
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=_LEGEND_COLUMNS,
        frameon=False,
        fontsize=8,
    )
    axes.set_title(f"{title}\n{_sentence(step)}", loc="left", fontsize=11)
    save(figure, path)


def _sentence(step: Events) -> str:
    summary = summarize(step)
    share = summary.hidden_share
    hidden = "" if share is None else f", {share:.0%} of it hidden"
    return (
        f"a step of {summary.step_ms:.1f} ms; collectives in flight for "
        f"{summary.in_flight_ms:.1f} ms{hidden}; {summary.sent_bytes:,.0f} bytes sent"
    )


def _draw_bar(axes: Axes, y: int, bar: _Bar, window: Interval) -> None:
    start, width = bar.start - window[0], bar.end - bar.start
    axes.barh(y, width, left=start, height=0.8, color=bar.color, linewidth=0)
    if bar.text and width > _CHARACTER * len(bar.text) * (window[1] - window[0]):
        is_dark = bar.color in (_BLACK, _BLUE, _BACKWARD, _GREEN, _ORANGE, _EXPOSED)
        color = "white" if is_dark else "black"
        axes.text(start + width / 2, y, bar.text, ha="center", va="center", fontsize=8, color=color)


def _bars(intervals: Iterable[Interval], color: str, name: str) -> Iterator[_Bar]:
    spans = list(intervals)
    longest = max(spans, key=lambda span: span[1] - span[0], default=None)
    for span in spans:
        yield _Bar(*span, color, name, name if span == longest else "")


def _rows(step: Events) -> Iterator[_Row]:
    yield _Row(
        "main thread",
        [
            *_bars(step.forward, _FORWARD, "forward"),
            *_bars(step.backward, _BACKWARD, "backward"),
            *_bars(step.compression, _SKY, "our hook"),
            *_bars(step.waiting, _WAITING, "waiting"),
            *_bars(step.starting, _STARTING, "starting an all-reduce"),
            *_bars(step.optimizer, _OPTIMIZER, "optimizer"),
        ],
    )
    if step.callbacks:
        yield _Row("gloo's threads", list(_bars(step.callbacks, _SKY, "callbacks of the hook")))
    for bucket in sorted({p.bucket for p in step.phases if p.bucket is not None}):
        phases = [p for p in step.phases if p.bucket == bucket]
        yield _Row(f"bucket {bucket}", [_phase_bar(*p) for p in phases if _is_shown(p.name)])
        mine = [c for c in step.collectives if c.bucket == bucket]
        yield _Row("all-reduces", list(itertools.chain.from_iterable(map(_flight_bars, mine))))
    others = [c for c in step.collectives if c.bucket is None]
    for i, row in enumerate(_pack(others)):
        bars = list(itertools.chain.from_iterable(map(_flight_bars, row)))
        yield _Row("all-reduces" if i == 0 else "", bars)
    yield _Row("any all-reduce", list(_parts(step)))


def _is_shown(phase: str) -> bool:
    return not phase.startswith(_CONTAINING_STARTS)


def _phase_bar(name: str, _: int | None, start: float, end: float) -> _Bar:
    if name.startswith("wait"):
        return _Bar(start, end, _WAITING, "waiting", name)
    return _Bar(start, end, _PHASES.get(name, _BLACK), name, name)


def _flight_bars(collective: Collective) -> Iterator[_Bar]:
    size = f"{collective.nbytes / 1e3:,.1f} kB"
    text = f"{collective.name}, {size}" if collective.name else size
    yield _Bar(collective.start, collective.taken, _QUEUED, "queued for gloo")
    yield _Bar(collective.taken, collective.end, _YELLOW, "all-reduce running", text)


def _pack(collectives: Iterable[Collective]) -> list[list[Collective]]:
    rows: list[list[Collective]] = []
    for collective in collectives:
        free = (row for row in rows if row[-1].end <= collective.start)
        row = next(free, None)
        if row is None:
            rows.append([collective])
        else:
            row.append(collective)
    return rows


def _parts(step: Events) -> Iterator[_Bar]:
    in_flight = merge((c.start, c.end) for c in step.collectives)
    exposed = subtract(in_flight, merge(step.backward + step.compression))
    parts = (
        (intersect(in_flight, step.backward), _BACKWARD, "hidden behind backward"),
        (intersect(in_flight, step.compression), _SKY, "hidden behind our hook"),
        (exposed, _EXPOSED, "exposed"),
    )
    for intervals, color, name in parts:
        yield from _bars(intervals, color, name)


def draw_memory(events: Events, path: Path, title: str) -> None:
    """Draw the allocated memory over the recorded steps, and what ran meanwhile.

    Args:
        events: Of a recording with memory.
        path: The picture, ``.png`` or ``.svg``.
        title: What was recorded.
    """
    figure, ((axes,),) = new_figure(width=11, height=4.2)
    shades: tuple[tuple[list[Interval], str, str], ...] = (
        (events.forward, _FORWARD, "forward"),
        (events.backward, "#EDEDED", "backward"),
        (events.compression, _SKY, "our hook"),
        (events.waiting, _EXPOSED, "waiting"),
        (events.optimizer, _OPTIMIZER, "optimizer"),
    )
    for intervals, color, name in shades:
        for i, (start, end) in enumerate(intervals):
            label = name if i == 0 else None
            axes.axvspan(start, end, color=color, alpha=0.45, linewidth=0, label=label)
    times = [ms for ms, _ in events.memory]
    allocated = [nbytes / 1e6 for _, nbytes in events.memory]
    axes.step(times, allocated, where="post", color=_BLACK, linewidth=0.9)
    _mark_peak(axes, times, allocated)
    axes.set_xlim(events.steps[0][0], events.steps[-1][1])
    style(axes, "time, ms", "allocated since recording began, MB")
    axes.set_title(f"{title}, memory of {len(events.steps)} steps", loc="left", fontsize=11)
    figure.legend(loc="outside lower center", ncols=_LEGEND_COLUMNS, frameon=False)
    save(figure, path)


def _mark_peak(axes: Any, times: list[float], allocated: list[float]) -> None:
    if not allocated:
        return
    peak = max(allocated)
    x = times[allocated.index(peak)]
    axes.plot([x], [peak], "o", color=_ORANGE, markersize=5)
    axes.annotate(
        f"peak {peak:.2f} MB",
        (x, peak),
        xytext=(6, 6),
        textcoords="offset points",
        color=_ORANGE,
        fontsize=9,
    )
    axes.margins(y=0.12)

"""The benchmark's results as plots."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from profiling.hooks import Hook
from profiling.plots import COLORS, label_lines, new_figure, save, style
from profiling.results import Measured, Result, Row
from profiling.scaling import Sweep

FLOOR_COLOR = "#777777"
_ORDER = (
    Hook.TORCH,
    Hook.EAGER,
    Hook.COMPILED,
    Hook.PYTHON_REDUCER,
    Hook.NONE,
    Hook.FP16,
    Hook.BF16,
)
_HOOK_COLORS = {
    Hook.NONE: COLORS[0],
    Hook.TORCH: COLORS[1],
    Hook.EAGER: COLORS[2],
    Hook.COMPILED: COLORS[3],
    Hook.PYTHON_REDUCER: COLORS[4],
    Hook.FP16: COLORS[5],
    Hook.BF16: COLORS[6],
}
_NAMES = {Measured.CALL: "one call of the hook", Measured.PASS: "forward and backward"}
_Line = list[tuple[float, float, float, float]]  # x, median, quartiles


def draw(rows: Sequence[Row], sweep: Sweep | None, target: Path) -> list[Path]:
    """Draw all that was measured.

    Args:
        rows: What was measured.
        sweep: What was varied; None: workloads and ranks.
        target: A file for the times, or a directory for these and for memory.

    Returns:
        What was written.
    """
    kinds = [
        kind for kind in Measured if any(r.measured is kind for row in rows for r in row.results)
    ]
    figures: dict[str, Any] = {}
    for kind in kinds:
        name = sweep.value if sweep else {Measured.CALL: "calls", Measured.PASS: "passes"}[kind]
        figures[name] = draw_sweep(rows, sweep) if sweep else draw_ranks(rows, kind)
        figures["memory" if kind is Measured.CALL else "memory-passes"] = draw_memory(rows, kind)
    if not figures:
        return []
    if target.suffix:
        save(next(iter(figures.values())), target)
        return [target]
    target.mkdir(parents=True, exist_ok=True)
    paths = [target / f"{name}.png" for name in figures]
    for figure, path in zip(figures.values(), paths, strict=True):
        save(figure, path)
    return paths


def draw_ranks(rows: Sequence[Row], measured: Measured) -> Any:
    """Draw time against rank, a panel for each workload and number of threads.

    Args:
        rows: What was measured.
        measured: What was timed.

    Returns:
        The figure.
    """
    workloads, threads = _distinct(rows, "workload"), _distinct(rows, "threads")
    figure, panels = new_figure(len(workloads), len(threads))
    for i, count in enumerate(threads):
        for j, workload in enumerate(workloads):
            chosen = [r for r in rows if (r.workload, r.threads) == (workload, count)]
            of = f"{workload}, {chosen[0].gradient_bytes / 1e6:.3g} MB, {_threads(count)}"
            axes = panels[i, j]
            style(axes, "rank of the approximation", f"{_NAMES[measured]} (ms)", of)
            _draw_lines(axes, chosen, measured, lambda row: row.rank)
            _set_ticks(axes.xaxis, sorted({row.rank for row in chosen}))
    return figure


def draw_sweep(rows: Sequence[Row], sweep: Sweep) -> Any:
    """Draw time, and time as multiples of the floor, against size or number of matrices.

    Args:
        rows: What was measured.
        sweep: What was varied.

    Returns:
        The figure: two panels for each rank and number of threads.
    """
    settings = list(dict.fromkeys((row.rank, row.threads) for row in rows))
    figure, panels = new_figure(2, len(settings))
    for (rank, threads), (left, right) in zip(settings, panels, strict=True):
        chosen = [row for row in rows if (row.rank, row.threads) == (rank, threads)]
        x, of_row, common = _describe(chosen, sweep)
        title = f"{common}, rank {rank}, {_threads(threads)}"
        style(left, x, "one call of the hook (ms)", title)
        _draw_lines(left, chosen, Measured.CALL, of_row)
        style(right, x, "one call / floor (5 passes over the gradient)", title)
        _draw_lines(right, chosen, Measured.CALL, of_row, is_relative=True)
        for axes in (left, right):
            _set_ticks(axes.xaxis, sorted({of_row(row) for row in chosen}))
    return figure


def _describe(rows: Sequence[Row], sweep: Sweep) -> tuple[str, Callable[[Row], float], str]:
    if sweep is Sweep.SIZE:
        common = f"{rows[0].tensors} square matrices"
        return "gradient (MB)", lambda row: row.gradient_bytes / 1e6, common
    common = f"{rows[0].gradient_bytes / 1e6:.3g} MB in square matrices"
    return "number of matrices", lambda row: row.tensors, common


def _draw_lines(
    axes: Axes,
    rows: Sequence[Row],
    measured: Measured,
    of_row: Callable[[Row], float],
    *,
    is_relative: bool = False,
) -> None:
    axes.set(xscale="log", yscale="log")
    labels: list[tuple[float, float, str, str]] = []
    for name, color, line in _lines(rows, measured, of_row, is_relative=is_relative):
        x, median, low, high = (list(values) for values in zip(*line, strict=True))
        dashes = "--" if color == FLOOR_COLOR else "-"
        marker = "" if color == FLOOR_COLOR and len(x) > 1 else "o"
        axes.plot(x, median, dashes, marker=marker, color=color, markersize=4)
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
        labels.append((x[-1], median[-1], name, color))
    _set_limits(axes, [of_row(row) for row in rows])
    label_lines(axes, labels)


def _lines(
    rows: Sequence[Row],
    measured: Measured,
    of_row: Callable[[Row], float],
    *,
    is_relative: bool,
) -> list[tuple[str, str, _Line]]:
    lines: list[tuple[str, str, _Line]] = []
    for hook in _ORDER:
        found = [(of_row(row), row.find(hook, measured)) for row in rows]
        line = [_point(x, result, is_relative=is_relative) for x, result in found if result]
        if line:
            lines.append((hook.label, _HOOK_COLORS[hook], sorted(line)))
    floors = [(of_row(row), r) for row in rows for r in row.results if r.measured is measured]
    if floors:
        by_x = {x: result.floor for x, result in floors}
        line = [
            (x, 1.0, 1.0, 1.0) if is_relative else (x, t.median, t.low, t.high)
            for x, t in by_x.items()
        ]
        lines.append(("floor", FLOOR_COLOR, sorted(line)))
    return lines


def _point(x: float, result: Result, *, is_relative: bool) -> tuple[float, float, float, float]:
    unit = result.floor.median if is_relative else 1.0
    time = result.time
    return x, time.median / unit, time.low / unit, time.high / unit


def draw_memory(rows: Sequence[Row], measured: Measured) -> Any:
    """Draw the memory that hooks take, in gradients, a panel for each workload.

    Args:
        rows: What was measured; of each workload the highest rank is drawn.
        measured: What was looked at.

    Returns:
        The figure.
    """
    best: dict[str, Row] = {}
    for row in rows:
        if row.workload not in best or row.rank > best[row.workload].rank:
            best[row.workload] = row
    figure, panels = new_figure(min(3, len(best)), -(-len(best) // 3), height=3.2)
    for axes in panels.flat[len(best) :]:
        axes.set_visible(False)
    for axes, row in zip(panels.flat, best.values(), strict=False):
        title = f"{row.workload}, {row.gradient_bytes / 1e6:.3g} MB, rank {row.rank}"
        style(axes, "memory (multiples of the gradient)", "", title)
        _draw_bars(axes, row, [r for r in row.results if r.measured is measured])
    return figure


def _draw_bars(axes: Axes, row: Row, results: Sequence[Result]) -> None:
    for y, result in enumerate(sorted(results, key=lambda r: _ORDER.index(r.hook))):
        kept, peak = result.memory.kept_bytes or 0, result.memory.peak_bytes
        color, unit = _HOOK_COLORS[result.hook], row.gradient_bytes
        axes.barh(y, kept / unit, color=color)
        axes.barh(y, peak / unit, left=kept / unit, color=color, alpha=0.4)
        megabytes = f" {kept / 1e6:.3g} MB kept + {peak / 1e6:.3g} MB in a call"
        if result.memory.kept_bytes is None:
            megabytes = f" {peak / 1e6:.3g} MB in a pass"
        axes.text((kept + peak) / unit, y, megabytes, va="center", fontsize=8.5, color=color)
    axes.set_yticks(range(len(results)))
    names = sorted(results, key=lambda r: _ORDER.index(r.hook))
    axes.set_yticklabels([result.hook.label for result in names])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.7 * axes.get_xlim()[1])  # room for the figures


def _distinct(rows: Sequence[Row], name: str) -> list[Any]:
    return list(dict.fromkeys(getattr(row, name) for row in rows))


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _set_limits(axes: Axes, xs: Sequence[float]) -> None:
    # Room on the right for the names of the lines.
    low, high = min(xs), max(xs)
    span = max(high / low, 4.0)
    axes.set_xlim(low / span**0.05, low * span**1.45 if high > low else low * span)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    low, high = axes.get_ylim()
    between = "25" if high / low < 100 else ""
    axes.yaxis.set_minor_formatter(
        FuncFormatter(lambda v, _: f"{v:g}" if f"{v:e}"[0] in between else "")
    )


def _set_ticks(axis: Any, values: Sequence[float]) -> None:
    axis.set_ticks(
        values, labels=[f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in values]
    )
    axis.set_minor_formatter(NullFormatter())

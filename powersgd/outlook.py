"""How a plan and its predictions are shown: tables, plot and JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from powersgd.costs import Exchange, Job, Link, Method, plan_layers
from powersgd.forecast import (
    BF16,
    PLAIN,
    RANKS,
    Forecast,
    advise,
    count_sent_bytes,
    predict,
    sweep_workers,
)
from powersgd.layout import matrix_shape
from powersgd.models import Layer
from powersgd.report import COLORS
from powersgd.units import format_bytes, format_rate, format_time

ASSUMPTIONS = (
    "Assumed: all workers are equal and none is late; each has a link of its own that carries 95 % "
    "payload, and no switch between them is congested, however many there are; every pair has the "
    "same latency; buckets travel one at a time while backward, two thirds of the computing, goes "
    "on; compression takes processor time from it; all-reduce costs the host what gloo costs."
)
SHOWN_RANKS = (1, 4, 16)  # in the plot
SWEEP_RANK = 4


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=" " not in name)
    return table


def describe(job: Job, layer: Layer, rank: int) -> dict[str, Any]:
    """Say what becomes of one parameter.

    Args:
        job: What is trained.
        layer: The parameter.
        rank: Of the approximation.

    Returns:
        Its name, shape, matrix, rate and floats sent, and why it is not compressed, if so.
    """
    matrix = matrix_shape(layer.spec)
    plan = plan_layers((layer,), rank, job.min_compression_rate)
    reason = None
    if matrix is None:
        reason = "empty" if layer.spec.numel == 0 else "a vector"
    elif not plan.groups:
        n, m = matrix
        possible = n * m / ((n + m) * min(n, m, rank))
        reason = f"rate {possible:.2g} is not over {job.min_compression_rate:g}"
    sent = plan.sent_numel
    return {
        "name": layer.name,
        "shape": list(layer.spec.shape),
        "matrix": None if matrix is None else list(matrix),
        "is_compressed": reason is None,
        "reason": reason,
        "rate": layer.spec.numel / sent if sent else 1.0,
        "sent_numel": sent,
    }


def layer_table(job: Job, rank: int) -> Table:
    """Show what becomes of each parameter.

    Args:
        job: What is trained.
        rank: Of the approximation.

    Returns:
        The table.
    """
    table = _table(f"Layers at rank {rank}", "parameter", "shape", "floats sent", "rate")
    table.add_column("not compressed because", overflow="fold")
    for layer in job.layers:
        row = describe(job, layer, rank)
        shape = "x".join(map(str, row["shape"])) or "scalar"
        rate = f"{row['rate']:.1f}" if row["is_compressed"] else ""
        reason = row["reason"] or ""
        table.add_row(row["name"], shape, f"{row['sent_numel']:,}", rate, reason)
    return table


def total_table(job: Job) -> Table:
    """Show what a whole step sends at each rank.

    Args:
        job: What is trained.

    Returns:
        The table.
    """
    numel = sum(layer.spec.numel for layer in job.layers)
    nbytes = sum(layer.nbytes for layer in job.layers)
    names = ("floats sent", "bytes sent", "rate")
    table = _table(f"All {len(job.layers)} parameters, {numel:,} floats", "averaging", *names)
    table.add_row(PLAIN.name, f"{numel:,}", format_bytes(nbytes), "1.0")
    for rank in RANKS:
        sent = count_sent_bytes(job, rank)
        layers = [plan_layers((x,), rank, job.min_compression_rate) for x in job.layers]
        floats = sum(plan.sent_numel for plan in layers)
        name = Method(Exchange.POWERSGD, rank).name
        rate = f"{nbytes / sent:.1f}" if sent else "1.0"
        table.add_row(name, f"{floats:,}", format_bytes(sent), rate)
    return table


def _rate_text(rate: float) -> str:
    if rate == 0:
        return "never"
    return "any rate" if math.isinf(rate) else format_rate(rate)


def forecast_table(forecasts: Sequence[Forecast], job: Job, link: Link) -> Table:
    """Show predicted step times.

    Args:
        forecasts: From `powersgd.forecast.predict`.
        job: What is trained.
        link: What connects the workers.

    Returns:
        The table.
    """
    title = (
        f"Predicted for {job.workers} workers on {format_rate(link.bits_per_s)}, latency "
        f"{format_time(link.latency_s)}, {format_time(job.compute_s)} to compute a step"
    )
    names = ("sent", "step", "speedup", "beats fp32 below", "beats bf16 below")
    table = _table(title, "averaging", *names)
    for forecast in forecasts:
        ratio = forecasts[0].step_s / forecast.step_s if forecast.step_s else 1.0
        rates = [] if forecast.break_even is None else map(_rate_text, forecast.break_even)
        table.add_row(
            forecast.method.name,
            format_bytes(forecast.sent_bytes),
            format_time(forecast.step_s),
            f"{ratio:.2f}",
            *rates,
        )
    return table


def worker_table(job: Job, link: Link, workers: Sequence[int]) -> Table:
    """Show predicted step times for several numbers of workers.

    Args:
        job: What is trained.
        link: What connects the workers.
        workers: Their numbers.

    Returns:
        The table.
    """
    methods = (PLAIN.name, BF16.name, Method(Exchange.POWERSGD, SWEEP_RANK).name)
    table = _table("Predicted step by number of workers", "workers", *methods)
    times = sweep_workers(job, link, SWEEP_RANK, workers)
    for count, row in zip(workers, times, strict=True):
        table.add_row(f"{count:,}", *map(format_time, row))
    return table


def draw(job: Job, link: Link, path: Path) -> None:
    """Draw predicted step time against link rate.

    Args:
        job: What is trained.
        link: What connects the workers; its rate is marked.
        path: A PNG or SVG file.
    """
    figure = Figure(figsize=(8.5, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    rates = [10 ** (7.5 + i / 20) for i in range(71)]  # 30 Mbit/s to 100 Gbit/s
    methods = [PLAIN, BF16, *(Method(Exchange.POWERSGD, rank) for rank in SHOWN_RANKS)]
    ends = []
    for method, color in zip(methods, COLORS, strict=False):
        links = [Link(rate, link.latency_s, link.algorithm) for rate in rates]
        times = [1e3 * job.step_s(method, at) for at in links]
        axes.plot([rate / 1e6 for rate in rates], times, color=color, linewidth=2)
        ends.append((times[0], method.name, color))
    axes.axvline(link.bits_per_s / 1e6, color="gray", linestyle=":", linewidth=1.5)
    text = f" your link, {format_rate(link.bits_per_s)}"
    place: Any = {"transform": axes.get_xaxis_transform(), "color": "gray", "fontsize": 9}
    axes.text(link.bits_per_s / 1e6, 0.97, text, va="top", **place)
    axes.set(xscale="log", yscale="log", xlabel="link rate of each worker (Mbit/s)")
    axes.set(ylabel="predicted time of a step (ms)", title=f"{job.workers} workers")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    _label_starts(axes, rates[0] / 1e6, ends)
    figure.savefig(path, dpi=150)


def _label_starts(axes: Axes, x: float, starts: Sequence[tuple[float, str, str]]) -> None:
    # Beside the slow end, where lines lie apart; moved up where two would overlap.
    axes.set_xlim(left=x / 12)
    axes.figure.canvas.draw()
    last = -math.inf
    for y, name, color in sorted(starts):
        _, pixel = axes.transData.transform((x, y))
        last = max(pixel, last + 17)
        _, at = axes.transData.inverted().transform((0, last))
        axes.text(x * 0.93, at, name, color=color, ha="right", va="center", fontsize=9)


def write_json(job: Job, rank: int, link: Link | None, workers: Sequence[int], path: Path) -> None:
    """Write everything that the tables show.

    Args:
        job: What is trained.
        rank: Of the table of layers.
        link: What connects the workers; None leaves out the predictions.
        workers: Numbers of workers to predict for.
        path: The file.
    """
    content: dict[str, Any] = {
        "rank": rank,
        "layers": [describe(job, layer, rank) for layer in job.layers],
        "sent_bytes": {r: count_sent_bytes(job, r) for r in RANKS},
        "costs": asdict(job.costs),
    }
    if link is not None:
        content["link"] = asdict(link)
        content["compute_s"] = job.compute_s
        content["predictions"] = [
            _prediction(replace(job, workers=count), link) for count in workers
        ]
    path.write_text(json.dumps(content, indent=1) + "\n")


def _prediction(job: Job, link: Link) -> dict[str, Any]:
    forecasts = predict(job, link)
    return {
        "workers": job.workers,
        "advice": advise(forecasts, link),
        "methods": [
            {
                "name": forecast.method.name,
                "sent_bytes": forecast.sent_bytes,
                "step_s": forecast.step_s,
                # JSON knows no infinity: null is a method that is always faster.
                "break_even_bits_per_s": [
                    None if math.isinf(rate) else rate for rate in forecast.break_even or ()
                ],
            }
            for forecast in forecasts
        ],
    }

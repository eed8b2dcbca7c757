"""The convergence study's plots: loss against steps and bytes, and what each part gains."""

import statistics
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from profiling.effects import Study
from profiling.plots import COLORS, label_lines, new_figure, save, style
from profiling.tasks import TASKS
from profiling.training import PLAIN, Kind, Outcome

WIDE = 10.0  # times the least loss: from there on a linear axis hides differences
Label = tuple[float, float, str, str]

VARIANTS = {  # (error feedback, warm start)
    (True, True): "both",
    (False, True): "no error feedback",
    (True, False): "no warm start",
    (False, False): "neither",
}


def draw_curves(study: Study, path: Path) -> None:
    """Plot the held-out loss against steps and against bytes, for plain and for each rank.

    Args:
        study: One task and optimizer.
        path: Of the picture.
    """
    figure, ((by_step, by_bytes),) = new_figure(columns=2)
    loss = TASKS[study.task].loss_label
    style(by_step, "steps", loss)
    style(by_bytes, "sent by each process (MB)", loss)
    by_bytes.set_xscale("log")
    _mark(by_bytes.xaxis)
    kinds = [kind for kind in (PLAIN, *map(Kind, study.ranks)) if kind in study.of_kind]
    ends: list[list[Label]] = [[], []]
    for kind, color in zip(kinds, cycle(COLORS)):
        for axes, labels, in_bytes in zip((by_step, by_bytes), ends, (False, True), strict=True):
            labels += _draw_band(axes, study.of_kind[kind], color, in_bytes=in_bytes)
    if study.shows_accuracy:  # the loss falls by orders of magnitude
        _use_log_loss(by_step, by_bytes)
    figure.suptitle(f"{study.title}: mean and range over {_count_seeds(study)}", fontsize=11)
    figure.draw_without_rendering()  # lays it out, as the labels' places need
    for axes, labels in zip((by_step, by_bytes), ends, strict=True):
        label_lines(axes, labels)
    save(figure, path)


def _use_log_loss(*panels: Axes) -> None:
    for axes in panels:
        axes.set_yscale("log")
        _mark(axes.yaxis)


def _mark(axis: Axis) -> None:
    # matplotlib marks whole decades and writes 2 x 10^0; here there may be less than one.
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _draw_band(axes: Axes, outcomes: list[Outcome], color: str, *, in_bytes: bool) -> list[Label]:
    good = [outcome.curve[1:] for outcome in outcomes if not outcome.has_diverged]
    if not good:  # no line, no label; the table tells
        return []
    x = [point.sent_bytes / 1e6 if in_bytes else float(point.step) for point in good[0]]
    losses = [[point.loss for point in points] for points in zip(*good, strict=True)]
    means = [statistics.fmean(values) for values in losses]
    axes.plot(x, means, color=color)
    axes.fill_between(x, list(map(min, losses)), list(map(max, losses)), color=color, alpha=0.15)
    kind, diverged = outcomes[0].run.kind, len(outcomes) - len(good)
    name = "plain" if kind == PLAIN else f"rank {kind.rank}"
    name += f" ({diverged} of {len(outcomes)} diverged)" if diverged else ""
    return [(x[-1], means[-1], name, color)]


def _count_seeds(study: Study) -> str:
    count = max(map(len, study.of_kind.values()))
    return f"{count} seed{'s' if count > 1 else ''}"


def draw_ablation(study: Study, path: Path) -> None:
    """Plot each rank's final loss with and without error feedback and warm start.

    Args:
        study: One task and optimizer, with a rank at least.
        path: Of the picture.
    """
    figure, ((axes,),) = new_figure(width=8)
    style(axes, "rank", f"final {TASKS[study.task].loss_label}")
    axes.set_title(f"{study.title}: mean ± standard deviation, {_count_seeds(study)}", fontsize=11)
    axes.set_xticks(range(len(study.ranks)), [str(rank) for rank in study.ranks])
    axes.set_xlim(-0.5, len(study.ranks) - 0.5)
    if _is_wide(study):
        _use_log_loss(axes)
    labels = _draw_plain(axes, study) if PLAIN in study.of_kind else []
    for i, (variant, name) in enumerate(VARIANTS.items()):
        labels += _draw_variant(axes, study, variant, name, i)
    figure.draw_without_rendering()  # lays it out, as the labels' places need
    label_lines(axes, labels)
    save(figure, path)


def _is_wide(study: Study) -> bool:
    losses = [study.summarize(kind).loss for kind in study.of_kind]
    found = [loss for loss in losses if loss is not None]
    return bool(found) and max(found) > WIDE * min(found)


def _draw_plain(axes: Axes, study: Study) -> list[Label]:
    plain = study.summarize(PLAIN)
    if plain.loss is None:
        return []
    spread = plain.loss_spread or 0.0
    axes.axhline(plain.loss, color=COLORS[0], linewidth=1)
    axes.axhspan(plain.loss - spread, plain.loss + spread, color=COLORS[0], alpha=0.1, linewidth=0)
    return [(axes.get_xlim()[1], plain.loss, "plain all-reduce", COLORS[0])]


def _draw_variant(
    axes: Axes, study: Study, variant: tuple[bool, bool], name: str, i: int
) -> list[Label]:
    color = COLORS[i + 1]
    places, means, spreads = [], [], []
    for place, rank in enumerate(study.ranks):
        x = place + 0.14 * (i - 1.5)
        summary = study.summarize(Kind(rank, *variant))
        if summary.diverged:
            text = f"{summary.diverged}/{summary.runs} diverged"
            text = f"{name}: {text}" if summary.loss is None else text
            axes.text(
                x, 0.99, text, color=color, fontsize=8.5, rotation=90, ha="center", va="top",
                transform=axes.get_xaxis_transform(),
            )  # fmt: skip
        if summary.loss is not None:
            places.append(x)
            means.append(summary.loss)
            spreads.append(summary.loss_spread or 0.0)
    axes.errorbar(places, means, spreads, fmt="o", capsize=3, color=color)
    return [] if summary.loss is None else [(axes.get_xlim()[1], summary.loss, name, color)]

"""How our plots look: one look tells the answer."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from powersgd.report import COLORS

__all__ = ["COLORS", "label_lines", "new_figure", "save", "style"]


def new_figure(columns: int = 1, rows: int = 1, width: float = 6.5, height: float = 4.4) -> Any:
    """Return a figure and its axes.

    Args:
        columns: Panels beside each other.
        rows: Panels above each other.
        width: Of a panel, in inches.
        height: Of a panel, in inches.

    Returns:
        The figure and an array of axes, ``(rows, columns)``.
    """
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def style(axes: Axes, x: str, y: str, title: str = "") -> None:
    """Give axes their labels, with units, a light grid, and no box.

    Args:
        axes: To be styled.
        x: Label of the x axis.
        y: Label of the y axis.
        title: Of the panel.
    """
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def label_lines(axes: Axes, labels: Iterable[tuple[float, float, str, str]]) -> None:
    """Write each line's name beside its end, apart from each other, in its colour.

    Args:
        axes: Whose limits and scales are final.
        labels: ``(x, y, text, colour)`` of each line's last point, in data coordinates.
    """
    pixels = [
        (*axes.transData.transform((x, y)), text, color)
        for x, y, text, color in sorted(labels, key=lambda label: label[1])
    ]
    line = 1.15 * 8.5 / 72 * axes.figure.dpi
    above, inverse = float("-inf"), axes.transData.inverted()
    for x, y, text, color in pixels:
        above = max(y, above + line)  # so that no two names overlap
        place_x, place_y = inverse.transform((x, above))
        axes.text(
            place_x,
            place_y,
            f" {text}",
            color=color,
            fontsize=8.5,
            va="center",
            ha="left",
            clip_on=False,
        )


def save(figure: Figure, path: Path) -> None:
    """Write a figure.

    Args:
        figure: To be written.
        path: Ends in ``.png`` or ``.svg``.

    Raises:
        ValueError: If it ends in something else.
    """
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"the plot's file is {path}, but must end in .png or .svg")
    figure.savefig(path, dpi=150)

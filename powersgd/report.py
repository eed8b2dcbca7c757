"""What training runs gave, and how it is shown: table, sentences, plot and JSON.

rich and matplotlib are imported where they are used: a process that only trains needs neither.
"""

import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

# Okabe and Ito's colours, told apart with every kind of colour vision; all-reduce is black.
COLORS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
TOLERATED_POINTS = 1.0  # a rank should cost no more accuracy than this


class Point(NamedTuple):
    """The net after a number of steps, measured on the test images.

    Attributes:
        step: Steps done.
        sent_bytes: Bytes that one process has handed to all-reduce so far.
        loss: Mean cross-entropy, in nats.
        accuracy: Share of the images that are recognised, 0 to 1.
    """

    step: int
    sent_bytes: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Result:
    """What one training run gave.

    Attributes:
        rank: Rank of PowerSGD's approximation, or None for plain all-reduce.
        seed: The run's seed.
        curve: The net after 1, 2, 4, 8, ... steps of the first epoch, and after each epoch.
        step_bytes: Bytes per step and process once PowerSGD has started.
        compression_rate: Elements before / after compression, in the compressed steps.
        step_s: Median time of a step once PowerSGD has started, in seconds.
    """

    rank: int | None
    seed: int
    curve: list[Point]
    step_bytes: float
    compression_rate: float
    step_s: float

    @property
    def name(self) -> str:
        """How this way of averaging gradients is called."""
        return method_name(self.rank)


def method_name(rank: int | None) -> str:
    """Name plain all-reduce (None) or PowerSGD by its rank."""
    return "all-reduce" if rank is None else f"rank {rank}"


@dataclass(frozen=True)
class Method:
    """One way of averaging gradients, over all seeds.

    Attributes:
        name: ``"all-reduce"`` or ``"rank 2"``.
        results: One for each seed; their curves have the same steps and bytes.
    """

    name: str
    results: list[Result]

    def mean(self, value: Callable[[Result], float]) -> float:
        """Average a value of the results over the seeds."""
        return statistics.fmean(map(value, self.results))

    def spread(self, value: Callable[[Result], float]) -> float:
        """Return a value's standard deviation over the seeds; 0 for a single one."""
        values = [value(result) for result in self.results]
        return statistics.stdev(values) if len(values) > 1 else 0.0


def accuracy_percent(result: Result) -> float:
    """Return the accuracy after the last step, in percent."""
    return 100 * result.curve[-1].accuracy


def loss(result: Result) -> float:
    """Return the loss after the last step, in nats."""
    return result.curve[-1].loss


def sent_bytes(result: Result) -> float:
    """Return the bytes sent in the whole run by one process."""
    return result.curve[-1].sent_bytes


def group_by_method(results: Sequence[Result]) -> list[Method]:
    """Collect the seeds of each way of averaging, in the order of first appearance."""
    names = dict.fromkeys(result.name for result in results)
    return [Method(name, [r for r in results if r.name == name]) for name in names]


def build_table(methods: Sequence[Method]) -> "Table":
    """Build the table of all methods, readable from 80 columns on."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("Gradients\naveraged by", no_wrap=True)
    for heading in (
        "Test\naccuracy, %",
        "Test\nloss",
        "Bytes\nper step",
        "Com-\npression",
        "Time per\nstep, ms",
        "Sent in\nall, MB",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for method in methods:
        table.add_row(*_cells(method))
    return table


def _cells(method: Method) -> tuple[str, ...]:
    def with_spread(value: Callable[[Result], float], digits: int) -> str:
        spread = f" ±{method.spread(value):.{digits}f}" if len(method.results) > 1 else ""
        return f"{method.mean(value):.{digits}f}{spread}"

    return (
        method.name,
        with_spread(accuracy_percent, 2),
        with_spread(loss, 3),
        f"{method.mean(lambda r: r.step_bytes):,.0f}",
        f"{method.mean(lambda r: r.compression_rate):.1f}",
        f"{1e3 * method.mean(lambda r: r.step_s):.1f}",
        f"{method.mean(sent_bytes) / 1e6:.1f}",
    )


def explain(methods: Sequence[Method], start_iter: int) -> str:
    """Say what the table's columns are.

    Args:
        methods: All methods.
        start_iter: Steps that sent full gradients before PowerSGD started.

    Returns:
        A few sentences.
    """
    result = methods[0].results[0]
    spread = " ± standard deviation" if len(methods[0].results) > 1 else ""
    return (
        f"After {result.curve[-1].step} steps, {_seeds(methods[0])}{spread}. Bytes are what each "
        "process hands to all-reduce: per step once PowerSGD has started, in all with the "
        f"{start_iter} full gradients before that. Between processes of one machine sending costs "
        "little, so the time per step shows what compression itself costs."
    )


def conclude(methods: Sequence[Method]) -> list[str]:
    """Say for each rank how far its accuracy is from plain all-reduce's, and what it saves.

    Args:
        methods: Plain all-reduce first, then the ranks.

    Returns:
        One sentence for each rank.
    """
    plain, *ranks = methods
    return [
        f"{method.name.capitalize()} is {_judge(method, plain)}, and sends "
        f"{_ratio(plain, method, lambda r: r.step_bytes)} times less per step, "
        f"{_ratio(plain, method, sent_bytes)} times less in all."
        for method in ranks
    ]


def _judge(method: Method, plain: Method) -> str:
    points = method.mean(accuracy_percent) - plain.mean(accuracy_percent)
    if abs(points) < 0.005:
        return f"as accurate as plain all-reduce ({_seeds(plain)})"
    side = "below" if points < 0 else "above"
    text = f"{abs(points):.2f} points {side} plain all-reduce ({_seeds(plain)})"
    if points > 0:
        return text
    # Accuracies are multiples of one image; the slack is for the rounding of their mean.
    verdict = "within" if points >= -TOLERATED_POINTS - 1e-6 else "worse than"
    return f"{text}, {verdict} the tolerated {TOLERATED_POINTS:.0f} point"


def _ratio(plain: Method, method: Method, value: Callable[[Result], float]) -> str:
    return f"{plain.mean(value) / method.mean(value):.1f}"


def _seeds(method: Method) -> str:
    count = len(method.results)
    return "one seed" if count == 1 else f"mean of {count} seeds"


def write_json(methods: Sequence[Method], path: Path) -> None:
    """Write all results, with the curve of every run.

    Args:
        methods: All methods.
        path: The file.
    """
    runs = [
        {**asdict(result), "name": result.name, "curve": [p._asdict() for p in result.curve]}
        for method in methods
        for result in method.results
    ]
    path.write_text(json.dumps({"runs": runs, "conclusions": conclude(methods)}, indent=1) + "\n")


def draw(methods: Sequence[Method], path: Path) -> None:
    """Draw loss and accuracy against the bytes sent, as lines of the mean over bands of the range.

    Args:
        methods: All methods.
        path: The PNG file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw_panel(left, methods, lambda point: point.loss)
    left.set(yscale="log", ylabel="test loss (cross-entropy, nats)")
    left.yaxis.set_major_formatter("{x:g}")
    _draw_panel(right, methods, lambda point: 100 * point.accuracy)
    right.set(ylabel="test accuracy (%)")
    right.legend(loc="lower right", frameon=False)
    band = ", shaded: their range" if len(methods[0].results) > 1 else ""
    figure.suptitle(
        f"A small net on digits, averaged by all-reduce or PowerSGD ({_seeds(methods[0])}{band})"
    )
    figure.savefig(path, dpi=150, format="png")


def _draw_panel(axes: "Axes", methods: Sequence[Method], value: Callable[[Point], float]) -> None:
    for method, color in zip(methods, itertools.cycle(COLORS)):
        megabytes = [point.sent_bytes / 1e6 for point in method.results[0].curve]
        points = zip(*(result.curve for result in method.results), strict=True)
        values = [[value(point) for point in seeds] for seeds in points]
        means = [statistics.fmean(seeds) for seeds in values]
        axes.plot(megabytes, means, color=color, label=method.name)
        axes.plot(megabytes[-1], means[-1], "o", color=color)
        axes.fill_between(
            megabytes,
            [min(seeds) for seeds in values],
            [max(seeds) for seeds in values],
            color=color,
            alpha=0.15,
            linewidth=0,
        )
    axes.set(xscale="log", xlabel="sent by each process so far (MB)")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)

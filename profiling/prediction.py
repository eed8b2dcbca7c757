"""Check ``powersgd plan`` against a real slow link: ``python -m profiling.prediction``.

The planner gets what a user would give it: the link's nominal rate, a step's time without
communication, and what `powersgd.calibration` measures. Calibration runs in as many processes at
once as there are ranks, because here they share one machine. The rig of `profiling.network` then
times whole steps.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from powersgd.calibration import calibrate
from powersgd.costs import Costs, Exchange, Job, Link, Method
from powersgd.models import Layer
from powersgd.units import format_rate
from profiling.hooks import Hook
from profiling.link import LinkError
from profiling.network import Row, measure, parse_rates, require_model, require_suffix
from profiling.network_models import MODELS, make_model
from profiling.plots import COLORS, label_lines, new_figure, save, style
from profiling.results import machine
from profiling.workers import run_locally

RATES = ["50Mbit", "100Mbit", "300Mbit", "1Gbit"]
HOOKS = [(Hook.NONE, 0), (Hook.BF16, 0), (Hook.EAGER, 1), (Hook.EAGER, 4)]
ALLOWED = 0.25  # of the measured time
EXCHANGES = {Hook.NONE: Exchange.PLAIN, Hook.BF16: Exchange.BF16, Hook.EAGER: Exchange.POWERSGD}


@dataclass(frozen=True)
class Check:
    """One prediction.

    Attributes:
        rate_bits_per_s: Of the link.
        method: How gradients were averaged.
        measured_s: A step on the rig, median.
        predicted_s: What the planner says.
    """

    rate_bits_per_s: float
    method: Method
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """How far off the prediction is, as a share of what was measured."""
        return self.predicted_s / self.measured_s - 1


def average(every: Sequence[Costs]) -> Costs:
    """Return the mean of costs that several processes have measured at the same time.

    Args:
        every: Of one machine, by process.

    Returns:
        The mean.
    """
    first = every[0]
    values: dict[str, Any] = {}
    for field in fields(Costs):
        of_field = [getattr(costs, field.name) for costs in every]
        if isinstance(of_field[0], float):
            values[field.name] = statistics.fmean(of_field)
        elif isinstance(of_field[0], tuple):
            values[field.name] = tuple(map(statistics.fmean, zip(*of_field, strict=True)))
        else:
            values[field.name] = of_field[0]
    return Costs(**{**values, "ranks": first.ranks})


def _calibrate(_: int) -> Costs:
    dist.barrier()  # all at once
    dist.destroy_process_group()
    return calibrate()


def check(rows: Sequence[Row], layers: Sequence[Layer], costs: Costs) -> list[Check]:
    """Predict what was measured.

    Args:
        rows: From the rig.
        layers: Of the model that was trained.
        costs: Of this machine.

    Returns:
        A prediction for each row.
    """
    checks = []
    for row in rows:
        job = Job(tuple(layers), row.workers, row.compute_s, costs)
        method = Method(EXCHANGES[row.hook], row.rank)
        link = Link(row.rate_bits_per_s, 0.0)
        predicted_s = job.step_s(method, link)
        checks.append(Check(row.rate_bits_per_s, method, row.median_s, predicted_s))
    return checks


def make_table(checks: Sequence[Check]) -> Table:
    """Show predictions beside what was measured.

    Args:
        checks: All of them.

    Returns:
        The table.
    """
    table = Table(title="A training step in ms", title_justify="left")
    for name in ("link", "averaging", "measured", "predicted", "off by"):
        table.add_column(name, justify="left" if name == "averaging" else "right", no_wrap=True)
    for one in checks:
        table.add_row(
            format_rate(one.rate_bits_per_s),
            one.method.name,
            f"{1e3 * one.measured_s:.0f}",
            f"{1e3 * one.predicted_s:.0f}",
            f"{one.error:+.0%}",
        )
    return table


def draw(checks: Sequence[Check], path: Path) -> None:
    """Draw predictions as lines and what was measured as dots.

    Args:
        checks: All of them.
        path: A PNG or SVG file.
    """
    figure, ((axes,),) = new_figure(width=8)
    style(axes, "link rate (Mbit/s)", "time of a step (ms)", "lines: predicted, dots: measured")
    axes.set(xscale="log", yscale="log")
    ends = []
    methods = dict.fromkeys(one.method for one in checks)
    for method, color in zip(methods, COLORS, strict=False):
        chosen = [one for one in checks if one.method == method]
        x = [one.rate_bits_per_s / 1e6 for one in chosen]
        predicted = [1e3 * one.predicted_s for one in chosen]
        axes.plot(x, predicted, color=color)
        axes.plot(x, [1e3 * one.measured_s for one in chosen], "o", color=color)
        ends.append((x[-1], predicted[-1], method.name, color))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * 3)  # room for the names
    label_lines(axes, ends)
    save(figure, path)


def main(
    rate: Annotated[list[str], typer.Option(help="Of the link, each way.")] = RATES,
    model: Annotated[
        str, typer.Option(callback=require_model, help=f"{', '.join(MODELS)}.")
    ] = "square",
    workers: Annotated[int, typer.Option(min=2, max=4, help="Ranks.")] = 2,
    repeats: Annotated[int, typer.Option(min=5, help="Timed steps of each.")] = 20,
    to_json: Annotated[Path | None, typer.Option("--json", help="Also write all here.")] = None,
    plot: Annotated[
        Path | None, typer.Option(callback=require_suffix, help=".png or .svg.")
    ] = None,
) -> None:
    """Predict training steps over a shaped link, then measure them."""
    rates, console = parse_rates(rate), Console()
    costs = average(run_locally(_calibrate, workers))
    try:
        rows = measure(rates, HOOKS, workers, model, repeats=repeats)
    except LinkError as error:
        Console(stderr=True).print(f"No result: {error}.", soft_wrap=True, markup=False)
        raise typer.Exit(1) from None
    layers = [Layer.of(name, p) for name, p in make_model(model)[0].named_parameters()]
    checks = check(rows, layers, costs)
    console.print(make_table(checks))
    good = sum(abs(one.error) <= ALLOWED for one in checks)
    console.print(f"{good} of {len(checks)} predictions are within {ALLOWED:.0%} of the measured.")
    if to_json is not None:
        found = [asdict(one) | {"error": one.error} for one in checks]
        content = {"machine": machine(), "costs": asdict(costs), "checks": found}
        to_json.write_text(json.dumps(content, indent=1))
    if plot is not None:
        draw(checks, plot)


if __name__ == "__main__":
    typer.run(main)

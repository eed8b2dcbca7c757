"""Train over a real slow link, with every hook in turn: ``python -m profiling.network``.

Each rank lives in a network namespace of its own, and tc limits what passes between them. Whole
steps are timed, so what a hook saves on the wire and what it costs on the processor both count.
Needs Linux, root, and ``ip`` and ``tc`` of iproute2.
"""

import json
import platform
import statistics
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from powersgd import units
from profiling.hooks import Hook
from profiling.link import Link, LinkError, namespaces
from profiling.network_models import MODELS
from profiling.network_processes import start_ranks
from profiling.network_report import (
    Row,
    find_break_even,
    make_break_even_table,
    make_table,
    plot,
)
from profiling.results import machine

__all__ = ["LinkError", "Row", "measure", "measure_each"]

RATES = ["50Mbit", "100Mbit", "300Mbit", "1Gbit", "3Gbit", "10Gbit"]
HOOKS: list[Hook] = [
    hook for hook in Hook if hook is not Hook.PYTHON_REDUCER
]  # which takes long to compile
FEWEST = 5  # steps: quartiles need some
LOWEST, HIGHEST = 1e6, 1e11  # bit/s


def measure(
    rates: Sequence[float],
    hooks: Sequence[tuple[Hook, int]],
    workers: int = 2,
    model: str | Sequence[Sequence[int]] = "square",
    **options: Any,
) -> list[Row]:
    """Time training steps over a shaped link; see `measure_each`.

    Args:
        rates: Of the link, in bit/s.
        hooks: Each with its rank; the rank of a hook without one does not matter.
        workers: Number of ranks, 2 or more.
        model: A name of `profiling.network_models.MODELS`, or shapes of parameters.
        **options: Of `measure_each`.

    Returns:
        A row for each rate and hook, in the order given.
    """
    with closing(measure_each(rates, hooks, workers, model, **options)) as each:
        return [row for rows in each for row in rows]


def measure_each(
    rates: Sequence[float],
    hooks: Sequence[tuple[Hook, int]],
    workers: int = 2,
    model: str | Sequence[Sequence[int]] = "square",
    *,
    batch: int = 32,
    threads: int = 1,
    repeats: int = 30,
    seconds: float = 30,
    latency_s: float = 0.0,
    limit_s: float = 300,
) -> Generator[list[Row], None, None]:
    """Time training steps over a shaped link, one rate after the other.

    All hooks, and steps without communication, are taken in turn in the same processes. Warm-up
    runs before the link is shaped.

    Args:
        rates: Of the link, in bit/s.
        hooks: Each with its rank; the rank of a hook without one does not matter.
        workers: Number of ranks, 2 or more.
        model: A name of `profiling.network_models.MODELS`, or shapes of parameters, which compute
            next to nothing.
        batch: Samples of each rank in a step.
        threads: Of each rank.
        repeats: Timed steps of each hook at each rate.
        seconds: At a slow rate there are fewer steps, down to 5, so that it takes about as long.
        latency_s: Added to each message, one way; 0 needs nothing from the kernel.
        limit_s: Hard limit for warm-up and for each rate.

    Yields:
        The rows of one rate.

    Raises:
        LinkError: If the link cannot be made, a rank ends early, or the limit is reached.
    """
    hooks = [(hook, rank if hook.is_low_rank else 0) for hook, rank in hooks]
    task = {
        "hooks": [(hook.value, rank) for hook, rank in hooks],
        "model": model,
        "batch": batch,
        "threads": threads,
    }
    times = {"fewest": FEWEST, "repeats": repeats, "seconds": seconds}
    with namespaces(workers) as link:
        _try(link, rates, latency_s)
        with start_ranks(link, task) as ranks:
            ranks.ask({}, limit_s)
            for rate in rates:
                link.shape(rate, latency_s)
                request = {"bits_per_s": rate, **times}
                answer = ranks.ask(request, limit_s)[0]
                yield _make_rows(rate, hooks, workers, answer)


def _try(link: Link, rates: Sequence[float], latency_s: float) -> None:
    # What tc refuses is said before anything has been waited for.
    for rate in rates:
        link.shape(rate, latency_s)
    link.unshape()


def _make_rows(
    rate: float, hooks: Sequence[tuple[Hook, int]], workers: int, answer: dict[str, Any]
) -> list[Row]:
    compute, *every = answer["times_s"]
    rows = []
    for (hook, rank), times, sent in zip(hooks, every, answer["sent_bytes"][1:], strict=True):
        low, median, high = statistics.quantiles(times, n=4)
        rows.append(
            Row(
                rate_bits_per_s=rate,
                hook=hook,
                rank=rank,
                workers=workers,
                median_s=median,
                low_s=low,
                high_s=high,
                achieved_bits_per_s=answer["achieved_bits_per_s"],
                compute_s=statistics.median(compute),
                latency_s=answer["latency_s"],
                sent_bytes=sent,
                steps=len(times),
            )
        )
    return rows


def _parse_rate(text: str) -> float:
    try:
        rate = units.parse_rate(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not LOWEST <= rate <= HIGHEST:
        raise typer.BadParameter(f"{text!r} is out of range; give 1Mbit to 100Gbit")
    return rate


def parse_rates(texts: list[str]) -> list[float]:
    """Read rates.

    Args:
        texts: Such as ``100Mbit``.

    Returns:
        Bits per second, ascending, each once.
    """
    return sorted({_parse_rate(text) for text in texts})


def _parse_latency(text: str) -> float:
    try:
        return units.parse_time(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _write(rows: list[Row], settings: dict[str, Any], path: Path) -> None:
    everything = {
        "machine": {**machine(), "kernel": platform.release()},
        "settings": settings,
        "rows": [asdict(row) for row in rows],
        "break_even": find_break_even(rows),
    }
    path.write_text(json.dumps(everything, indent=1))


def _require_positive(numbers: list[int]) -> list[int]:
    for number in numbers:
        if number < 1:
            raise typer.BadParameter(f"{number} is not allowed; give integers >= 1")
    return numbers


def require_suffix(path: Path | None) -> Path | None:
    """Return a plot's path if its name says what to draw; raises BadParameter otherwise."""
    if path is not None and path.suffix.lower() not in (".png", ".svg"):
        raise typer.BadParameter(f"{path} must end in .png or .svg")
    return path


def require_model(name: str) -> str:
    """Return a model's name if there is one of this name; raises BadParameter otherwise."""
    if name not in MODELS:
        raise typer.BadParameter(f"no model {name!r}; there are {', '.join(MODELS)}")
    return name


def main(
    rate: Annotated[list[str], typer.Option(help="Of the link, each way.")] = RATES,
    hook: Annotated[list[Hook], typer.Option(help="What averages the gradients.")] = HOOKS,
    rank: Annotated[list[int], typer.Option(callback=_require_positive)] = [1, 4],  # noqa: B006
    workers: Annotated[int, typer.Option(min=2, max=4, help="Ranks, each in a namespace.")] = 2,
    model: Annotated[str, typer.Option(help=f"{', '.join(MODELS)}.", callback=require_model)] = (
        "square"
    ),
    batch: Annotated[int, typer.Option(min=1, help="Samples of each rank in a step.")] = 32,
    threads: Annotated[int, typer.Option(min=1, help="Of each rank.")] = 1,
    latency: Annotated[str, typer.Option(help="Added to each message, one way; by netem.")] = "0ms",
    repeats: Annotated[int, typer.Option(min=FEWEST, help="Timed steps of each hook.")] = 30,
    seconds: Annotated[float, typer.Option(min=1, help="Fewer steps at slow rates.")] = 30,
    limit: Annotated[float, typer.Option(min=1, help="Hard limit for each rate, in s.")] = 300,
    save: Annotated[Path | None, typer.Option("--json", help="Also write everything here.")] = None,
    plot_to: Annotated[
        Path | None, typer.Option("--plot", help=".png or .svg.", callback=require_suffix)
    ] = None,
) -> None:
    """Time whole training steps over a shaped link; find the rates below which PowerSGD pays."""
    rates, latency_s = parse_rates(rate), _parse_latency(latency)
    hooks = [(one, r) for one in hook for r in (rank if one.is_low_rank else [0])]
    settings = {"model": model, "batch": batch, "threads": threads, "latency_s": latency_s}
    limits = {"repeats": repeats, "seconds": seconds, "limit_s": limit}
    console, rows = Console(), list[Row]()
    try:
        # Closed at once also if a signal comes between two rates.
        with closing(measure_each(rates, hooks, workers, **settings, **limits)) as each:  # type: ignore[arg-type]
            for found in track(each, "Measuring", len(rates), console=console, transient=True):
                rows += found
    except LinkError as error:
        Console(stderr=True).print(f"No result: {error}.", soft_wrap=True, markup=False)
        raise typer.Exit(1) from None
    console.print(make_table(rows), make_break_even_table(rows))
    if save is not None:
        _write(rows, {**settings, **limits, "workers": workers}, save)
    if plot_to is not None:
        plot(rows, f"{model}, {workers} workers, batch {batch} each", plot_to)


if __name__ == "__main__":
    typer.run(main)

"""Does it train? Loss against steps and bytes sent: ``python -m profiling.convergence``.

Two tasks, two optimizers; plain all-reduce and PowerSGD of several ranks, each with and without
error feedback and warm start; several seeds. All kinds of one task and optimizer get the same
initial weights, data and learning rate, which was chosen for plain all-reduce. Two local ranks
train them one after the other.
"""

import json
import math
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

import powersgd
from powersgd.demo import LARGEST_RANK
from profiling.convergence_tables import make_markdown, make_table
from profiling.curves import draw_ablation, draw_curves
from profiling.effects import CLEAR, Study, group
from profiling.tasks import TASKS
from profiling.training import OPTIMIZERS, PLAIN, START, Kind, Outcome, Point, Run, train_all
from profiling.workers import run_locally

WORLD_SIZE = 2


def list_runs(
    tasks: list[str], optimizers: list[str], ranks: list[int], seeds: int, steps: int | None
) -> list[Run]:
    """List the runs: plain all-reduce, and all four variants of PowerSGD for each rank.

    Args:
        tasks: Names of `TASKS`.
        optimizers: Names of `OPTIMIZERS`.
        ranks: Of the approximation.
        seeds: Number of seeds, from 0.
        steps: Of each run; None is each task's own number.

    Returns:
        The runs, in the order of the tables.
    """
    switches = (True, False)
    kinds = [PLAIN, *(Kind(*choice) for choice in product(ranks, switches, switches))]
    return [
        Run(task, optimizer, kind, seed, steps or TASKS[task].steps)
        for task, optimizer, kind, seed in product(tasks, optimizers, kinds, range(seeds))
    ]


def to_json(outcomes: list[Outcome]) -> dict[str, Any]:
    """Return outcomes, and what they say, as what JSON can hold; a loss that is not finite is null.

    Args:
        outcomes: Of all runs.

    Returns:
        What `from_json` reads, the machine, the settings and the conclusions.
    """
    dictionaries = [asdict(outcome) for outcome in outcomes]
    for point in (point for outcome in dictionaries for point in outcome["curve"]):
        point["loss"] = point["loss"] if math.isfinite(point["loss"]) else None
    return {
        "machine": {
            "torch": torch.__version__,
            "powersgd": powersgd.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
        },
        "world_size": WORLD_SIZE,
        "plain_steps": START,
        "learning_rates": {name: dict(task.learning_rates) for name, task in TASKS.items()},
        "conclusions": {study.title: study.conclude() for study in group(outcomes)},
        "outcomes": dictionaries,
    }


def from_json(saved: dict[str, Any]) -> list[Outcome]:
    """Return the outcomes that `to_json` wrote.

    Args:
        saved: What it returned.

    Returns:
        The outcomes.
    """
    return [
        Outcome(
            Run(**{**outcome["run"], "kind": Kind(**outcome["run"]["kind"])}),
            [Point(**{**p, "loss": _or_nan(p["loss"])}) for p in outcome["curve"]],
            outcome["plain_bytes"],
            outcome["step_bytes"],
        )
        for outcome in saved["outcomes"]
    ]


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _known(names: list[str], known: dict[str, Any], what: str) -> list[str]:
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"no {what} {name!r}; there are {', '.join(known)}")
    return list(dict.fromkeys(names))


def _check_tasks(names: list[str]) -> list[str]:
    return _known(names, TASKS, "task")


def _check_optimizers(names: list[str]) -> list[str]:
    return _known(names, OPTIMIZERS, "optimizer")


def _check_ranks(ranks: list[int]) -> list[int]:
    for rank in ranks:
        if not 1 <= rank <= LARGEST_RANK:
            raise typer.BadParameter(f"{rank} is not allowed; give 1 to {LARGEST_RANK}")
    return sorted(set(ranks))


def _check_load(path: Path | None) -> Path | None:
    if path is not None and not path.is_file():
        raise typer.BadParameter(f"{path} is no file")
    return path


def _print(studies: list[Study], console: Console) -> None:
    for study in studies:
        console.print(make_table(study))
        for sentence in study.conclude():
            console.print(sentence, soft_wrap=True)
        console.print()
    console.print(
        "Differences are of final losses, seed by seed, mean ± standard deviation; clear is more "
        f"than {CLEAR:g} standard deviations, or another number of diverged runs.",
        soft_wrap=True,
    )


def _draw(studies: list[Study], directory: Path) -> Iterator[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    for study in studies:
        name = f"{study.task}-{study.optimizer}"
        yield directory / f"{name}-curves.png"
        draw_curves(study, directory / f"{name}-curves.png")
        if study.ranks:
            yield directory / f"{name}-ablation.png"
            draw_ablation(study, directory / f"{name}-ablation.png")


def main(
    task: Annotated[
        list[str], typer.Option(callback=_check_tasks, help=f"One of {', '.join(TASKS)}.")
    ] = list(TASKS),  # noqa: B006 (typer reads it)
    optimizer: Annotated[
        list[str], typer.Option(callback=_check_optimizers, help=f"One of {', '.join(OPTIMIZERS)}.")
    ] = list(OPTIMIZERS),  # noqa: B006
    rank: Annotated[
        list[int], typer.Option(callback=_check_ranks, help="Beside plain all-reduce.")
    ] = [1, 2, 4, 8],  # noqa: B006
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 3,
    steps: Annotated[
        int | None, typer.Option(min=START + 1, help="Of a run; by default the task's own.")
    ] = None,
    save: Annotated[Path | None, typer.Option("--json", help="Also write all here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Folder for plots, as PNG.")] = None,
    load: Annotated[
        Path | None,
        typer.Option(callback=_check_load, help="Show what --json wrote; train nothing."),
    ] = None,
    markdown: Annotated[bool, typer.Option(help="Print a Markdown table alone.")] = False,
) -> None:
    """Train with plain all-reduce and PowerSGD; show losses, and what each part of it gains."""
    if load is None:
        runs = list_runs(task, optimizer, rank, seeds, steps)
        outcomes: list[Outcome] = run_locally(train_all, WORLD_SIZE, runs)[0]
    else:
        outcomes = from_json(json.loads(load.read_text()))
    if save is not None:  # first of all: it took minutes
        save.parent.mkdir(parents=True, exist_ok=True)
        save.write_text(json.dumps(to_json(outcomes), indent=1, allow_nan=False))
    studies = group(outcomes)
    if markdown:
        print(make_markdown(studies))
    else:
        _print(studies, Console())
    for path in _draw(studies, plot) if plot is not None else ():
        print(path, file=sys.stderr)


if __name__ == "__main__":
    typer.run(main)

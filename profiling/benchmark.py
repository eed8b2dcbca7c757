"""Time hooks side by side and count their memory: ``python -m profiling.benchmark``.

One gloo rank, one bucket: the only case in which torch's hook works, and one in which nothing but
the compression itself is timed. The hooks run in turn, each in a process of its own; the floor is 5
passes over the gradient, timed as 2.5 times a copy of it in the same run. With ``--hook
python_reducer``, which has no bucket, whole backward passes are timed too, see `profiling.passes`.
``--sweep size`` and ``--sweep tensors`` take square matrices in place of workloads.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track

from powersgd.workloads import WORKLOADS
from profiling.calls import measure_calls
from profiling.charts import draw
from profiling.hooks import Hook
from profiling.passes import measure_passes
from profiling.results import Result, Row, machine
from profiling.scaling import Sweep, make_sweep
from profiling.tables import call_table, memory_table, pass_table, speed_sentences

USUAL = ("square", "resnet18", "gpt")
USUAL_RANKS = (1, 2, 4, 8)
USUAL_THREADS = (1, 2)
USUAL_HOOKS = [Hook.TORCH, Hook.EAGER, Hook.COMPILED]
SWEEP_RANKS = (2,)
SWEEP_THREADS = (1,)


@dataclass(frozen=True)
class Setting:
    """What one line of the table is measured with.

    Attributes:
        name: Of the workload.
        shapes: Of its parameters.
        threads: Of each operation.
        rank: Of the approximation.
    """

    name: str
    shapes: Sequence[tuple[int, ...]]
    threads: int
    rank: int


def measure(setting: Setting, hooks: Sequence[Hook], repeats: int) -> Row:
    """Measure hooks on one workload, in turn.

    Args:
        setting: The workload, threads and rank.
        hooks: To be measured; passes are measured if `python_reducer` is among them.
        repeats: Timed calls of each.

    Returns:
        The row.
    """
    numbers = setting.rank, setting.threads, repeats
    with_bucket = [hook for hook in hooks if hook is not Hook.PYTHON_REDUCER]
    results: list[Result] = []
    skipped: list[str] = []
    if with_bucket:
        results, skipped = measure_calls(setting.shapes, with_bucket, *numbers)
    if Hook.PYTHON_REDUCER in hooks:
        more, also = measure_passes(setting.shapes, hooks, *numbers)
        results, skipped = results + more, skipped + also
    numel = sum(torch.Size(shape).numel() for shape in setting.shapes)
    tensors = len(setting.shapes)
    return Row(setting.name, numel, tensors, setting.threads, setting.rank, results, skipped)


def _save(rows: Sequence[Row], path: Path) -> None:
    flat = [entry for row in rows for entry in row.to_json()]
    path.write_text(json.dumps({"machine": machine(), "rows": flat}, indent=1))


def _report(console: Console, rows: Sequence[Row], hooks: Sequence[Hook]) -> None:
    with_bucket = [hook for hook in hooks if hook is not Hook.PYTHON_REDUCER]
    if with_bucket:
        console.print(call_table(rows, with_bucket))
        console.print(memory_table(rows))
    if Hook.PYTHON_REDUCER in hooks:
        console.print(pass_table(rows))
    for sentence in speed_sentences(rows, hooks):
        console.print(sentence)
    for row in rows:
        for sentence in row.skipped:
            where = f"{row.workload}, rank {row.rank}, {row.threads} threads"
            console.print(f"{where}: {sentence}")


def _positive(numbers: list[int] | None) -> list[int] | None:
    for number in numbers or ():
        if number < 1:
            raise typer.BadParameter(f"{number} is not allowed; give integers >= 1")
    return numbers


def _positive_size(sizes: list[float] | None) -> list[float] | None:
    for size in sizes or ():
        if not 0 < size < float("inf"):
            raise typer.BadParameter(f"{size} is not allowed; give numbers > 0, in MiB")
    return sizes


def _known(names: list[str] | None) -> list[str] | None:
    for name in names or ():
        if name not in WORKLOADS:
            raise typer.BadParameter(f"no workload {name!r}; there are {', '.join(WORKLOADS)}")
    return names


def _writable(path: Path | None) -> Path | None:
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise typer.BadParameter(f"{path} is no file in a directory that exists")
    return path


def _drawable(path: Path | None) -> Path | None:
    if path is None or path.is_dir():
        return path
    if path.suffix.lower() not in ("", ".png", ".svg"):
        raise typer.BadParameter(f"{path} must be a directory, or end in .png or .svg")
    if path.exists() and not path.suffix:
        raise typer.BadParameter(f"{path} is a file that does not end in .png or .svg")
    if path.suffix:
        return _writable(path)
    return path


def _choose(
    workload: list[str] | None,
    sweep: Sweep | None,
    size: list[float] | None,
    tensors: list[int] | None,
) -> dict[str, Sequence[tuple[int, ...]]]:
    if sweep is None and (size or tensors):
        raise typer.BadParameter("--size and --tensors belong to --sweep")
    if sweep is None:
        return {name: list(WORKLOADS[name]().values()) for name in workload or USUAL}
    if workload:
        raise typer.BadParameter("--workload and --sweep exclude each other")
    try:
        squares = make_sweep(sweep, size or [], tensors or [])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return {one.name: one.shapes for one in squares}


def main(
    workload: Annotated[
        list[str] | None,
        typer.Option(
            callback=_known,
            help=f"Any of {', '.join(WORKLOADS)}.  [default: {', '.join(USUAL)}]",
        ),
    ] = None,
    hook: Annotated[
        list[Hook], typer.Option(help="With python_reducer, passes are timed, too.")
    ] = USUAL_HOOKS,
    rank: Annotated[
        list[int] | None,
        typer.Option(callback=_positive, help="[default: 1, 2, 4, 8; in sweeps 2]"),
    ] = None,
    threads: Annotated[
        list[int] | None, typer.Option(callback=_positive, help="[default: 1, 2; in sweeps 1]")
    ] = None,
    repeats: Annotated[int, typer.Option(min=3, help="Timed calls of each hook.")] = 15,
    sweep: Annotated[
        Sweep | None, typer.Option(help="Cost against what, in place of workloads.")
    ] = None,
    size: Annotated[
        list[float] | None,
        typer.Option(callback=_positive_size, help="Of a sweep's gradient, in MiB."),
    ] = None,
    tensors: Annotated[
        list[int] | None, typer.Option(callback=_positive, help="A sweep's number of matrices.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--json", callback=_writable, help="Also write the rows here.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(callback=_drawable, help="Plots: a .png or .svg of times, or a directory."),
    ] = None,
) -> None:
    """Time hooks, and the floor, in one run, and count what they allocate."""
    hooks = list(dict.fromkeys(hook))
    if sweep and Hook.PYTHON_REDUCER in hooks:
        raise typer.BadParameter("python_reducer is measured on workloads alone, not in sweeps")
    shapes = _choose(workload, sweep, size, tensors)
    counts = threads or (SWEEP_THREADS if sweep else USUAL_THREADS)
    ranks = rank or (SWEEP_RANKS if sweep else USUAL_RANKS)
    settings = [
        Setting(name, of, count, r)
        for count in counts
        for name, of in shapes.items()
        for r in ranks
    ]
    console, rows = Console(), []
    for setting in track(settings, "Measuring", console=console, transient=True):
        rows.append(measure(setting, hooks, repeats))
        if save is not None:  # now: a long run may be stopped
            _save(rows, save)
    _report(console, rows, hooks)
    for path in draw(rows, sweep, plot) if plot else ():
        console.print(f"Wrote {path}.")


if __name__ == "__main__":
    typer.run(main)

"""The command line: its options, and the local processes that it starts and always ends."""

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

import powersgd
from powersgd.arguments import require
from powersgd.demo import LARGEST_RANK, Run, default_batch_size, train_all
from powersgd.planner import check_file, plan
from powersgd.report import (
    Point,
    Result,
    build_table,
    conclude,
    draw,
    explain,
    group_by_method,
    method_name,
    write_json,
)

app = typer.Typer(
    help="PowerSGD gradient compression for PyTorch.", add_completion=False, rich_markup_mode=None
)


class WorkerError(Exception):
    """A local process failed; the message is a sentence for the user."""


def run(arguments: Sequence[str]) -> int:
    """Run the command line; wrong arguments and failed processes give one sentence.

    Args:
        arguments: What follows the program's name.

    Returns:
        The exit code.
    """
    command = typer.main.get_command(app)
    try:
        return command.main(list(arguments), prog_name="powersgd", standalone_mode=False) or 0
    except typer.Abort:  # Ctrl-C, in older versions of typer
        return 130
    except (WorkerError, OSError) as error:
        sentence, code = str(error), 1
    except Exception as error:
        # Wrong arguments raise click's classes or typer's copy of them; this they have in common.
        if not hasattr(error, "format_message"):
            raise
        sentence, code = str(error.format_message()), 2
    print(sentence if sentence.endswith((".", "?")) else f"{sentence}.", file=sys.stderr)
    return code


@app.callback(invoke_without_command=True)
def _base(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        print(f"torch-powersgd {powersgd.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


def _parse_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def _number(text: str) -> Any:
    return typer.Option(help=text, metavar="N", parser=_parse_number)


@app.command()
def demo(
    ranks: Annotated[
        str, typer.Option(metavar="N,N", help="Ranks to compare, separated by commas.")
    ] = "1,2,4",
    seeds: Annotated[int, _number("Runs of each kind, 1 to 20.")] = 3,
    epochs: Annotated[int, _number("Passes over the images, 1 to 1000.")] = 10,
    workers: Annotated[int, _number("Processes, 2 to 16.")] = 2,
    batch_size: Annotated[
        int | None, _number("Images per step, all processes together; about 64.")
    ] = None,
    start_iter: Annotated[int, _number("Full gradients before PowerSGD starts.")] = 4,
    plot: Annotated[Path, typer.Option(metavar="FILE", help="The PNG file to draw.")] = Path(
        "powersgd-demo.png"
    ),
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A JSON file for all results.")
    ] = None,
) -> None:
    """Compare plain all-reduce with PowerSGD on a small net.

    Local processes train a convolutional net on scikit-learn's digits, from the same seeds and
    with the same images in the same order. It takes one to two minutes and ends with a table, and
    with a plot of loss and accuracy against the bytes sent.
    """
    try:
        require("--seeds", seeds, 1, 20)
        require("--workers", workers, 2, 16)
        check_file("--plot", plot, ".png")
        check_file("--json", json, ".json")
        batch_size = default_batch_size(workers) if batch_size is None else batch_size
        kinds = [Run(r, 0, epochs, batch_size, start_iter) for r in (None, *_parse_ranks(ranks))]
        for kind in kinds:
            kind.check(workers)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    runs = [replace(kind, seed=seed) for seed in range(seeds) for kind in kinds]
    methods = group_by_method(_train_locally(runs, workers))
    console = Console()
    console.print(build_table(methods))
    for sentence in (explain(methods, start_iter), *conclude(methods)):
        console.print(f"\n{sentence}", highlight=False)
    if json is not None:
        write_json(methods, json)
    draw(methods, plot)
    print(f"\nThe plot is in {plot}.")


app.command()(plan)


def _parse_ranks(text: str) -> list[int]:
    try:
        ranks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"--ranks is {text!r}, but must be numbers such as 1,2,4") from None
    for rank in ranks:
        require("--ranks", rank, 1, LARGEST_RANK)
    return ranks


def _train_locally(runs: Sequence[Run], world_size: int) -> list[Result]:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    results: list[Result] = []
    with (
        _start_workers(runs, world_size) as workers,
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("Starting processes", total=len(runs) * runs[0].steps)
        for message in _receive(workers):
            if isinstance(message, Result):
                results.append(message)
                if not console.is_terminal:
                    _print_result(message)
            elif isinstance(message, Point):
                running = runs[len(results)]
                progress.update(
                    task,
                    description=f"{method_name(running.rank)}, seed {running.seed}",
                    completed=len(results) * running.steps + message.step,
                )
    return results


def _print_result(result: Result) -> None:
    accuracy = result.curve[-1].accuracy
    print(
        f"{result.name}, seed {result.seed}: test accuracy {accuracy:.2%}",
        file=sys.stderr,
        flush=True,
    )


@contextmanager
def _start_workers(
    runs: Sequence[Run], world_size: int
) -> Iterator[dict[Connection, SpawnProcess]]:
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, SpawnProcess] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it also cleans up here
    with tempfile.TemporaryDirectory() as directory:
        try:
            with _hold_back_ctrl_c():
                for rank in range(world_size):
                    receiver, sender = context.Pipe(duplex=False)
                    worker = context.Process(
                        target=_work,
                        args=(runs, rank, world_size, f"{directory}/store", sender),
                        name=f"Worker {rank}",
                        daemon=True,
                    )
                    worker.start()
                    sender.close()  # so that the receiver learns when the worker dies
                    workers[receiver] = worker
            yield workers
        finally:
            for worker in workers.values():
                worker.kill()
            for worker in workers.values():
                worker.join()


@contextmanager
def _hold_back_ctrl_c() -> Iterator[None]:
    # Processes inherit the mask, so the terminal's Ctrl-C reaches this process alone, also while
    # they are still importing. The resource tracker lifts the mask when it starts: it goes first.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(runs: Sequence[Run], rank: int, world_size: int, path: str, sender: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        train_all(runs, rank, world_size, path, sender.send)
        sender.send(None)
    except BrokenPipeError:
        pass  # the parent is gone
    except Exception as error:
        sender.send(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _receive(workers: dict[Connection, SpawnProcess]) -> Iterator[object]:
    running = dict(workers)
    while running:
        for receiver in running.keys() & connection.wait(list(running)):
            worker = running[receiver]
            try:
                message = receiver.recv()
            except EOFError:
                message = "it ended before its work was done"
            if message is None:
                del running[receiver]
            elif isinstance(message, str):
                raise WorkerError(_find_cause(workers.values(), worker.name, message))
            else:
                yield message


def _find_cause(workers: Iterable[SpawnProcess], name: str, complaint: str) -> str:
    # A worker that is killed cannot complain; the others do, about a closed connection.
    for worker in workers:
        worker.join(timeout=0.2)
        if worker.exitcode is not None and worker.exitcode < 0:
            return f"{worker.name} was ended by {signal.Signals(-worker.exitcode).name}."
    return f"{name} failed: {complaint}."

"""``powersgd plan``: what is compressed of a model, and whether that pays on a link."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from powersgd import calibration
from powersgd.arguments import number, require
from powersgd.costs import BUCKET_MB, Algorithm, Costs, Job, Link
from powersgd.forecast import advise, predict
from powersgd.models import read_layers
from powersgd.outlook import (
    ASSUMPTIONS,
    draw,
    forecast_table,
    layer_table,
    total_table,
    worker_table,
    write_json,
)
from powersgd.units import parse_rate, parse_time

Value = TypeVar("Value")


def _parsed(option: str, parse: Callable[[str], Value], text: str) -> Value:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error


def _parse_workers(text: str) -> list[int]:
    try:
        workers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r} must be numbers such as 16 or 16,256,4096") from None
    for count in workers:
        require("it", count, 2, 1_000_000)
    return workers


def check_file(option: str, path: Path | None, *suffixes: str) -> None:
    """Refuse a file that cannot be written, before anything else is done.

    Args:
        option: The command line's name for it.
        path: The file; None if it was not asked for.
        *suffixes: One of which it must have.

    Raises:
        ValueError: With one sentence.
    """
    if path is None:
        return
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"{option} is {path}, but must end in {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise ValueError(f"{option} is {path}, but there is no directory {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option} is {path}, but no file can be written there")


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="module:function that returns a module, a state_dict or .safetensors file, shapes "
            "such as 512x256,64x3x3x3, or square, resnet18, resnet50, lstm, gpt, gpt2, vit_b, "
            "t5_large."
        ),
    ],
    rank: Annotated[int, typer.Option(help="Rank in the table of layers.")] = 1,
    min_compression_rate: Annotated[float, typer.Option(help="See PowerSGDState.")] = 2,
    link: Annotated[str | None, typer.Option(help="Link of each worker, such as 1Gbit.")] = None,
    latency: Annotated[str, typer.Option(help="Of one message, one way.")] = "100us",
    workers: Annotated[str, typer.Option(help="Workers; several such as 16,256,4096.")] = "16",
    compute: Annotated[str, typer.Option(help="A step's time without communication.")] = "0s",
    algorithm: Annotated[Algorithm, typer.Option(help="Of all-reduce.")] = Algorithm.BEST,
    bucket_cap_mb: Annotated[float, typer.Option(help="DDP's.")] = BUCKET_MB,
    calibrate: Annotated[bool, typer.Option(help="Measure this machine first (10 s).")] = False,
    device: Annotated[str, typer.Option(help="Where to measure: cpu or cuda.")] = "cpu",
    costs: Annotated[
        Path | None, typer.Option(help="JSON file: written by --calibrate, else read.")
    ] = None,
    layers: Annotated[bool, typer.Option(help="Show the table of layers.")] = True,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="PNG or SVG to draw.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="JSON of all figures.")] = None,
) -> None:
    """Show what is compressed of a model, and predict whether it pays.

    With --link it predicts the time of a step with all-reduce in fp32 and bf16 and with PowerSGD
    at ranks 1 to 32, and the link rate at which they break even.
    """
    sys.path.insert(0, os.getcwd())  # where MODEL's module is looked for first, as by python -m
    try:
        require("--rank", rank, 1, 1_000_000)
        number("--min-compression-rate", min_compression_rate, "> 0")
        number("--bucket-cap-mb", bucket_cap_mb, "> 0")
        if link is None and (plot is not None or compute != "0s"):
            raise ValueError("--plot and --compute need --link")
        check_file("--plot", plot, ".png", ".svg")
        check_file("--json", json, ".json")
        counts = _parsed("--workers", _parse_workers, workers)
        latency_s = _parsed("--latency", parse_time, latency)
        rate = None if link is None else _parsed("--link", parse_rate, link)
        path = None if rate is None else Link(rate, latency_s, algorithm)
        compute_s = _parsed("--compute", parse_time, compute)
        found = tuple(read_layers(model))
        measured = _get_costs(calibrate, device, costs)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    job = Job(found, counts[0], compute_s, measured, min_compression_rate, bucket_cap_mb)
    console = Console()
    if layers:
        console.print(layer_table(job, rank))
    console.print(total_table(job))
    if path is not None:
        _show_forecast(console, job, path, counts, plot)
    if json is not None:
        write_json(job, rank, path, counts, json)


def _get_costs(should_measure: bool, device: str, file: Path | None) -> Costs:
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device is {device!r}, but must be cpu or cuda")
    if not should_measure:
        return calibration.DEFAULT if file is None else calibration.load(file)
    check_file("--costs", file, ".json")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ValueError("--device is cuda, but torch finds no GPU")
    measured = calibration.calibrate(device)
    if file is not None:
        calibration.save(measured, file)
    return measured


def _show_forecast(
    console: Console, job: Job, link: Link, workers: Sequence[int], plot: Path | None
) -> None:
    forecasts = predict(job, link)
    console.print(forecast_table(forecasts, job, link))
    if len(workers) > 1:
        console.print(worker_table(job, link, workers))
    console.print(f"\n{advise(forecasts, link)}", highlight=False)
    console.print(f"\n{ASSUMPTIONS} Costs: {job.costs.source}.", highlight=False, style="dim")
    if plot is not None:
        draw(job, link, plot)
        console.print(f"\nThe plot is in {plot}.", highlight=False)

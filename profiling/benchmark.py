"""Time our hook against torch's, side by side: ``python -m profiling.benchmark``.

One process, one gloo rank, one bucket: the only case in which torch's hook works, and one in which
nothing but the compression itself is timed. The two hooks run in alternation on the same bucket;
the floor is 5 passes over the gradient, timed as 2.5 times a copy of it in the same run.
"""

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel

import powersgd
from profiling.workloads import WORKLOADS, Shapes

WARM_UP = 3  # calls: allocations, caches


@dataclass(frozen=True)
class Row:
    """One line of the table; times are medians in ms, spreads are quartiles."""

    workload: str
    threads: int
    rank: int
    torch_ms: float
    torch_quartiles: tuple[float, float]
    ours_ms: float
    ours_quartiles: tuple[float, float]
    floor_ms: float

    @property
    def speedup(self) -> float:
        """How many times faster ours is."""
        return self.torch_ms / self.ours_ms


def make_bucket(shapes: Shapes) -> Any:
    """Return a DDP bucket of zeros that holds parameters of all the shapes.

    Args:
        shapes: The parameters' shapes.

    Returns:
        A ``torch.distributed.GradBucket``; its buffer may be filled and given to a hook repeatedly.
    """
    model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
    for parameter in model.parameters():
        parameter.grad = torch.zeros(()).expand_as(parameter)  # used in this step, says DDP
    ddp = DistributedDataParallel(model, bucket_cap_mb=1_000_000)
    (bucket,) = ddp.reducer._get_zeros_like_grad_buckets()
    return bucket


def _time_ms(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - start)


def _summary(times: list[float]) -> tuple[float, tuple[float, float]]:
    low, median, high = statistics.quantiles(times[WARM_UP:], n=4)
    return median, (low, high)


def measure(workload: str, rank: int, repeats: int) -> Row:
    """Time both hooks on one workload, in alternation.

    Args:
        workload: A name of `WORKLOADS`.
        rank: Rank of the approximation.
        repeats: Timed calls of each.

    Returns:
        The row.
    """
    bucket = make_bucket(WORKLOADS[workload]())
    buffer = bucket.buffer()
    source = torch.randn(buffer.shape, generator=torch.Generator().manual_seed(0))
    their_state = theirs.PowerSGDState(None, rank, start_powerSGD_iter=2)
    our_state = powersgd.PowerSGDState(None, rank, start_powerSGD_iter=2)
    floors, their_times, our_times = [], [], []
    for _ in range(repeats + WARM_UP):
        floors.append(2.5 * _time_ms(lambda: buffer.copy_(source)))
        their_times.append(_time_ms(lambda: theirs.powerSGD_hook(their_state, bucket).wait()))
        buffer.copy_(source)
        our_times.append(_time_ms(lambda: powersgd.powerSGD_hook(our_state, bucket).wait()))
    return Row(
        workload,
        torch.get_num_threads(),
        rank,
        *_summary(their_times),
        *_summary(our_times),
        _summary(floors)[0],
    )


def _measure_all(
    workloads: list[str], threads: list[int], ranks: list[int], repeats: int
) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/s", rank=0, world_size=1)
        try:
            for count in threads:
                torch.set_num_threads(count)
                for workload in workloads:
                    yield from (measure(workload, rank, repeats) for rank in ranks)
        finally:
            dist.destroy_process_group()


def _table(rows: list[Row]) -> Table:
    table = Table(
        title="One call of the hook: median (quartiles) in ms",
        caption="floor: 5 passes over the gradient; x: torch / ours",
    )
    for name in ("workload", "threads", "rank", "torch", "ours", "floor", "x"):
        table.add_column(name, justify="left" if name == "workload" else "right")
    for row in rows:
        table.add_row(
            row.workload,
            str(row.threads),
            str(row.rank),
            f"{row.torch_ms:.0f} ({row.torch_quartiles[0]:.0f}-{row.torch_quartiles[1]:.0f})",
            f"{row.ours_ms:.0f} ({row.ours_quartiles[0]:.0f}-{row.ours_quartiles[1]:.0f})",
            f"{row.floor_ms:.0f}",
            f"{row.speedup:.1f}",
        )
    return table


def _machine() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "powersgd": powersgd.__version__,
        "python": platform.python_version(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


def _positive(numbers: list[int]) -> list[int]:
    for number in numbers:
        if number < 1:
            raise typer.BadParameter(f"{number} is not allowed; give integers >= 1")
    return numbers


def main(
    workload: Annotated[list[str], typer.Option(help=f"One of {', '.join(WORKLOADS)}.")] = list(  # noqa: B006 (typer reads it)
        WORKLOADS
    ),
    rank: Annotated[list[int], typer.Option(callback=_positive)] = [1, 2, 4, 8],  # noqa: B006
    threads: Annotated[list[int], typer.Option(callback=_positive)] = [1, 2],  # noqa: B006
    repeats: Annotated[int, typer.Option(min=3, help="Timed calls of each hook.")] = 15,
    save: Annotated[Path | None, typer.Option("--json", help="Also write the rows here.")] = None,
) -> None:
    """Time torch's hook, ours and the floor, in one run."""
    unknown = sorted(set(workload) - set(WORKLOADS))
    if unknown:
        raise typer.BadParameter(f"no workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}")
    console = Console()
    total = len(workload) * len(rank) * len(threads)
    measured = _measure_all(workload, threads, rank, repeats)
    rows = list(track(measured, "Measuring", total=total, console=console, transient=True))
    console.print(_table(rows))
    worst = min(rows, key=lambda row: row.speedup)
    console.print(
        f"Ours is at least {worst.speedup:.1f} times faster (lowest: {worst.workload}, "
        f"rank {worst.rank}, {worst.threads} threads)."
    )
    if save is not None:
        save.write_text(
            json.dumps({"machine": _machine(), "rows": [asdict(row) for row in rows]}, indent=1)
        )


if __name__ == "__main__":
    typer.run(main)

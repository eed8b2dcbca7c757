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
from collections.abc import Callable, Iterable, Iterator
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
from powersgd.workloads import WORKLOADS

WARM_UP = 3  # calls: allocations, caches


@dataclass(frozen=True)
class Timing:
    """Quartiles of the times of one call, in ms."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.0f} ({self.low:.0f}-{self.high:.0f})"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    workload: str
    threads: int
    rank: int
    torch: Timing
    ours: Timing
    compiled: Timing
    floor: Timing

    @property
    def speedup(self) -> float:
        """How many times faster ours is."""
        return self.torch.median / self.ours.median

    @property
    def compiled_speedup(self) -> float:
        """How many times faster ours is with compiled steps."""
        return self.torch.median / self.compiled.median


def make_bucket(shapes: Iterable[tuple[int, ...]]) -> Any:
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


def _summary(times: list[float]) -> Timing:
    return Timing(*statistics.quantiles(times[WARM_UP:], n=4))


def measure(workload: str, rank: int, repeats: int) -> Row:
    """Time torch's hook, ours and ours with compiled steps on one workload, in alternation.

    Args:
        workload: A name of `WORKLOADS`.
        rank: Rank of the approximation.
        repeats: Timed calls of each.

    Returns:
        The row.
    """
    bucket = make_bucket(WORKLOADS[workload]().values())
    buffer = bucket.buffer()
    source = torch.randn(buffer.shape, generator=torch.Generator().manual_seed(0))
    their_state = theirs.PowerSGDState(None, rank, start_powerSGD_iter=2)
    ours = powersgd.PowerSGDState(None, rank, start_powerSGD_iter=2)
    compiled = powersgd.PowerSGDState(
        None, rank, start_powerSGD_iter=2, steps=powersgd.compile_steps()
    )
    calls = [
        lambda: theirs.powerSGD_hook(their_state, bucket).wait(),
        lambda: powersgd.powerSGD_hook(ours, bucket).wait(),
        lambda: powersgd.powerSGD_hook(compiled, bucket).wait(),
    ]
    floors: list[float] = []
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats + WARM_UP):
        floors.append(2.5 * _time_ms(lambda: buffer.copy_(source)))
        for call, taken in zip(calls, times, strict=True):
            buffer.copy_(source)
            taken.append(_time_ms(call))
    summaries = [_summary(taken) for taken in (*times, floors)]
    return Row(workload, torch.get_num_threads(), rank, *summaries)


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
        caption="floor: 5 passes over the gradient; x: torch / the column before",
    )
    for name in ("workload", "threads", "rank", "torch", "ours", "x", "compiled", "x", "floor"):
        table.add_column(name, justify="left" if name == "workload" else "right")
    for row in rows:
        table.add_row(
            row.workload,
            str(row.threads),
            str(row.rank),
            str(row.torch),
            str(row.ours),
            f"{row.speedup:.1f}",
            str(row.compiled),
            f"{row.compiled_speedup:.1f}",
            f"{row.floor.median:.0f}",
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
    """Time torch's hook, ours, ours with compiled steps and the floor, in one run."""
    unknown = sorted(set(workload) - set(WORKLOADS))
    if unknown:
        raise typer.BadParameter(f"no workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}")
    console = Console()
    total = len(workload) * len(rank) * len(threads)
    measured = _measure_all(workload, threads, rank, repeats)
    rows = list(track(measured, "Measuring", total=total, console=console, transient=True))
    console.print(_table(rows))
    for name, key in (("Ours", "speedup"), ("Compiled", "compiled_speedup")):
        worst = min(rows, key=lambda row: float(getattr(row, key)))
        console.print(
            f"{name} is at least {getattr(worst, key):.1f} times faster than torch's (lowest: "
            f"{worst.workload}, rank {worst.rank}, {worst.threads} threads)."
        )
    if save is not None:
        save.write_text(
            json.dumps({"machine": _machine(), "rows": [asdict(row) for row in rows]}, indent=1)
        )


if __name__ == "__main__":
    typer.run(main)

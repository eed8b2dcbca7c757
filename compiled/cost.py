"""What compiling costs: ``python -m compiled.cost``.

`powersgd.compile_steps` compiles once for each shape of matrices, so a model's cost grows with its
number of distinct shapes. Two fresh processes, one after the other, compile for the same shapes:
the first with an empty cache, the second with what the first has left.
"""

import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch._dynamo.utils import counters
from torch._inductor import metrics

import powersgd

COLUMNS = 512  # with as many rows and more, each matrix is large enough to be compiled for


@dataclass(frozen=True)
class Cost:
    """What one process has paid.

    Attributes:
        seconds: Wall-clock time of the first call for each shape.
        kernels: Kernels that Inductor generated.
        hits: Graphs that came from Inductor's cache.
        again_seconds: Wall-clock time of a second call for each shape.
    """

    seconds: float
    kernels: int
    hits: int
    again_seconds: float


def measure(cache: str, count: int, rank: int) -> Cost:
    """Compile for a number of shapes in this process.

    Args:
        cache: Directory of Inductor's cache.
        count: Number of distinct shapes.
        rank: Rank of the factors.

    Returns:
        The cost.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch.set_num_threads(1)
    steps = powersgd.compile_steps()
    counters.clear()
    metrics.reset()
    seconds = [_run_all(steps, count, rank) for _ in range(2)]
    hits = counters["inductor"]["fxgraph_cache_hit"]
    return Cost(seconds[0], metrics.generated_kernel_count, hits, seconds[1])


def _run_all(steps: powersgd.Steps, count: int, rank: int) -> float:
    start = time.perf_counter()
    with torch.no_grad():
        for n in range(COLUMNS, COLUMNS + 8 * count, 8):
            matrix, p = torch.zeros(1, n, COLUMNS), torch.zeros(1, rank, n)
            q = torch.zeros(1, rank, COLUMNS)
            steps.compress_(matrix, matrix.clone(), q)
            steps.project(matrix, p)
            steps.decompress_(matrix, matrix.clone(), p, q, q.clone())
    return time.perf_counter() - start


def main(
    count: Annotated[int, typer.Option(min=1, help="Distinct shapes.")] = 50,
    rank: Annotated[int, typer.Option(min=1, max=8, help="Rank of the factors.")] = 4,
) -> None:
    """Compile for many shapes with an empty and with a filled cache; print time and kernels."""
    table = Table(title=f"compile_steps on {count} shapes, rank {rank}")
    for name in ("cache", "seconds", "kernels", "from the cache", "second call, seconds"):
        table.add_column(name, justify="left" if name == "cache" else "right")
    with tempfile.TemporaryDirectory() as cache:
        for name in ("empty", "filled"):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
                cost = fresh.submit(measure, cache, count, rank).result()
            numbers = (f"{cost.seconds:.1f}", cost.kernels, cost.hits, f"{cost.again_seconds:.3f}")
            table.add_row(name, *map(str, numbers))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)

"""What the compiler makes of each step: ``python -m compiled.report``."""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch._inductor.compile_fx import inductor_metrics_log

from compiled.targets import Target, targets


@dataclass(frozen=True)
class Line:
    """One target through torch.compile.

    Attributes:
        name: The target's.
        graphs: Graphs of the first call; 1 is right.
        breaks: Graph breaks; 0 is right.
        recompiles: Graphs that a second call with the same shapes added; 0 is right.
        guards: What is checked before each call, and may so cause another compilation.
        kernels: Kernels that Inductor generated; products that it leaves to a library do not count.
        moved_bytes: What the kernels and library calls read and write, as Inductor counts it.
        least_bytes: Each input read once, and each result and each changed input written once.
    """

    name: str
    graphs: int
    breaks: int
    recompiles: int
    guards: int
    kernels: int
    moved_bytes: int
    least_bytes: int

    @property
    def ratio(self) -> float:
        """How many times the least possible traffic the code causes."""
        return self.moved_bytes / self.least_bytes


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []


def inspect(target: Target) -> Line:
    """Compile one target and look at what comes out.

    Args:
        target: The target.

    Returns:
        The line; ``graphs`` and ``breaks`` say so if it did not compile as one graph.
    """
    torch._dynamo.reset()
    guards = len(torch._dynamo.explain(target.step)(*target.fresh_inputs()).out_guards or [])
    torch._dynamo.reset()
    counters.clear()
    metrics.reset()
    inductor_metrics_log.setLevel(logging.INFO)  # only then it counts bytes
    compiled = torch.compile(target.step, dynamic=False)
    with torch._inductor.config.patch(fx_graph_cache=False), torch.no_grad():  # no hit: count anew
        results = target.run(compiled)
        graphs = counters["stats"]["unique_graphs"]
        target.run(compiled)
    nbytes = [tensor.nbytes for tensor in [*_tensors(target.inputs), *results]]
    return Line(
        target.name,
        graphs,
        sum(counters["graph_break"].values()),
        counters["stats"]["unique_graphs"] - graphs,
        guards,
        metrics.generated_kernel_count,
        metrics.num_bytes_accessed,
        sum(nbytes),
    )


def _table(lines: list[Line]) -> Table:
    table = Table(title="The steps through torch.compile")
    names = ("target", "graphs", "breaks", "recompiles", "guards", "kernels", "bytes", "x least")
    for name in names:
        justify: Any = "left" if name == "target" else "right"
        table.add_column(name, justify=justify, overflow="fold")  # also in a narrow terminal, whole
    for line in lines:
        is_right = line.graphs == 1 and not line.breaks and not line.recompiles
        counts = (line.graphs, line.breaks, line.recompiles, line.guards, line.kernels)
        numbers = [*map(str, counts), str(line.moved_bytes), f"{line.ratio:.1f}"]
        table.add_row(line.name, *numbers, style=None if is_right else "red")
    return table


def main(
    only: Annotated[str, typer.Option(help="Targets whose name begins so.")] = "",
    save: Annotated[Path | None, typer.Option("--json", help="Also write the lines here.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write the table here.")] = None,
) -> None:
    """Compile every target and print graphs, breaks, recompiles, guards, kernels and traffic."""
    chosen = [target for target in targets() if target.name.startswith(only)]
    if not chosen:
        raise typer.BadParameter(f"no target begins with {only!r}")
    console = Console(record=True)
    lines = [inspect(target) for target in track(chosen, "Compiling", transient=True)]
    console.print(_table(lines))
    if save is not None:
        save.write_text(json.dumps([asdict(line) for line in lines], indent=1))
    if html is not None:
        html.write_text(console.export_html())


if __name__ == "__main__":
    typer.run(main)

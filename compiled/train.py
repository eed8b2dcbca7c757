"""Training loops that compile: ``python -m compiled.train``.

The same small model on the same data in two local gloo processes, in one of three modes:

- ``eager``: nothing is compiled;
- ``ddp_optimizer``: ``torch.compile(ddp_model)``, forward and backward compiled, gradients reduced
  by DDP's own reducer as always;
- ``python_reducer``: the hook is traced into the backward graph, collectives and all.
"""

import math
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import powersgd

START = 3  # steps of plain averaging before compression starts


class Mode(str, Enum):
    """What is compiled."""

    EAGER = "eager"
    DDP_OPTIMIZER = "ddp_optimizer"
    PYTHON_REDUCER = "python_reducer"


@dataclass(frozen=True)
class Run:
    """What one rank saw.

    Attributes:
        losses: By step, this rank's.
        parameters: At the end.
        residuals: By parameter, at the end.
        iterations: Steps the state counted.
        stats: `PowerSGDState.compression_stats`.
        graphs: Graphs that were compiled: forward, and with ``python_reducer`` backward too.
        collectives: All-reduces started in the last step.
        are_nan: By parameter, whether all of its averaged gradient was NaN in the last step.
    """

    losses: list[float]
    parameters: list[Tensor]
    residuals: list[Tensor | None]
    iterations: int
    stats: tuple[float, int, int]
    graphs: int
    collectives: int
    are_nan: list[bool]


class Model(nn.Module):
    """A small convolutional net of several buckets, one weight in channels_last memory.

    Not a ``Sequential``: with DDPOptimizer, torch compiles only modules that are not its own.
    """

    def __init__(self) -> None:
        super().__init__()
        convolution: Any = nn.Conv2d(3, 40, 3)
        self.convolution = convolution.to(memory_format=torch.channels_last)
        self.hidden = nn.Linear(1440, 400)
        self.output = nn.Linear(400, 10)

    def forward(self, batch: Tensor) -> Tensor:
        """Map images ``(b, 3, 8, 8)`` to ``(b, 10)``."""
        features = self.convolution(batch).flatten(1).tanh()
        result: Tensor = self.output(self.hidden(features).tanh())
        return result


def _set_up(mode: Mode, is_bucketing: bool) -> None:
    torch._dynamo.reset()
    # The lines that a training script needs:
    torch._dynamo.config.optimize_ddp = (
        "python_reducer" if mode is Mode.PYTHON_REDUCER else mode is Mode.DDP_OPTIMIZER
    )
    torch._dynamo.config.compiled_autograd = mode is Mode.PYTHON_REDUCER
    torch._inductor.config.bucket_all_reduces_fx = "all" if is_bucketing else "none"


class _Counter:
    """Inductor, counting its graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.graphs += 1
        return compile_fx(graph, inputs)


def _make_step(ddp: nn.Module, mode: Mode, inductor: _Counter) -> Callable[[Tensor], Tensor]:
    forward = torch.compile(ddp, backend=inductor) if mode is Mode.DDP_OPTIMIZER else ddp

    def run_step(batch: Tensor) -> Tensor:
        loss: Any = forward(batch).square().mean()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    if mode is Mode.PYTHON_REDUCER:
        return torch.compile(run_step, backend=inductor)
    return run_step


def train(
    rank: int,
    mode: Mode,
    steps: int = 20,
    *,
    is_bucketing: bool = False,
    bad_step: int | None = None,
    options: dict[str, Any] | None = None,
) -> Run:
    """Train on this rank of the default group.

    Args:
        rank: This process's rank; seeds its data.
        mode: What is compiled.
        steps: Steps to train, the first `START` without compression.
        is_bucketing: Let Inductor merge all-reduces (``python_reducer`` only).
        bad_step: A step in which rank 1 gets a batch of NaN.
        options: More arguments for `powersgd.PowerSGDState`.

    Returns:
        What happened.
    """
    _set_up(mode, is_bucketing)
    torch.manual_seed(0)
    model = Model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    settings = {"start_powerSGD_iter": START, "min_compression_rate": 0.5} | (options or {})
    state = powersgd.PowerSGDState(None, 2, **settings)
    ddp.register_comm_hook(state, powersgd.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inductor = _Counter()
    step = _make_step(ddp, mode, inductor)
    generator = torch.Generator().manual_seed(rank)
    profiler = torch.profiler.profile()
    losses = []
    for i in range(steps):
        batch = torch.randn(8, 3, 8, 8, generator=generator)
        batch = batch * math.nan if i == bad_step and rank == 1 else batch
        with profiler if i == steps - 1 else nullcontext():
            losses.append(step(batch).item())
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        are_nan = [bool(gradient.isnan().all()) for gradient in gradients]
        if all(gradient.isfinite().all() for gradient in gradients):
            optimizer.step()
        optimizer.zero_grad()
    events = profiler.events()  # type: ignore[no-untyped-call]
    return Run(
        losses,
        [parameter.detach() for parameter in model.parameters()],
        [state.residual(parameter) for parameter in model.parameters()],
        state.iter,
        state.compression_stats(),
        inductor.graphs,
        sum(event.name == "gloo:all_reduce" for event in events or []),
        are_nan,
    )


def _spawned(rank: int, directory: str, mode: Mode, steps: int, is_bucketing: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/s", rank=rank, world_size=2)
    run = train(rank, mode, steps, is_bucketing=is_bucketing)
    if rank == 0:
        torch.save(run, f"{directory}/run.pt")
    dist.destroy_process_group()


def main(
    steps: Annotated[int, typer.Option(min=5, help="Steps to train.")] = 20,
    bucket: Annotated[bool, typer.Option(help="Let Inductor merge all-reduces.")] = True,
) -> None:
    """Train in all three modes in two gloo processes, and compare."""
    table = Table(title=f"{steps} steps, the first {START} without compression")
    for name in ("mode", "first loss", "last loss", "graphs", "all-reduces per step"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for mode in Mode:
        with tempfile.TemporaryDirectory() as store:
            arguments = (store, mode, steps, bucket)
            spawn(_spawned, arguments, 2)  # type: ignore[no-untyped-call]
            run: Run = torch.load(f"{store}/run.pt", weights_only=False)
        numbers = (f"{run.losses[0]:.6f}", f"{run.losses[-1]:.6f}", run.graphs, run.collectives)
        table.add_row(mode.value, *map(str, numbers))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)

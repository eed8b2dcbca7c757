"""Record training steps under DDP for people to look at: ``python -m profiling.ddp``.

It starts ranks of its own on this machine, or runs as one rank of a job::

    python -m profiling.ddp --hook eager --rank 2 --out traces
    torchrun --nproc-per-node 2 -m profiling.ddp --hook none --out traces

Each rank writes a trace for Perfetto or chrome://tracing, the same for TensorBoard's plugin, and
pictures of one step and of memory. Recording begins when compression has started and everything
is compiled. `profiling.summary` says what the printed figures mean.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console

from profiling.events import find_events
from profiling.hooks import START, Hook, make_backward, wrap
from profiling.nets import Net, Task, make_task
from profiling.recorder import prepare, record_steps
from profiling.summary import DEFINITION, Summary, summarize, time_table, to_json, traffic_table
from profiling.timeline import draw_memory, draw_step
from profiling.workers import run_locally

WARM_UP = START + 4  # steps: plain averaging, the first compressed ones, compilation


@dataclass(frozen=True)
class Recording:
    """What is recorded.

    Attributes:
        hook: What averages the gradients.
        rank: Of the approximation.
        net: The model.
        steps: Recorded steps.
        out: Directory that all of it is written to.
    """

    hook: Hook
    rank: int
    net: Net
    steps: int
    out: Path

    @property
    def has_callbacks(self) -> bool:
        """Whether the hook computes in callbacks, which run on gloo's threads."""
        return self.hook in (Hook.FP16, Hook.BF16, Hook.TORCH)

    @property
    def title(self) -> str:
        """What it is, for people."""
        of_rank = f", rank {self.rank}" if self.hook.is_low_rank else ""
        return f"{self.hook.label}{of_rank}, {self.net.value}"

    def notes(self) -> list[str]:
        """Return what a reader has to know, in sentences."""
        notes = []
        if self.hook is Hook.TORCH:
            notes.append(
                "torch's hook works on gloo with one bucket alone: bucket_cap_mb is raised until "
                "it holds the model, so that communication begins when backward has ended."
            )
        if self.has_callbacks:
            notes.append(
                "This hook computes in callbacks on gloo's threads, so operators of all threads "
                "are recorded. There is no memory: torch counts it by thread, and what one thread "
                "allocates and another frees would seem to be kept for ever."
            )
        else:
            notes.append(
                "Memory is counted from when recording began: what lives longer is not in it."
            )
        if self.hook is Hook.PYTHON_REDUCER:
            notes.append(
                "The hook is compiled into the graph of backward: there are no buckets, none of "
                "our ranges, and compression counts as backward. Waits are those of the graph."
            )
        return notes


def record(rank: int, recording: Recording) -> Summary:
    """Train on one rank of the default group; record, write and draw.

    Args:
        rank: This process.
        recording: What is recorded.

    Returns:
        What the trace comes to.
    """
    step = _make_step(make_task(recording.net, rank), recording)
    prepare(recording.out, rank)
    for _ in range(WARM_UP):
        step()
    title, out = recording.title, recording.out
    trace = record_steps(
        step, recording.steps, out, rank, title, all_threads=recording.has_callbacks
    )
    events = find_events(trace)
    caption = f"{title}: process {rank}"
    draw_step(events, out / f"rank{rank}-step.png", caption)
    if events.memory:
        draw_memory(events, out / f"rank{rank}-memory.png", caption)
    return summarize(events)


def _make_step(task: Task, recording: Recording) -> Callable[[], None]:
    hook, cap = recording.hook, task.bucket_cap_mb
    cap = 2 * task.gradient_mb if hook is Hook.TORCH else cap
    ddp, _ = wrap(task.model, hook, recording.rank, bucket_cap_mb=cap)
    backward = make_backward(ddp, task.loss, hook)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        backward(task.batch)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _record_in_job(recording: Recording) -> list[Summary]:
    # One rank of those that torchrun has started; rank 0 gets all summaries, the others none.
    dist.init_process_group("gloo")
    try:
        rank = dist.get_rank()
        every: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
        dist.gather_object(record(rank, recording), every)
        return every or []
    finally:
        dist.destroy_process_group()


def _report(recording: Recording, summaries: list[Summary]) -> None:
    console = Console()
    console.print(time_table(summaries, recording.title))
    console.print(traffic_table(summaries[0]))
    for note in recording.notes():
        console.print(note)
    facts = {
        "hook": recording.hook.value,
        "rank": recording.rank if recording.hook.is_low_rank else None,
        "model": recording.net.value,
        "torch": torch.__version__,
        "definition": DEFINITION,
        "notes": recording.notes(),
        "ranks": to_json(summaries),
    }
    path = recording.out / "summary.json"
    path.write_text(json.dumps(facts, indent=1))
    console.print(
        f"Open {recording.out}/rank0.json.gz at https://ui.perfetto.dev, look at the pictures "
        f"beside it, or run: tensorboard --logdir {recording.out}/tensorboard"
    )


def _writable(out: Path) -> Path:
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"{out} is a file, but must be a directory")
    return out


def main(
    out: Annotated[
        Path, typer.Option(callback=_writable, help="Directory; replaces an earlier recording.")
    ],
    hook: Annotated[Hook, typer.Option(help="What averages the gradients.")] = Hook.EAGER,
    rank: Annotated[int, typer.Option(min=1, help="Of the approximation.")] = 2,
    model: Annotated[Net, typer.Option()] = Net.TRANSFORMER,
    steps: Annotated[int, typer.Option(min=1, help="Recorded steps.")] = 5,
    ranks: Annotated[int, typer.Option(min=1, help="Processes; torchrun brings its own.")] = 2,
) -> None:
    """Record training steps under DDP: traces, pictures, and where the time goes."""
    recording = Recording(hook, rank, model, steps, out)
    out.mkdir(parents=True, exist_ok=True)
    is_in_job = "RANK" in os.environ
    summaries = _record_in_job(recording) if is_in_job else run_locally(record, ranks, recording)
    if summaries:
        _report(recording, summaries)


if __name__ == "__main__":
    typer.run(main)

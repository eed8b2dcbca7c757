"""Train for thousands of steps through all that can go wrong: ``python -m profiling.soak``.

Ranks meet an inf or a NaN, parameters that some or all of them do not use, a changing loss scale,
and checkpoints from which everything is built anew. It fails if ranks come to differ, if a step is
thrown away without a reason or a bad one is not, or if memory grows.
"""

import gc
import json
import math
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import powersgd

BAD = 0.03  # of all steps
DOUBLING, SMALLEST, LARGEST = 40, 2.0**-4, 2.0**12  # good steps between, and range of, loss scales
SETTLED = 0.2  # of all segments: from there on memory must not grow
ALLOWED_GROWTH_MB = 2.0


@dataclass
class Segment:
    """What one rank went through from one checkpoint to the next.

    Attributes:
        steps: Number of steps.
        bad: Steps in which a rank had an inf or a NaN.
        unused: Steps in which this rank left a branch of the model unused.
        unused_by_all: Steps in which all ranks left the same one unused.
        rescaled: Changes of the loss scale.
        loss: Mean over the good steps.
        resident_mb: Memory of the process at the end; 0 where the system does not tell.
        tensors: Python's tensors at the end.
    """

    steps: int = 0
    bad: int = 0
    unused: int = 0
    unused_by_all: int = 0
    rescaled: int = 0
    loss: float = 0.0
    resident_mb: float = 0.0
    tensors: int = 0


class Branches(nn.Module):
    """Two branches, of which a batch may use either or both."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(24, 32)
        self.branches = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.head = nn.Linear(32, 9)

    def forward(self, inputs: Tensor, used: list[bool]) -> Tensor:
        """Return outputs ``(batch, 9)`` of inputs ``(batch, 24)``."""
        hidden = torch.tanh(self.stem(inputs))
        for branch, is_used in zip(self.branches, used, strict=True):
            hidden = hidden + branch(hidden) if is_used else hidden
        outputs: Tensor = self.head(torch.tanh(hidden))
        return outputs


class Trainer:
    """A model in training on one rank, which draws its own accidents."""

    def __init__(self, seed: int) -> None:
        self.model = Branches()
        self.ddp = DistributedDataParallel(
            self.model, bucket_cap_mb=0.002, find_unused_parameters=True
        )
        self.state = powersgd.PowerSGDState(
            None, 2, start_powerSGD_iter=10, min_compression_rate=0.5, random_seed=seed
        )
        self.ddp.register_comm_hook(self.state, powersgd.powerSGD_hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.seed, self.scale, self.good_steps = seed, 1.0, 0

    def save(self, path: Path, *, is_shared: bool) -> None:
        """Save everything, with this rank's own residuals or the mean of all."""
        make = powersgd.shared_state_dict if is_shared else powersgd.PowerSGDState.state_dict
        everything = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "powersgd": make(self.state, self.ddp),
            "scale": (self.scale, self.good_steps),
        }
        torch.save(everything, path)

    def load(self, path: Path) -> None:
        """Load what `save` saved on this rank."""
        saved = torch.load(path)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.state.load_state_dict(saved["powersgd"], self.ddp)
        self.scale, self.good_steps = saved["scale"]

    def step(self, step: int, segment: Segment) -> None:
        """Make one step, and count what happened.

        Raises:
            RuntimeError: If a good step gave non-finite gradients, or a bad one finite ones.
        """
        world_size = dist.get_world_size()
        common = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        bad_rank = int(torch.randint(world_size, (), generator=common))
        is_bad = bool(torch.rand((), generator=common) < BAD)
        choices = torch.randint(3, (world_size,), generator=common).tolist()
        mine = [choices[dist.get_rank()] != 0, choices[dist.get_rank()] != 1]
        own = torch.Generator().manual_seed(step * world_size + dist.get_rank())
        inputs = torch.randn(16, 24, generator=own)
        targets = torch.sin(inputs[:, :9] + inputs[:, 9:18])

        self.optimizer.zero_grad()
        loss = (self.ddp(inputs, mine) - targets).square().mean()
        accident = (math.inf, math.nan)[step % 2] if is_bad and bad_rank == dist.get_rank() else 1.0
        self.state.loss_scale = self.scale
        (loss * (self.scale * accident)).backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        is_finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        if is_finite == is_bad:
            raise RuntimeError(f"step {step} was {'bad' if is_bad else 'good'}: finite {is_finite}")
        if is_finite:
            for gradient in gradients:
                gradient.div_(self.scale)
            self.optimizer.step()
            segment.loss += loss.item()
        segment.rescaled += self._rescale(is_finite)
        segment.steps += 1
        segment.bad += is_bad
        segment.unused += not all(mine)
        segment.unused_by_all += choices in ([0] * world_size, [1] * world_size)

    def _rescale(self, is_finite: bool) -> bool:
        before = self.scale
        self.good_steps = self.good_steps + 1 if is_finite else 0
        if not is_finite:
            self.scale = max(self.scale / 2, SMALLEST)
        elif self.good_steps % DOUBLING == 0:
            self.scale = min(self.scale * 2, LARGEST)
        return self.scale != before

    def require_equal_ranks(self, step: int) -> None:
        """Raise unless all ranks hold the same parameters to the bit.

        Raises:
            RuntimeError: If they do not.
        """
        flat = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(every, flat)
        if not all(torch.equal(flat, other) for other in every):
            raise RuntimeError(f"ranks hold different parameters after step {step}")


def soak(rank: int, directory: Path, steps: int, every: int, seed: int) -> list[Segment]:
    """Train on one rank of the default group.

    Args:
        rank: This rank.
        directory: For checkpoints.
        steps: Steps of the whole run.
        every: Steps from one checkpoint to the next, from which everything is built anew.
        seed: Seeds the accidents.

    Returns:
        What happened between the checkpoints.

    Raises:
        RuntimeError: See `Trainer.step` and `Trainer.require_equal_ranks`.
    """
    segments: list[Segment] = []
    path = directory / f"{rank}.pt"
    for start in range(0, steps, every):
        torch.manual_seed(start)  # what is built anew is not what was saved
        trainer, segment = Trainer(seed), Segment()
        if segments:
            trainer.load(path)
        for step in range(start, min(start + every, steps)):
            trainer.step(step, segment)
        trainer.require_equal_ranks(step)
        trainer.save(path, is_shared=len(segments) % 2 == 1)
        del trainer
        gc.collect()
        segment.loss /= max(1, segment.steps - segment.bad)
        segment.resident_mb = _resident_mb()
        segment.tensors = sum(issubclass(type(t), Tensor) for t in gc.get_objects())
        segments.append(segment)
    return segments


def _resident_mb() -> float:
    statm = Path("/proc/self/statm")
    pages = int(statm.read_text().split()[1]) if statm.exists() else 0
    return pages * resource.getpagesize() / 1e6


def _work(rank: int, world_size: int, directory: str, *arguments: int) -> None:
    torch.set_num_threads(1)
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    segments = soak(rank, Path(directory), *arguments)
    Path(directory, f"{rank}.json").write_text(json.dumps([asdict(s) for s in segments]))
    dist.destroy_process_group()


def _settled(segments: list[Segment]) -> Segment:
    return segments[math.ceil(SETTLED * len(segments)) - 1]


def _find_growth(ranks: list[list[Segment]]) -> Iterator[str]:
    for rank, segments in enumerate(ranks):
        first, last = _settled(segments), segments[-1]
        grown = last.resident_mb - first.resident_mb
        if grown > ALLOWED_GROWTH_MB:
            yield f"rank {rank}: memory has grown by {grown:.1f} MB since it had settled"
        if last.tensors > first.tensors:
            yield f"rank {rank}: {last.tensors - first.tensors} tensors more"


def _summary(ranks: list[list[Segment]], seconds: float) -> dict[str, Any]:
    segments = ranks[0]
    settled = _settled(segments)
    totals = {
        name: sum(getattr(segment, name) for segment in segments)
        for name in ("steps", "bad", "unused", "unused_by_all", "rescaled")
    }
    return {
        **totals,
        "ranks": len(ranks),
        "resumed": len(segments) - 1,
        "loss": [segments[0].loss, segments[-1].loss],
        "resident_mb": [settled.resident_mb, segments[-1].resident_mb],
        "tensors": [settled.tensors, segments[-1].tensors],
        "seconds": seconds,
    }


def main(
    steps: Annotated[int, typer.Option(min=20)] = 10_000,
    ranks: Annotated[int, typer.Option(min=2)] = 3,
    every: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")] = 200,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    save: Annotated[Path | None, typer.Option("--json", help="Also write figures here.")] = None,
) -> None:
    """Train through bad numbers, unused parameters, rescaling and resuming; look for leaks."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        arguments = (ranks, directory, steps, every, seed)
        spawn(_work, arguments, nprocs=ranks)  # type: ignore[no-untyped-call]
        files = [Path(directory, f"{rank}.json") for rank in range(ranks)]
        results = [[Segment(**s) for s in json.loads(file.read_text())] for file in files]
    figures = _summary(results, time.perf_counter() - start)
    console = Console()
    for name, value in figures.items():
        values = value if isinstance(value, list) else [value]
        console.print(f"{name.replace('_', ' '):14}", ", then ".join(f"{v:.6g}" for v in values))
    if save is not None:
        save.write_text(json.dumps(figures, indent=1))
    problems = list(_find_growth(results))
    if problems:
        console.print("; ".join(problems))
        sys.exit(1)
    console.print("All ranks hold the same parameters, and memory is flat.")


if __name__ == "__main__":
    typer.run(main)

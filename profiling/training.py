"""One training run of the convergence study, and many of them in one pair of processes."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import powersgd
from profiling.tasks import TASKS, mean_loss

START = 4  # steps of plain averaging before PowerSGD
FLOAT_BYTES = 4
BUCKET_CAP_MB = 0.2  # these small models get several buckets, as a real one has
WARM_UP = 0.1  # of all steps, in which the learning rate rises
MEASUREMENTS = 12  # evenly spaced ones; the first steps get more
EXPLODED = 2.0  # times the untrained model's loss

OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, rate, momentum=0.9),
    "adamw": lambda parameters, rate: torch.optim.AdamW(parameters, rate),
}
OPTIMIZER_TITLES = {"sgd": "SGD with momentum", "adamw": "AdamW"}


@dataclass(frozen=True)
class Kind:
    """A way to average gradients: plain all-reduce, or PowerSGD with these settings.

    Attributes:
        rank: Rank of the approximation; None is plain all-reduce.
        use_error_feedback: Whether what compression left out is added to the next gradient.
        warm_start: Whether Q starts from the last step's.
    """

    rank: int | None = None
    use_error_feedback: bool = True
    warm_start: bool = True

    @property
    def name(self) -> str:
        """What it is, in a few words."""
        if self.rank is None:
            return "plain all-reduce"
        without = [
            name
            for name, is_used in (
                ("error feedback", self.use_error_feedback),
                ("warm start", self.warm_start),
            )
            if not is_used
        ]
        return f"rank {self.rank}" + (f", no {' or '.join(without)}" if without else "")


PLAIN = Kind()


@dataclass(frozen=True)
class Run:
    """What one training run does.

    Attributes:
        task: A name of `TASKS`.
        optimizer: A name of `OPTIMIZERS`.
        kind: What averages the gradients.
        seed: Of the initial weights and the order of the data; not of PowerSGD.
        steps: Number of steps.
    """

    task: str
    optimizer: str
    kind: Kind
    seed: int
    steps: int


@dataclass(frozen=True)
class Point:
    """What was measured after a step.

    Attributes:
        step: Number of steps made.
        sent_bytes: Handed to all-reduce by each rank so far.
        loss: Mean on the held-out data, in nats.
        accuracy: Share of right answers there.
    """

    step: int
    sent_bytes: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Outcome:
    """What a run gave.

    Attributes:
        run: What was run.
        curve: Points, from the untrained model on; a run whose loss is not finite ends there.
        plain_bytes: Of a step without compression.
        step_bytes: Of a step once compression has started.
    """

    run: Run
    curve: list[Point] = field(repr=False)
    plain_bytes: int = 0
    step_bytes: float = 0.0

    @property
    def final(self) -> Point:
        """The last point."""
        return self.curve[-1]

    @property
    def has_diverged(self) -> bool:
        """Whether the loss became inf or NaN, or ended far above that of the untrained model."""
        is_finite = all(math.isfinite(point.loss) for point in self.curve)
        return not is_finite or self.final.loss > EXPLODED * self.curve[0].loss


def train(run: Run) -> Outcome:
    """Train a model on all ranks of the default group.

    Args:
        run: What to do; the same on all ranks.

    Returns:
        The outcome, the same on all ranks.
    """
    task = TASKS[run.task]
    torch.manual_seed(run.seed)
    ddp, state = _wrap(task.build(), run.kind)
    optimizer = OPTIMIZERS[run.optimizer](ddp.parameters(), task.learning_rates[run.optimizer])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, run))
    curve = [Point(0, 0, *_evaluate(ddp.module, task.held_out()))]
    for step in range(run.steps):
        optimizer.zero_grad()
        inputs, targets = _share(task.draw(run.seed, step))
        mean_loss(ddp(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if _is_measured(step + 1, run.steps):
            sent = _sent_bytes(ddp, state, step + 1)
            curve.append(Point(step + 1, sent, *_evaluate(ddp.module, task.held_out())))
            if not math.isfinite(curve[-1].loss):  # of all ranks: they all stop
                break
    plain_bytes = _sent_bytes(ddp, None, 1)
    rate = 1.0 if state is None else state.compression_stats()[0] or 1.0
    return Outcome(run, curve, plain_bytes, plain_bytes / rate)


def learning_rate(step: int, run: Run) -> float:
    """Return what a step's learning rate is in terms of its peak: a short rise, half a cosine.

    Args:
        step: Counted from 0.
        run: The run.

    Returns:
        Above 0, and at most 1.
    """
    rise = max(1, round(WARM_UP * run.steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, run.steps - rise)))


def _wrap(
    model: nn.Module, kind: Kind
) -> tuple[DistributedDataParallel, powersgd.PowerSGDState | None]:
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_CAP_MB)
    if kind.rank is None:
        return ddp, None
    state = powersgd.PowerSGDState(
        None,
        kind.rank,
        start_powerSGD_iter=START,
        use_error_feedback=kind.use_error_feedback,
        warm_start=kind.warm_start,
    )
    ddp.register_comm_hook(state, powersgd.powerSGD_hook)
    return ddp, state


def _share(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    inputs, targets = batch
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return inputs[mine], targets[mine]


def _sent_bytes(model: nn.Module, state: powersgd.PowerSGDState | None, steps: int) -> int:
    # The hook counts its compressed steps alone; all others send the whole gradient.
    numel = sum(parameter.numel() for parameter in model.parameters())
    _, before, after = (1, 0, 0) if state is None else state.compression_stats()
    return FLOAT_BYTES * (steps * numel - before + after)


def _is_measured(step: int, steps: int) -> bool:
    every = max(1, steps // MEASUREMENTS)
    is_power_of_2 = step & (step - 1) == 0
    return step == steps or step % every == 0 or (step < every and is_power_of_2)


@torch.no_grad()
def _evaluate(model: nn.Module, held_out: tuple[Tensor, Tensor]) -> tuple[float, float]:
    inputs, targets = _share(held_out)
    logits = model(inputs)
    correct = (logits.argmax(dim=-1) == targets).sum().item()
    numel = targets.numel()
    sums = torch.tensor(
        [mean_loss(logits, targets).item() * numel, correct, numel], dtype=torch.float64
    )
    dist.all_reduce(sums)
    loss, accuracy = (sums[:2] / sums[2]).tolist()
    return loss, accuracy


def train_all(rank: int, runs: Sequence[Run]) -> list[Outcome]:
    """Do several runs on one rank of the default group; rank 0 shows the progress on stderr.

    Args:
        rank: This rank.
        runs: One after the other; the same on all ranks.

    Returns:
        Their outcomes.
    """
    return [train(run) for run in (_track(runs) if rank == 0 else runs)]


def _track(runs: Sequence[Run]) -> Iterator[Run]:
    console = Console(file=sys.stderr)
    return iter(track(runs, "Training", console=console, transient=True))

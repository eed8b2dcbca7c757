"""The demo's training run: a small convolutional net on scikit-learn's digits, under DDP.

``powersgd demo`` compares several runs in local processes; the same `train` runs under torchrun,
on one machine or several::

    torchrun --nproc-per-node 2 -m powersgd.demo --rank 2 --epochs 4
    torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m powersgd.demo
"""

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from powersgd import PowerSGDState, powerSGD_hook
from powersgd.arguments import require
from powersgd.report import Point, Result

TRAIN_IMAGES = 1347  # three quarters of the 1797 digits
LARGEST_RANK = 56  # above it no layer of the net is compressed to less than half its size
PEAK_LEARNING_RATE = 0.1
FLOAT_BYTES = 4
BUCKET_CAP_MB = 0.1  # this small net gets several buckets, as a real model has


@dataclass(frozen=True)
class Run:
    """What one training run does.

    Attributes:
        rank: Rank of PowerSGD's approximation, or None for plain all-reduce.
        seed: Seeds the initial weights and the order of the images.
        epochs: Passes over the training images.
        batch_size: Images per step, over all processes together.
        start_iter: Steps that send full gradients before PowerSGD starts.
    """

    rank: int | None
    seed: int = 0
    epochs: int = 10
    batch_size: int = 64
    start_iter: int = 4

    @property
    def epoch_steps(self) -> int:
        """Full batches in one pass; the images left over wait for the next shuffle."""
        return TRAIN_IMAGES // self.batch_size

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs * self.epoch_steps

    def check(self, world_size: int) -> None:
        """Refuse what cannot run, in terms of the command line's options.

        Args:
            world_size: Number of processes.

        Raises:
            ValueError: With one sentence that names the option, its value and what is allowed.
        """
        require("--batch-size", self.batch_size, world_size, 256)
        if self.batch_size % world_size:
            raise ValueError(
                f"--batch-size is {self.batch_size}, but must be a multiple of {world_size}, the "
                "number of processes"
            )
        require("--epochs", self.epochs, 1, 1000)
        require("--seed", self.seed, 0, 1_000_000)
        last = self.steps - 1
        require("--start-iter", self.start_iter, 2, last, f" (a run has {self.steps} steps)")
        if self.rank is not None:
            require("--rank", self.rank, 1, LARGEST_RANK, " (0 is plain all-reduce)")


def default_batch_size(world_size: int) -> int:
    """Return 64, or the next lower multiple of the number of processes; one each at least."""
    return max(64 // world_size, 1) * world_size


@functools.cache
def load_split() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Load the 1797 digits that scikit-learn ships: three quarters to train, one to test.

    Returns:
        Training images, float ``(n, 1, 8, 8)`` in 0 to 1, and their labels, int64 ``(n,)``; then
        the same for the test.
    """
    # Imported here, so that --help and wrong arguments do not wait for it.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(
        pixels, labels, train_size=TRAIN_IMAGES, stratify=labels, random_state=0
    )
    images, test_images = (
        torch.tensor(part, dtype=torch.float32).view(-1, 1, 8, 8) / 16 for part in parts[:2]
    )
    return images, torch.tensor(parts[2]), test_images, torch.tensor(parts[3])


def build_net() -> nn.Module:
    """Build the net: two convolutions and two linear layers, 151,306 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train(run: Run, on_point: Callable[[Point], None]) -> Result:
    """Train the net in all processes of the default group, and test it on the way.

    Args:
        run: What to do; the same in all processes.
        on_point: Called for each point of the curve as soon as it is there.

    Returns:
        The result; all processes measure the same net, but their own times.
    """
    images, labels, *test = load_split()
    ddp, state = _build(run)
    optimizer = torch.optim.SGD(ddp.parameters(), momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_LEARNING_RATE, total_steps=run.steps
    )
    times, curve = [], []
    for step, batch in enumerate(_draw_batches(run), start=1):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = cross_entropy(ddp(images[batch]), labels[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        times.append(time.perf_counter() - start)
        schedule.step()
        if _is_measured(step, run.epoch_steps):
            sent_bytes = _count_sent_bytes(ddp, state, step)
            curve.append(Point(step, sent_bytes, *_evaluate(ddp.module, *test)))
            on_point(curve[-1])
    rate = 1.0 if state is None else state.compression_stats()[0]
    step_s = statistics.median(times[run.start_iter :])
    step_bytes = _count_sent_bytes(ddp, None, 1) / rate
    return Result(run.rank, run.seed, curve, step_bytes, rate, step_s)


def _build(run: Run) -> tuple[DistributedDataParallel, PowerSGDState | None]:
    torch.manual_seed(run.seed)
    ddp = DistributedDataParallel(build_net(), bucket_cap_mb=BUCKET_CAP_MB)
    if run.rank is None:
        return ddp, None
    state = PowerSGDState(
        None, matrix_approximation_rank=run.rank, start_powerSGD_iter=run.start_iter
    )
    ddp.register_comm_hook(state, powerSGD_hook)
    return ddp, state


def _draw_batches(run: Run) -> Iterator[Tensor]:
    # The order depends on seed and epoch alone: the same for every rank and way of averaging.
    for epoch in range(run.epochs):
        generator = torch.Generator().manual_seed(1000 * run.seed + epoch)
        order = torch.randperm(TRAIN_IMAGES, generator=generator)
        for batch in order[: run.epoch_steps * run.batch_size].view(-1, run.batch_size):
            yield batch[dist.get_rank() :: dist.get_world_size()]


def _count_sent_bytes(net: nn.Module, state: PowerSGDState | None, steps: int) -> int:
    # The hook counts its compressed steps alone; all others send the whole gradient.
    numel = sum(parameter.numel() for parameter in net.parameters())
    _, before, after = (1, 0, 0) if state is None else state.compression_stats()
    return FLOAT_BYTES * (steps * numel - before + after)


def _is_measured(step: int, epoch_steps: int) -> bool:
    is_power_of_2 = step & (step - 1) == 0
    return (step < epoch_steps and is_power_of_2) or step % epoch_steps == 0


@torch.no_grad()
def _evaluate(net: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    scores = net(images)
    accuracy = (scores.argmax(dim=1) == labels).float().mean()
    return cross_entropy(scores, labels).item(), accuracy.item()


def train_all(
    runs: Sequence[Run], rank: int, world_size: int, path: str, send: Callable[[object], None]
) -> None:
    """Do several runs in one of the local processes.

    Args:
        runs: The runs, one after the other; the same in all processes.
        rank: This process, from 0.
        world_size: Number of processes.
        path: A file that does not exist yet, the same for all processes; they meet there.
        send: Gets each `Point` as it comes and the `Result` of each run; on rank 0 alone.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{path}", rank=rank, world_size=world_size)
    report = send if rank == 0 else (lambda _: None)
    for run in runs:
        report(train(run, report))
    dist.destroy_process_group()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # Every process gets the same arguments; one sentence is enough.
        if os.environ.get("RANK", "0") == "0":
            print(message, file=sys.stderr)
        raise SystemExit(2)


def _parse(arguments: Sequence[str]) -> Run:
    parser = _Parser(
        prog="torchrun ... -m powersgd.demo",
        description="Train a small net on scikit-learn's digits, in the processes of torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rank", type=int, default=2, help="rank; 0 is plain all-reduce")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the images")
    parser.add_argument("--batch-size", type=int, help="images per step, all processes; about 64")
    parser.add_argument("--start-iter", type=int, default=4, help="steps before PowerSGD starts")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and order")
    options = vars(parser.parse_args(arguments))
    if "WORLD_SIZE" not in os.environ:
        parser.error("Start this with torchrun, or use `powersgd demo`, which needs no torchrun.")
    world_size = int(os.environ["WORLD_SIZE"])
    if options["batch_size"] is None:
        options["batch_size"] = default_batch_size(world_size)
    run = Run(**{**options, "rank": options["rank"] or None})
    try:
        run.check(world_size)
        load_split()
    except ValueError as error:
        parser.error(f"{error}.")
    except ModuleNotFoundError as error:
        parser.error(f"{error.name} is missing: pip install 'torch-powersgd[cli]' brings it.")
    return run


def main() -> None:
    """Train in the processes that torchrun started; rank 0 prints."""
    run = _parse(sys.argv[1:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_speaker = dist.get_rank() == 0

    def print_epoch(point: Point) -> None:
        if is_speaker and point.step % run.epoch_steps == 0:
            print(
                f"epoch {point.step // run.epoch_steps}: test loss {point.loss:.4f}, accuracy "
                f"{point.accuracy:.2%}, {point.sent_bytes / 1e6:.2f} MB sent by each process",
                flush=True,
            )

    result = train(run, print_epoch)
    if is_speaker:
        print(
            f"{result.name}: test accuracy {result.curve[-1].accuracy:.2%}, "
            f"{result.step_bytes:,.0f} bytes per step, compression rate "
            f"{result.compression_rate:.1f}, {1e3 * result.step_s:.1f} ms per step"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

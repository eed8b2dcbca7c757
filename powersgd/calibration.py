"""Measure what compression and all-reduce cost on this machine, for `powersgd.costs`."""

import json
import math
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import ProcessGroupGloo
from torch.nn.parallel import DistributedDataParallel

from powersgd.costs import Costs
from powersgd.ddp import powerSGD_hook
from powersgd.state import PowerSGDState

RANKS = (1, 2, 4, 8, 16, 32)
REPEATS, WARM_UP = 7, 3
LARGE = [(1024, 1024)] * 8  # one batch: what elements cost
SMALL = [(96 + i, 160) for i in range(48)]  # as many batches: what each of them costs
SMALL_BYTES, LARGE_BYTES = 4, 8 * 2**20
OTHERS_BYTES = 64 * 2**20  # more than caches hold

# Two cores of a shared virtual machine (AMD EPYC), one thread; `powersgd plan --calibrate`.
DEFAULT = Costs(
    "one core of an AMD EPYC (the default; --calibrate measures this machine)",
    RANKS,
    (2.1e-9, 2.7e-9, 3.3e-9, 4.3e-9, 5.0e-9, 8.0e-9),
    (4.2e-4, 4.2e-4, 3.7e-4, 3.8e-4, 5.8e-4, 6.0e-4),
    cast_s=5e-10,
    copy_s=9e-10,
    message_s=3e-4,
    byte_s=1.5e-9,
)


def make_bucket(shapes: Iterable[tuple[int, ...]], device: str = "cpu") -> Any:
    """Return a DDP bucket of zeros that holds parameters of all the shapes.

    Args:
        shapes: The parameters' shapes.
        device: Where they lie.

    Returns:
        A ``torch.distributed.GradBucket``; its buffer may be filled and given to a hook repeatedly.
    """
    model = nn.ParameterList([nn.Parameter(torch.zeros(s, device=device)) for s in shapes])
    for parameter in model.parameters():
        parameter.grad = torch.zeros((), device=device).expand_as(parameter)  # used in this step
    # The parameters are never touched, so that they take no memory, unless they are sent around.
    ddp = DistributedDataParallel(model, bucket_cap_mb=1_000_000, init_sync=False)
    (bucket,) = ddp.reducer._get_zeros_like_grad_buckets()
    return bucket


def calibrate(device: str = "cpu") -> Costs:
    """Measure the costs of this machine, in about 10 s, with torch's current number of threads.

    Args:
        device: ``"cpu"`` or ``"cuda"``, where gradients lie; all-reduce is measured on the CPU.

    Returns:
        The costs.

    Raises:
        RuntimeError: If there is a default process group already.
    """
    if dist.is_initialized():
        raise RuntimeError("calibrate makes a process group of its own: destroy yours first")
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=_new_store(), rank=0, world_size=1)
    try:
        large = [_time_hook(LARGE, rank, device) for rank in RANKS]
        small = [_time_hook(SMALL, rank, device) for rank in RANKS]
        cast_s, copy_s = _time_copies(device)
    finally:
        dist.destroy_process_group()
    numel = sum(math.prod(shape) for shape in LARGE)
    rest = sum(math.prod(shape) for shape in SMALL)
    element_s = tuple(time_s / numel for time_s in large)
    group_s = tuple(
        max(0.0, time_s - rest * each) / len(SMALL)
        for time_s, each in zip(small, element_s, strict=True)
    )
    message_s, byte_s = _time_all_reduce()
    return Costs(_describe(device), RANKS, element_s, group_s, cast_s, copy_s, message_s, byte_s)


def _new_store() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined]


def _describe(device: str) -> str:
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return f"measured on this machine ({name}, {torch.get_num_threads()} threads)"


def _median(call: Callable[[], object], device: str, others_bytes: int = OTHERS_BYTES) -> float:
    times = []
    others = torch.zeros(others_bytes // 4, device=device)
    for _ in range(REPEATS + WARM_UP):
        others.add_(1)  # in training, backward and the optimizer use the caches in between
        _synchronize(device)
        start = time.perf_counter()
        call()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UP:])


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _time_hook(shapes: list[tuple[int, int]], rank: int, device: str) -> float:
    bucket = make_bucket(shapes, device)
    bucket.buffer().normal_()
    state = PowerSGDState(None, rank, start_powerSGD_iter=2, min_compression_rate=1e-9)

    def call() -> None:
        powerSGD_hook(state, bucket).wait()

    return _median(call, device)


def _time_copies(device: str) -> tuple[float, float]:
    # Of one element: to bf16 and back, and in float32 to another place and back.
    buffer, other = torch.randn(2, 4 * 2**20, device=device)
    half = torch.empty_like(buffer, dtype=torch.bfloat16)

    def time_through(stop: Tensor) -> float:
        time_s = _median(lambda: buffer.copy_(stop.copy_(buffer)), device)
        return time_s / int(buffer.numel())

    return time_through(half), time_through(other)


def _time_all_reduce() -> tuple[float, float]:
    # Two ranks in two threads, over loopback: the time of a message, and of a byte.
    store, times = _new_store(), {}

    def work(rank: int) -> None:
        group: Any = ProcessGroupGloo(store, rank, 2, timedelta(minutes=1))
        for nbytes in (SMALL_BYTES, LARGE_BYTES):
            tensor = torch.zeros(nbytes // 4)

            def call(tensor: Tensor = tensor) -> None:
                group.allreduce([tensor]).wait()

            times[rank, nbytes] = _median(call, "cpu", 0)  # or the two would not be in step

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    small, large = times[0, SMALL_BYTES], times[0, LARGE_BYTES]
    # A ring of two sends two messages one after the other, and each byte once.
    return small / 2, max(0.0, large - small) / LARGE_BYTES


def save(costs: Costs, path: Path) -> None:
    """Write costs as JSON.

    Args:
        costs: To be written.
        path: The file.
    """
    path.write_text(json.dumps(asdict(costs), indent=1) + "\n")


def load(path: Path) -> Costs:
    """Read what `save` has written.

    Args:
        path: The file.

    Returns:
        The costs.

    Raises:
        ValueError: If the file holds none.
    """
    try:
        fields = json.loads(path.read_text())
        lists = {name: tuple(fields[name]) for name in ("ranks", "element_s", "group_s")}
        return Costs(**{**fields, **lists})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} holds no costs written by --calibrate: {error}") from error

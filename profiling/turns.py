"""Time actions in turn, each in a process of its own.

In one process they would change each other's times: torch's hook computes in gloo's threads, each
of which gets a team of OpenMP threads, and once there are more of these than cores, all teams wait
asleep. With two threads, everybody's operations then start up to twice as slowly.
"""

import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from profiling.hooks import START
from profiling.results import Memory, Timing

WARM_UP = START + 1  # calls: allocations, caches, compilation
FLOOR = 2.5  # copies of the gradient: 5 passes over it

_Name = TypeVar("_Name")


class Action(NamedTuple):
    """What is measured, in its process.

    Attributes:
        run: One call, which is timed.
        prepare: Called before each, and not timed.
        count_memory: Called once, at the end.
    """

    run: Callable[[], Any]
    prepare: Callable[[], Any]
    count_memory: Callable[[], Memory]


_made: list[Action] = []  # the one of this process


def take_turns(
    makes: Mapping[_Name, Callable[[], Action]], numel: int, threads: int, repeats: int
) -> tuple[dict[_Name, tuple[Timing, Memory]], Timing]:
    """Measure actions in turn, so that whatever else the machine does meets all of them.

    Args:
        makes: By any name, what makes an action in a process with a gloo group of its own. Can be
            pickled.
        numel: Elements of the gradient, float32.
        threads: Of each operation.
        repeats: Timed calls of each action, after `WARM_UP`.

    Returns:
        Times and memory by name, and the times of the floor, which is measured in this process.
    """
    torch.set_num_threads(threads)
    source = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    target = torch.empty_like(source)
    times: dict[_Name, list[float]] = {name: [] for name in makes}
    floors: list[float] = []
    with ExitStack() as stack:
        processes = {name: stack.enter_context(_new_process()) for name in makes}
        begun = [processes[name].submit(_begin, make, threads) for name, make in makes.items()]
        for one in begun:
            one.result()
        for _ in range(WARM_UP + repeats):
            floors.append(FLOOR * _time_ms(lambda: target.copy_(source)))
            for name, process in processes.items():
                times[name].append(process.submit(_time).result())
        memories = {name: process.submit(_count).result() for name, process in processes.items()}
    found = {name: (Timing.of(times[name][WARM_UP:]), memories[name]) for name in makes}
    return found, Timing.of(floors[WARM_UP:])


def _new_process() -> ProcessPoolExecutor:
    # Ctrl-C reaches it too, and ends it without a word.
    default = (signal.SIGINT, signal.SIG_DFL)
    return ProcessPoolExecutor(1, get_context("spawn"), signal.signal, default)


def _begin(make: Callable[[], Action], threads: int) -> None:
    torch.set_num_threads(threads)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    _made.append(make())


def _time() -> float:
    _made[0].prepare()
    return _time_ms(_made[0].run)


def _count() -> Memory:
    return _made[0].count_memory()


def _time_ms(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - start)

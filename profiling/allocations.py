"""How much memory an action allocates, as torch's allocator reports it to the profiler."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.autograd.profiler import profile, record_function

from profiling.results import Memory

_MARK = "benchmark: the call that is looked at"


def measure_memory(action: Callable[[], Any], prepare: Callable[[], Any], calls: int) -> Memory:
    """Count what the last of several calls allocates, and what those before it have kept.

    The profiler sees one thread. Hooks that compute in a collective's callbacks do so in this one
    here, because each collective is waited for before its future is handed out.

    Args:
        action: One call of a hook, or one backward pass.
        prepare: Called before each, and not looked at.
        calls: How many. What is kept was allocated within them: the first has to be the first.

    Returns:
        The peak of the last call, and what was kept when it began.
    """
    waiting = patch.object(dist, "all_reduce", _wait_in(dist.all_reduce))
    with waiting, _without_noise(), profile(profile_memory=True) as profiler:
        for _ in range(calls - 1):
            prepare()
            action()
        prepare()
        with record_function(_MARK):
            action()
    return _summarize(profiler.kineto_results.events())


def _wait_in(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    def wait(*arguments: Any, **options: Any) -> Any:
        work = all_reduce(*arguments, **options)
        if work is not None:
            work.wait()
        return work

    return wait


def _summarize(events: list[Any]) -> Memory:
    (mark,) = (event for event in events if event.name() == _MARK)
    start, end = mark.start_ns(), mark.start_ns() + mark.duration_ns()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    kept = sum(nbytes for when, nbytes in changes if when < start)
    peak = total = 0
    for when, nbytes in sorted(changes, key=lambda change: change[0]):
        if start <= when < end:
            total += nbytes
            peak = max(peak, total)
    return Memory(peak, kept)


# torch 2.13 writes the first when a profiler starts and stops, the second for memory that was there
# before, which we mean not to count.
_NOISE = (b"USDT:", b"Memory block of unknown size was allocated before the profiling started")


@contextmanager
def _without_noise() -> Iterator[None]:
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            for line in file.read().splitlines(keepends=True):
                if not any(noise in line for noise in _NOISE):
                    os.write(2, line)

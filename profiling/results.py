"""What the benchmark finds: times, memory, and the machine that they hold for."""

import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

import powersgd
from profiling.hooks import Hook


class Measured(str, Enum):
    """What one of the timed actions is."""

    CALL = "call"  # of the hook, on a full bucket
    PASS = "pass"  # forward and backward of a model that computes nothing, under DDP


@dataclass(frozen=True)
class Timing:
    """Quartiles of the times of one action, in ms."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, times: Sequence[float]) -> "Timing":
        """Return the quartiles of some times.

        Args:
            times: In ms; two at least.

        Returns:
            Their quartiles.
        """
        return cls(*statistics.quantiles(times, n=4))

    def __str__(self) -> str:
        digits = 0 if self.median >= 10 else 1 if self.median >= 1 else 2
        low, median, high = (f"{ms:.{digits}f}" for ms in (self.low, self.median, self.high))
        return f"{median} ({low}-{high})"


@dataclass(frozen=True)
class Memory:
    """Bytes that a hook allocates.

    Attributes:
        peak_bytes: The most during one call or pass, beyond what was there before it.
        kept_bytes: What it keeps from one call to the next; None where that was not counted.
    """

    peak_bytes: int
    kept_bytes: int | None = None


@dataclass(frozen=True)
class Plain:
    """The same passes with plain averaging: eager ones, or compiled ones for `python_reducer`.

    Attributes:
        time: Of one pass.
        peak_bytes: The most during one pass, beyond what was there before it.
    """

    time: Timing
    peak_bytes: int


@dataclass(frozen=True)
class Result:
    """One hook on one workload.

    Attributes:
        measured: What was timed.
        hook: Which hook.
        time: Of one call or pass.
        floor: 2.5 times a copy of the gradient, timed in the same run.
        memory: What it allocates.
        plain: What a pass has to be compared with; None for calls.
    """

    measured: Measured
    hook: Hook
    time: Timing
    floor: Timing
    memory: Memory
    plain: Plain | None = None


@dataclass(frozen=True)
class Row:
    """All hooks on one workload: one line of the table.

    Attributes:
        workload: Its name.
        numel: Elements of the gradient, float32.
        tensors: Number of parameters.
        threads: Of each operation.
        rank: Of the approximation, for hooks that have one.
        results: Of the hooks that were measured.
        skipped: A sentence about each hook that was not.
    """

    workload: str
    numel: int
    tensors: int
    threads: int
    rank: int
    results: list[Result]
    skipped: list[str]

    @property
    def gradient_bytes(self) -> int:
        """Size of the gradient."""
        return 4 * self.numel

    def find(self, hook: Hook, measured: Measured = Measured.CALL) -> Result | None:
        """Return a hook's result.

        Args:
            hook: Which hook.
            measured: What was timed.

        Returns:
            The result; None if it was not measured.
        """
        for result in self.results:
            if (result.hook, result.measured) == (hook, measured):
                return result
        return None

    def speedup(self, hook: Hook) -> float | None:
        """Tell how many times faster than torch's hook another one is.

        Args:
            hook: The other hook.

        Returns:
            The ratio of the medians of one call; None if one of them was not measured.
        """
        theirs, ours = self.find(Hook.TORCH), self.find(hook)
        return theirs.time.median / ours.time.median if theirs and ours else None

    def to_json(self) -> list[dict[str, Any]]:
        """Return plain data.

        Returns:
            A dictionary for each hook; the last are the sentences about those that were skipped.
        """
        setting = {
            "workload": self.workload,
            "numel": self.numel,
            "tensors": self.tensors,
            "gradient_bytes": self.gradient_bytes,
            "threads": self.threads,
            "rank": self.rank,
        }
        measured = [setting | asdict(result) for result in self.results]
        return measured + [setting | {"skipped": sentence} for sentence in self.skipped]


def machine() -> dict[str, Any]:
    """Return what times depend on.

    Returns:
        Versions and the processor, as plain data.
    """
    return {
        "torch": torch.__version__,
        "powersgd": powersgd.__version__,
        "python": platform.python_version(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpu_model": _first(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
    }


def available_bytes() -> int:
    """Tell how much memory may still be used.

    Returns:
        What the kernel thinks, or the container's limit leaves; all of it where neither can be
        known.
    """
    known = _first(Path("/proc/meminfo"), "MemAvailable")
    if known is None:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    kernel = 1024 * int(known.split()[0])
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        return min(kernel, int(limit.read_text()) - int(used.read_text()))
    return kernel


def _first(path: Path, key: str) -> str | None:
    lines: Iterable[str] = path.read_text().splitlines() if path.exists() else ()
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(key))
    return next(values, None)

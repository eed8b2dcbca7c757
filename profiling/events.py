"""What a trace of DDP training says, read from the Chrome trace that ``torch.profiler`` writes.

Times are in ms from the start of the first recorded step. The main thread is the one that runs the
steps; on CPUs autograd runs backward in it too, and DDP its hooks.
"""

import gzip
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from profiling.intervals import Interval, intersect, merge, subtract

_ITEM_BYTES = {
    "double": 8,
    "float": 4,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "long int": 8,
    "int": 4,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
}
_PHASE = re.compile(r"powersgd: (?P<phase>.+?)(?:, bucket (?P<bucket>\d+))?$")
_BACKWARD = ("autograd::engine::evaluate_function", "Torch-Compiled Region: !")
_FORWARD = ("DistributedDataParallel.forward", "CompiledFunction")  # the second in a compiled step
_WAIT, _START, _RUN = "_c10d_functional::wait_tensor", "c10d::allreduce_", "gloo:all_reduce"


class Phase(NamedTuple):
    """One of our named ranges.

    Attributes:
        name: Such as ``"P"`` or ``"wait for Q"``.
        bucket: Its bucket, or None.
        start: In ms.
        end: In ms.
    """

    name: str
    bucket: int | None
    start: float
    end: float


class Collective(NamedTuple):
    """One all-reduce.

    Attributes:
        name: What it sums up, such as ``"P"``; ``""`` if no range of ours says so.
        bucket: Its bucket, or None.
        start: When it was started, in ms.
        taken: When one of gloo's threads began to run it, in ms.
        end: When this rank had the sum, in ms; callbacks, which torch counts in, come after it.
        nbytes: Bytes that this rank handed over.
    """

    name: str
    bucket: int | None
    start: float
    taken: float
    end: float
    nbytes: int


@dataclass
class Events:
    """What was read.

    Attributes:
        rank: Of the process, from the trace.
        world_size: Number of processes, from the trace.
        steps: The recorded steps.
        phases: Our ranges, by time.
        collectives: All all-reduces, by time.
        forward: When the main thread ran forward.
        backward: When it computed gradients, without hooks, and without starting collectives.
        compression: When it ran our hook, without waiting, and without starting collectives.
        waiting: When it waited for collectives inside of backward: in our hook, or in a graph.
        starting: When it started collectives.
        optimizer: When it ran an optimizer.
        callbacks: When other threads ran operators: callbacks of a hook, on gloo's threads.
        memory: ``(ms, bytes)``: what is allocated on the CPU, less what was when recording began.
    """

    rank: int
    world_size: int
    steps: list[Interval]
    phases: list[Phase]
    collectives: list[Collective]
    forward: list[Interval]
    backward: list[Interval]
    compression: list[Interval]
    waiting: list[Interval]
    starting: list[Interval]
    optimizer: list[Interval]
    callbacks: list[Interval]
    memory: list[tuple[float, int]]

    def within(self, window: Interval) -> "Events":
        """Return what lies in a window of time.

        Args:
            window: Such as one of `steps`.

        Returns:
            The events that begin in it; times of the main thread are cut at its ends.
        """
        low, high = window
        cut = [window]
        return replace(
            self,
            steps=cut,
            phases=[p for p in self.phases if low <= p.start < high],
            collectives=[c for c in self.collectives if low <= c.start < high],
            forward=intersect(self.forward, cut),
            backward=intersect(self.backward, cut),
            compression=intersect(self.compression, cut),
            waiting=intersect(self.waiting, cut),
            starting=intersect(self.starting, cut),
            optimizer=intersect(self.optimizer, cut),
            callbacks=intersect(self.callbacks, cut),
            memory=[(ms, nbytes) for ms, nbytes in self.memory if low <= ms < high],
        )


@dataclass(frozen=True)
class _Raw:
    name: str
    thread: Any
    start: float
    end: float
    category: str
    arguments: dict[str, Any]

    def is_computing(self) -> bool:
        return self.category == "cpu_op" and self.name != _START


def read_trace(path: Path) -> dict[str, Any]:
    """Read a trace.

    Args:
        path: Ends in ``.json`` or ``.json.gz``.

    Returns:
        The trace as it was written.
    """
    data = path.read_bytes()
    trace: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return trace


def find_events(trace: dict[str, Any]) -> Events:
    """Find steps, phases, collectives and memory in a trace.

    Args:
        trace: From `read_trace`, recorded with ``record_shapes=True`` and a schedule.

    Returns:
        What was found.

    Raises:
        ValueError: If no step was recorded, or a collective has a dtype that is not known.
    """
    marks = [e for e in trace["traceEvents"] if e.get("name", "").startswith("ProfilerStep#")]
    marks = [e for e in marks if e["ph"] == "X"]
    if not marks:
        raise ValueError("the trace has no ProfilerStep# event: give torch.profiler a schedule")
    origin, main = min(e["ts"] for e in marks), marks[0]["tid"]
    raw = sorted(_read_raw(trace["traceEvents"], origin), key=lambda e: (e.start, -e.end))
    ours = [e for e in raw if e.thread == main]
    phases = list(_find_phases(ours))
    containers = _spans(ours, *_BACKWARD)
    waiting = merge([p[2:] for p in phases if p.name.startswith("wait")] + _spans(ours, _WAIT))
    starting = merge(_spans(ours, _START))
    busy = merge(waiting + starting)  # which is no computation
    hook = _find_hook(containers, phases)
    facts = trace.get("distributedInfo", {})
    return Events(
        rank=facts.get("rank", 0),
        world_size=facts.get("world_size", 1),
        steps=merge(_spans(ours, "ProfilerStep#")),
        phases=phases,
        collectives=_find_collectives(raw, phases),
        forward=merge(_spans(ours, *_FORWARD)),
        backward=subtract(subtract(merge(containers), hook), busy),
        compression=subtract(hook, busy),
        waiting=waiting,
        starting=starting,
        optimizer=merge(_spans(ours, "Optimizer.step")),
        callbacks=merge((e.start, e.end) for e in raw if e.is_computing() and e.thread != main),
        memory=_find_memory(trace["traceEvents"], origin),
    )


def _read_raw(events: Iterable[dict[str, Any]], origin: float) -> Iterator[_Raw]:
    for e in events:
        if e.get("ph") == "X" and e.get("cat") in ("cpu_op", "user_annotation"):
            start = (e["ts"] - origin) / 1e3
            end = start + e.get("dur", 0) / 1e3
            yield _Raw(e["name"], e["tid"], start, end, e["cat"], e.get("args", {}))


def _spans(raw: Iterable[_Raw], *prefixes: str) -> list[Interval]:
    return [(e.start, e.end) for e in raw if e.name.startswith(prefixes)]


def _find_phases(raw: Iterable[_Raw]) -> Iterator[Phase]:
    for e in raw:
        match = _PHASE.match(e.name)
        if match and e.category == "user_annotation":
            bucket = match["bucket"]
            yield Phase(match["phase"], None if bucket is None else int(bucket), e.start, e.end)


def _find_hook(containers: list[Interval], phases: list[Phase]) -> list[Interval]:
    # What is between two ranges in one call from autograd is ours too. DDP calls hooks from there.
    spans = [phase[2:] for phase in phases]
    for low, high in containers:
        inside = [(start, end) for start, end in spans if low <= start and end <= high]
        if inside:
            spans.append((inside[0][0], max(end for _, end in inside)))
    return merge(spans)


def _find_collectives(raw: list[_Raw], phases: list[Phase]) -> list[Collective]:
    # gloo's threads take collectives in the order in which they were started.
    starts = [(e, _numel(e.arguments["Input Dims"][0])) for e in raw if e.name == _START]
    found = []
    for run in (e for e in raw if e.name == _RUN):
        sizes = [math.prod(shape) for shape in run.arguments["Input Dims"]]
        fits = (i for i, (e, n) in enumerate(starts) if n == sum(sizes) and e.start <= run.start)
        index = next(fits, None)
        start = run.start if index is None else starts.pop(index)[0].start
        around = next((p for p in phases if p.start <= start < p.end), None)
        name = around.name.removeprefix("all-reduce of ") if around else ""
        nbytes = sum(
            size * _item_bytes(kind)
            for size, kind in zip(sizes, run.arguments["Input type"], strict=True)
        )
        bucket = around.bucket if around else None
        found.append(Collective(name, bucket, start, run.start, _find_end(run, raw), nbytes))
    return sorted(found, key=lambda collective: collective.start)


def _find_end(run: _Raw, raw: list[_Raw]) -> float:
    # torch ends the event after callbacks, which the same thread runs once it has the sum.
    after = (e.start for e in raw if e.thread == run.thread and e.category == "cpu_op")
    return next((start for start in after if run.start < start < run.end), run.end)


def _numel(shapes: Iterable[Iterable[int]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _item_bytes(kind: str) -> int:
    if kind not in _ITEM_BYTES:
        raise ValueError(f"a collective has the dtype {kind!r}; known are {', '.join(_ITEM_BYTES)}")
    return _ITEM_BYTES[kind]


def _find_memory(events: Iterable[dict[str, Any]], origin: float) -> list[tuple[float, int]]:
    found = [
        ((e["ts"] - origin) / 1e3, e["args"]["Total Allocated"], e["args"]["Bytes"])
        for e in events
        if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0
    ]
    found.sort(key=lambda event: event[0])
    before = found[0][1] - found[0][2] if found else 0
    return [(ms, allocated - before) for ms, allocated, _ in found]

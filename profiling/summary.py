"""What a trace of DDP training comes to: times of phases, bytes, hidden communication, memory.

Communication counts as hidden while the main thread computes. A collective is in flight from the
call that starts it until this rank has the sum; that includes its wait for a thread of gloo's and
for ranks that come later. The time in which any is in flight has three parts:

- behind backward: the main thread computes gradients (events of autograd, less our hook);
- behind compression: it runs our hook, as Q of one bucket while that of another travels;
- exposed: the rest. It waits in the hook, waits when backward has ended, starts a collective, or
  runs what no event tells of.

Hidden are the first two. In a graph of ``python_reducer`` compression can't be told from backward:
it counts as backward. Ranks that share processor cores with gloo's threads pay for what is hidden.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from profiling.events import Events
from profiling.intervals import Interval, intersect, merge, subtract, total

DEFINITION = (
    "hidden: while a collective is in flight (from its start to the sum), the main thread computes "
    "gradients or runs our hook; exposed: it waits, starts a collective, or backward has ended"
)

_LABELS = {
    "compression": "our hook without waits",
    "waiting": "waiting in backward",
    "starting": "starting collectives",
    "callbacks": "callbacks on gloo's threads",
    "in_flight": "collectives in flight",
    "behind_backward": "  behind backward",
    "behind_compression": "  behind our hook",
    "exposed": "  exposed",
}


@dataclass(frozen=True)
class PhaseTime:
    """Time in one of our ranges for one bucket.

    Attributes:
        name: Of the phase.
        bucket: Of the step's order, or None.
        count: How often, in all recorded steps.
        ms: In all recorded steps.
    """

    name: str
    bucket: int | None
    count: int
    ms: float


@dataclass(frozen=True)
class Traffic:
    """All-reduces of one kind and size.

    Attributes:
        name: What they sum up; ``""`` if no range of ours says so.
        bucket: Of the step's order, or None.
        nbytes: Of each.
        count: How many, in all recorded steps.
        ms: In flight, sum over all of them.
        queued_ms: Of that, until a thread of gloo's took it.
    """

    name: str
    bucket: int | None
    nbytes: int
    count: int
    ms: float
    queued_ms: float


@dataclass(frozen=True)
class Summary:
    """What one rank's trace comes to; ``_ms`` and ``_bytes`` are means over the recorded steps.

    Attributes:
        rank: Of the process.
        steps: Number of recorded steps.
        step_ms: A step.
        forward_ms: Forward.
        backward_ms: Gradients, without any hook.
        compression_ms: Our hook, without waits and starts of collectives.
        waiting_ms: Waits inside of backward: in our hook, or in a compiled graph.
        starting_ms: Calls that start collectives.
        optimizer_ms: The optimizer.
        callbacks_ms: Operators on threads of gloo's.
        in_flight_ms: Any collective is in flight.
        behind_backward_ms: Part of it; see above.
        behind_compression_ms: Part of it.
        exposed_ms: Part of it.
        sent_bytes: Bytes handed to all-reduce.
        peak_bytes: The most that was allocated, over what was when recording began; None if the
            trace holds no memory.
        phases: Times of our ranges.
        traffic: The all-reduces.
    """

    rank: int
    steps: int
    step_ms: float
    forward_ms: float
    backward_ms: float
    compression_ms: float
    waiting_ms: float
    starting_ms: float
    optimizer_ms: float
    callbacks_ms: float
    in_flight_ms: float
    behind_backward_ms: float
    behind_compression_ms: float
    exposed_ms: float
    sent_bytes: float
    peak_bytes: int | None
    phases: list[PhaseTime]
    traffic: list[Traffic]

    @property
    def hidden_share(self) -> float | None:
        """Hidden part of the communication, 0 to 1; None without communication."""
        hidden = self.behind_backward_ms + self.behind_compression_ms
        return hidden / self.in_flight_ms if self.in_flight_ms else None


def summarize(events: Events) -> Summary:
    """Add up what a trace says.

    Args:
        events: From `profiling.events.find_events`.

    Returns:
        The summary.
    """
    steps = len(events.steps)
    in_flight = merge((c.start, c.end) for c in events.collectives)
    computing = merge(events.backward + events.compression)

    def mean(intervals: list[Interval]) -> float:
        return total(intervals) / steps

    return Summary(
        rank=events.rank,
        steps=steps,
        step_ms=mean(events.steps),
        forward_ms=mean(events.forward),
        backward_ms=mean(events.backward),
        compression_ms=mean(events.compression),
        waiting_ms=mean(events.waiting),
        starting_ms=mean(events.starting),
        optimizer_ms=mean(events.optimizer),
        callbacks_ms=mean(events.callbacks),
        in_flight_ms=mean(in_flight),
        behind_backward_ms=mean(intersect(in_flight, events.backward)),
        behind_compression_ms=mean(intersect(in_flight, events.compression)),
        exposed_ms=mean(subtract(in_flight, computing)),
        sent_bytes=sum(c.nbytes for c in events.collectives) / steps,
        peak_bytes=max((nbytes for _, nbytes in events.memory), default=None),
        phases=_add_phases(events),
        traffic=_add_traffic(events),
    )


def _add_phases(events: Events) -> list[PhaseTime]:
    times: dict[tuple[str, int | None], list[float]] = {}
    for phase in events.phases:
        times.setdefault((phase.name, phase.bucket), []).append(phase.end - phase.start)
    return [PhaseTime(*key, len(ms), sum(ms)) for key, ms in times.items()]


def _add_traffic(events: Events) -> list[Traffic]:
    kinds: dict[tuple[str, int | None, int], list[tuple[float, float]]] = {}
    for c in events.collectives:
        times = kinds.setdefault((c.name, c.bucket, c.nbytes), [])
        times.append((c.end - c.start, c.taken - c.start))
    return [
        Traffic(*key, len(times), sum(ms for ms, _ in times), sum(queued for _, queued in times))
        for key, times in kinds.items()
    ]


def time_table(summaries: list[Summary], title: str) -> Table:
    """Lay out the times of all ranks, in ms per step.

    Args:
        summaries: One for each rank.
        title: Of the table.

    Returns:
        A column for each rank.
    """
    table = Table(title=title, caption=DEFINITION)
    table.add_column("ms per step")
    for summary in summaries:
        table.add_column(f"rank {summary.rank}", justify="right")
    rows = [_time_rows(summary) for summary in summaries]
    for name in dict.fromkeys(name for row in rows for name in row):
        table.add_row(name, *(row.get(name, "") for row in rows))
    return table


def _time_rows(summary: Summary) -> dict[str, str]:
    parts = ("step", "forward", "backward", "optimizer", "compression", "waiting", "starting")
    rows = {_LABELS.get(name, name): f"{getattr(summary, f'{name}_ms'):.2f}" for name in parts}
    for name in dict.fromkeys(phase.name for phase in summary.phases):
        ms = sum(phase.ms for phase in summary.phases if phase.name == name)
        rows[f"  {name}"] = f"{ms / summary.steps:.2f}"
    if summary.callbacks_ms:
        rows[_LABELS["callbacks"]] = f"{summary.callbacks_ms:.2f}"
    for name in ("in_flight", "behind_backward", "behind_compression", "exposed"):
        rows[_LABELS[name]] = f"{getattr(summary, f'{name}_ms'):.2f}"
    share = summary.hidden_share
    rows["  hidden share"] = "" if share is None else f"{share:.0%}"
    peak = summary.peak_bytes
    rows["memory peak, MB"] = "" if peak is None else f"{peak / 1e6:.2f}"
    return rows


def traffic_table(summary: Summary) -> Table:
    """Lay out one rank's collectives.

    Args:
        summary: The rank's.

    Returns:
        A row for each kind and size.
    """
    mean = f"{summary.sent_bytes:,.0f} bytes per step"
    table = Table(title=f"All-reduces of rank {summary.rank}: {mean}")
    for name in ("sums up", "bucket", "bytes each", "per step", "ms each", "of it queued"):
        table.add_column(name, justify="left" if name == "sums up" else "right")
    for t in summary.traffic:
        times = (f"{t.ms / t.count:.2f}", f"{t.queued_ms / t.count:.2f}")
        bucket = "" if t.bucket is None else str(t.bucket)
        share = f"{t.count / summary.steps:g}"
        table.add_row(t.name or "not named", bucket, f"{t.nbytes:,}", share, *times)
    return table


def to_json(summaries: Iterable[Summary]) -> list[dict[str, Any]]:
    """Return what is saved.

    Args:
        summaries: One for each rank.

    Returns:
        Their fields and `Summary.hidden_share`.
    """
    return [{**asdict(s), "hidden_share": s.hidden_share} for s in summaries]

"""Named ranges in profiler traces: which phase of which bucket runs when."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

_NOTHING = nullcontext()


def named_range(phase: str, bucket: int | None = None) -> AbstractContextManager[object]:
    """Mark what runs inside of the context in the traces of ``torch.profiler``.

    Args:
        phase: Such as ``"P"`` or ``"all-reduce of Q"``.
        bucket: The bucket's place in the step's order; None for what belongs to no bucket.

    Returns:
        A range named ``powersgd: phase, bucket i``. Nothing if no profiler runs: a range costs
        microseconds also then, asking for the profiler tens of nanoseconds.

    Example:
        >>> with torch.profiler.profile() as profiler, named_range("P", 3):
        ...     _ = torch.ones(1)
        >>> "powersgd: P, bucket 3" in {event.name for event in profiler.events()}
        True
    """
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return _NOTHING
    where = "" if bucket is None else f", bucket {bucket}"
    return record_function(f"powersgd: {phase}{where}")

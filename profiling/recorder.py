"""Record steps with ``torch.profiler`` and write the traces so that people find their way."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

TENSORBOARD = "tensorboard"  # directory of the traces for its plugin
PREFIX = "powersgd: "  # of our ranges


def prepare(out: Path, rank: int) -> None:
    """Remove an earlier recording, which TensorBoard and people would mix with the new one.

    Args:
        out: Directory of the recording.
        rank: This process, of the default group; all of them make this call.
    """
    if rank == 0:
        _remove(out, "rank*")
    dist.barrier()
    _remove(out, f"rank{rank}")  # where ranks do not share a directory


def _remove(out: Path, process: str) -> None:
    names = (".json.gz", "-step.png", "-memory.png")
    for pattern in (
        *(process + name for name in names),
        f"{TENSORBOARD}/{process}.*.pt.trace.json",
    ):
        for path in out.glob(pattern):
            path.unlink()


def record_steps(
    step: Callable[[], None],
    count: int,
    out: Path,
    rank: int,
    title: str,
    *,
    all_threads: bool = False,
) -> dict[str, Any]:
    """Record steps, and write the trace.

    Args:
        step: Makes a step; one more is made, unrecorded, to warm the profiler up.
        count: Steps to record.
        out: Directory of the recording: the trace becomes ``rank0.json.gz`` there, and a file for
            TensorBoard's plugin in which our ranges are operators.
        rank: This process.
        title: Named in the trace.
        all_threads: Whether to record operators of all threads, and no memory; else those of this
            thread alone, and its memory. gloo's collectives are recorded with both.

    Returns:
        The trace.
    """
    target = out / TENSORBOARD
    config = _ExperimentalConfig(profile_all_threads=all_threads)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=count, repeat=1),
        on_trace_ready=tensorboard_trace_handler(str(target), f"rank{rank}"),
        record_shapes=True,
        profile_memory=not all_threads,
        experimental_config=config,
    ) as profiler:
        for _ in range(count + 1):
            step()
            profiler.step()
    (written,) = target.glob(f"rank{rank}.*.pt.trace.json")
    trace: dict[str, Any] = json.loads(written.read_bytes())
    _name_(trace, rank, title)
    packed = gzip.compress(json.dumps(trace).encode())
    (out / f"rank{rank}.json.gz").write_bytes(packed)
    written.write_text(json.dumps(_with_operators(trace)))
    return trace


def _with_operators(trace: dict[str, Any]) -> dict[str, Any]:
    # The plugin's operator view knows operators alone, and skips what else was annotated.
    events = [
        {**e, "cat": "cpu_op"} if e["name"].startswith(PREFIX) and e["ph"] == "X" else e
        for e in trace["traceEvents"]
    ]
    return {**trace, "traceEvents": events}


def _name_(trace: dict[str, Any], rank: int, title: str) -> None:
    # torch calls every process and every thread "python".
    events = trace["traceEvents"]
    trace.pop("traceName", None)  # a path of this machine
    main = next(e["tid"] for e in events if e["name"].startswith("ProfilerStep#"))
    gloo = {e["tid"] for e in events if e["name"].startswith("gloo:")}
    for event in events:
        if event["ph"] != "M" or "args" not in event:
            continue
        arguments = event["args"]
        if event["name"] == "process_name" and arguments["name"].startswith("python"):
            arguments["name"] = f"rank {rank}: {title}"
        elif event["name"] == "process_sort_index" and event["pid"] != "Spans":
            arguments["sort_index"] = rank
        elif event["name"] == "thread_name" and event["tid"] == main:
            arguments["name"] = "main thread"
        elif event["name"] == "thread_name" and event["tid"] in gloo:
            arguments["name"] = "gloo"
        elif event["name"] == "thread_sort_index" and event["tid"] in (main, *gloo):
            arguments["sort_index"] = 0 if event["tid"] == main else 1

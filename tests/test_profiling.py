"""What `python -m profiling.ddp` records, writes and says is what happened."""

import gzip
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from powersgd.layout import ParameterSpec
from powersgd.plan import make_plan
from profiling import ddp
from profiling.events import find_events, read_trace
from profiling.intervals import intersect, merge, subtract, total
from profiling.nets import Net, make_task
from profiling.summary import summarize

RANK, STEPS = 2, 2
PHASES = {
    *("plan", "P", "all-reduce of P", "wait for P", "orthogonalization"),
    *("Q", "all-reduce of Q", "wait for Q", "reconstruction"),
}
PNG = b"\x89PNG\r\n"


def _run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(ddp.main)
    return CliRunner().invoke(app, list(arguments))


def _event(name: str, start: int, end: int, thread: int = 1, **arguments: Any) -> dict[str, Any]:
    is_ours = name.startswith(("powersgd", "gloo", "ProfilerStep", "Optimizer", "Distributed"))
    category = "user_annotation" if is_ours else "cpu_op"
    times = {"ts": 7e9 + start, "dur": end - start}
    return {"ph": "X", "cat": category, "name": name, "tid": thread, **times, "args": arguments}


def _start(numel: int, start: int, end: int) -> dict[str, Any]:
    return _event("c10d::allreduce_", start, end, **{"Input Dims": [[[numel]], [], []]})


def _gloo(numel: int, kind: str, start: int, end: int, thread: int) -> dict[str, Any]:
    arguments = {"Input Dims": [[numel]], "Input type": [kind]}
    return _event("gloo:all_reduce", start, end, thread, **arguments)


def _memory(at: int, allocated: int, size: int, device: int = 0) -> dict[str, Any]:
    arguments = {"Total Allocated": allocated, "Bytes": size, "Device Type": device}
    return {"ph": "i", "name": "[memory]", "tid": 1, "ts": 7e9 + at, "args": arguments}


def _trace() -> dict[str, Any]:
    """One step of 10 ms with two buckets; times in microseconds."""
    node = "autograd::engine::evaluate_function: Node"
    events = [
        _event("ProfilerStep#4", 0, 10_000),
        _event("DistributedDataParallel.forward", 0, 2000),
        _event(node, 2000, 4000),
        _event("powersgd: P, bucket 0", 3000, 3500),
        _event("powersgd: all-reduce of P, bucket 0", 3500, 3700),
        _start(100, 3550, 3650),
        _gloo(100, "float", 3700, 6000, thread=2),
        _event(node, 4000, 5000),
        _event(node, 5000, 9000),
        _event("powersgd: P, bucket 1", 5200, 5600),
        _event("powersgd: all-reduce of P, bucket 1", 5600, 5800),
        _start(50, 5650, 5750),
        _event("powersgd: wait for P, bucket 0", 5800, 6000),
        _event("powersgd: wait for P, bucket 1", 6000, 7100),
        _gloo(50, "c10::Half", 6100, 7000, thread=3),
        _event("powersgd: Q, bucket 0", 7200, 7600),
        _event("powersgd: Q, bucket 0", 7600, 7800),
        _event("powersgd: reconstruction, bucket 0", 8000, 8500),
        _event("Optimizer.step#SGD.step", 9200, 9800),
        _memory(100, 5000, 1000),  # 4000 before recording began
        _memory(4000, 9000, 4000),
        _memory(5000, 90_000, 4000, device=1),
        _memory(6000, 6000, -3000),
    ]
    return {"distributedInfo": {"rank": 3, "world_size": 4}, "traceEvents": events}


def test_summary_of_a_trace_by_hand() -> None:
    summary = summarize(find_events(_trace()))
    assert (summary.rank, summary.steps) == (3, 1)
    expected = {
        "step": 10,
        "forward": 2,
        "backward": 1 + 1.5 + 0.5,  # 2 to 3, 3.7 to 5.2, 8.5 to 9
        "compression": 0.55 + 0.05 + 0.45 + 0.05 + 1.4,
        "waiting": 1.3,
        "starting": 0.2,
        "optimizer": 0.6,
        "callbacks": 0,
        "in_flight": 7 - 3.55,
        "behind_backward": 1.5,
        "behind_compression": 0.05 + 0.45 + 0.05,
        "exposed": 0.1 + 0.1 + 1.2,
    }
    actual = {name: getattr(summary, f"{name}_ms") for name in expected}
    assert actual == pytest.approx(expected)
    assert summary.hidden_share == pytest.approx(2.05 / 3.45)
    assert summary.peak_bytes == 5000
    assert summary.sent_bytes == 100 * 4 + 50 * 2
    (first, second) = summary.traffic
    assert (first.name, first.bucket, first.nbytes, first.count) == ("P", 0, 400, 1)
    assert (second.name, second.bucket, second.nbytes, second.count) == ("P", 1, 100, 1)
    assert [first.ms, first.queued_ms] == pytest.approx([2.45, 0.15])
    assert [second.ms, second.queued_ms] == pytest.approx([1.35, 0.45])
    (q,) = (phase for phase in summary.phases if phase.name == "Q")
    assert (q.bucket, q.count, q.ms) == (0, 2, pytest.approx(0.6))


def test_what_a_callback_does_is_no_communication() -> None:
    trace = _trace()
    trace["traceEvents"].append(_event("aten::mm", 5500, 5900, thread=2))
    events = find_events(trace)
    assert events.collectives[0].end == pytest.approx(5.5)
    assert total(events.callbacks) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("event", "message"),
    [("ProfilerStep#4", "has no ProfilerStep# event"), ("gloo:all_reduce", "the dtype 'Float4'")],
)
def test_a_trace_that_cannot_be_read(event: str, message: str) -> None:
    trace = _trace()
    for found in [e for e in trace["traceEvents"] if e["name"] == event]:
        found["args"]["Input type"] = ["Float4"]
        found["name"] = event.replace("Profiler", "Other")
    with pytest.raises(ValueError, match=message):
        find_events(trace)


def test_intervals_against_points() -> None:
    a, b = merge([(5, 9), (0, 2), (1, 3), (3, 4), (7, 7)]), merge([(1, 2), (3, 6), (8, 20)])
    assert a == [(0, 4), (5, 9)]

    def points(intervals: list[tuple[float, float]]) -> set[int]:
        return {i for low, high in intervals for i in range(int(low), int(high))}

    assert points(intersect(a, b)) == points(a) & points(b)
    assert points(subtract(a, b)) == points(a) - points(b)
    assert total(a) == len(points(a))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("recorded") / "new"
    options = ["--hook", "eager", "--model", "tiny", "--rank", str(RANK), "--steps", str(STEPS)]
    result = _run("--out", str(out), *options, "--ranks", "2")
    assert result.exit_code == 0, result.output
    assert "hidden share" in result.output
    return out


def _expected_bytes(buckets: int) -> tuple[int, int]:
    """Of all P messages in a step, and of all Q; sums over buckets do not depend on the buckets."""
    specs = [ParameterSpec.of(p) for p in make_task(Net.TINY, 0).model.parameters()]
    plans = [make_plan([spec], RANK, 2) for spec in specs]
    p = sum(plan.p_numel + plan.uncompressed_numel for plan in plans) + buckets  # a flag in each
    return 4 * p, 4 * sum(plan.q_numel for plan in plans)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_phase_of_every_bucket_is_in_the_trace(recorded: Path, rank: int) -> None:
    trace = read_trace(recorded / f"rank{rank}.json.gz")
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert f"rank {rank}: powersgd eager, rank 2, tiny" in names
    assert trace["distributedInfo"]["rank"] == rank
    events = find_events(trace)
    assert (events.rank, events.world_size, len(events.steps)) == (rank, 2, STEPS)
    buckets = {phase.bucket for phase in events.phases}
    assert len(buckets) > 1
    counts = Counter((phase.name, phase.bucket) for phase in events.phases)
    assert counts == {(name, bucket): STEPS for name in PHASES for bucket in buckets}
    for name, expected in zip("PQ", _expected_bytes(len(buckets)), strict=True):
        mine = [c for c in events.collectives if c.name == name]
        assert Counter(c.bucket for c in mine) == dict.fromkeys(buckets, STEPS)
        assert sum(c.nbytes for c in mine) == STEPS * expected
    assert all(c.start <= c.taken <= c.end for c in events.collectives)
    assert len(events.collectives) == 2 * STEPS * len(buckets)
    assert sum(e["name"] == "gloo:all_reduce" for e in trace["traceEvents"]) == len(
        events.collectives
    )


def test_pictures_and_summary_are_written(recorded: Path) -> None:
    for rank in (0, 1):
        for picture in ("step", "memory"):
            assert (recorded / f"rank{rank}-{picture}.png").read_bytes().startswith(PNG)
    saved = json.loads((recorded / "summary.json").read_text())
    assert [summary["rank"] for summary in saved["ranks"]] == [0, 1]
    for summary in saved["ranks"]:
        parts = ("behind_backward_ms", "behind_compression_ms", "exposed_ms")
        assert math.isclose(sum(summary[part] for part in parts), summary["in_flight_ms"])
        assert 0 <= summary["hidden_share"] <= 1
        buckets = len({phase["bucket"] for phase in summary["phases"]})
        assert summary["sent_bytes"] == sum(_expected_bytes(buckets))
        assert summary["peak_bytes"] > 0


LOAD = """
import json, sys
from torch_tb_profiler import io
from torch_tb_profiler.profiler.loader import RunLoader

with io.Cache() as caches:
    run = RunLoader("run", sys.argv[1], caches).load()
found = {"views": [view.name for view in run.views], "operators": {}}
for (worker, _), profile in run.profiles.items():
    if worker == "All":
        found["traffic"] = profile.comm_ops["data"]
    else:
        rows = profile.operation_table_by_name["data"]
        found["operators"][worker] = {row["name"]: row["calls"] for row in rows}
print(json.dumps(found))
"""


@pytest.mark.timeout(120)
def test_tensorboards_plugin_reads_the_traces(recorded: Path) -> None:
    """With the plugin's own loader: what it would show, and not whether a browser shows it."""
    pytest.importorskip("torch_tb_profiler.profiler.loader")
    command = [sys.executable, "-W", "error", "-c", LOAD, str(recorded / "tensorboard")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["views"] == ["overall", "operator", "trace", "distributed", "memory"]
    events = find_events(read_trace(recorded / "rank0.json.gz"))
    buckets = {phase.bucket for phase in events.phases}
    for worker in ("rank0", "rank1"):
        ours = {n: c for n, c in found["operators"][worker].items() if n.startswith("powersgd")}
        assert ours == {f"powersgd: {p}, bucket {b}": STEPS for p in PHASES for b in buckets}
        ((name, calls, nbytes, *_),) = found["traffic"][worker]["rows"]
        assert (name, calls) == ("gloo:all_reduce", 2 * STEPS * len(buckets))
        assert nbytes == STEPS * sum(_expected_bytes(len(buckets)))


@pytest.mark.timeout(120)
def test_torchrun_brings_the_ranks(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = ["-m", "profiling.ddp", "--hook", "bf16", "--model", "tiny", "--steps", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, *script, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall("ms per step", done.stdout)) == 1  # rank 0 alone speaks
    saved = json.loads((tmp_path / "summary.json").read_text())
    numel = sum(p.numel() for p in make_task(Net.TINY, 0).model.parameters())
    assert [summary["sent_bytes"] for summary in saved["ranks"]] == [2 * numel] * 2
    for rank in (0, 1):
        trace = json.loads(gzip.decompress((tmp_path / f"rank{rank}.json.gz").read_bytes()))
        assert not [e for e in trace["traceEvents"] if e["name"].startswith("powersgd")]
        assert (tmp_path / f"rank{rank}-step.png").exists()
        assert not (tmp_path / f"rank{rank}-memory.png").exists()  # torch cannot count it
        assert saved["ranks"][rank]["peak_bytes"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '--out'"),
        (["--out", "FILE"], "is a file, but must be a directory"),
        (["--out", "new", "--hook", "zip"], "Invalid value for '--hook'"),
        (["--out", "new", "--steps", "0"], "Invalid value for '--steps'"),
        (["--out", "new", "--rank", "0"], "Invalid value for '--rank'"),
        (["--out", "new", "--model", "huge"], "Invalid value for '--model'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str) -> None:
    result = _run(*(__file__ if argument == "FILE" else argument for argument in arguments))
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
    assert not Path("new").exists()

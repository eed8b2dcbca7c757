"""The benchmark measures what it says, in time and in memory."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from profiling import benchmark, calls, results, turns
from profiling.hooks import Hook
from profiling.results import Measured, Memory, Result, Row, Timing
from profiling.scaling import Sweep, make_sweep

N, M = 256, 192
NUMEL = N * M + 64
RANK = 2


def _run(*arguments: object) -> Any:
    app = typer.Typer()
    app.command()(benchmark.main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def _entries(path: Path) -> list[dict[str, Any]]:
    content = json.loads(path.read_text())
    assert content["machine"]["torch"] == torch.__version__
    assert content["machine"]["cores"] >= 1
    return content["rows"]


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"weight": (N, M), "bias": (64,)}
    monkeypatch.setattr(benchmark, "WORKLOADS", {"tiny": lambda: tiny})


@pytest.mark.usefixtures("_tiny")
def test_every_hook_is_timed_and_its_memory_counted(tmp_path: Path) -> None:
    options = ["--workload", "tiny", "--rank", RANK, "--threads", 1, "--repeats", 3]
    hooks = [h for h in Hook if h not in (Hook.PYTHON_REDUCER, Hook.COMPILED)]
    for hook in hooks:
        options += ["--hook", hook.value]
    save, plots = tmp_path / "rows.json", tmp_path / "plots"
    result = _run(*options, "--json", save, "--plot", plots)
    assert result.exit_code == 0, result.output
    found = {entry["hook"]: entry for entry in _entries(save)}
    assert list(found) == [hook.value for hook in hooks]
    for entry in found.values():
        assert (entry["numel"], entry["tensors"], entry["rank"]) == (NUMEL, 2, RANK)
        assert 0 < entry["time"]["low"] <= entry["time"]["median"] <= entry["time"]["high"]
        assert entry["floor"]["median"] > 0
    peak = {name: entry["memory"]["peak_bytes"] for name, entry in found.items()}
    kept = {name: entry["memory"]["kept_bytes"] for name, entry in found.items()}
    assert peak["none"] < 100
    assert 2 * NUMEL <= peak["fp16"] < 2 * NUMEL + 200
    assert kept["none"] < 100
    # Ours keeps the residual of what is compressed, Q, and the spare Q.
    ours = 4 * (N * M + 2 * RANK * M)
    assert ours <= kept["eager"] < ours + 2000
    assert peak["eager"] < 4 * N * M / 2
    assert {path.name for path in plots.iterdir()} == {"calls.png", "memory.png"}


@pytest.mark.filterwarnings("ignore")  # torch's own, while it traces
@pytest.mark.usefixtures("_tiny")
def test_python_reducer_is_compared_with_a_compiled_plain_pass(tmp_path: Path) -> None:
    options = ["--workload", "tiny", "--rank", RANK, "--threads", 1, "--repeats", 3]
    save = tmp_path / "rows.json"
    hooks = ["--hook", "eager", "--hook", "python_reducer"]
    result = _run(*options, *hooks, "--json", save)
    assert result.exit_code == 0, result.output
    kinds = [(entry["measured"], entry["hook"]) for entry in _entries(save)]
    assert kinds == [("call", "eager"), ("pass", "eager"), ("pass", "python_reducer")]
    assert all(e["plain"]["time"]["median"] > 0 for e in _entries(save) if e["measured"] == "pass")
    assert "Forward and backward" in result.output


def test_sweeps_vary_what_they_say(tmp_path: Path) -> None:
    save, picture = tmp_path / "rows.json", tmp_path / "sweep.svg"
    sizes = ["--sweep", "size", "--size", 0.25, "--size", 1, "--tensors", 4]
    options = ["--repeats", 3, "--hook", "eager", "--json", save, "--plot", picture]
    result = _run(*sizes, *options)
    assert result.exit_code == 0, result.output
    assert [(e["gradient_bytes"], e["tensors"]) for e in _entries(save)] == [(2**18, 4), (2**20, 4)]
    assert picture.read_text().count("<svg") == 1
    squares = make_sweep(Sweep.TENSORS, [1], [16, 1, 4])
    assert [(s.count, s.side) for s in squares] == [(1, 512), (4, 256), (16, 128)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "none"], "no workload 'none'"),
        (["--rank", "0"], "0 is not allowed"),
        (["--size", "4"], "belong to --sweep"),
        (["--sweep", "size", "--workload", "gpt"], "exclude each other"),
        (["--sweep", "tensors", "--size", "1", "--size", "2"], "takes one size"),
        (["--sweep", "size", "--size", "0"], "give numbers > 0"),
        (["--sweep", "size", "--size", "1e-6"], "too little for 16 matrices"),
        (["--sweep", "size", "--hook", "python_reducer"], "not in sweeps"),
        (["--json", "/no/such/file.json"], "no file in a directory that exists"),
        (["--plot", "x.pdf"], "must be a directory, or end in .png or .svg"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments: list[str], message: str) -> None:
    result = _run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_what_does_not_fit_is_said_or_measured_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "available_bytes", lambda: 6e9)
    hooks = [Hook.NONE, Hook.TORCH, Hook.EAGER]
    # torch's alone: 1 + 1 + 1.3 + 2.2 GB, and 0.3 GB for its process.
    blocks, skipped = calls.make_blocks(hooks, 10**9, shared=1, each=1)
    assert blocks == [[Hook.NONE, Hook.EAGER]]
    (sentence,) = skipped
    assert sentence == (
        "torch's PowerSGD is skipped: it needs 5.8 GB of memory, and 5.4 GB may be used."
    )
    monkeypatch.setattr(calls, "available_bytes", lambda: 8.5e9)
    blocks, skipped = calls.make_blocks(hooks, 10**9, shared=1, each=1)
    assert (blocks, skipped) == ([[Hook.NONE, Hook.TORCH], [Hook.EAGER]], [])
    assert results.available_bytes() > 0


def _make_entry(path: Path, name: str) -> turns.Action:
    def write(what: str) -> None:
        with path.open("a") as file:
            file.write(f"{name} {what} {os.getpid()} {torch.get_num_threads()}\n")

    return turns.Action(lambda: write("run"), lambda: write("prepare"), lambda: Memory(len(name)))


def test_hooks_take_turns_in_processes_of_their_own(tmp_path: Path) -> None:
    path, names = tmp_path / "entries", ["one", "three"]
    makes = {name: partial(_make_entry, path, name) for name in names}
    found, floor = turns.take_turns(makes, 10, threads=1, repeats=3)
    entries = [line.split() for line in path.read_text().splitlines()]
    turn = [[name, what] for name in names for what in ("prepare", "run")]
    assert [entry[:2] for entry in entries] == (turns.WARM_UP + 3) * turn
    processes = {(name, int(process)) for name, _, process, _ in entries}
    assert len(processes) == len({process for _, process in processes} | {os.getpid()}) - 1 == 2
    assert {threads for *_, threads in entries} == {"1"}
    assert {name: memory for name, (_, memory) in found.items()} == {
        "one": Memory(3),
        "three": Memory(5),
    }
    assert floor.low > 0


def test_speedup_is_torchs_median_over_ours() -> None:
    def result(hook: Hook, *times: float) -> Result:
        timing = Timing.of(times)
        return Result(Measured.CALL, hook, timing, timing, Memory(0))

    pair = [result(Hook.TORCH, 8.0, 9.0, 10.0), result(Hook.EAGER, 2.0, 3.0, 90.0)]
    row = Row("tiny", 10, 1, 1, 1, pair, [])
    assert row.speedup(Hook.EAGER) == 3
    assert row.speedup(Hook.COMPILED) is None

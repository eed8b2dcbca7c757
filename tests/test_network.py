"""A slow link is as slow as it says, is left without a trace, and tells where PowerSGD pays."""

import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from typer.testing import CliRunner

from profiling import link, network
from profiling.hooks import Hook
from profiling.link import LinkError, find_obstacle, namespaces
from profiling.network_rank import Trainer, require_equal
from profiling.network_report import ALWAYS, NEVER, Row, describe_break_even, find_crossings
from tests.ranks import run_ranks

ROOT = Path(__file__).parent.parent
SHAPES = [(256, 256)] * 4
NBYTES = 4 * 256 * 256 * 4
COMMAND = [sys.executable, "-m", "profiling.network", "--rate", "1Mbit", "--hook", "none"]


@functools.cache
def _why_not() -> str | None:
    try:
        with namespaces(2) as made:
            made.shape(1e8)
    except LinkError as error:
        return str(error)
    return None


@pytest.fixture
def permitted() -> None:
    """Skip where there can be no such link."""
    reason = _why_not()
    if reason is not None:
        pytest.skip(reason)


def _names(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split() if name.startswith(f"powersgd-{pid}-")]


def _pids(name: str) -> list[int]:
    command = ["ip", "netns", "pids", name]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    return [int(pid) for pid in listed.stdout.split()]


def _wait_until(is_done: Callable[[], Any], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not is_done():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


@pytest.mark.usefixtures("permitted")
@pytest.mark.timeout(120)
def test_a_link_is_as_slow_as_it_says_and_a_dead_rank_ends_the_run() -> None:
    hooks = [(Hook.NONE, 3), (Hook.BF16, 0), (Hook.EAGER, 1)]
    rates = (200e6, 20e6, 200e6)
    options = {"repeats": 5, "limit_s": 60}
    with closing(network.measure_each(rates, hooks, 2, SHAPES, **options)) as each:  # type: ignore[arg-type]
        fast, slow = next(each), next(each)
        for rows, rate in ((fast, 200e6), (slow, 20e6)):
            assert [(row.hook, row.rank) for row in rows] == [
                *((h, 0) for h, _ in hooks[:2]),
                hooks[2],
            ]
            for row in rows:
                # How far below depends on what else the machine does.
                assert 0 < row.achieved_bits_per_s < rate
                assert (row.rate_bits_per_s, row.workers, row.steps) == (rate, 2, 5)
                assert row.low_s <= row.median_s <= row.high_s
                assert min(row.compute_s, row.latency_s) > 0
            sent = [row.sent_bytes for row in rows]
            assert NBYTES < sent[0] < 1.2 * NBYTES  # a ring of two sends everything once
            assert NBYTES / 2 < sent[1] < 1.2 * NBYTES / 2
            assert sent[2] < NBYTES / 20
        # No link can be faster than its rate, whatever else the machine does.
        assert slow[0].median_s > 0.95 * 8 * NBYTES / 20e6
        assert slow[0].median_s > fast[0].median_s
        names = _names(os.getpid())
        assert len(names) == 2
        (victim,) = _pids(next(name for name in names if name.endswith("-1")))
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(LinkError, match="rank 1 ended early with exit code -9"):
            next(each)
    assert _names(os.getpid()) == []


@pytest.mark.usefixtures("permitted")
@pytest.mark.timeout(120)
def test_three_ranks_meet_at_a_bridge() -> None:
    rows = network.measure([50e6], [(Hook.NONE, 0)], 3, SHAPES, repeats=5, limit_s=60)
    (row,) = rows
    assert 0 < row.achieved_bits_per_s < 50e6
    assert 4 / 3 * NBYTES < row.sent_bytes < 1.2 * 4 / 3 * NBYTES  # 2 (W - 1) / W of everything
    assert _names(os.getpid()) == []


@pytest.mark.usefixtures("permitted")
@pytest.mark.timeout(60)
def test_ranks_that_do_not_answer_end_the_run() -> None:
    with pytest.raises(LinkError, match=r"did not answer within 0.2 s"):
        network.measure([1e8], [(Hook.NONE, 0)], 2, SHAPES, limit_s=0.2)
    assert _names(os.getpid()) == []


@pytest.fixture
def running() -> Iterator[tuple["subprocess.Popen[str]", list[int]]]:
    """A command whose ranks are at work, and their ids."""
    process = subprocess.Popen(
        COMMAND, cwd=ROOT, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    with process:
        try:
            _wait_until(lambda: len([_ for name in _names(process.pid) for _ in _pids(name)]) == 2)
            yield process, [pid for name in _names(process.pid) for pid in _pids(name)]
        finally:
            process.kill()


def _have_ended(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}/root").exists() for pid in pids)


@pytest.mark.usefixtures("permitted")
@pytest.mark.timeout(120)
def test_sigterm_leaves_nothing_behind(running: Any) -> None:
    process, pids = running
    process.terminate()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "Traceback" not in errors
    assert _names(process.pid) == []
    assert _have_ended(pids)


@pytest.mark.usefixtures("permitted")
@pytest.mark.timeout(120)
def test_what_a_killed_run_left_goes_with_the_next(running: Any) -> None:
    process, pids = running
    process.kill()
    process.wait()
    _wait_until(lambda: _have_ended(pids))  # of their own, without the one that started them
    assert len(_names(process.pid)) == 2
    with namespaces(2):
        assert _names(process.pid) == []
        assert len(_names(os.getpid())) == 2


@pytest.mark.usefixtures("permitted")
@pytest.mark.parametrize("words", ["netns add .*-1$", "type veth", "type bridge", "address add"])
def test_a_half_made_link_is_removed(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = link._run

    def fail(command: str) -> str:
        if re.search(words, command):
            raise LinkError(f"no {words}")
        return run(command)

    monkeypatch.setattr(link, "_run", fail)
    with pytest.raises(LinkError, match="no "), namespaces(3):
        pass
    assert _names(os.getpid()) == []


@pytest.mark.usefixtures("permitted")
def test_a_latency_is_there_or_refused() -> None:
    with namespaces(2) as made:
        try:
            made.shape(1e8, 0.005)
        except LinkError as error:
            assert "netem" in str(error)  # noqa: PT017 (either is right)
            return
        shown = link._run(f"tc -n {made.names[0]} qdisc show dev veth0")
        assert "delay 5ms" in shown


def _run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(network.main)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "fast"], "'fast' is no link rate"),
        (["--rate", "200Gbit"], "out of range"),
        (["--model", "none"], "no model 'none'"),
        (["--rank", "0"], "0 is not allowed"),
        (["--latency", "soon"], "'soon' is no time"),
        (["--plot", "plot.pdf"], "must end in .png or .svg"),
        (["--workers", "1"], "Invalid value for '--workers'"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str) -> None:
    result = _run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_what_is_missing_is_said_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ip").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = _run("--rate", "1Gbit")
    assert result.exit_code == 1
    missing = "No result: `tc` (of iproute2) isn't on PATH, and a shaped link needs it."
    assert result.output.strip() == missing
    (tmp_path / "tc").touch(mode=0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert find_obstacle() == "network namespaces need root"


RATES = [1e8, 1e9, 1e10]


@pytest.mark.parametrize(
    ("times", "baseline", "crossings", "sentence"),
    [
        # From a tenth to ten times as long in one decade of the rate: half way, 10 ** 8.5.
        ([100, 100, 100], [1000, 10, 10], [10**8.5], "below 316 Mbit/s"),
        # From 1/2 to 4 times as long: after a third of the decade.
        ([10, 40, 40], [20, 10, 10], [10 ** (8 + 1 / 3)], "below 215 Mbit/s"),
        ([1, 1, 2], [2, 1, 1], [1e9], "below 1 Gbit/s"),
        ([1, 1, 1], [2, 1, 2], [], ALWAYS),
        ([1, 1, 1], [1, 1, 2], [], ALWAYS),
        ([2, 2, 2], [1, 1, 1], [], NEVER),
        ([1, 1, 1], [1, 1, 1], [], NEVER),
        ([4, 1, 1], [1, 4, 4], [10**8.5], "above 316 Mbit/s"),
        (
            [1, 2, 1],
            [2, 1, 2],
            [10**8.5, 10**9.5],
            "below 316 Mbit/s, and the curves cross again at 3.16 Gbit/s",
        ),
    ],
)
def test_break_even(
    times: list[float], baseline: list[float], crossings: list[float], sentence: str
) -> None:
    found = find_crossings(RATES, times, baseline)
    assert found == pytest.approx(crossings, rel=1e-9)
    assert describe_break_even(RATES, times, baseline) == sentence


def _row(rate: float, hook: Hook, rank: int, median_s: float) -> Row:
    quartiles = (0.9 * median_s, 1.1 * median_s)
    return Row(rate, hook, rank, 2, median_s, *quartiles, 0.95 * rate, 0.03, 3e-4, 10**6, 9)


def test_the_command_writes_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(rates: list[float], hooks: list[tuple[Hook, int]], *_: Any, **__: Any) -> Any:
        for rate in rates:
            yield [_row(rate, h, r, 0.1 if r else 1e8 / rate) for h, r in hooks]

    monkeypatch.setattr(network, "measure_each", measured)
    files = [str(tmp_path / name) for name in ("rows.json", "plot.svg")]
    hooks = ["--hook", "none", "--hook", "eager", "--rank", "2"]
    rates = ["--rate", "10Gbit", "--rate", "100Mbit"]
    result = _run(*rates, *hooks, "--json", files[0], "--plot", files[1])
    assert result.exit_code == 0, result.output
    saved = network.json.loads(Path(files[0]).read_text())
    assert [row["hook"] for row in saved["rows"]] == ["none", "eager"] * 2
    assert saved["break_even"] == {"powersgd eager, rank 2": {"all-reduce fp32": "below 1 Gbit/s"}}
    assert "below 1 Gbit/s" in result.output
    assert Path(files[1]).read_text().startswith("<?xml")


def _check_averages(rank: int) -> None:
    for hook, tolerance in ((Hook.NONE, 1e-6), (Hook.BF16, 2**-7), (Hook.FP16, 2**-10)):
        task = {"model": [(8, 6), (5,)], "batch": 1}
        trainer = Trainer(task, hook, 0)
        trainer.step()
        mean = trainer.inputs.clone()
        dist.all_reduce(mean)
        gradients = [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
        torch.testing.assert_close(torch.cat(gradients), mean / 2, rtol=tolerance, atol=tolerance)
        require_equal(hook.label, trainer.digest())
    next(trainer.model.parameters()).grad[0, 0] += rank  # type: ignore[index]
    with pytest.raises(RuntimeError, match="fp16 gave ranks different averaged gradients"):
        require_equal(hook.label, trainer.digest())


@pytest.mark.timeout(120)
def test_gradients_are_averages_and_differences_are_noticed() -> None:
    run_ranks(_check_averages, 2)

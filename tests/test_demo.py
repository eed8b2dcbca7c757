"""The command line as a user meets it: the demo, its errors, and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.image
import numpy
import pytest

from powersgd import cli, demo, report
from powersgd.__main__ import main

ROOT = Path(__file__).parent.parent
DEMO = [sys.executable, "-W", "error", "-m", "powersgd", "demo"]
ENDLESS = [*DEMO, "--ranks", "1", "--seeds", "20", "--epochs", "1"]
FULL_BYTES = 4 * 151_306
STEP_BYTES = {1: 4 * 1_917, 2: 4 * 3_600}
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")


class Outcome(NamedTuple):
    stdout: str
    stderr: str
    runs: list[dict[str, Any]]
    png: Path


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("demo")
    options = ["--ranks=2,1", "--seeds=1", "--epochs=2", "--plot=a.png", "--json=a.json"]
    done = subprocess.run(
        [*DEMO, *options], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    runs = json.loads((folder / "a.json").read_text())["runs"]
    return Outcome(done.stdout, done.stderr, runs, folder / "a.png")


def _run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**ENVIRONMENT, **variables}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )


# What a run shows


def test_table_has_a_whole_row_for_each_way_of_averaging(outcome: Outcome) -> None:
    lines = outcome.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in outcome.stdout
    for name, step_bytes, rate in (
        ("all-reduce", "605,224", "1.0"),
        ("rank 1", "7,668", "78.9"),
        ("rank 2", "14,400", "42.0"),
    ):
        (row,) = [line for line in lines if line.startswith(name)]
        cells = re.split(r" {2,}", row.strip())
        assert cells[3:5] == [step_bytes, rate]
        assert 50 < float(cells[1]) <= 100
        assert float(cells[5]) > 0


def test_sentences_agree_with_the_results(outcome: Outcome) -> None:
    plain, *ranks = (100 * run["curve"][-1]["accuracy"] for run in outcome.runs)
    text = " ".join(outcome.stdout.split())
    for rank, accuracy in zip((1, 2), ranks, strict=True):
        (found,) = re.findall(rf"Rank {rank} is (as accurate as|[\d.]+ points \w+) plain", text)
        distance = abs(accuracy - plain)
        expected = f"{distance:.2f} points {'below' if accuracy < plain else 'above'}"
        assert found == (expected if distance > 0.005 else "as accurate as")
    assert "one seed" in text
    assert "what each process hands to all-reduce" in text


def test_bytes_are_those_of_full_and_compressed_steps(outcome: Outcome) -> None:
    assert [run["rank"] for run in outcome.runs] == [None, 1, 2]
    for run in outcome.runs:
        step_bytes = STEP_BYTES.get(run["rank"], FULL_BYTES)
        assert run["step_bytes"] == pytest.approx(step_bytes)
        for point in run["curve"]:
            compressed = max(0, point["step"] - 4)
            full = point["step"] - compressed
            assert point["sent_bytes"] == full * FULL_BYTES + compressed * step_bytes
        assert [point["step"] for point in run["curve"]] == [1, 2, 4, 8, 16, 21, 42]


def test_runs_share_seed_and_data_until_compression_starts(outcome: Outcome) -> None:
    starts = [[point["loss"] for point in run["curve"][:3]] for run in outcome.runs]
    assert starts[1] == pytest.approx(starts[0], rel=1e-5)
    assert starts[2] == pytest.approx(starts[0], rel=1e-5)
    assert len({run["curve"][-1]["loss"] for run in outcome.runs}) == 3


def test_plot_shows_lines_in_the_colours_of_all_runs(outcome: Outcome) -> None:
    pixels = matplotlib.image.imread(outcome.png)[..., :3]
    assert pixels.shape[0] > 400
    assert pixels.shape[1] > 800
    for colour in report.COLORS[:3]:
        wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (numpy.abs(pixels - wanted).max(axis=-1) < 0.02).sum() > 200, colour


def test_log_has_a_line_for_each_run_and_no_noise(outcome: Outcome) -> None:
    names = [line.partition(":")[0] for line in outcome.stderr.splitlines()]
    assert names == ["all-reduce, seed 0", "rank 1, seed 0", "rank 2, seed 0"]


def test_torchrun_trains_the_same_net(outcome: Outcome, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = ["-m", "powersgd.demo", "--rank", "2", "--epochs", "2"]
    done = _run(*launch, *script, TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    *epochs, last = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in epochs] == ["epoch 1", "epoch 2"]
    local = outcome.runs[2]["curve"][-1]
    loss = re.findall(r"test loss ([\d.]+)", epochs[-1])
    assert float(loss[0]) == pytest.approx(local["loss"], rel=0.01)
    assert last.startswith(f"rank 2: test accuracy {local['accuracy']:.2%}, 14,400 bytes per step")


# What it concludes


def _methods(*accuracies: list[float]) -> list[report.Method]:
    ranks = (None, 2)
    results = [
        report.Result(rank, seed, [report.Point(9, 900, 0.1, accuracy)], 100, 1.0, 0.01)
        for rank, group in zip(ranks, accuracies, strict=True)
        for seed, accuracy in enumerate(group)
    ]
    return report.group_by_method(results)


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ([0.97, 0.96], "1.50 points below plain all-reduce (mean of 2 seeds), worse than the"),
        ([0.96, 0.98], "1.00 points below plain all-reduce (mean of 2 seeds), within the"),
        ([0.98, 0.98], "as accurate as plain all-reduce (mean of 2 seeds), and"),
        ([0.99, 0.98], "0.50 points above plain all-reduce (mean of 2 seeds), and"),
    ],
)
def test_conclusion_says_what_is_true(accuracies: list[float], expected: str) -> None:
    plain = [0.98, 0.98]
    (sentence,) = report.conclude(_methods(plain, accuracies))
    assert sentence.startswith(f"Rank 2 is {expected}")


# Help and errors


def test_help_lists_every_option() -> None:
    done = _run(*DEMO, "--help")
    assert done.returncode == 0
    listed = re.findall(r"^  (--[a-z-]+)", done.stdout, flags=re.MULTILINE)
    options = ["--ranks", "--seeds", "--epochs", "--workers", "--batch-size", "--start-iter"]
    assert listed == [*options, "--plot", "--json", "--help"]


@pytest.mark.parametrize(("processes", "images"), [(2, 64), (3, 63), (16, 64), (100, 100)])
def test_the_default_batch_is_about_64_images_and_fits_the_processes(
    processes: int, images: int
) -> None:
    assert demo.default_batch_size(processes) == images


def test_no_command_and_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "demo" in capfd.readouterr().out
    assert main(["--version"]) == 0
    assert re.fullmatch(r"torch-powersgd \d+\.\d+\.\d+\S*\n", capfd.readouterr().out)


WRONG = [
    ("--seeds 0", "--seeds is 0, but must be from 1 to 20"),
    ("--seeds x", "'x' is not a whole number"),
    ("--epochs 0", "--epochs is 0, but must be from 1 to 1000"),
    ("--epochs 1.5", "'1.5' is not a whole number"),
    ("--workers 1", "--workers is 1, but must be from 2 to 16"),
    ("--batch-size 63", "--batch-size is 63, but must be a multiple of 2"),
    ("--batch-size 1", "--batch-size is 1, but must be from 2 to 256"),
    ("--start-iter 1", "--start-iter is 1, but must be from 2 to 209"),
    ("--start-iter 210", "--start-iter is 210, but must be from 2 to 209 (a run has 210 steps)"),
    ("--ranks 1,a", "--ranks is '1,a', but must be numbers such as 1,2,4"),
    ("--ranks 1,,2", "--ranks is '1,,2'"),
    ("--ranks 0", "--ranks is 0, but must be from 1 to 56"),
    ("--ranks 57", "--ranks is 57, but must be from 1 to 56"),
    ("--plot a.pdf", "--plot is a.pdf, but must end in .png"),
    ("--plot no/a.png", "--plot is no/a.png, but there is no directory no"),
    ("--json a.txt", "--json is a.txt, but must end in .json"),
    ("--speed 1", "No such option: --speed"),
    ("--seeds", "--seeds"),
    ("more", "more"),
]


@pytest.mark.parametrize(("arguments", "expected"), WRONG)
def test_wrong_arguments_give_one_sentence_and_start_nothing(
    arguments: str,
    expected: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli, "_start_workers", None)
    assert main(["demo", *arguments.split()]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert expected in captured.err
    assert captured.err.count("\n") == 1


def test_wrong_argument_in_a_process_of_its_own() -> None:
    done = _run(*DEMO, "--seeds", "99")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "Invalid value: --seeds is 99, but must be from 1 to 20.\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--rank 99", "--rank is 99, but must be from 1 to 56 (0 is plain all-reduce)."),
        ("--epochs x", "argument --epochs: invalid int value: 'x'"),
    ],
)
def test_wrong_arguments_under_torchrun(
    arguments: str,
    expected: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["demo", *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        demo.main()
    assert capfd.readouterr().err == f"{expected}\n"


@pytest.mark.parametrize("package", ["typer", "rich", "matplotlib", "sklearn"])
def test_a_missing_package_gives_one_sentence(
    package: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["demo"]) == 2
    assert capfd.readouterr().err == (
        f"The command line needs {package}: install with pip install 'torch-powersgd[cli]'.\n"
    )


def test_the_entry_point_itself_needs_none_of_them() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('typer', 'rich', 'matplotlib', 'sklearn')))"
        "\nfrom powersgd.__main__ import main; sys.exit(main(['demo']))"
    )
    done = _run(sys.executable, "-W", "error", "-c", code)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "typer and rich and matplotlib and sklearn" in done.stderr


# How it ends


def _living(session: int) -> dict[int, str]:
    # The processes of a session by id, with their command lines; the dead but unread do not count.
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_text()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found[int(folder.name)] = command
    return found


def _wait_until(is_true: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _workers(session: int) -> list[int]:
    return [pid for pid, command in _living(session).items() if "spawn_main" in command]


class Running(NamedTuple):
    process: subprocess.Popen[str]
    log: Path

    def wait_for_workers(self) -> None:
        assert _wait_until(lambda: len(_workers(self.process.pid)) == 2, 30)

    def wait_for_training(self) -> None:
        assert _wait_until(lambda: "seed 0" in self.log.read_text(), 60), self.log.read_text()


@pytest.fixture
def running(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    # A parameter is added to the environment.
    environment = {**ENVIRONMENT, "TMPDIR": str(tmp_path), **getattr(request, "param", {})}
    log = tmp_path / "log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            ENDLESS,
            cwd=tmp_path,
            env=environment,
            stdout=stream,
            stderr=stream,
            text=True,
            start_new_session=True,
        )
    yield Running(process, log)
    for pid in _living(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()


@needs_proc
def test_ctrl_c_ends_all_processes_at_once(running: Running) -> None:
    running.wait_for_training()
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(timeout=5) == 130
    assert _wait_until(lambda: not _living(running.process.pid), 2), _living(running.process.pid)
    assert all("test accuracy" in line for line in running.log.read_text().splitlines())


@needs_proc
@pytest.mark.parametrize("running", [{"FORCE_COLOR": "1", "TERM": "xterm"}], indirect=True)
def test_ctrl_c_of_a_terminal_leaves_the_progress_bar_tidy(running: Running) -> None:
    running.wait_for_training()
    os.killpg(running.process.pid, signal.SIGINT)
    assert running.process.wait(timeout=5) == 130
    assert _wait_until(lambda: not _living(running.process.pid), 2), _living(running.process.pid)
    text = running.log.read_text()
    assert "━" in text
    assert "%" in text
    assert "\x1b[?25h" in text  # the cursor is visible again
    assert "Traceback" not in text


@needs_proc
def test_ctrl_c_is_quiet_while_processes_still_start(running: Running) -> None:
    running.wait_for_workers()
    os.killpg(running.process.pid, signal.SIGINT)
    assert running.process.wait(timeout=5) == 130
    assert _wait_until(lambda: not _living(running.process.pid), 2), _living(running.process.pid)
    assert running.log.read_text() == ""


@needs_proc
def test_workers_end_when_the_parent_is_killed(running: Running) -> None:
    running.wait_for_training()
    running.process.kill()
    running.process.wait()
    assert _wait_until(lambda: not _living(running.process.pid), 5), _living(running.process.pid)


@needs_proc
def test_a_killed_worker_ends_the_demo_with_one_sentence(running: Running) -> None:
    running.wait_for_training()
    os.kill(_workers(running.process.pid)[1], signal.SIGKILL)
    assert running.process.wait(timeout=10) == 1
    assert _wait_until(lambda: not _living(running.process.pid), 2), _living(running.process.pid)
    lines = [line for line in running.log.read_text().splitlines() if "accuracy" not in line]
    assert len(lines) == 1
    assert re.fullmatch(r"Worker \d was ended by SIGKILL\.", lines[0])


def test_a_worker_that_raises_ends_the_demo_with_one_sentence() -> None:
    done = _run(*DEMO, "--seeds", "1", GLOO_SOCKET_IFNAME="nowhere0", TORCH_CPP_LOG_LEVEL="FATAL")
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(r"Worker \d failed: RuntimeError: .*nowhere0.*\n", done.stderr)

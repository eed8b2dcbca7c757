"""The commands of a checkout do what their help says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import powersgd
from compiled import cost, export, train
from profiling import soak


def _run(main: Callable[..., Any], *arguments: str) -> Any:
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, while it exports
def test_export_writes_checked_files_that_load(tmp_path: Path) -> None:
    out = str(tmp_path / "files")
    result = _run(export.main, "64x48,7", "--rank", "2", "--out", out, "--format", "export")
    assert result.exit_code == 0, result.output
    (path,) = Path(out).iterdir()
    assert path.name == "powersgd-rank2-float32-export.pt2"
    assert "1 shapes of 2 parameters checked" in " ".join(result.output.split())
    assert isinstance(powersgd.load_steps(path), powersgd.Steps)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["64y48"], "no file, no list of shapes"),
        (["64x48", "--dtype", "int8"], "no dtype 'int8'"),
        (["2x2"], "no matrix that is compressed at rank 1"),
        (["no_such_module:function"], "No module named"),
    ],
)
def test_export_refuses_what_it_cannot_use(arguments: list[str], message: str) -> None:
    result = _run(export.main, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_soak_reports_what_it_went_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "ALLOWED_GROWTH_MB", 100)  # nothing has settled so soon
    save = str(tmp_path / "figures.json")
    result = _run(soak.main, "--steps", "60", "--ranks", "2", "--every", "20", "--json", save)
    assert result.exit_code == 0, result.output
    figures = json.loads(Path(save).read_text())
    assert [figures[name] for name in ("steps", "ranks", "resumed")] == [60, 2, 2]
    assert all(figures[name] > 0 for name in ("bad", "unused", "unused_by_all", "rescaled"))
    assert figures["loss"][1] < figures["loss"][0]


def test_soak_notices_what_grows() -> None:
    flat = [soak.Segment(resident_mb=100.0, tensors=5) for _ in range(10)]
    late = [*flat[:9], soak.Segment(resident_mb=103.0, tensors=6)]
    early = [soak.Segment(resident_mb=50.0, tensors=1), *flat[1:]]
    assert list(soak._find_growth([flat, early])) == []
    assert list(soak._find_growth([flat, late])) == [
        "rank 1: memory has grown by 3.0 MB since it had settled",
        "rank 1: 1 tensors more",
    ]


def test_cost_of_compiling_is_paid_once(tmp_path: Path) -> None:
    """The second measurement reads the first one's cache, so it is not of a fresh process."""
    # Two for each shape: one starts the step, one ends it.
    costs = [cost.measure(str(tmp_path), 2, 1) for _ in range(2)]
    assert [c.kernels for c in costs] == [4, 4]
    assert [c.hits for c in costs] == [0, 4]


def test_training_prints_a_line_for_each_mode() -> None:
    result = _run(train.main, "--steps", "5")
    assert result.exit_code == 0, result.output
    assert all(mode.value in result.output for mode in train.Mode)

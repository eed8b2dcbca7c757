"""The report says what the compiler does, also where it is not what we want."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from compiled import report
from compiled.targets import Target, targets


def test_one_pass_moves_no_more_than_it_must() -> None:
    (target,) = (t for t in targets() if t.name == "decompress_at_once_-3x8x6-rank2-float32")
    line = report.inspect(target)
    assert (line.graphs, line.breaks, line.recompiles, line.kernels) == (1, 0, 0, 1)
    matrices, p, q = 3 * 8 * 6 * 4, 3 * 2 * 8 * 4, 3 * 2 * 6 * 4
    assert line.least_bytes == 4 * matrices + p + 2 * q
    assert line.moved_bytes == line.least_bytes


def test_a_graph_break_shows() -> None:
    def broken(matrix: Tensor) -> Tensor:
        doubled = matrix * 2
        torch._dynamo.graph_break()
        return doubled + 1

    line = report.inspect(Target("broken", broken, (torch.randn(3, 4),)))
    assert line.graphs == 2
    assert line.breaks >= 1


def test_the_command_writes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = report.typer.Typer()
    app.command()(report.main)
    one = Target("one", torch.add, (torch.ones(2), torch.ones(2)))
    monkeypatch.setattr(report, "targets", lambda: iter([one]))
    save, html = tmp_path / "report.json", tmp_path / "report.html"
    result = CliRunner().invoke(app, ["--json", str(save), "--html", str(html)])
    assert result.exit_code == 0, result.output
    (line,) = json.loads(save.read_text())
    assert (line["name"], line["graphs"]) == ("one", 1)
    assert "one" in html.read_text()
    assert CliRunner().invoke(app, ["--only", "nothing"]).exit_code == 2

"""What ships, what an import pulls in, and which way imports run."""

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import powersgd

ROOT = Path(__file__).parent.parent

# From the ground up; a module imports only from rows above its own.
LAYERS = (
    ("orthogonalization", "arguments", "layout", "positions", "owner", "collectives", "ranges"),
    ("fsdp_internals",),
    ("steps", "names"),
    ("phases", "fused"),
    ("compilation", "loading"),
    ("plan", "settings"),
    ("memory",),
    ("entries",),
    ("saving",),
    ("state",),
    ("allocation",),
    ("compression", "agreement", "rehearsal"),
    ("arrival",),
    ("reduction",),
    ("traced", "sharing"),
    ("ddp", "loop", "fsdp"),
    ("registration", "torchft", "lightning"),
    ("__init__",),
)
APPLICATION = (
    *("workloads", "models", "units", "costs", "calibration", "forecast", "outlook", "planner"),
    *("demo", "report", "cli", "__main__"),
)
MAY_IMPORT_DISTRIBUTED = {
    *("collectives", "traced", "ddp", "fsdp", "fsdp_internals", "torchft", "demo", "calibration"),
}


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def _ours(path: Path) -> set[str]:
    return {
        name.split(".")[1]
        for name in (n if n.startswith("powersgd.") else "" for n in _imports(path))
        if name.count(".") >= 1
    }


def test_every_module_has_a_place() -> None:
    placed = {name for row in LAYERS for name in row} | set(APPLICATION)
    assert {path.stem for path in (ROOT / "powersgd").glob("*.py")} <= placed


def test_imports_run_one_way() -> None:
    below: set[str] = set()
    for row in LAYERS:
        for name in row:
            assert _ours(ROOT / "powersgd" / f"{name}.py") <= below, name
        below |= set(row)


def test_only_the_seam_and_front_ends_know_torch_distributed() -> None:
    for path in (ROOT / "powersgd").glob("*.py"):
        if any(name.startswith("torch.distributed") for name in _imports(path)):
            assert path.stem in MAY_IMPORT_DISTRIBUTED, path


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [("powersgd", ("compiled", "profiling", "tests")), ("compiled", ("profiling", "tests"))],
)
def test_rooms_import_one_way(room: str, forbidden: tuple[str, ...]) -> None:
    for path in (ROOT / room).glob("*.py"):
        assert not {name.split(".")[0] for name in _imports(path)} & set(forbidden), path


def test_import_pulls_in_torch_alone() -> None:
    code = (
        "import sys, torch.distributed.nn.functional, torch.nn.parallel\n"
        "before = set(sys.modules)\n"
        "import powersgd\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert result.stdout.strip() == "['powersgd']"


def test_wheel_holds_the_library_alone(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        source.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source)
    for room in ("powersgd", "compiled", "profiling", "tests"):
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", build, str(tmp_path)]
    subprocess.run(command, cwd=source, capture_output=True, timeout=100, check=True)
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        (metadata_name,) = (name for name in names if name.endswith("/METADATA"))
        metadata = wheel.read(metadata_name).decode().splitlines()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"powersgd"}
    assert "powersgd/py.typed" in names
    required = [s for s in metadata if s.startswith("Requires-Dist:") and "extra ==" not in s]
    assert len(required) == 1
    assert required[0].startswith("Requires-Dist: torch")
    assert "License-Expression: BSD-3-Clause" in metadata
    assert f"Version: {powersgd.__version__}" in metadata

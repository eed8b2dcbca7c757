"""Steps from files: every kind equals the eager steps, and says so if it does not fit."""

import copy
import json
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

import powersgd
from compiled.export import Format, write
from compiled.targets import run_phases

from .models import train_large
from .ranks import run_ranks
from .tolerances import assert_close

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, while it exports

RANK = 2
SUFFIX = {Format.SCRIPT: ".ts", Format.EXPORT: ".pt2", Format.AOTI: ".pt2"}
KINDS = [
    pytest.param(
        kind,
        marks=pytest.mark.skipif(
            kind is Format.SCRIPT and sys.version_info >= (3, 14),
            reason="Python 3.14 and newer have no TorchScript",
        ),
    )
    for kind in Format
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[Format, Path]:
    directory = tmp_path_factory.mktemp("steps")
    paths = {kind: directory / f"{kind.value}{SUFFIX[kind]}" for kind in Format}
    for kind, path in paths.items():
        write(path, kind, RANK, torch.float32)
    return paths


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize(
    ("count", "n", "m", "gap"), [(1, 30, 20, 0), (3, 16, 24, 0), (2, 7, 9, 5), (1, 300, 1000, 0)]
)
def test_loaded_phases_equal_the_eager_ones(
    files: dict[Format, Path], kind: Format, count: int, n: int, m: int, gap: int, *,
    with_residual: bool,
) -> None:  # fmt: skip
    size = n * m + gap
    gradient = torch.randn(count * size).as_strided((count, n, m), (size, m, 1))
    old = torch.randn(count, n, m) if with_residual else None
    p, q, own = (torch.randn(count, RANK, k) for k in (n, m, m))
    results = []
    for steps in (powersgd.load_steps(files[kind]), powersgd.EAGER):
        units = steps.orthogonalize_all([p, q], 0.0)
        results.append(units + run_phases(steps, gradient, old, p, own, q))
    for mine, right in zip(*results, strict=True):
        assert_close(mine, right)


def _train_both(rank: int, path: Path) -> list[list[Tensor]]:
    return [
        train_large(rank, steps, 2, strict_from=100)
        for steps in (powersgd.load_steps(path), powersgd.EAGER)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_training_with_loaded_steps_equals_eager(files: dict[Format, Path], kind: Format) -> None:
    ranks = run_ranks(_train_both, 2, files[kind], timeout_s=200)
    for loaded, eager in ranks:
        for mine, first, right in zip(loaded, ranks[0][0], eager, strict=True):
            assert torch.equal(mine, first)
            assert_close(mine, right, scale=10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_with_loaded_steps_can_be_copied_and_pickled(
    files: dict[Format, Path], kind: Format
) -> None:
    state = powersgd.PowerSGDState(None, steps=powersgd.load_steps(files[kind]))
    for copied in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        matrix, p = torch.randn(1, 30, 20), torch.randn(1, 2, 30)
        assert_close(copied.steps.project(matrix, p), powersgd.EAGER.project(matrix, p))
        assert copied.steps.project.__self__ is not state.steps.project.__self__


@pytest.mark.parametrize("kind", [Format.EXPORT, Format.AOTI])
def test_another_rank_or_dtype_is_an_error(files: dict[Format, Path], kind: Format) -> None:
    steps = powersgd.load_steps(files[kind])
    with pytest.raises(ValueError, match=r"rank 2 and torch\.float32 on CPU, but .* rank 3"):
        steps.compress_(torch.randn(1, 9, 9), torch.randn(1, 9, 9), torch.randn(1, 3, 9))
    double = torch.randn(1, 9, 9).double()
    with pytest.raises(ValueError, match=r"rank 2 and .* on CPU, but .* torch\.float64"):
        steps.project(double, double[:, :2])


def test_a_file_of_rank_1_leaves_vectors_to_the_eager_steps(tmp_path: Path) -> None:
    write(tmp_path / "one.pt2", Format.EXPORT, 1, torch.float32)
    steps = powersgd.load_steps(tmp_path / "one.pt2")
    for shape in ((1, 1, 50), (1, 50, 1), (2, 3, 4)):
        matrix, p = torch.randn(shape), torch.randn(shape[0], 1, shape[1])
        assert_close(steps.project(matrix, p), p @ matrix)


def test_a_matrix_too_small_for_the_rank_is_compressed_all_the_same(
    files: dict[Format, Path],
) -> None:
    matrix, p = torch.randn(3, 1, 50), torch.ones(3, 1, 1)
    assert_close(powersgd.load_steps(files[Format.EXPORT]).project(matrix, p), matrix)


def test_files_of_other_versions_and_other_files_are_errors(
    files: dict[Format, Path], tmp_path: Path
) -> None:
    old = tmp_path / "old.pt2"
    with zipfile.ZipFile(files[Format.EXPORT]) as source, zipfile.ZipFile(old, "w") as target:
        for name in source.namelist():
            is_facts = name.endswith("/extra/powersgd.json")
            content = json.dumps({"torch": "1.0"}).encode() if is_facts else source.read(name)
            target.writestr(name, content)
    with pytest.raises(ValueError, match=r"made by torch 1\.0, but this is torch .*export"):
        powersgd.load_steps(old)
    other = tmp_path / "other.pt"
    torch.save({}, other)
    (tmp_path / "text").write_text("text")
    for path in (other, tmp_path / "text"):
        with pytest.raises(ValueError, match=r"does not hold steps .* compiled\.export"):
            powersgd.load_steps(path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        powersgd.load_steps(tmp_path / "nothing")


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("cmake") or not shutil.which("c++"):
        pytest.skip("needs cmake and a C++ compiler")
    build = tmp_path_factory.mktemp("runner")
    source = Path(__file__).parents[1] / "compiled" / "runner"
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for command in (["-S", source, "-B", build, prefix], ["--build", build]):
        subprocess.run(["cmake", *map(str, command)], check=True, timeout=280, capture_output=True)
    return build / "runner"


def _run_in_python(steps: powersgd.Steps, inputs: list[Tensor]) -> list[Tensor]:
    q, *rest = (tensor.clone() for tensor in inputs)
    matrices, residuals = rest[::2], rest[1::2]
    sent = [steps.compress_(m, r, q) for m, r in zip(matrices, residuals, strict=True)]
    (p,) = steps.orthogonalize_all([torch.stack(sent).mean(0)], 0.0)
    own = [steps.project(matrix, p) for matrix in matrices]
    mean = torch.stack(own).mean(0)
    for matrix, left, local in zip(matrices, residuals, own, strict=True):
        steps.decompress_(matrix, left, p, local, mean)
    return [matrices[0], *residuals]


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 and newer have no TorchScript")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [Format.SCRIPT, Format.AOTI])
def test_cpp_prints_the_same_numbers(
    files: dict[Format, Path], runner: Path, kind: Format, tmp_path: Path
) -> None:
    inputs = [torch.randn(1, RANK, 40), *(torch.randn(1, 30, 40) for _ in range(3 * 2))]
    torch.save(inputs, tmp_path / "inputs")
    paths = [files[kind], files[Format.SCRIPT], tmp_path / "inputs", tmp_path / "outputs"]
    result = subprocess.run(
        [runner, kind.value, *paths], check=True, timeout=100, capture_output=True, text=True
    )
    expected = _run_in_python(powersgd.load_steps(files[kind]), inputs)
    sums = [float(tensor.double().abs().sum()) for tensor in expected]
    assert [float(line) for line in result.stdout.split()] == pytest.approx(sums, rel=1e-6)
    for mine, right in zip(
        torch.load(tmp_path / "outputs", weights_only=False), expected, strict=True
    ):
        assert_close(mine, right)

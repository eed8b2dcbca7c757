"""The steps from a file: TorchScript, exported programs or an AOTInductor package.

``python -m compiled.export`` writes such files. A ``.pt2`` file is made for one rank, one dtype and
the CPU, and for any batch of matrices with at least two rows and columns.
"""

import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from powersgd.phases import EAGER, Steps

FACTS = "powersgd.json"  # what a file was made for: torch version, rank and dtype


class _Loaded:
    """The phases of a ``.pt2`` file; it does not check its inputs itself, so they are here."""

    def __init__(self, path: Path) -> None:
        facts = _read_facts(path)
        self._path = path
        self._rank: int = facts["rank"]
        self._dtype: str = facts["dtype"]
        self._phases: dict[str, Callable[..., Any]] = _load_phases(path)

    def __reduce__(self) -> Any:
        return _Loaded, (self._path,)

    def _fits(self, matrix: Tensor, rank: int) -> bool:
        smallest = min(matrix.shape[1:])
        is_expected_rank = rank == min(self._rank, smallest)
        if str(matrix.dtype) == self._dtype and is_expected_rank and matrix.is_cpu:
            # A matrix too small for the rank, or with one row or column, is for the eager steps.
            return smallest >= max(self._rank, 2)
        raise ValueError(
            f"{self._path} holds the steps for rank {self._rank} and {self._dtype} on CPU, but the "
            f"matrix is to have rank {rank} and is {matrix.dtype} on {matrix.device}; export the "
            "steps for these"
        )

    def compress_(self, gradient: Tensor, residual: Tensor | None, q: Tensor) -> Tensor:
        if not self._fits(gradient, q.size(1)) or residual is None:
            return EAGER.compress_(gradient, residual, q)
        return torch.cat([self._phases["compress_"](*one) for one in _apart(gradient, residual, q)])

    def project(self, matrix: Tensor, p: Tensor) -> Tensor:
        if not self._fits(matrix, p.size(1)):
            return EAGER.project(matrix, p)
        return torch.cat([self._phases["project"](*one) for one in _apart(matrix, p)])

    def decompress_(
        self, matrix: Tensor, residual: Tensor | None, p: Tensor, q_local: Tensor, q: Tensor
    ) -> None:
        if not self._fits(matrix, p.size(1)) or residual is None:
            EAGER.decompress_(matrix, residual, p, q_local, q)
            return
        for one in _apart(matrix, residual, p, q_local, q):
            self._phases["decompress_"](*one)


class _Scripted:
    """The phases of a TorchScript file."""

    def __init__(self, path: Path) -> None:
        _read_facts(path)
        self._path = path
        self._module: Any = torch.jit.load(path)  # type: ignore[no-untyped-call]

    def __reduce__(self) -> Any:
        return _Scripted, (self._path,)

    def orthogonalize_all(self, factors: list[Tensor], epsilon: float) -> list[Tensor]:
        units: list[Tensor] = self._module.orthogonalize_all(factors, epsilon)
        return units

    def compress_(self, gradient: Tensor, residual: Tensor | None, q: Tensor) -> Tensor:
        p: Tensor = self._module.compress_(gradient, residual, q)
        return p

    def project(self, matrix: Tensor, p: Tensor) -> Tensor:
        q: Tensor = self._module.project(matrix, p)
        return q

    def decompress_(
        self, matrix: Tensor, residual: Tensor | None, p: Tensor, q_local: Tensor, q: Tensor
    ) -> None:
        self._module.decompress_(matrix, residual, p, q_local, q)


def _apart(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    # The programs expect matrices without gaps between them: one by one, if there are some.
    if all(tensor.is_contiguous() for tensor in tensors):
        return [tensors]
    return [tuple(t[i : i + 1] for t in tensors) for i in range(tensors[0].size(0))]


def load_steps(path: str | Path) -> Steps:
    """Load the steps from a file, for ``PowerSGDState(..., steps=...)``.

    Args:
        path: A ``.pt2`` file (exported programs or an AOTInductor package) or a TorchScript file,
            written by ``python -m compiled.export``. Such files hold code that runs: load only
            those that you trust.

    Returns:
        The steps. Those of a ``.pt2`` file raise a ValueError for another rank or dtype than it was
        made for; without error feedback, and for matrices too small for the rank, they are the
        eager ones.

    Raises:
        FileNotFoundError: If there is no such file.
        RuntimeError: If a TorchScript file meets Python 3.14 or newer.
        ValueError: If the file does not hold steps, or was made by another version of torch.

    Example:
        >>> state = PowerSGDState(None, steps=load_steps("steps.pt2"))  # doctest: +SKIP
    """
    path = Path(path)
    if path.suffix == ".pt2":
        loaded = _Loaded(path)
        return EAGER._replace(
            compress_=loaded.compress_, project=loaded.project, decompress_=loaded.decompress_
        )
    if sys.version_info >= (3, 14):
        raise RuntimeError(
            f"{path} is TorchScript, which Python 3.14 and newer do not support; export a .pt2 file"
        )
    scripted = _Scripted(path)
    return EAGER._replace(
        compress_=scripted.compress_,
        orthogonalize_all=scripted.orthogonalize_all,
        project=scripted.project,
        decompress_=scripted.decompress_,
    )


def _read_facts(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(f"/extra/{FACTS}")]
            facts: dict[str, Any] = json.loads(archive.read(names[0])) if names else {}
        if facts.get("torch") == torch.__version__:
            return facts
        if facts:
            raise ValueError(
                f"{path} was made by torch {facts['torch']}, but this is torch "
                f"{torch.__version__}; export the steps again"
            )
    raise ValueError(f"{path} does not hold steps written by python -m compiled.export")


def _load_phases(path: Path) -> dict[str, Any]:
    from torch.export.pt2_archive._package import load_pt2  # it imports the compiler

    contents = load_pt2(str(path))
    programs = {name: program.module() for name, program in contents.exported_programs.items()}
    return programs | contents.aoti_runners

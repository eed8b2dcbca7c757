"""Write the steps to files that `powersgd.load_steps` and the C++ runner read.

``python -m compiled.export --help`` shows the command line.
"""

import json
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.pt2_archive._package import package_pt2

import powersgd
from compiled.targets import run_phases
from powersgd import fused
from powersgd.loading import FACTS
from powersgd.models import read_layers
from powersgd.orthogonalization import orthogonalize_all
from powersgd.plan import make_plan


class Format(str, Enum):
    """What kind of file."""

    SCRIPT = "script"
    EXPORT = "export"
    AOTI = "aoti"


FILE_NAMES = {
    Format.SCRIPT: "powersgd.ts",
    Format.EXPORT: "powersgd-rank{rank}-{dtype}-export.pt2",
    Format.AOTI: "powersgd-rank{rank}-{dtype}-aoti.pt2",
}
LARGEST_FUSED_RANK = 8  # above, products are faster
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 5e-2}
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


class _Scripted(nn.Module):
    """All phases, for TorchScript; of any rank and dtype."""

    @torch.jit.export
    def compress_(self, gradient: Tensor, residual: Tensor | None, q: Tensor) -> Tensor:
        return fused.compress_(gradient, residual, q)

    @torch.jit.export
    def orthogonalize_all(self, factors: list[Tensor], epsilon: float) -> list[Tensor]:
        return orthogonalize_all(factors, epsilon)

    @torch.jit.export
    def project(self, matrix: Tensor, p: Tensor) -> Tensor:
        return fused.project(matrix, p)

    @torch.jit.export
    def decompress_(
        self, matrix: Tensor, residual: Tensor | None, p: Tensor, q_local: Tensor, q: Tensor
    ) -> None:
        fused.decompress_(matrix, residual, p, q_local, q)


class _Phase(nn.Module):
    """One phase, for torch.export."""

    def __init__(self, phase: Callable[..., Tensor | None]) -> None:
        super().__init__()
        self.phase = phase

    def forward(self, *tensors: Tensor) -> Tensor:
        result = self.phase(*tensors)
        return tensors[0].new_zeros(()) if result is None else result  # a program returns something


def export_phases(
    rank: int, dtype: torch.dtype, *, is_compiled: bool = False
) -> dict[str, ExportedProgram]:
    """Export each phase, with error feedback, for any batch and matrix size.

    Args:
        rank: Rank of the factors.
        dtype: Of all tensors.
        is_compiled: Whether the programs will be compiled; else they run as they are.

    Returns:
        The programs by the names of `powersgd.Steps`.
    """
    b, n, m = Dim("b", min=1), Dim("n", min=2), Dim("m", min=2)
    matrix = (torch.zeros(3, 24, 40, dtype=dtype), {0: b, 1: n, 2: m})
    p = (torch.zeros(3, rank, 24, dtype=dtype), {0: b, 2: n})
    q = (torch.zeros(3, rank, 40, dtype=dtype), {0: b, 2: m})
    is_fused = is_compiled and rank <= LARGEST_FUSED_RANK
    compress_ = fused.compress_at_once_ if is_fused else fused.compress_
    decompress_ = fused.decompress_at_once_ if is_fused else fused.decompress_
    arguments: dict[str, tuple[Any, ...]] = {
        "compress_": (compress_, matrix, matrix, q),
        "project": (fused.project, matrix, p),
        "decompress_": (decompress_, matrix, matrix, p, q, q),
    }
    return {
        name: torch.export.export(
            _Phase(phase),
            tuple(example.clone() for example, _ in pairs),
            dynamic_shapes=(tuple(sizes for _, sizes in pairs),),
        )
        for name, (phase, *pairs) in arguments.items()
    }


def write(path: Path, kind: Format, rank: int, dtype: torch.dtype) -> None:
    """Write one file.

    Args:
        path: Where; ``.pt2`` for exported programs and AOTInductor packages.
        kind: What kind of file.
        rank: Rank of the factors; TorchScript takes any.
        dtype: Of all tensors; TorchScript takes any.
    """
    facts = json.dumps({"torch": torch.__version__, "rank": rank, "dtype": str(dtype)})
    if kind is Format.SCRIPT:
        scripted: Any = torch.jit.script(_Scripted())
        scripted.save(path, _extra_files={FACTS: facts})
        return
    programs = export_phases(rank, dtype, is_compiled=kind is Format.AOTI)
    if kind is Format.EXPORT:
        package_pt2(str(path), exported_programs=programs, extra_files={FACTS: facts})
        return
    options = {"aot_inductor.package": True}
    compiled: dict[str, Any] = {}
    for name, program in programs.items():
        inputs = program.example_inputs[0]
        compiled[name] = torch._inductor.aot_compile(program.module(), inputs, options=options)
    package_pt2(str(path), aoti_files=compiled, extra_files={FACTS: facts})


def largest_difference(
    steps: powersgd.Steps, n: int, m: int, rank: int, dtype: torch.dtype
) -> float:
    """Compare steps with the eager ones on one random matrix.

    Args:
        steps: The steps to check.
        n: Rows.
        m: Columns.
        rank: Rank of the factors.
        dtype: Of all tensors.

    Returns:
        The largest difference of all results, relative to the largest entry.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = ((n, m), (n, m), (rank, n), (rank, m), (rank, m))
    inputs = [torch.randn(1, *shape, generator=generator).to(dtype) for shape in shapes]
    results = [run_phases(form, *inputs) for form in (steps, powersgd.EAGER)]
    return max(
        float((mine - right).abs().max() / right.abs().max())
        for mine, right in zip(*results, strict=True)
    )


def main(
    source: Annotated[
        str,
        typer.Argument(
            help="512x256,64x3x3x3, a state_dict or .safetensors file, module:function, or gpt2."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory for the files.")] = Path(),
    rank: Annotated[int, typer.Option(min=1, help="Rank of the factors.")] = 1,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "float32",
    min_compression_rate: Annotated[float, typer.Option(help="See PowerSGDState.")] = 2,
    kinds: Annotated[
        list[Format], typer.Option("--format", help="What to write; repeat for several.")
    ] = list(Format),  # noqa: B006 (typer reads it)
) -> None:
    """Write the steps to files, and check each on a model's matrices against the eager steps."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"no dtype {dtype!r}; there are {', '.join(DTYPES)}")
    try:
        specs = [layer.spec for layer in read_layers(source)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    plan = make_plan(specs, rank, min_compression_rate)
    matrices = sorted({(group.n, group.m) for group in plan.groups if group.rank == rank})
    if not matrices:
        raise typer.BadParameter(f"{source} has no matrix that is compressed at rank {rank}")
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    for kind in kinds:
        path = out / FILE_NAMES[kind].format(rank=rank, dtype=dtype)
        write(path, kind, rank, DTYPES[dtype])
        steps = powersgd.load_steps(path)
        worst = max(largest_difference(steps, *nm, rank, DTYPES[dtype]) for nm in matrices)
        if not worst <= TOLERANCES[DTYPES[dtype]]:  # also if it is NaN
            console.print(f"{path} is wrong: it differs from the eager steps by {worst:.1e}")
            raise typer.Exit(1)
        console.print(
            f"{path}: {len(matrices)} shapes of {len(specs)} parameters checked, largest relative "
            f"difference from the eager steps {worst:.1e}"
        )


if __name__ == "__main__":
    typer.run(main)

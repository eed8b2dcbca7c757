"""Every step in every form: TorchScript, torch.compile, torch.export, vmap and derivatives."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled.targets import SHAPES, Target, every_target, targets
from powersgd import EAGER, compute_p, compute_q, orthogonalize, reconstruct, residual

from .tolerances import assert_close

TARGETS = list(every_target())
PURE = [target for target in TARGETS if not target.out and "_all" not in target.name]
# One case for each shape and dtype: all its steps.
CASES: dict[str, list[Target]] = {}
for _target in TARGETS:
    CASES.setdefault(_target.name.partition("-")[2], []).append(_target)


def _id(target: Target) -> str:
    return target.name


def _assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected) > 0
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, scale=2)


class _Module(torch.nn.Module):
    """Steps as one program, which returns what they return and what they write."""

    def __init__(self, steps: list[Target]) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, inputs: list[tuple[Any, ...]]) -> list[Tensor]:
        results: list[Tensor] = []
        for target, arguments in zip(self.steps, inputs, strict=True):
            results += target.call(target.step, arguments)
        return results


def _inputs(steps: list[Target]) -> list[tuple[Any, ...]]:
    return [target.fresh_inputs() for target in steps]


@pytest.mark.parametrize("target", TARGETS, ids=_id)
def test_scripts(target: Target) -> None:
    _assert_same(target.run(torch.jit.script(target.step)), target.run(target.step))


class _Counter:
    """A backend that compiles nothing and counts graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        self.graphs += 1
        return graph


@pytest.mark.parametrize("target", TARGETS, ids=_id)
def test_compiles_in_one_graph_once(target: Target) -> None:
    count = _Counter()
    compiled = torch.compile(target.step, fullgraph=True, backend=count, dynamic=False)
    expected = target.run(target.step)
    _assert_same(target.run(compiled), expected)
    with torch.compiler.set_stance("fail_on_recompile"):
        _assert_same(target.run(compiled), expected)
    assert count.graphs == 1


def _other_sizes(target: Target) -> Target:
    """The same step and rank, on another batch of larger matrices."""
    case = target.name.split("-")[1]
    dtype = next(t.dtype for t in target.inputs if isinstance(t, Tensor))
    b, n, m, r = next(s for s in SHAPES if case == "x".join(map(str, s[:3])))
    return next(
        t
        for t in targets(dtype, [(b + 1, n + 3, m + 2, r)])
        if t.name.split("-")[0] == target.name.split("-")[0]
    )


DYNAMIC = [
    t for t in TARGETS if not t.name.partition("-")[2].startswith("1x") and "_all" not in t.name
]


@pytest.mark.parametrize("target", DYNAMIC, ids=_id)
def test_compiles_once_for_all_sizes(target: Target) -> None:
    """A batch of 1 is left out, because the compiler makes a program of its own for it."""
    count = _Counter()
    compiled = torch.compile(target.step, fullgraph=True, backend=count, dynamic=True)
    _assert_same(target.run(compiled), target.run(target.step))
    other = _other_sizes(target)
    with torch.compiler.set_stance("fail_on_recompile"):
        _assert_same(other.run(compiled), other.run(other.step))
    assert count.graphs == 1


# A C++ compiler takes seconds for each: all shapes in one dtype, one shape in the other dtypes.
BUILT = [case for case in CASES if case.startswith("3x8x6") or case.endswith("float32")]


@pytest.mark.parametrize(("case", "dynamic"), [*((c, False) for c in BUILT), (BUILT[1], True)])
def test_inductor_equals_eager(case: str, dynamic: bool) -> None:
    steps = CASES[case]
    program = _Module(steps)
    expected = program(_inputs(steps))
    with torch.no_grad():
        compiled = torch.compile(program, fullgraph=True, dynamic=dynamic)
        _assert_same(compiled(_inputs(steps)), expected)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, while it exports
@pytest.mark.parametrize("case", [c for c in BUILT if c.endswith(("float32", "bfloat16"))])
def test_ahead_of_time_equals_eager(case: str, tmp_path: Path) -> None:
    steps = CASES[case]
    program = _Module(steps)
    expected = program(_inputs(steps))
    exported = torch.export.export(program, (_inputs(steps),))
    path = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(tmp_path / "steps.pt2")
    )
    loaded = torch._inductor.aoti_load_package(path)
    _assert_same(list(loaded(_inputs(steps))), expected)


class _Round(torch.nn.Module):
    """All steps of one worker, as one module."""

    def forward(self, matrix: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        p = orthogonalize(compute_p(matrix, q))
        own = compute_q(matrix, p)
        return reconstruct(p, own), residual(matrix, p, own)


@pytest.mark.parametrize("target", TARGETS, ids=_id)
def test_exports(target: Target) -> None:
    program = torch.export.export(_Module([target]), (_inputs([target]),))
    _assert_same(program.module()(_inputs([target])), target.run(target.step))


def test_exports_with_dynamic_sizes() -> None:
    sizes = {
        0: torch.export.Dim("batch"),
        1: torch.export.Dim("n", min=3),
        2: torch.export.Dim("m", min=3),
    }
    example = (torch.randn(3, 8, 6), torch.randn(3, 2, 6))
    program = torch.export.export(
        _Round(), example, dynamic_shapes=(sizes, {0: sizes[0], 2: sizes[2]})
    )
    for b, n, m in ((2, 5, 9), (5, 12, 4)):
        other = (torch.randn(b, n, m), torch.randn(b, 2, m))
        _assert_same(list(program.module()(*other)), list(_Round()(*other)))


@pytest.mark.parametrize("target", PURE, ids=_id)
def test_vmap_equals_the_batch(target: Target) -> None:
    _assert_same(target.run(torch.func.vmap(target.step)), target.run(target.step))


@pytest.mark.parametrize("target", [t for t in PURE if "float64" in t.name], ids=_id)
def test_derivatives(target: Target) -> None:
    inputs = [value.clone().requires_grad_() for value in target.inputs]
    assert torch.autograd.gradcheck(target.step, inputs, check_forward_ad=True)


def test_the_bundle_is_immutable() -> None:
    with pytest.raises(AttributeError):
        EAGER.project = compute_q  # type: ignore[misc]

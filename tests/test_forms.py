"""Every step in every form: TorchScript, torch.compile, torch.export, vmap and derivatives."""

import pytest
import torch
from torch import Tensor

from compiled.targets import Target, targets
from powersgd import EAGER, compute_p, compute_q, orthogonalize, reconstruct, residual

from .tolerances import assert_close

TARGETS = list(targets())
PURE = [target for target in TARGETS if not target.out and "_all" not in target.name]


def _id(target: Target) -> str:
    return target.name


def _assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected) > 0
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, scale=2)


@pytest.mark.parametrize("target", TARGETS, ids=_id)
def test_scripts(target: Target) -> None:
    _assert_same(target.run(torch.jit.script(target.step)), target.run(target.step))


@pytest.mark.parametrize("target", TARGETS, ids=_id)
def test_compiles_in_one_graph_once(target: Target) -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        nonlocal graphs
        graphs += 1
        return graph

    compiled = torch.compile(target.step, fullgraph=True, backend=count, dynamic=False)
    expected = target.run(target.step)
    _assert_same(target.run(compiled), expected)
    with torch.compiler.set_stance("fail_on_recompile"):
        _assert_same(target.run(compiled), expected)
    assert graphs == 1


class _Round(torch.nn.Module):
    """All steps of one worker, as one module."""

    def forward(self, matrix: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        p = orthogonalize(compute_p(matrix, q))
        own = compute_q(matrix, p)
        return reconstruct(p, own), residual(matrix, p, own)


def test_inductor_compiles_the_round() -> None:
    matrix, q = torch.randn(3, 8, 6), torch.randn(3, 2, 6)
    compiled = torch.compile(_Round(), fullgraph=True)
    _assert_same(list(compiled(matrix, q)), list(_Round()(matrix, q)))


@pytest.mark.parametrize("target", TARGETS, ids=_id)
def test_exports(target: Target) -> None:
    class Module(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            return target.step(*inputs)

    program = torch.export.export(Module(), target.fresh_inputs())
    _assert_same(target.run(program.module()), target.run(target.step))


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


@pytest.mark.parametrize(
    "target", [t for t in targets(torch.float64) if t.name in {p.name for p in PURE}], ids=_id
)
def test_derivatives(target: Target) -> None:
    inputs = [value.clone().requires_grad_() for value in target.inputs]
    assert torch.autograd.gradcheck(target.step, inputs, check_forward_ad=True)


def test_the_bundle_is_immutable() -> None:
    with pytest.raises(AttributeError):
        EAGER.project = compute_q  # type: ignore[misc]

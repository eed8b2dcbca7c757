"""compile_steps: equal to the eager steps, compiled once, before compression starts."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import powersgd

from .ranks import run_ranks
from .tolerances import assert_close

N, M = 520, 512  # large enough to be compiled


def _matrices(count: int, gap: int) -> Tensor:
    size = N * M + gap
    return torch.randn(count * size).as_strided((count, N, M), (size, M, 1))


@pytest.mark.parametrize("r", [1, 3, 8])
@pytest.mark.parametrize(("count", "gap"), [(1, 0), (3, 0), (2, 7)])
@pytest.mark.parametrize("with_residual", [True, False])
def test_compiled_phases_equal_the_eager_ones(
    count: int, gap: int, r: int, with_residual: bool
) -> None:
    compiled, eager = powersgd.compile_steps(), powersgd.EAGER
    for stance in ("default", "fail_on_recompile"):
        gradient = _matrices(count, gap)
        old = torch.randn(count, N, M) if with_residual else None
        q, own, mean = (torch.randn(count, r, M) for _ in range(3))
        results = []
        for steps in (compiled, eager):
            new = None if old is None else old.clone()
            matrix = torch.empty_strided(gradient.shape, gradient.stride()).copy_(gradient)
            with torch.no_grad(), torch.compiler.set_stance(stance):
                p = steps.compress_(matrix, new, q)
                projected = steps.project(matrix, p)
                steps.decompress_(matrix, new, p, own, mean)
            results.append([p, projected, matrix, *([] if new is None else [new])])
        for a, e in zip(*results, strict=True):
            assert_close(a, e)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = [(N, M), (M, N), (N, M), (40, 30), (N,)]
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.randn(shape, generator=generator) / 30) for shape in shapes]
        )

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d, e = self.weights
        return (x @ a.mT + e).tanh() @ b.mT @ c.mT + d.mean()


def _train(rank: int, steps: Any, start: int, strict_from: int) -> list[Tensor]:
    model = _Model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=2)
    options = {"min_compression_rate": 0.5, "start_powerSGD_iter": start}
    state = powersgd.PowerSGDState(None, 2, **options, steps=steps)
    ddp.register_comm_hook(state, powersgd.powerSGD_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for i in range(start + 6):
        torch.compiler.set_stance("fail_on_recompile" if i >= strict_from else "default")
        ddp(torch.randn(16, M, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def _train_twice(rank: int) -> list[list[Tensor]]:
    start = 3
    compiled = _train(rank, powersgd.compile_steps(), start, strict_from=start)
    return [compiled, _train(rank, powersgd.EAGER, start, strict_from=start)]


def test_training_compiles_in_the_warm_up_and_equals_eager() -> None:
    """From the first compressed step on, anything left to compile would raise."""
    ranks = run_ranks(_train_twice, 2, timeout_s=200)
    for compiled, eager in ranks:
        for mine, first, plain in zip(compiled, ranks[0][0], eager, strict=True):
            assert torch.equal(mine, first)
            assert_close(mine, plain, scale=10)


def _mix(rank: int) -> str:
    steps = powersgd.compile_steps(backend="eager") if rank else powersgd.EAGER
    with pytest.raises(ValueError, match="ranks disagree on whether the steps are") as caught:
        _train(rank, steps, 2, strict_from=100)
    dist.barrier()
    return str(caught.value)


def test_all_ranks_must_compile_or_none() -> None:
    assert len(set(run_ranks(_mix, 2))) == 1


def test_without_a_compiler_it_warns_and_returns_the_eager_steps() -> None:
    broken = {"cpp.cxx": (None, "no-such-compiler"), "fx_graph_cache": False}
    with (
        torch._inductor.config.patch(broken),
        pytest.warns(UserWarning, match="eager steps, because torch.compile failed"),
    ):
        assert powersgd.compile_steps() is powersgd.EAGER

"""The same code on a GPU: equal to the CPU, compiled or not, and no copy makes the host wait."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import powersgd
from compiled.targets import run_phases

from .tolerances import assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SHAPES = [(64, 48), (64,), (64, 48), (80, 30)]
START, BAD, STEPS = 3, 7, 12


@pytest.fixture
def _nccl(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def _gloo(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])

    def forward(self, gradients: list[Tensor]) -> Tensor:
        pairs = zip(self.weights, gradients, strict=True)
        return torch.stack([(weight * gradient).sum() for weight, gradient in pairs]).sum()


def _train(device: str, *, no_waiting: bool = False, **options: Any) -> list[list[Tensor]]:
    """By step, the averages; one gradient of step BAD is infinite."""
    ddp = DistributedDataParallel(_Model().to(device), bucket_cap_mb=0.005)
    settings = {"start_powerSGD_iter": START, "min_compression_rate": 0.5}
    state = powersgd.PowerSGDState(None, 2, **settings, **options)
    ddp.register_comm_hook(state, powersgd.powerSGD_hook)
    generator = torch.Generator().manual_seed(0)
    outputs = []
    for step in range(STEPS):
        gradients = [torch.randn(shape, generator=generator) for shape in SHAPES]
        gradients[0][0, 0] = torch.inf if step == BAD else 1
        inputs = [gradient.to(device) for gradient in gradients]
        ddp.zero_grad()
        loss = ddp(inputs)
        if no_waiting and step > START:
            torch.cuda.set_sync_debug_mode("error")
        try:
            loss.backward()
        finally:
            if device != "cpu":
                torch.cuda.set_sync_debug_mode("default")
        outputs.append([p.grad.cpu() for p in ddp.parameters()])
    return outputs


def _assert_same(actual: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for step, (mine, right) in enumerate(zip(actual, expected, strict=True)):
        for a, e in zip(mine, right, strict=True):
            assert torch.equal(a.isfinite(), e.isfinite()), f"step {step}"
            assert_close(a.nan_to_num(0, 0, 0), e.nan_to_num(0, 0, 0), scale=20)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[Tensor]]:
    store = tmp_path_factory.mktemp("cpu") / "s"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    averages = _train("cpu")
    dist.destroy_process_group()
    return averages


@pytest.mark.usefixtures("_nccl")
def test_training_equals_the_cpu(expected: list[list[Tensor]]) -> None:
    _assert_same(_train("cuda"), expected)


@pytest.mark.usefixtures("_nccl")
def test_training_compiled_equals_the_cpu(expected: list[list[Tensor]]) -> None:
    _assert_same(_train("cuda", steps=powersgd.compile_steps()), expected)


@pytest.mark.usefixtures("_gloo")
def test_gloo_with_tensors_on_a_gpu(expected: list[list[Tensor]]) -> None:
    _assert_same(_train("cuda"), expected)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("warm_start", [True, False])
@pytest.mark.usefixtures("_nccl")
def test_no_copy_makes_the_host_wait(is_compiled: bool, warm_start: bool) -> None:
    """It does not see the wait for the flag of the step before, which is an event."""
    steps = powersgd.compile_steps() if is_compiled else powersgd.EAGER
    assert len(_train("cuda", no_waiting=True, steps=steps, warm_start=warm_start)) == STEPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [1, 4, 12])
@pytest.mark.parametrize("with_residual", [True, False])
def test_phases_equal_the_cpu(dtype: torch.dtype, rank: int, with_residual: bool) -> None:
    shapes = ((64, 48), (64, 48), (rank, 64), (rank, 48), (rank, 48))
    inputs: list[Tensor | None] = [torch.randn(3, *shape).to(dtype) for shape in shapes]
    if not with_residual:
        inputs[1] = None
    right = run_phases(powersgd.EAGER, *inputs)
    moved = [None if tensor is None else tensor.cuda() for tensor in inputs]
    for steps in (powersgd.EAGER, powersgd.compile_steps()):
        for mine, theirs in zip(run_phases(steps, *moved), right, strict=True):
            assert_close(mine.cpu(), theirs, scale=4)

"""The reduction from inside one process: changing buckets, modes of autograd, the masked path."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import powersgd
from powersgd.compression import _decompress_masked_

from .tolerances import assert_close

SHAPES = [(30, 20), (20,), (30, 20), (12, 40), (7,), (30, 20)]


@pytest.fixture(autouse=True)
def _group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _model() -> nn.Module:
    model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])
    for parameter in model.parameters():
        parameter.grad = torch.zeros(parameter.shape)
    return model


def _buckets(model: nn.Module, **options: Any) -> list[Any]:
    ddp = DistributedDataParallel(model, find_unused_parameters=True, **options)
    return ddp.reducer._get_zeros_like_grad_buckets()


def _state() -> powersgd.PowerSGDState:
    return powersgd.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=0.5)


def _step(state: Any, model: nn.Module, buckets: list[Any], seed: int) -> list[Tensor]:
    """Hand one step's gradients, by parameter, to the hook; return the averages."""
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(shape, generator=generator) for shape in SHAPES]
    index = {id(p): i for i, p in enumerate(model.parameters())}
    for bucket in buckets:
        for view, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            view.copy_(gradients[index[id(parameter)]])
    futures = [powersgd.powerSGD_hook(state, bucket) for bucket in buckets]
    averages: list[Tensor] = [torch.empty(0)] * len(SHAPES)
    for bucket, future in zip(buckets, futures, strict=True):
        assert future.wait().data_ptr() == bucket.buffer().data_ptr()
        for view, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            averages[index[id(parameter)]] = view.clone()
    return averages


@pytest.mark.parametrize("back", [False, True])
def test_residuals_and_q_follow_their_parameters_into_new_buckets(back: bool) -> None:
    same, changing = _model(), _model()
    one = _buckets(same, bucket_cap_mb=100)
    before = _buckets(changing, bucket_cap_mb=100)
    after = _buckets(changing, bucket_cap_mb=0.001)
    if back:
        before, after = after, before
    assert sorted([len(before), len(after)]) == [1, 4]
    expected_state, state = _state(), _state()
    for step in range(8):
        expected = _step(expected_state, same, one, step)
        actual = _step(state, changing, before if step < 5 else after, step)
        for a, e in zip(actual, expected, strict=True):
            assert_close(a, e, scale=20)
    for mine, theirs in zip(changing.parameters(), same.parameters(), strict=True):
        left, right = state.residual(mine), expected_state.residual(theirs)
        assert (left is None) == (mine.dim() < 2)
        if left is not None and right is not None:
            assert right.abs().max() > 0.1
            assert_close(left, right, scale=20)


def test_autocast_and_create_graph_change_nothing() -> None:
    plain, other = _model(), _model()
    plain_buckets, buckets = _buckets(plain, bucket_cap_mb=100), _buckets(other, bucket_cap_mb=100)
    plain_state, state = _state(), _state()
    for step in range(5):
        expected = _step(plain_state, plain, plain_buckets, step)
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
            actual = _step(state, other, buckets, step)
        assert all(map(torch.equal, actual, expected))
        assert not any(a.requires_grad for a in actual)


@pytest.mark.parametrize("error_feedback", [True, False])
def test_the_masked_path_of_gpus_equals_the_direct_one(error_feedback: bool) -> None:
    matrix, old, p, own, q = (torch.randn(2, *s) for s in ((6, 9), (6, 9), (2, 6), (2, 9), (2, 9)))
    kept = old.clone() if error_feedback else None
    direct, masked = (matrix.clone(), old.clone()), (matrix.clone(), kept)
    powersgd.EAGER.decompress_(*direct, p, own, q)
    _decompress_masked_(torch.tensor(True), powersgd.EAGER, *masked, p, own, q)
    assert torch.equal(masked[0], direct[0])
    if kept is not None:
        assert torch.equal(kept, direct[1])
        _decompress_masked_(torch.tensor(False), powersgd.EAGER, masked[0], kept, p, own, q)
        assert masked[0].isnan().all()
        assert torch.equal(kept, direct[1])

"""What a state keeps and what a step allocates, counted from outside."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import powersgd
from profiling.benchmark import make_bucket

SHAPES = [(256, 256), (256,)] * 6 + [(300, 128), (7, 7)]
COMPRESSED_NUMEL = 6 * 256 * 256 + 300 * 128
RANK = 2
P_NUMEL = RANK * (6 * 256 + 300)
Q_NUMEL = RANK * (6 * 256 + 128)


@pytest.fixture(autouse=True)
def _group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _live_bytes() -> int:
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class _Allocations(TorchDispatchMode):
    """Remembers the largest storage that an operation returned and that was not there before."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known = known
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in self.known:
                    self.largest = max(self.largest, storage.nbytes())
        return result


def _step(state: powersgd.PowerSGDState, bucket: Any) -> None:
    bucket.buffer().normal_()
    powersgd.powerSGD_hook(state, bucket).wait()


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, COMPRESSED_NUMEL + 2 * Q_NUMEL),
        ({"warm_start": False}, COMPRESSED_NUMEL),
        ({"use_error_feedback": False}, 2 * Q_NUMEL),
    ],
)
def test_a_state_keeps_one_buffer_and_factors(settings: dict[str, bool], kept: int) -> None:
    bucket = make_bucket(SHAPES)
    state = powersgd.PowerSGDState(None, RANK, start_powerSGD_iter=2, **settings)
    _buffer = bucket.buffer()  # DDP's own, seen by Python from here on
    before = _live_bytes()
    for _ in range(2):
        _step(state, bucket)
    assert _live_bytes() - before < 1024  # plain averaging keeps nothing
    for _ in range(5):
        _step(state, bucket)
    assert 4 * kept <= _live_bytes() - before < 4 * kept + 1024


def test_a_step_never_clones_the_gradient() -> None:
    bucket = make_bucket(SHAPES)
    state = powersgd.PowerSGDState(None, RANK, start_powerSGD_iter=2)
    for _ in range(4):
        _step(state, bucket)
    known = {bucket.buffer().untyped_storage().data_ptr()}
    known |= {t.untyped_storage().data_ptr() for t in gc.get_objects() if type(t) is Tensor}
    with _Allocations(known) as allocations:
        powersgd.powerSGD_hook(state, bucket).wait()
    # The largest is a factor in float64, or the message of all P and everything uncompressed.
    message_bytes = 4 * (P_NUMEL + 6 * 256 + 49)
    assert message_bytes <= allocations.largest <= 2 * message_bytes
    assert allocations.largest < 4 * COMPRESSED_NUMEL / 50

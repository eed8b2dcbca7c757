"""What a state keeps and what a step allocates, counted from outside."""

import gc
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import powersgd
from powersgd.calibration import make_bucket

from .ranks import run_ranks

SHAPES = [(256, 256), (256,)] * 6 + [(300, 128), (7, 7)]
COMPRESSED_NUMEL = 6 * 256 * 256 + 300 * 128
RANK = 2
P_NUMEL = RANK * (6 * 256 + 300)
Q_NUMEL = RANK * (6 * 256 + 128)


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


def _kept_bytes(_: int, settings: dict[str, bool]) -> tuple[int, int]:
    bucket = make_bucket(SHAPES)
    state = powersgd.PowerSGDState(None, RANK, start_powerSGD_iter=2, **settings)
    _buffer = bucket.buffer()  # DDP's own, seen by Python from here on
    before = _live_bytes()
    for _ in range(2):
        _step(state, bucket)
    warming_up = _live_bytes() - before
    for _ in range(5):
        _step(state, bucket)
    return warming_up, _live_bytes() - before


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, COMPRESSED_NUMEL + 2 * Q_NUMEL),
        ({"warm_start": False}, COMPRESSED_NUMEL),
        ({"use_error_feedback": False}, 2 * Q_NUMEL),
    ],
)
def test_a_state_keeps_one_buffer_and_factors(settings: dict[str, bool], kept: int) -> None:
    ((warming_up, compressing),) = run_ranks(_kept_bytes, 1, settings)
    assert warming_up < 1024  # plain averaging keeps nothing
    assert 4 * kept <= compressing < 4 * kept + 1024


def _largest_allocation(_: int) -> int:
    bucket = make_bucket(SHAPES)
    state = powersgd.PowerSGDState(None, RANK, start_powerSGD_iter=2)
    for _ in range(4):
        _step(state, bucket)
    known = {bucket.buffer().untyped_storage().data_ptr()}
    known |= {t.untyped_storage().data_ptr() for t in gc.get_objects() if type(t) is Tensor}
    with _Allocations(known) as allocations:
        powersgd.powerSGD_hook(state, bucket).wait()
    return allocations.largest


def test_a_step_never_clones_the_gradient() -> None:
    (largest,) = run_ranks(_largest_allocation, 1)
    # The largest is a factor in float64, or the message of all P and everything uncompressed.
    message_bytes = 4 * (P_NUMEL + 6 * 256 + 49)
    assert message_bytes <= largest <= 2 * message_bytes
    assert largest < 4 * COMPRESSED_NUMEL / 50

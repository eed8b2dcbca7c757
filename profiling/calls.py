"""Time calls of hooks on one full bucket, in turn, and count the memory they take."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

import powersgd
from powersgd.calibration import make_bucket
from profiling.allocations import measure_memory
from profiling.hooks import START, Hook
from profiling.results import Measured, Result, available_bytes
from profiling.turns import Action, take_turns

# How often the gradient fits into what a hook keeps, and into what it takes for a while.
KEPT = {Hook.TORCH: 1.3, Hook.EAGER: 1.2, Hook.COMPILED: 1.2, Hook.PYTHON_REDUCER: 1.2}
TAKEN = {Hook.FP16: 0.6, Hook.BF16: 0.6, Hook.TORCH: 2.2, Hook.PYTHON_REDUCER: 4.0}
_TAKEN_BY_OTHERS = 0.3
_PROCESS_BYTES = 3e8  # of each hook's process, with its libraries
_USABLE = 0.9  # of the memory that is free: pages of other programs come and go


def make_call(hook: Hook, rank: int, bucket: Any, steps: powersgd.Steps) -> Callable[[], Tensor]:
    """Return one call of a hook, with a new state where it has one.

    Args:
        hook: Any but ``python_reducer``, which has no bucket.
        rank: Of the approximation.
        bucket: From `make_bucket`.
        steps: Of a state of ours.

    Returns:
        A function that averages the bucket's gradient in place and waits for it. Compression starts
        with call `START`, counted from 0.
    """
    state: Any = None
    if hook is Hook.TORCH:
        state = theirs.PowerSGDState(None, rank, start_powerSGD_iter=START)
    elif hook.is_ours:
        state = powersgd.PowerSGDState(None, rank, start_powerSGD_iter=START, steps=steps)
    functions: dict[Hook, Callable[..., Any]] = {
        Hook.NONE: default_hooks.allreduce_hook,
        Hook.FP16: default_hooks.fp16_compress_hook,
        Hook.BF16: default_hooks.bf16_compress_hook,
        Hook.TORCH: theirs.powerSGD_hook,
    }
    function = functions.get(hook, powersgd.powerSGD_hook)
    return lambda: function(state, bucket).wait()


def make_blocks(
    hooks: Sequence[Hook], gradient_bytes: int, shared: float, each: float
) -> tuple[list[list[Hook]], list[str]]:
    """Group hooks so that what is measured in turn fits into memory.

    Args:
        hooks: To be measured.
        gradient_bytes: Size of the gradient.
        shared: Gradients that are held once.
        each: Gradients that are held for each hook, beside what it keeps itself.

    Returns:
        The groups, and a sentence about each hook that does not fit even alone.
    """
    available = available_bytes()
    blocks: list[list[Hook]] = [[]]
    skipped: list[str] = []
    for hook in hooks:
        alone = _needed_bytes([hook], gradient_bytes, shared, each)
        together = _needed_bytes([*blocks[-1], hook], gradient_bytes, shared, each)
        if alone > _USABLE * available:
            skipped.append(
                f"{hook.label} is skipped: it needs {alone / 1e9:.1f} GB of memory, and "
                f"{_USABLE * available / 1e9:.1f} GB may be used."
            )
        elif together > _USABLE * available and blocks[-1]:
            blocks.append([hook])
        else:
            blocks[-1].append(hook)
    return [block for block in blocks if block], skipped


def _needed_bytes(hooks: Sequence[Hook], gradient_bytes: int, shared: float, each: float) -> float:
    kept = sum(each + KEPT.get(hook, 0.0) for hook in hooks)
    taken = max(TAKEN.get(hook, _TAKEN_BY_OTHERS) for hook in hooks)
    return gradient_bytes * (shared + kept + taken) + _PROCESS_BYTES * len(hooks)


def measure_calls(
    shapes: Sequence[tuple[int, ...]],
    hooks: Sequence[Hook],
    rank: int,
    threads: int,
    repeats: int,
) -> tuple[list[Result], list[str]]:
    """Time one call of each hook on one bucket, in turn.

    Args:
        shapes: Of the parameters in the bucket.
        hooks: Any but ``python_reducer``.
        rank: Of the approximation.
        threads: Of each operation.
        repeats: Timed calls of each.

    Returns:
        The results, and sentences about hooks for which there is not enough memory.
    """
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    # Once: two buffers for the floor. In each process: the bucket, and what it is filled with.
    blocks, skipped = make_blocks(hooks, 4 * numel, shared=2, each=2)
    results: list[Result] = []
    for block in blocks:
        makes = {hook: partial(_make_action, shapes, hook, rank) for hook in block}
        found, floor = take_turns(makes, numel, threads, repeats)
        results += [Result(Measured.CALL, hook, t, floor, m) for hook, (t, m) in found.items()]
    return results, skipped


def _make_action(shapes: Sequence[tuple[int, ...]], hook: Hook, rank: int) -> Action:
    bucket = make_bucket(shapes)
    buffer = bucket.buffer()
    source = torch.randn(buffer.shape, generator=torch.Generator().manual_seed(0))
    steps = powersgd.compile_steps() if hook is Hook.COMPILED else powersgd.EAGER

    def copy() -> None:
        buffer.copy_(source)

    def make() -> Callable[[], Tensor]:
        return make_call(hook, rank, bucket, steps)

    return Action(make(), copy, lambda: measure_memory(make(), copy, START + 2))

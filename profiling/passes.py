"""Time whole backward passes of a model that computes nothing, so that only averaging is left.

`python_reducer` compiles the hook into backward: it has no bucket and no call of its own. So all
hooks are compared by passes of one model, whose backward hands out gradients that are there
before. What a hook costs is the difference to the same pass with plain averaging: an eager pass for
DDP's hooks, a compiled one for `python_reducer`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from profiling.allocations import measure_memory
from profiling.calls import make_blocks
from profiling.hooks import Hook, make_backward, set_compiler, wrap
from profiling.results import Measured, Memory, Plain, Result
from profiling.turns import Action, take_turns

BUCKET_MB = 1_000_000  # one bucket, with which torch's hook works


class _HandOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None


class Stored(nn.Module):
    """A model that computes nothing and has any gradients one likes.

    Args:
        shapes: Of its parameters.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return a 0-dim zero whose gradients with respect to the parameters are ``gradients``."""
        pairs = zip(self.weights, gradients, strict=True)
        apply: Callable[[Tensor, Tensor], Tensor] = _HandOut.apply
        return torch.stack([apply(weight, gradient) for weight, gradient in pairs]).sum()


class Pass:
    """Forward and backward of a `Stored` model under DDP.

    Args:
        shapes: Of the parameters.
        hook: What averages the gradients.
        rank: Of the approximation.
        is_plain: Whether the averages are plain, with everything else as for the hook.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], hook: Hook, rank: int, *, is_plain: bool = False
    ) -> None:
        is_traced = hook is Hook.PYTHON_REDUCER
        options: dict[str, Any] = {
            "bucket_cap_mb": BUCKET_MB,
            "gradient_as_bucket_view": not is_traced,
            "init_sync": False,
        }
        if is_plain:
            set_compiler(hook)
            self.ddp = DistributedDataParallel(Stored(shapes), **options)
        else:
            self.ddp, _ = wrap(Stored(shapes), hook, rank, **options)
        self._run = make_backward(self.ddp, lambda model, batch: model(batch), hook)

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Leave averages of ``gradients`` in the parameters."""
        self._run(gradients)

    def forget(self) -> None:
        """Let go of the averages, as an optimizer does after a step."""
        for parameter in self.ddp.parameters():
            parameter.grad = None


def measure_passes(
    shapes: Sequence[tuple[int, ...]],
    hooks: Sequence[Hook],
    rank: int,
    threads: int,
    repeats: int,
) -> tuple[list[Result], list[str]]:
    """Time passes with each hook, in turn, and count the memory they take.

    Args:
        shapes: Of the parameters.
        hooks: Any; plain passes are measured in any case.
        rank: Of the approximation.
        threads: Of each operation.
        repeats: Timed passes of each.

    Returns:
        The results, and sentences about hooks for which there is not enough memory.
    """
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    chosen = [hook for hook in hooks if hook is not Hook.NONE]
    # Once: two buffers for the floor, and both kinds of plain passes. In each process, theirs too:
    # the gradients and their averages.
    blocks, skipped = make_blocks(chosen, 4 * numel, shared=6, each=2)
    results: list[Result] = []
    for block in blocks:
        makes = {(hook, False): partial(_make_action, shapes, hook, rank, False) for hook in block}
        for hook in map(_plain_of, (Hook.NONE, *block)):
            makes[hook, True] = partial(_make_action, shapes, hook, rank, True)
        found, floor = take_turns(makes, numel, threads, repeats)
        plain = {
            hook: Plain(t, m.peak_bytes) for (hook, is_plain), (t, m) in found.items() if is_plain
        }
        also = [Hook.NONE] if Hook.NONE in hooks and not results else []
        for hook in also + block:
            time, memory = found[hook, hook is Hook.NONE]
            base = plain[_plain_of(hook)]
            peak = Memory(memory.peak_bytes)
            results.append(Result(Measured.PASS, hook, time, floor, peak, base))
    return results, [f"In whole passes, {sentence}" for sentence in skipped]


def _make_action(
    shapes: Sequence[tuple[int, ...]], hook: Hook, rank: int, is_plain: bool
) -> Action:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    one = Pass(shapes, hook, rank, is_plain=is_plain)

    def run() -> None:
        one(gradients)

    return Action(run, one.forget, lambda: measure_memory(run, one.forget, 2))


def _plain_of(hook: Hook) -> Hook:
    return Hook.PYTHON_REDUCER if hook is Hook.PYTHON_REDUCER else Hook.NONE

"""Time whole backward passes of a model that computes nothing, so that only averaging is left.

`python_reducer` compiles the hook into backward: it has no bucket and no call of its own. So all
hooks are compared by passes of one model, whose backward hands out gradients that are there
before. What a hook costs is the difference to the same pass with plain averaging: an eager pass for
DDP's hooks, a compiled one for `python_reducer`.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from profiling.allocations import measure_memory
from profiling.calls import alternate, make_blocks
from profiling.hooks import Hook, make_backward, wrap
from profiling.results import Measured, Memory, Plain, Result

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
        self._hook = hook
        is_traced = hook is Hook.PYTHON_REDUCER
        options: dict[str, Any] = {
            "bucket_cap_mb": BUCKET_MB,
            "gradient_as_bucket_view": not is_traced,
            "init_sync": False,
        }
        with _seen_by_compiler(hook):
            if is_plain:
                self.ddp = DistributedDataParallel(Stored(shapes), **options)
            else:
                self.ddp, _ = wrap(Stored(shapes), hook, rank, **options)
            self._run = make_backward(self.ddp, lambda model, batch: model(batch), hook)

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Leave averages of ``gradients`` in the parameters."""
        with _seen_by_compiler(self._hook):
            self._run(gradients)

    def forget(self) -> None:
        """Let go of the averages, as an optimizer does after a step."""
        for parameter in self.ddp.parameters():
            parameter.grad = None


@contextmanager
def _seen_by_compiler(hook: Hook) -> Iterator[None]:
    # What `wrap` sets once for a whole process, here for one pass: passes alternate.
    is_traced = hook is Hook.PYTHON_REDUCER
    dynamo = torch._dynamo.config.patch(
        optimize_ddp="python_reducer" if is_traced else True, compiled_autograd=is_traced
    )
    merged = "all" if is_traced else "none"
    with dynamo, torch._inductor.config.patch(bucket_all_reduces_fx=merged):
        yield


def measure_passes(
    shapes: Sequence[tuple[int, ...]], hooks: Sequence[Hook], rank: int, repeats: int
) -> tuple[list[Result], list[str]]:
    """Time passes with each hook, in alternation, and count the memory they take.

    Args:
        shapes: Of the parameters.
        hooks: Any; plain passes are measured in any case.
        rank: Of the approximation.
        repeats: Timed passes of each.

    Returns:
        The results, and sentences about hooks for which there is not enough memory.
    """
    gc.collect()
    torch.compiler.reset()  # all models are compiled from the same code, and there is a limit
    gradient_bytes = 4 * sum(torch.Size(shape).numel() for shape in shapes)
    chosen = [hook for hook in hooks if hook is not Hook.NONE]
    # Held once: the gradients, two copies for the floor, what both kinds of plain passes take.
    blocks, skipped = make_blocks(chosen, gradient_bytes, shared=5, each=1)
    results: list[Result] = []
    for block in blocks:
        found = _measure_block(shapes, block, rank, repeats)
        results += found if Hook.NONE in hooks and not results else found[1:]
        gc.collect()
    return results, [f"In whole passes, {sentence}" for sentence in skipped]


def _measure_block(
    shapes: Sequence[tuple[int, ...]], hooks: Sequence[Hook], rank: int, repeats: int
) -> list[Result]:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    other = torch.empty_like(flat)
    passes: dict[tuple[Hook, bool], Pass] = {}
    for hook in hooks:
        passes[hook, False] = Pass(shapes, hook, rank)
    for hook in {_plain_of(hook) for hook in (Hook.NONE, *hooks)}:
        passes[hook, True] = Pass(shapes, hook, rank, is_plain=True)

    def forget() -> None:
        for one in passes.values():
            one.forget()

    def act(one: Pass) -> Callable[[], None]:
        return lambda: one(gradients)

    actions = {name: act(one) for name, one in passes.items()}
    times, floor = alternate(actions, forget, lambda: other.copy_(flat), repeats)
    peaks = {name: measure_memory(act, forget, 2).peak_bytes for name, act in actions.items()}
    plain = {name: Plain(times[name], peaks[name]) for name in actions if name[1]}

    def result(hook: Hook) -> Result:
        name = hook, hook is Hook.NONE
        memory = Memory(peaks[name])
        base = plain[_plain_of(hook), True]
        return Result(Measured.PASS, hook, times[name], floor, memory, base)

    return [result(hook) for hook in (Hook.NONE, *hooks)]


def _plain_of(hook: Hook) -> Hook:
    return Hook.PYTHON_REDUCER if hook is Hook.PYTHON_REDUCER else Hook.NONE

"""The ways to average gradients that are compared: each of DDP's hooks by a name."""

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel

import powersgd

START = 2  # steps of plain averaging; PowerSGD allows no fewer


class Hook(str, Enum):
    """What averages the gradients."""

    NONE = "none"
    FP16 = "fp16"
    BF16 = "bf16"
    TORCH = "torch"
    EAGER = "eager"
    COMPILED = "compiled"
    PYTHON_REDUCER = "python_reducer"

    @property
    def is_low_rank(self) -> bool:
        """Whether it has a rank."""
        return self not in (Hook.NONE, Hook.FP16, Hook.BF16)

    @property
    def is_ours(self) -> bool:
        """Whether it is a form of ours."""
        return self in (Hook.EAGER, Hook.COMPILED, Hook.PYTHON_REDUCER)

    @property
    def label(self) -> str:
        """Its name for people."""
        return _LABELS[self]


_LABELS = {
    Hook.NONE: "all-reduce fp32",
    Hook.FP16: "all-reduce fp16",
    Hook.BF16: "all-reduce bf16",
    Hook.TORCH: "torch's PowerSGD",
    Hook.EAGER: "powersgd eager",
    Hook.COMPILED: "powersgd compiled",
    Hook.PYTHON_REDUCER: "powersgd python_reducer",
}


def average_in_bf16(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Run torch's bf16 hook, which DDP refuses by its name on any backend but NCCL and XCCL.

    Args:
        state: None, or a process group.
        bucket: The bucket that is ready.

    Returns:
        A future of the averaged gradients.
    """
    return default_hooks.bf16_compress_hook(state, bucket)  # type: ignore[arg-type]


def set_compiler(hook: Hook) -> None:
    """Set how torch.compile sees DDP, in the whole process.

    Args:
        hook: What averages the gradients.
    """
    is_traced = hook is Hook.PYTHON_REDUCER
    torch._dynamo.config.optimize_ddp = "python_reducer" if is_traced else True
    torch._dynamo.config.compiled_autograd = is_traced
    torch._inductor.config.bucket_all_reduces_fx = "all" if is_traced else "none"


def wrap(
    model: nn.Module, hook: Hook, rank: int = 1, **options: Any
) -> tuple[DistributedDataParallel, Any]:
    """Wrap a model in DDP with a hook; sets how torch.compile sees DDP.

    Args:
        model: The model.
        hook: What averages its gradients.
        rank: Rank of the approximation, where there is one.
        **options: Of DDP, such as ``bucket_cap_mb``.

    Returns:
        The DDP model and the hook's state, None where it has none. Compression starts with step
        `START`, counted from 0. torch's own hook works with one bucket alone: give it a
        ``bucket_cap_mb`` that holds the model.
    """
    set_compiler(hook)
    ddp = DistributedDataParallel(model, **options)
    if hook in (Hook.FP16, Hook.BF16):
        half = default_hooks.fp16_compress_hook if hook is Hook.FP16 else average_in_bf16
        ddp.register_comm_hook(ddp.process_group, half)
        return ddp, None
    if hook is Hook.TORCH:
        state: Any = theirs.PowerSGDState(None, rank, start_powerSGD_iter=START)
        ddp.register_comm_hook(state, theirs.powerSGD_hook)
        return ddp, state
    if hook is Hook.NONE:
        return ddp, None
    steps = powersgd.compile_steps() if hook is Hook.COMPILED else powersgd.EAGER
    state = powersgd.PowerSGDState(None, rank, start_powerSGD_iter=START, steps=steps)
    ddp.register_comm_hook(state, powersgd.powerSGD_hook)
    return ddp, state


def make_backward(
    ddp: nn.Module, loss: Callable[[nn.Module, Any], Tensor], hook: Hook
) -> Callable[[Any], Tensor]:
    """Return what runs forward and backward on one batch.

    Args:
        ddp: The model from `wrap`.
        loss: Called with the model and the batch.
        hook: What averages the gradients; ``python_reducer`` compiles all of it.

    Returns:
        A function of the batch that returns the loss and leaves averaged gradients.
    """

    def run(batch: Any) -> Tensor:
        value = loss(ddp, batch)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    return torch.compile(run) if hook is Hook.PYTHON_REDUCER else run

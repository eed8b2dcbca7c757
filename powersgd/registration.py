"""The hook in one line."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from powersgd.compilation import find_steps
from powersgd.ddp import powerSGD_hook
from powersgd.state import PowerSGDState


def register(
    ddp_model: DistributedDataParallel,
    rank: int = 1,
    *,
    hook: Callable[..., Any] = powerSGD_hook,
    **settings: Any,
) -> PowerSGDState:
    """Compress a DDP model's gradients: build the state, and register the hook with it.

    The steps are compiled if this machine has a compiler, which takes seconds per shape during
    warm-up; give ``steps=powersgd.EAGER`` if it should not.

    Args:
        ddp_model: The model, which has no hook yet.
        rank: ``matrix_approximation_rank`` of `powersgd.PowerSGDState`.
        hook: `powersgd.powerSGD_hook` or `powersgd.batched_powerSGD_hook`.
        **settings: The other arguments of `powersgd.PowerSGDState`, such as
            ``start_powerSGD_iter``.

    Returns:
        The state, to be saved with the model; its process group is the model's.

    Raises:
        RuntimeError: If the model has a hook already (from torch).
        TypeError: If ``ddp_model`` is no ``DistributedDataParallel``, or a setting is unknown.
        ValueError: If an argument is out of its range.

    Example:
        >>> state = register(ddp_model, rank=2, start_powerSGD_iter=500)  # doctest: +SKIP
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(
            f"ddp_model is {type(ddp_model)!r}, but must be a "
            "torch.nn.parallel.DistributedDataParallel; for other loops there are "
            "powersgd.average_gradients and powersgd.fsdp.register"
        )
    if "steps" not in settings and not _is_traced():
        settings["steps"] = find_steps()
    state = PowerSGDState(ddp_model.process_group, rank, **settings)
    ddp_model.register_comm_hook(state, hook)
    return state


def _is_traced() -> bool:
    # In a graph the steps play no part.
    return bool(torch._dynamo.config.optimize_ddp == "python_reducer")

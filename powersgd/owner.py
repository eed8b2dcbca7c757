"""Which DDP model a hook is called for: DDP does not tell its hooks."""

import gc
from collections.abc import Collection

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def find_ddps(state: object) -> list[DistributedDataParallel]:
    """Look through Python's objects for the DDP models with which a state is registered.

    Args:
        state: The state.

    Returns:
        The DDP models.
    """
    return [ddp for ddp in _all() if _is_registered(ddp, state)]


def find_new_ddp(
    state: object, parameter: Tensor, former: Collection[DistributedDataParallel]
) -> DistributedDataParallel | None:
    """Look through Python's objects for the DDP model of a parameter.

    Args:
        state: The state that the hook was registered with.
        parameter: A parameter of the model.
        former: DDP models that it is not.

    Returns:
        The DDP model; of several around the same module, only one with which the state is
        registered, if there is any. None if there is none, or DDP's own object is gone.
    """
    found = [ddp for ddp in _all() if any(p is parameter for p in ddp.parameters())]
    registered = [ddp for ddp in found if _is_registered(ddp, state)]
    return next((ddp for ddp in registered or found if ddp not in former), None)


def _is_registered(ddp: DistributedDataParallel, state: object) -> bool:
    return any(hooked is state for _, hooked in ddp._comm_hooks)


def _all() -> list[DistributedDataParallel]:
    # `isinstance` would ask objects that pretend to be something else.
    return [t for t in gc.get_objects() if issubclass(type(t), DistributedDataParallel)]

"""Which DDP model a hook is called for: DDP does not tell its hooks."""

import gc

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def find_ddps(state: object) -> list[DistributedDataParallel]:
    """Look through Python's objects for the DDP models with which a state is registered.

    Args:
        state: The state.

    Returns:
        The DDP models.
    """
    return [ddp for ddp in _all() if any(hooked is state for _, hooked in ddp._comm_hooks)]


def find_ddp(state: object, parameter: Tensor) -> DistributedDataParallel | None:
    """Look through Python's objects for the DDP model of a parameter.

    Args:
        state: The state that the hook was registered with.
        parameter: A parameter of the model.

    Returns:
        The DDP model; of several around the same module, the one that the state is registered with,
        if there is one. None if DDP's own object is gone.
    """
    found = [ddp for ddp in _all() if any(p is parameter for p in ddp.parameters())]
    found.sort(key=lambda ddp: all(hooked is not state for _, hooked in ddp._comm_hooks))
    return found[0] if found else None


def _all() -> list[DistributedDataParallel]:
    # `isinstance` would ask objects that pretend to be something else.
    return [t for t in gc.get_objects() if issubclass(type(t), DistributedDataParallel)]

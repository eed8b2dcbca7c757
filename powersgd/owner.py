"""Which DDP model a hook is called for: DDP does not tell its hooks."""

import gc

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def find_ddp(state: object, parameter: Tensor) -> DistributedDataParallel | None:
    """Look through Python's objects for the DDP model of a parameter.

    Args:
        state: The state that the hook was registered with.
        parameter: A parameter of the model.

    Returns:
        The DDP model; of several around the same module, the one that the state is registered with,
        if there is one. None if DDP's own object is gone.
    """
    found = [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), DistributedDataParallel)
        and any(p is parameter for p in thing.parameters())
    ]
    found.sort(key=lambda ddp: all(hooked is not state for _, hooked in ddp._comm_hooks))
    return found[0] if found else None

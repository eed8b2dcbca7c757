"""The names of a model's parameters, by which a state is saved."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from powersgd.arguments import show


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Name a model's parameters alike, whatever it is wrapped in.

    Args:
        module: The model, or a DDP model or a compiled module around it.

    Returns:
        The parameters by name, tied ones once.

    Raises:
        ValueError: If it is no module.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"module is {show(module)}, but must be a torch.nn.Module")
    inner: Any = module
    while _is_compiled(inner) or isinstance(inner, nn.parallel.DistributedDataParallel):
        inner = inner._orig_mod if _is_compiled(inner) else inner.module
    compiled = [name for name, part in inner.named_modules() if _is_compiled(part)]
    names = {}
    for name, parameter in inner.named_parameters():
        for path in reversed(compiled):  # inner ones first
            if name.startswith(f"{path}._orig_mod."):
                name = f"{path}.{name.removeprefix(f'{path}._orig_mod.')}"
        names[name] = parameter
    return names


class StandIns:
    """What stands for parameters of which only gradients are seen: new tensors in every step.

    They take no memory to speak of; row by row in layout, whatever the gradients' strides are.
    """

    def __init__(self) -> None:
        self._of: dict[tuple[Any, ...], Tensor] = {}

    def find(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the stand-ins of parameters, the same ones for each call.

        Args:
            tensors: Parameters or gradients by name.

        Returns:
            By name, of the same shapes, dtypes and devices.
        """
        return {name: self._find(name, tensor) for name, tensor in tensors.items()}

    def _find(self, name: str, like: Tensor) -> Tensor:
        key = (name, like.shape, like.dtype, like.device)
        if key not in self._of:
            one = torch.empty((), dtype=like.dtype, device=like.device)
            self._of[key] = one.expand(like.shape).requires_grad_()
        return self._of[key]


def _is_compiled(module: nn.Module) -> bool:
    # Without the import of a compiler that nobody has used.
    dynamo: Any = sys.modules.get("torch._dynamo")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)

"""The names of a model's parameters, by which a state is saved."""

import sys
from typing import Any

from torch import nn

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


def _is_compiled(module: nn.Module) -> bool:
    # Without the import of a compiler that nobody has used.
    dynamo: Any = sys.modules.get("torch._dynamo")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)

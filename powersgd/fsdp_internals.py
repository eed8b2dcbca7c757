"""What FSDP2 does not tell by public interfaces; all of it is here, and a test names each part."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


class Shard(NamedTuple):
    """A parameter's part of a parameter group's buffer of reduced gradients.

    Attributes:
        parameter: The sharded parameter, a ``DTensor``.
        padded_numel: Elements in the buffer, those of the parameter's local part first.
    """

    parameter: Tensor
    padded_numel: int


class ParameterGroup:
    """The parameters whose gradients FSDP reduces together.

    Args:
        group: FSDP's ``FSDPParamGroup``.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def is_replicated(self) -> bool:
        """Tell whether FSDP itself averages over replicas: its mesh has a dimension for them."""
        return hasattr(self._group.mesh_info, "replicate_mesh_size")

    def has_hook(self) -> bool:
        """Tell whether an all-reduce hook is set."""
        return self._group._all_reduce_hook is not None

    def ranks(self) -> set[int]:
        """Return the ranks of the world over which FSDP shards."""
        return set(self._group.mesh_info.mesh.mesh.flatten().tolist())

    def shards(self) -> list[Shard]:
        """Return what lies in the buffer, in its order; only in the backward pass."""
        return [
            Shard(p.sharded_param, p.padded_sharded_param_size.numel())
            for p in self._group.fsdp_params
            if p.unsharded_param.requires_grad
        ]

    def find(self, parameter: Tensor) -> Any:
        """Return what finds a parameter again if FSDP replaces it; None if it is not in here.

        Args:
            parameter: A sharded parameter.
        """
        found = (p for p in self._group.fsdp_params if p.sharded_param is parameter)
        return next(found, None)


def find_groups(model: nn.Module) -> Iterator[tuple[FSDPModule, ParameterGroup]]:
    """Look for the parameter groups of a model.

    Args:
        model: The model.

    Yields:
        The groups, each with a module that manages it.
    """
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            for group in state._fsdp_param_groups if id(state) not in seen else ():
                yield module, ParameterGroup(group)
            seen.add(id(state))

"""The front end for FSDP2: compression between replicas, each of which is sharded.

Hybrid sharding without FSDP's own all-reduce: FSDP shards over a mesh of one dimension, and hands
each parameter group's reduced gradients, the shard of this rank, to the hook that is set here.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from powersgd.arrival import Arrival
from powersgd.collectives import ProcessGroupCollectives
from powersgd.fsdp_internals import ParameterGroup, find_groups
from powersgd.layout import local
from powersgd.names import named_parameters
from powersgd.reduction import reduce_bucket
from powersgd.state import PowerSGDState


def register(model: nn.Module, state: PowerSGDState, replicate_group: dist.ProcessGroup) -> None:
    """Compress the gradients of an FSDP2 model between its replicas.

    Each shard is compressed as a matrix of its own. Each parameter group ends its part of the step
    on its own, in FSDP's all-reduce stream: 2 collectives for each group and step, and an inf or a
    NaN makes the step a bad one for its group alone. A parameter that was not used takes part with
    zeros.

    The replicas must start from the same parameters: nothing is broadcast here. Activation
    checkpointing must not be reentrant, or a step counts as several.

    Args:
        model: The model, after ``fully_shard`` with a mesh of one dimension, the shards.
        state: Settings and memory; one for each model. Gets ``replicate_group``.
        replicate_group: The ranks that hold the same shard.

    Raises:
        TypeError: If ``state`` is not a `powersgd.PowerSGDState`.
        ValueError: If no part of the model is sharded; if FSDP averages over replicas itself; if
            ``replicate_group`` has ranks over which the model is sharded; or if the model has an
            all-reduce hook or the state another group.

    References:
        ``torch.distributed.fsdp.FSDPModule.set_all_reduce_hook``.

    Example:
        >>> mesh = init_device_mesh(  # doctest: +SKIP
        ...     "cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
        >>> fully_shard(model, mesh=mesh["shard"])  # doctest: +SKIP
        >>> register(model, state, mesh.get_group("replicate"))  # doctest: +SKIP
    """
    if not isinstance(state, PowerSGDState):
        raise TypeError(f"state must be a powersgd.PowerSGDState, got {type(state)!r}")
    groups = list(find_groups(model))
    _check(groups, state, replicate_group)
    state.process_group = replicate_group
    for module, _ in groups:
        module.reshard()  # what is sharded has the names
    hook = _Hook(model, [group for _, group in groups], state)
    for module, group in groups:
        module.set_all_reduce_hook(partial(hook, group))
        # So that what arrives does not depend on which parameters were used.
        module.set_reduce_scatter_unused_params(True, recurse=False)


def _check(groups: list[Any], state: PowerSGDState, replicate_group: dist.ProcessGroup) -> None:
    if not groups:
        raise ValueError("the model is not sharded: call torch.distributed.fsdp.fully_shard first")
    replicas = set(dist.get_process_group_ranks(replicate_group)) - {dist.get_rank()}
    for _, group in groups:
        if group.is_replicated():
            raise ValueError(
                "FSDP averages over the replicas itself, because the model was sharded with a mesh "
                "of two dimensions, so that a hook would come too late to save anything: give "
                'fully_shard the shards alone, mesh=mesh["shard"]'
            )
        if group.ranks() & replicas:
            raise ValueError(
                f"replicate_group has the ranks {sorted(group.ranks() & replicas)}, over which the "
                "model is sharded; it must have the ranks that hold the same shard"
            )
        if group.has_hook():
            raise ValueError("the model has an all-reduce hook already")
    if state.process_group is not None and state.process_group is not replicate_group:
        raise ValueError("the state has another process group than replicate_group")


class _Hook:
    """All parameter groups of a model in their steps."""

    def __init__(
        self, model: nn.Module, groups: list[ParameterGroup], state: PowerSGDState
    ) -> None:
        self._state, self._backward, self._index = state, -1, 0
        self._collectives = ProcessGroupCollectives(state.process_group)
        self._named = {
            name: next(filter(None, (group.find(parameter) for group in groups)), parameter)
            for name, parameter in named_parameters(model).items()
        }

    def __call__(self, group: ParameterGroup, reduced: Tensor) -> None:
        # Autograd's number of the backward pass: an aborted one leaves nothing behind.
        backward = torch._C._current_graph_task_id()
        is_first, self._backward = backward != self._backward, backward
        self._index = 0 if is_first else self._index + 1
        if is_first:
            Variable._execution_engine.queue_callback(self._state.count_iteration)
        shards = group.shards()
        numels = [local(shard.parameter).numel() for shard in shards]
        padded = torch.split(reduced, [shard.padded_numel for shard in shards])
        views = [part[:numel] for part, numel in zip(padded, numels, strict=True)]
        is_padded = sum(numels) < reduced.numel()
        buffer = torch.cat(views) if is_padded else reduced
        arrival = Arrival(
            buffer,
            [shard.parameter for shard in shards],
            self._find_names,
            self._collectives,
            self._index,
            is_first=is_first,
            # FSDP takes the gradients when the hook has returned, so that none can wait.
            is_last=True,
            is_new=False,
            is_square=False,
            may_be_unused=True,
        )
        reduce_bucket(self._state, arrival).wait()
        if is_padded:
            for view, average in zip(views, torch.split(buffer, numels), strict=True):
                view.copy_(average)

    def _find_names(self) -> Mapping[str, Tensor]:
        return {name: getattr(p, "sharded_param", p) for name, p in self._named.items()}

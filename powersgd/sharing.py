"""Checkpoints that several ranks write: one file for all, or torch.distributed.checkpoint."""

import io
from typing import Any

import torch
from torch import Tensor

from powersgd.agreement import require_agreement
from powersgd.arrival import require_home
from powersgd.collectives import Collectives, find_collectives, start_mean_, wait
from powersgd.layout import local
from powersgd.saving import SHARED, Model, find_names
from powersgd.state import PowerSGDState


def shared_state_dict(state: PowerSGDState, module: Model) -> dict[str, Any]:
    """Return what any rank of any group can go on from: the residuals are the mean over ranks.

    If every rank starts with the mean residual, the next update is the same (to rounding) as with
    each rank's own, and nothing is lost when the number of ranks changes. A collective: all ranks
    of the group call it between two steps; one of them saves the result.

    Args:
        state: The state.
        module: The model that it serves, or a DDP or compiled module around it, or its parameters
            by name; see `PowerSGDState.state_dict`.

    Returns:
        See `PowerSGDState.state_dict`; equal on all ranks.

    Raises:
        RuntimeError: If there is no process group, or a collective fails.
        ValueError: On all ranks, if the state of any of them serves other parameters than
            ``module`` has or holds another rank's residuals, or if ranks differ in what they hold.

    Example:
        >>> saved = shared_state_dict(state, ddp_model)  # doctest: +SKIP
        >>> if dist.get_rank() == 0:  # doctest: +SKIP
        ...     torch.save(saved, "powersgd.pt")
    """
    collectives = find_collectives(state.process_group)
    saved: dict[str, Any] = {}
    names: dict[str, Tensor] = {}

    def collect() -> dict[str, Any]:
        names.update(find_names(state, module))
        require_home(state, collectives)
        saved.update(state.state_dict(module))
        for name, entry in saved["parameters"].items():
            if entry["is_owed"] and "residual" not in entry:  # this rank owes nothing any more
                entry["residual"] = torch.zeros_like(local(names[name]))
                entry["tensors"] = f"residual {entry['tensors']}".strip()
        saved["rank"] = SHARED
        numbers = {k: v for k, v in saved.items() if isinstance(v, int | str)}
        entries = {
            name: [v for v in entry.values() if not isinstance(v, Tensor)]
            for name, entry in saved["parameters"].items()
        }
        is_own = state.origin is not None  # while others hold the mean: some would count twice
        return {
            "whether each rank has loaded its own residuals": is_own,
            **numbers,
            **saved["settings"],
            "the saved parameters": entries,
        }

    require_agreement(collect, collectives, _find_device(state, module))
    for name, parameter in names.items():
        entry = saved["parameters"][name]
        if "residual" in entry:
            entry["residual"] = _mean(entry["residual"], collectives).to(parameter.dtype)
    return saved


def _find_device(state: PowerSGDState, module: Model) -> torch.device:
    try:
        tensors = list(find_names(state, module).values())
    except ValueError:  # to be raised once the other ranks know
        tensors = list(state.served())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _mean(residual: Tensor, collectives: Collectives) -> Tensor:
    # In single precision at least: these are small numbers, to be divided further.
    wide = torch.promote_types(residual.dtype, torch.float32)
    total = residual.to(wide).contiguous()
    wait(start_mean_(torch.view_as_real(total) if total.is_complex() else total, collectives))
    return total


class Checkpoint:
    """A state beside model and optimizer in ``torch.distributed.checkpoint``.

    Each rank's residuals lie under a key with its rank, so that no rank gets those of another; or
    all ranks share their mean, and the checkpoint fits any number of ranks, as long as the first
    rank of the state's group is the same. Load into a new state, or call ``state.reset()``
    first: ``dcp.load`` asks for what a state holds, too, and ranks that differ in it get an error.

    Args:
        state: The state.
        module: The model that it serves, or a DDP or compiled module around it, or its parameters
            by name; see `PowerSGDState.state_dict`.
        shared: Save `shared_state_dict`; when loading, expect it. The same on all ranks: else their
            collectives do not match, and gloo aborts.

    References:
        ``torch.distributed.checkpoint.stateful.Stateful``.

    Example:
        >>> everything = {"model": model, "powersgd": Checkpoint(state, model)}  # doctest: +SKIP
        >>> dcp.save(everything, checkpoint_id="step_1000")  # doctest: +SKIP
    """

    def __init__(self, state: PowerSGDState, module: Model, *, shared: bool = False) -> None:
        self._state, self._module, self._shared = state, module, shared

    def state_dict(self) -> dict[str, bytes]:
        """Return the state as bytes under one key; of a shared state, a collective.

        Bytes, because what a new state holds does not tell which tensors will be loaded.

        Returns:
            What ``torch.save`` makes of the state.

        Raises:
            RuntimeError: See `shared_state_dict`.
            ValueError: See `shared_state_dict`.
        """
        make = shared_state_dict if self._shared else PowerSGDState.state_dict
        file = io.BytesIO()
        torch.save(make(self._state, self._module), file)
        return {self._key(): file.getvalue()}

    def load_state_dict(self, saved: dict[str, bytes]) -> None:
        """Load what `state_dict` returned.

        Args:
            saved: The bytes under this rank's key.

        Raises:
            KeyError: If there is no such key.
            RuntimeError: See `PowerSGDState.load_state_dict`.
            ValueError: See `PowerSGDState.load_state_dict`.
        """
        file = io.BytesIO(saved[self._key()])
        try:
            state = torch.load(file, map_location="cpu")
        except Exception as error:
            raise ValueError(f"the bytes of {self._key()} cannot be read: {error!r}") from error
        self._state.load_state_dict(state, self._module)

    def _key(self) -> str:
        # Ranks of the world, because several models may be trained by a group each.
        collectives = find_collectives(self._state.process_group)
        first = collectives.members()[0]
        return f"shared{first}" if self._shared else f"rank{collectives.rank()}"

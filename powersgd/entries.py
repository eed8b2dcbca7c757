"""What a parameter carries over as plain data, and what is wrong with such data."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from powersgd.layout import ParameterSpec, matrix_shape, unflatten
from powersgd.memory import Carried

_TENSORS = ("residual", "q", "spare")
_HALVES = (torch.float16, torch.bfloat16)  # of hooks wrapped around ours


def pack(parameter: Tensor, place: tuple[str, int], carried: Carried) -> dict[str, Any]:
    """Make a parameter's entry: tensors, numbers and strings.

    Args:
        parameter: The parameter.
        place: Its position in the model, see `powersgd.positions`.
        carried: What it carries over.

    Returns:
        The entry; its tensors are copies, the residual in the shape of the parameter.
    """
    tensors = {
        "residual": None if carried.residual is None else unflatten(carried.residual, parameter),
        "q": carried.q,
        "spare": carried.spare,
    }
    kept = {name: tensor.detach().clone() for name, tensor in tensors.items() if tensor is not None}
    return {
        "kind": place[0],
        "position": place[1],
        "loss_scale": carried.loss_scale,
        "is_owed": int(carried.is_owed),
        "is_square": int(carried.is_square),
        "tensors": " ".join(kept),
        **kept,
    }


def unpack(parameter: Tensor, entry: Mapping[str, Any]) -> Carried:
    """Read a parameter's entry, in which `find_entry_problems` finds nothing.

    Args:
        parameter: The parameter.
        entry: From `pack`.

    Returns:
        What the parameter carries over, on the parameter's device.
    """
    flat: Tensor | None = None
    if "residual" in entry:
        left = entry["residual"]
        numel = ParameterSpec.of(parameter).numel
        flat = torch.empty(numel, dtype=left.dtype.to_real(), device=parameter.device)
        unflatten(flat, parameter).copy_(left)
    q, spare = (
        entry[name].to(parameter.device, copy=True) if name in entry else None
        for name in ("q", "spare")
    )
    return Carried(
        flat, q, spare, entry["loss_scale"], bool(entry["is_owed"]), bool(entry["is_square"])
    )


def find_entry_problems(name: str, entry: Any, parameter: Tensor, rank: int) -> Iterator[str]:
    """Look for everything that is wrong with a parameter's entry.

    Args:
        name: The parameter's name.
        entry: What should come from `pack`.
        parameter: The parameter.
        rank: The rank of the factors.

    Yields:
        One clause for each problem.
    """
    expected: dict[str, type] = {
        "kind": str,
        "position": int,
        "loss_scale": float,
        "is_owed": int,
        "is_square": int,
        "tensors": str,
    }
    if not isinstance(entry, Mapping):
        yield f"{name} is {type(entry)!r}"
        return
    broken = [k for k, kind in expected.items() if type(entry.get(k)) is not kind]
    if broken:
        yield from (f"{name}.{k} is {entry.get(k)!r}" for k in broken)
        return
    held = entry["tensors"].split()
    yield from (f"unexpected {name}.{k}" for k in entry if k not in {*expected, *held})
    for part in held:
        tensor = entry.get(part)
        if part not in _TENSORS or not isinstance(tensor, Tensor):
            yield f"missing {name}.{part}"
            continue
        shape = _expected_shape(part, entry, parameter, rank)
        if tensor.shape != shape:
            yield f"{name}.{part} has the shape {tuple(tensor.shape)}, expected {tuple(shape)}"
        dtype = parameter.dtype if part == "residual" else parameter.dtype.to_real()
        if tensor.dtype != dtype and (dtype.is_complex or tensor.dtype not in _HALVES):
            yield f"{name}.{part} is {tensor.dtype}, expected {dtype}"
        elif not tensor.isfinite().all():
            yield f"{name}.{part} is not finite"
    if not (math.isfinite(entry["loss_scale"]) and entry["loss_scale"] > 0):
        yield f"{name}.loss_scale is {entry['loss_scale']!r}"


def _expected_shape(
    part: str, entry: Mapping[str, Any], parameter: Tensor, rank: int
) -> tuple[int, ...]:
    if part == "residual":
        return tuple(parameter.shape)
    shape = matrix_shape(ParameterSpec.of(parameter))
    if entry["is_square"] or shape is None:  # of a whole bucket: DDP decides how wide it is
        columns = entry[part].shape[-1:] or (0,)
        return (min(rank, *columns), *columns)
    return min(rank, *shape), shape[1]

"""What a parameter carries over as plain data, and what is wrong with such data."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from powersgd.arguments import show
from powersgd.layout import ParameterSpec, local, matrix_shape
from powersgd.memory import Carried
from powersgd.settings import LARGEST_SCALE, SMALLEST_SCALE

_TENSORS = ("residual", "q", "spare")
# Between which the largest entry of a unit row lies, however it is rounded.
_BELOW_UNITS, _ABOVE_UNITS = 1e-30, 2.0
_FLAGS = ("is_owed", "is_square")


def pack(parameter: Tensor, place: tuple[str, int], carried: Carried) -> dict[str, Any]:
    """Make a parameter's entry: tensors, numbers and strings.

    Args:
        parameter: The parameter.
        place: Its position in the model, see `powersgd.positions`.
        carried: What it carries over.

    Returns:
        The entry; its tensors are copies, of the parameter's dtype.
    """
    tensors = {name: getattr(carried, name) for name in _TENSORS}
    kept = {
        name: tensor.detach().to(_expected_dtype(name, parameter), copy=True)
        for name, tensor in tensors.items()
        if tensor is not None
    }
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
    residual, q, spare = (
        entry[name].to(parameter.device, copy=True) if name in entry else None for name in _TENSORS
    )
    is_owed, is_square = bool(entry["is_owed"]), bool(entry["is_square"])
    return Carried(residual, q, spare, entry["loss_scale"], is_owed, is_square)


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
        **dict.fromkeys(_FLAGS, int),
        "tensors": str,
    }
    if not isinstance(entry, Mapping):
        yield f"{name} is {type(entry)!r}"
        return
    broken = [k for k, kind in expected.items() if type(entry.get(k)) is not kind]
    if broken:
        yield from (f"{name}.{k} is {show(entry.get(k))}" for k in broken)
        return
    yield from _find_number_problems(name, entry)
    held = entry["tensors"].split()
    yield from (f"unexpected {name}.{k}" for k in entry if k not in {*expected, *held})
    if ("q" in held) != ("spare" in held):
        yield f"{name} has one of q and spare, expected both or none"
    if entry["is_owed"] and "q" in held:
        yield f"unexpected {name}.q: it is owed, so no longer compressed"
    is_vector = matrix_shape(ParameterSpec.of(parameter)) is None
    for part in held:
        if part not in _TENSORS or not isinstance(entry.get(part), Tensor):
            yield f"missing {name}.{part}"
        elif is_vector and not entry["is_square"] and not (part == "residual" and entry["is_owed"]):
            yield f"unexpected {name}.{part}: a parameter of its shape is not compressed"
        else:
            yield from _find_tensor_problems(name, part, entry, parameter, rank)


def _find_number_problems(name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{name}.{k} is {entry[k]}" for k in _FLAGS if entry[k] not in (0, 1))
    if not SMALLEST_SCALE < entry["loss_scale"] < LARGEST_SCALE:
        yield f"{name}.loss_scale is {entry['loss_scale']!r}"
    kind, position = entry["kind"], entry["position"]
    is_met = kind == "sparse" or kind.startswith("torch.")  # the dtype, when it was met first
    if not (is_met and position >= 0) and (kind, position) != ("", -1):
        yield f"{name} has the kind {kind!r} and the position {position}"


def _find_tensor_problems(
    name: str, part: str, entry: Mapping[str, Any], parameter: Tensor, rank: int
) -> Iterator[str]:
    tensor = entry[part]
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        yield f"{name}.{part} is {'a meta' if tensor.is_meta else 'not a dense'} tensor"
        return
    shape = _expected_shape(part, entry, parameter, rank)
    if tensor.shape != shape:
        yield f"{name}.{part} has the shape {tuple(tensor.shape)}, expected {tuple(shape)}"
    dtype = _expected_dtype(part, parameter)
    if tensor.dtype != dtype:
        yield f"{name}.{part} is {tensor.dtype}, expected {dtype}"
    elif not tensor.isfinite().all():
        yield f"{name}.{part} is not finite"
    elif part != "residual" and tensor.numel():
        # A row of zeros would stay so, and one of large numbers overflow. An epsilon shortens rows.
        largest, least = tensor.abs().amax(-1), min(torch.finfo(tensor.dtype).tiny, _BELOW_UNITS)
        if not ((largest >= least) & (largest < _ABOVE_UNITS)).all():
            yield f"{name}.{part} has rows that are not of unit length"


def _expected_dtype(part: str, parameter: Tensor) -> torch.dtype:
    return parameter.dtype if part == "residual" else parameter.dtype.to_real()


def _expected_shape(
    part: str, entry: Mapping[str, Any], parameter: Tensor, rank: int
) -> tuple[int, ...]:
    if part == "residual":
        return tuple(local(parameter).shape)
    shape = matrix_shape(ParameterSpec.of(parameter))
    if entry["is_square"] or shape is None:  # of a whole bucket: DDP decides how wide it is
        columns = entry[part].shape[-1:] or (0,)
        return (min(rank, *columns), *columns)
    return min(rank, *shape), shape[1]

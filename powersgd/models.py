"""Read the parameters of a model from wherever they are described."""

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from powersgd.layout import ParameterSpec
from powersgd.workloads import WORKLOADS

_STATISTICS = ("running_mean", "running_var")  # batch norm's, which get no gradient
_SAFETENSORS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class Layer(NamedTuple):
    """One parameter.

    Attributes:
        name: Its name in the model.
        spec: How it lies in memory.
        itemsize: Bytes of a real element.
    """

    name: str
    spec: ParameterSpec
    itemsize: int = 4

    @property
    def nbytes(self) -> int:
        """Bytes of its gradient."""
        return self.spec.numel * self.itemsize

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "Layer":
        """Describe a parameter."""
        itemsize = tensor.element_size() // (2 if tensor.is_complex() else 1)
        return cls(name, ParameterSpec.of(tensor), itemsize)


def read_layers(source: str) -> list[Layer]:
    """Read a model's parameters; no weights are allocated where that can be avoided.

    Args:
        source: A name of `powersgd.workloads.WORKLOADS`, a list of shapes such as
            ``512x256,64x3x3x3``, a state_dict (``.pt``, ``.pth``) or ``.safetensors`` file, or
            ``module:function`` that returns a module.

    Returns:
        The trainable parameters, in the model's order; tied ones once.

    Raises:
        ValueError: If the source is none of these, or has no parameters.
    """
    layers = _read(source)
    if not layers:
        raise ValueError(f"{source!r} has no floating-point parameters")
    return layers


def _read(source: str) -> list[Layer]:
    path = Path(source)
    if source in WORKLOADS:
        return [_contiguous(name, shape) for name, shape in WORKLOADS[source]().items()]
    if path.is_file():
        return _read_safetensors(path) if path.suffix == ".safetensors" else _read_file(path)
    if re.fullmatch(r"\d+(x\d+)*(,\d+(x\d+)*)*", source):
        shapes = [tuple(int(size) for size in shape.split("x")) for shape in source.split(",")]
        return [_contiguous(str(i), shape) for i, shape in enumerate(shapes)]
    module, _, function = source.partition(":")
    if not function:
        raise ValueError(
            f"{source!r} is no workload ({', '.join(WORKLOADS)}), no file, no list of shapes such "
            "as 512x256,64x3x3x3, and no module:function"
        )
    named = _build(module, function).named_parameters()
    return [Layer.of(name, p) for name, p in named if p.requires_grad]


def _contiguous(name: str, shape: tuple[int, ...], itemsize: int = 4) -> Layer:
    return Layer(name, ParameterSpec.of(torch.empty(shape, device="meta")), itemsize)


def _build(module: str, function: str) -> nn.Module:
    try:
        build: Any = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{module}:{function} cannot be loaded: {error}") from error
    try:
        with torch.device("meta"):
            model = build()
    except Exception:  # whatever a model's own code does that the meta device cannot
        try:
            model = build()
        except Exception as error:
            raise ValueError(
                f"{module}:{function}() failed: {type(error).__name__}: {error}"
            ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{module}:{function} returned a {type(model).__name__}, but no module")
    return model


def _read_safetensors(path: Path) -> list[Layer]:
    # The length of a JSON header, then the header.
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(size) if size < path.stat().st_size else b"")
        except ValueError as error:
            raise ValueError(f"{path} is no safetensors file") from error
    return [
        _contiguous(name, tuple(entry["shape"]), _SAFETENSORS[entry["dtype"]])
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] in _SAFETENSORS and _is_trained(name)
    ]


def _read_file(path: Path) -> list[Layer]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} cannot be read as a state_dict: {reason}") from error
    layers, seen = [], set()
    for name, tensor in _find_tensors(content):
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape)
        is_number = tensor.is_floating_point() or tensor.is_complex()
        if is_number and _is_trained(name) and (place not in seen or not tensor.numel()):
            layers.append(Layer.of(name, tensor))
        seen.add(place)
    return layers


def _find_tensors(content: Any) -> Iterator[tuple[str, Tensor]]:
    # A checkpoint may hold the state_dict beside other things.
    if isinstance(content, Mapping):
        for key in ("model", "state_dict", "model_state_dict", "module"):
            if isinstance(content.get(key), Mapping):
                content = content[key]
                break
        yield from ((name, t) for name, t in content.items() if isinstance(t, Tensor))


def _is_trained(name: str) -> bool:
    return name.rpartition(".")[2] not in _STATISTICS

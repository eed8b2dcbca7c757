"""The front end for loops without DDP: all gradients of a model at once, after backward."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn

from powersgd.arrival import Arrival
from powersgd.collectives import find_collectives
from powersgd.layout import ParameterSpec, local, unflatten
from powersgd.names import named_parameters
from powersgd.reduction import reduce_bucket
from powersgd.state import PowerSGDState

_FindNames = Callable[[], Mapping[str, Tensor]]


@overload
def average_gradients(gradients: nn.Module | Iterable[Tensor], state: PowerSGDState) -> None: ...


@overload
def average_gradients(
    gradients: Mapping[str, Tensor], state: PowerSGDState
) -> dict[str, Tensor]: ...


def average_gradients(
    gradients: nn.Module | Iterable[Tensor] | Mapping[str, Tensor], state: PowerSGDState
) -> dict[str, Tensor] | None:
    """Average a model's gradients over the ranks with PowerSGD: two collectives for each dtype.

    Counts a step of the state. All ranks call it, with the same parameters; a parameter that a rank
    has not used takes part with zeros there, and keeps its residual. Sparse gradients travel one by
    one, as they are.

    Args:
        gradients: The model, or its parameters, after backward: their ``grad`` is overwritten; or
            gradients by name, all of them in each step, as ``torch.func.grad`` returns them.
        state: Settings and memory; one for each model. Its process group says which ranks.

    Returns:
        Of gradients by name, their averages; else None. See `powersgd.powerSGD_hook` for the
        averages of a step in which a rank had an inf or a NaN.

    Raises:
        RuntimeError: If there is no process group, or a collective fails (a rank died, a timeout).
        TypeError: If ``state`` is not a `powersgd.PowerSGDState`, or ``gradients`` none of these.
        ValueError: If no parameter is to be trained. On all ranks, if the state serves another
            model, holds another rank's residuals or is a copy that does not fit, or if ranks differ
            in settings or models.

    References:
        Algorithms 1 and 2 of Vogels et al. (2019), arXiv:1905.13727.

    Example:
        >>> state = PowerSGDState(None, start_powerSGD_iter=10)
        >>> loss.backward()  # doctest: +SKIP
        >>> average_gradients(model, state)  # doctest: +SKIP
    """
    if not isinstance(state, PowerSGDState):
        raise TypeError(f"state must be a powersgd.PowerSGDState, got {type(state)!r}")
    if isinstance(gradients, Mapping):
        _listed(gradients.values())
        stand_ins = state.stand_ins.find(gradients)
        members = [_Member(stand_ins[name], g) for name, g in gradients.items()]
        return dict(zip(stand_ins, _average(members, lambda: stand_ins, state), strict=True))
    find_names: _FindNames | None = None
    if isinstance(gradients, nn.Module):
        find_names = partial(named_parameters, gradients)
        gradients = gradients.parameters()
    parameters = [parameter for parameter in _listed(gradients) if parameter.requires_grad]
    members = [_Member(p, _as_before(p, state)) for p in parameters]
    averages = _average(members, find_names, state)
    for parameter, average in zip(parameters, averages, strict=True):
        _set_gradient(parameter, average)
    return None


def _listed(gradients: Any) -> list[Tensor]:
    is_many = isinstance(gradients, Iterable) and not isinstance(gradients, Tensor)
    tensors = list(gradients) if is_many else [gradients]
    strangers = [type(tensor) for tensor in tensors if not isinstance(tensor, Tensor)]
    if strangers or not is_many:
        kind = strangers[0] if strangers else Tensor
        raise TypeError(
            f"gradients must be a module, its parameters or tensors by name, got {kind!r}"
        )
    return tensors


class _Member(NamedTuple):
    """A parameter and its gradient on this rank; None if it was not used."""

    parameter: Tensor
    gradient: Tensor | None

    @property
    def kind(self) -> tuple[Any, ...]:
        is_sparse = self.gradient is not None and self.gradient.is_sparse
        one = (id(self.parameter),) if is_sparse else ()
        return self.parameter.dtype, self.parameter.device, *one


def _as_before(parameter: Tensor, state: PowerSGDState) -> Tensor | None:
    # Sparse once, sparse for ever: other ranks count on it.
    gradient = parameter.grad
    if state.positions.place(parameter)[0] == "sparse":
        gradient = torch.zeros_like(parameter) if gradient is None else gradient
        return gradient if gradient.is_sparse else gradient.to_sparse(1)
    if gradient is None or not state.positions.knows([parameter]):
        return gradient
    return gradient.to_dense() if gradient.is_sparse else gradient


@torch.no_grad()
def _average(
    members: Sequence[_Member],
    find_names: _FindNames | None,
    state: PowerSGDState,
) -> list[Tensor]:
    # In the order of the members; views of one buffer for each kind.
    if not members:
        raise ValueError("there is no gradient to average: no parameter requires one")
    buckets: dict[tuple[Any, ...], list[int]] = {}
    for i, member in enumerate(members):
        buckets.setdefault(member.kind, []).append(i)
    collectives = find_collectives(state.process_group)
    buffers, futures = [], []
    for n, indices in enumerate(buckets.values()):
        bucket = [members[i] for i in indices]
        buffers.append(_flatten(bucket))
        arrival = Arrival(
            buffers[-1],
            [member.parameter for member in bucket],
            find_names,
            collectives,
            n,
            is_first=n == 0,
            is_last=n == len(buckets) - 1,
            is_new=False,
            is_square=False,
            may_be_unused=any(member.gradient is None for member in bucket),
        )
        futures.append(reduce_bucket(state, arrival))
    for future in futures:
        future.wait()
    state.count_iteration()
    averages: list[Tensor] = [torch.empty(0)] * len(members)
    for buffer, indices in zip(buffers, buckets.values(), strict=True):
        for i, view in zip(indices, _views(buffer, [members[i] for i in indices]), strict=True):
            averages[i] = view
    return averages


def _flatten(bucket: Sequence[_Member]) -> Tensor:
    first = bucket[0]
    if first.gradient is not None and first.gradient.is_sparse:
        return first.gradient.clone()
    numel = sum(ParameterSpec.of(member.parameter).numel for member in bucket)
    dtype, device = first.parameter.dtype.to_real(), first.parameter.device
    buffer = torch.zeros(numel, dtype=dtype, device=device)
    for view, (_, gradient) in zip(_views(buffer, bucket), bucket, strict=True):
        if gradient is not None:
            view.copy_(local(gradient))
    return buffer


def _views(buffer: Tensor, bucket: Sequence[_Member]) -> list[Tensor]:
    if buffer.is_sparse:
        return [buffer]
    specs = [ParameterSpec.of(member.parameter) for member in bucket]
    flats = torch.split(buffer, [spec.numel for spec in specs])
    return [unflatten(flat, spec) for flat, spec in zip(flats, specs, strict=True)]


def _set_gradient(parameter: Tensor, average: Tensor) -> None:
    if average.is_sparse:
        parameter.grad = average
        return
    if parameter.grad is None or parameter.grad.is_sparse:
        parameter.grad = torch.zeros_like(parameter)
    local(parameter.grad).copy_(average)

"""A state as plain data by parameter name, for checkpoints and for pickle."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from powersgd.arguments import show
from powersgd.entries import find_entry_problems, pack, unpack
from powersgd.memory import Carried
from powersgd.names import named_parameters
from powersgd.settings import Settings

logger = logging.getLogger("powersgd.state")

Model = nn.Module | Mapping[str, Tensor]

FORMAT = "powersgd.PowerSGDState 1"
SHARED = -1  # in the place of a rank: the residuals are means over ranks, which fit any of them
COUNTERS = (
    "iter",
    "next_stats_report",
    "total_numel_before_compression",
    "total_numel_after_compression",
)
# What decides which parameters have a memory and of what shape.
_SHAPING = ("matrix_approximation_rank", "min_compression_rate", "use_error_feedback", "warm_start")
_FOREIGN = (
    "it must come from powersgd (torch's own PowerSGDState keeps its memory by bucket number, "
    "which cannot be taken over: start with a new powersgd.PowerSGDState, which warms up again)"
)


class Saved:
    """What `powersgd.PowerSGDState` does to outlive its process."""

    def state_dict(self, module: Model) -> dict[str, Any]:
        """Return all that this rank needs to go on exactly from here.

        The residuals are this rank's own: save one file per rank, or use
        `powersgd.shared_state_dict`.
        Settings that were set but are not in force yet are not in it: save once they are.

        Args:
            module: The model that this state serves, or a DDP or compiled module around it; of
                `powersgd.average_gradients` with gradients by name, parameters by name.

        Returns:
            Numbers, strings and copies of tensors in nested dicts, keyed by parameter name, which
            ``torch.load`` reads with ``weights_only=True``.

        Raises:
            ValueError: If the state serves parameters that ``module`` does not have, or was copied
                or unpickled and does not fit it.

        Example:
            >>> import powersgd, torch
            >>> module = torch.nn.Linear(2, 2)
            >>> powersgd.PowerSGDState(None).state_dict(module)["iter"]
            0
        """
        names = find_names(self, module)
        return _pack(_claimed(self, names), names)

    def load_state_dict(self, saved: Mapping[str, Any], module: Model) -> None:
        """Go on exactly from where `state_dict` was called; on all ranks before the same step.

        If only some ranks load, or one of them fails to, into states that have made steps before,
        all get an error in the next step, after the group's timeout.
        The settings stay as they were given to the constructor. With `batched_powerSGD_hook` it is
        exact if DDP's buckets are the same, also in the first step (``find_unused_parameters``).

        Args:
            saved: What `state_dict` returned on this rank of a group of this size, or what
                `powersgd.shared_state_dict` returned anywhere. Not changed, and not kept.
            module: The model, or a DDP or compiled module around it, or its parameters by name.

        Raises:
            RuntimeError: If a compiled backward already holds the state's memory.
            ValueError: If anything is missing, unexpected or does not fit; names all of it, and
                nothing is loaded. On all ranks in the next step, if one of them was given the
                residuals of another rank, or some their own and others a shared file.
        """
        _load(self, saved, module)

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickle and deepcopy keep: all but the process group.

        Memory is kept by parameter name; the next DDP model takes it up in its first step. Settings
        that were set but are not in force yet are in force then, too.

        Raises:
            ValueError: If the model was not found, so that its parameters have no names.
        """
        return _freeze(self)

    def __setstate__(self, saved: dict[str, Any]) -> None:
        """Restore what `__getstate__` returned, with the default process group.

        Raises:
            ValueError: If it was made by another class, such as torch's `PowerSGDState`.
        """
        _thaw(self, saved)


def find_names(state: Any, model: Model) -> Mapping[str, Tensor]:
    """Return the parameters by name under which a state keeps what they carry over.

    Args:
        state: The state.
        model: The model, or a module around it, or parameters or gradients by name.

    Returns:
        The parameters, or their stand-ins.

    Raises:
        ValueError: If it is neither.
    """
    if not isinstance(model, Mapping):
        return named_parameters(model)
    if not all(isinstance(tensor, Tensor) for tensor in model.values()):
        raise ValueError(
            f"module is {show(model)}, but must be a torch.nn.Module or its parameters"
        )
    found: Mapping[str, Tensor] = state.stand_ins.find(model)
    return found


def require_fit(state: Any, names: Mapping[str, Tensor] | None) -> None:
    """Raise if a state that was copied or unpickled does not fit the model that it meets.

    Args:
        state: The state. Not changed.
        names: The model's parameters by name; None if the model is not known.

    Raises:
        ValueError: If it does not fit; names all that is wrong.
    """
    if state.unclaimed is None:
        return
    if names is None:
        raise ValueError(
            "a copied or pickled PowerSGDState was not given its memory back, because its DDP "
            "model is not among Python's objects: use state_dict and load_state_dict"
        )
    rank = state.unclaimed["settings"]["matrix_approximation_rank"]
    problems = list(_misfits(state.unclaimed["parameters"], names, rank))
    if problems:
        raise ValueError(
            "this PowerSGDState was copied or pickled and does not fit the model: "
            + "; ".join(problems)
        )


def meet_model(state: Any, names: Mapping[str, Tensor] | None) -> None:
    """Take up what was copied or unpickled, and remember the parameters' names.

    Args:
        state: The state, which `require_fit` has let pass.
        names: The model's parameters by name; None if the model is not known.
    """
    if names is None:
        return
    state.names = names
    if state.unclaimed is not None:
        _take_up(state, state.unclaimed, names, _unpack(state.unclaimed, names))
        state.unclaimed = None


def _claimed(state: Any, names: Mapping[str, Tensor]) -> Any:
    if state.unclaimed is not None:
        require_fit(state, names)
        meet_model(state, names)
    return state


def _pack(state: Any, names: Mapping[str, Tensor]) -> dict[str, Any]:
    foreign = len(state.served() - set(names.values()))
    if foreign:
        raise ValueError(
            f"the state serves {foreign} parameters that this module does not have; give the model "
            "whose DDP wrapper has the hook"
        )
    rank, world_size = state.home or state.origin or (SHARED, 1)
    return {
        "format": FORMAT,
        **{name: getattr(state, name) for name in COUNTERS},
        "rank": rank,
        "world_size": world_size,
        "settings": state.in_force._asdict(),
        "parameters": {
            name: pack(parameter, state.positions.place(parameter), state.carried(parameter))
            for name, parameter in names.items()
        },
    }


def _load(state: Any, saved: Mapping[str, Any], module: Model) -> None:
    if state.traced is not None:
        raise RuntimeError("load_state_dict must come before the first compiled backward pass")
    names = find_names(state, module)
    problems = _find_problems(saved, names, state.settings())
    if problems:
        raise ValueError(f"cannot load this PowerSGDState: {'; '.join(problems)}")
    loaded = _unpack(saved, names)  # before anything is forgotten: there may be no memory for it
    state.reset()
    _take_up(state, saved, names, loaded)
    for name in COUNTERS:
        setattr(state, name, saved[name])


def _unpack(saved: Mapping[str, Any], names: Mapping[str, Tensor]) -> dict[Tensor, Carried]:
    entries = saved["parameters"].items()
    return {names[name]: unpack(names[name], entry) for name, entry in entries}


def _take_up(
    state: Any,
    saved: Mapping[str, Any],
    names: Mapping[str, Tensor],
    loaded: dict[Tensor, Carried],
) -> None:
    entries = {names[name]: entry for name, entry in saved["parameters"].items()}
    state.names = names
    state.loaded = loaded
    state.positions.restore({p: (e["kind"], e["position"]) for p, e in entries.items()})
    state.origin = _origin(saved)


def _origin(saved: Mapping[str, Any]) -> tuple[int, int] | None:
    is_own = any("residual" in e or e["is_owed"] for e in saved["parameters"].values())
    return (saved["rank"], saved["world_size"]) if is_own and saved["rank"] != SHARED else None


def _freeze(state: Any) -> dict[str, Any]:
    if state.process_group is not None:
        logger.warning(
            "The process group is not part of a pickled or copied PowerSGDState: set "
            "state.process_group before the next step if it is not the default group."
        )
    if state.served() and not state.names:
        raise ValueError(
            "this PowerSGDState has not found its DDP model among Python's objects, so it cannot "
            "be copied or pickled: use state_dict"
        )
    attributes = (*Settings._fields, *COUNTERS, "compression_stats_logging_frequency", "loss_scale")
    return {
        "format": FORMAT,
        "steps": state.steps,
        "attributes": {name: getattr(state, name) for name in attributes},
        "saved": state.unclaimed or (_pack(state, state.names) if state.names else None),
    }


def _thaw(state: Any, saved: Mapping[str, Any]) -> None:
    if saved.get("format") != FORMAT:
        raise ValueError(f"{_FOREIGN}, but it is {saved.get('format')!r}")
    state.__init__(None, steps=saved["steps"])
    for name, value in saved["attributes"].items():
        setattr(state, name, value)
    state.unclaimed = saved["saved"]
    if state.unclaimed is not None:
        state.origin = _origin(state.unclaimed)


def _find_problems(saved: Any, parameters: Mapping[str, Tensor], settings: Settings) -> list[str]:
    # One clause for each thing that keeps saved data from being taken over.
    kind = saved.get("format", "a dict of something else") if isinstance(saved, Mapping) else saved
    if not isinstance(kind, str) or kind != FORMAT:
        return [f"{_FOREIGN}, but it is {show(kind)}"]
    counts = (*COUNTERS, "rank", "world_size")
    expected = ("format", *counts, "settings", "parameters")
    misnamed = [f"missing {k}" for k in expected if k not in saved]
    misnamed += [f"unexpected {k}" for k in saved if k not in expected]
    if misnamed:
        return misnamed
    lowest = {"rank": SHARED, "world_size": 1}
    highest = {"next_stats_report": 2**64}  # it may lie as far ahead as users like
    wrong = [
        k
        for k in counts
        if type(saved[k]) is not int or not lowest.get(k, 0) <= saved[k] < highest.get(k, 2**62)
    ]
    wrong += [k for k in ("settings", "parameters") if not isinstance(saved[k], Mapping)]
    if wrong:
        return [f"{k} is {show(saved[k])}" for k in wrong]
    rank = settings.matrix_approximation_rank
    if type(saved["settings"].get("matrix_approximation_rank")) is int:
        rank = saved["settings"]["matrix_approximation_rank"]
    entries = saved["parameters"]
    return [*_differences(saved["settings"], settings), *_misfits(entries, parameters, rank)]


def _differences(saved: Mapping[str, Any], settings: Settings) -> Iterator[str]:
    names = {name: name in Settings._fields for name in (*Settings._fields, *saved)}
    for name, is_known in names.items():
        if name not in saved or not is_known:
            yield f"{'missing' if is_known else 'unexpected'} settings.{name}"
    for name in _SHAPING:
        then, now = saved.get(name), getattr(settings, name)
        if not isinstance(then, int | float) or then != now:
            yield f"{name} was {show(then)} when it was saved and is {now!r} now"


def _misfits(
    entries: Mapping[str, Any], parameters: Mapping[str, Tensor], rank: int
) -> Iterator[str]:
    yield from (f"unexpected {name}" for name in entries if name not in parameters)
    for name, parameter in parameters.items():
        if parameter.is_meta:
            yield f"{name} is a meta parameter: give the model memory first"
        elif name in entries:
            yield from find_entry_problems(name, entries[name], parameter, rank)
        elif parameter.requires_grad:
            yield f"missing {name}"
    places = Counter(
        (str(entry.get("kind")), str(entry.get("position")))
        for entry in entries.values()
        if isinstance(entry, Mapping)
    )
    twice = [place for place, count in places.items() if count > 1 and place != ("", "-1")]
    yield from (f"several parameters have the position {' '.join(place)}" for place in twice)

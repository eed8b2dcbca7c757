"""A bucket arrives: is it known, and do all ranks mean the same by it?

Ranks compare notes over one small all-gather when a bucket or its DDP model is new, and at the
start of a step that follows one in which any rank's settings had been changed. In between, the
settings that they have agreed on stay in force, so that a rank that was set differently cannot
start other collectives than the rest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from powersgd.agreement import require_agreement
from powersgd.allocation import add_bucket
from powersgd.collectives import Collectives, Work, find_collectives, wait
from powersgd.layout import ParameterSpec
from powersgd.memory import BucketState
from powersgd.phases import EAGER
from powersgd.plan import Plan, make_plan, make_square_plan
from powersgd.rehearsal import rehearse
from powersgd.saving import meet_model, require_fit
from powersgd.settings import Settings
from powersgd.state import PowerSGDState


@dataclass(frozen=True)
class Arrival:
    """A bucket as a front end hands it in.

    Attributes:
        buffer: The bucket's gradients, shape ``(numel,)``, or one sparse gradient. Overwritten.
        parameters: The parameters in the order of the buffer, in which they lie without gaps.
        find_names: Returns the model's parameters by name; None if the model is not known.
        collectives: Over which the front end averages; the state's must have the same members.
        index: Its place in the step, by which a profiler's ranges name it.
        is_first: Whether this is the step's first bucket.
        is_last: Whether this is the step's last bucket.
        is_new: Whether it is the first bucket of a model, or model wrapper, that is new to the
            state; equal on all ranks.
        is_square: View the whole bucket as one square matrix.
        may_be_unused: Whether a gradient of zeros may be that of a parameter that this rank has not
            used; the front end throws an average away if no rank has used the parameter.
    """

    buffer: Tensor
    parameters: Sequence[Tensor]
    find_names: Callable[[], Mapping[str, Tensor]] | None
    collectives: Collectives
    index: int
    is_first: bool
    is_last: bool
    is_new: bool
    is_square: bool
    may_be_unused: bool

    @property
    def kind(self) -> str:
        """What DDP keeps apart when it fills its buckets: the dtype, or sparse gradients."""
        return "sparse" if self.buffer.is_sparse else str(self.parameters[0].dtype)


class Flag:
    """Whether any rank had changed settings in a step; read at the start of the next one."""

    def __init__(self, flag: Tensor, work: Work | None = None) -> None:
        """Take a flag on its way to all ranks.

        Args:
            flag: One element, this rank's 0 or 1; once ``work`` is done, their mean.
            work: The all-reduce; None if it is done.
        """
        self._flag, self._work = flag, work
        self._event: Any = None
        if flag.is_cuda:
            self._copy_to_host()

    def is_set(self) -> bool:
        """Wait for the flag; all ranks get the same answer."""
        if self._event is not None:
            self._event.synchronize()
        else:
            wait(self._work)
            self._work = None
        return bool(self._flag != 0)

    def _copy_to_host(self) -> None:
        # In time for the next step, so that the host need not wait for what is queued by then; on
        # a stream of its own, so that backward need not wait for the all-reduce.
        stream: Any = torch.cuda.Stream(self._flag.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._flag.device))
        with torch.cuda.stream(stream):
            wait(self._work)
            on_device, self._flag = self._flag, torch.empty(1, device="cpu", pin_memory=True)
            self._flag.copy_(on_device, non_blocking=True)
            on_device.record_stream(stream)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(stream)


def require_same_group(state: PowerSGDState, theirs: Collectives) -> None:
    """Raise unless the state's process group has the ranks of the front end's.

    Args:
        state: The state.
        theirs: Over which the front end averages.

    Raises:
        ValueError: If the ranks differ: the replicas would drift apart without a word. Or if there
            is no such group any more.
    """
    try:
        mine = find_collectives(state.process_group).members()
    except KeyError:
        raise ValueError("the state's process group has been destroyed") from None
    try:
        ranks = theirs.members()
    except KeyError:
        raise ValueError("DDP's process group has been destroyed: make a new DDP model") from None
    if mine != ranks:
        raise ValueError(
            f"the state's process group has the ranks {mine}, but DDP averages over the "
            f"ranks {ranks}; give both the same process group"
        )


def find_home(collectives: Collectives) -> tuple[int, int]:
    """Return what tells whose residuals are whose: this rank in the world, the group's size."""
    return collectives.rank(), collectives.size()


def require_home(state: PowerSGDState, collectives: Collectives) -> None:
    """Raise unless this rank is the one whose residuals the state has loaded.

    Args:
        state: The state.
        collectives: Over which the front end averages.

    Raises:
        ValueError: If it is not: the residuals of the others would be lost.
    """
    here = find_home(collectives)
    if state.origin is not None and state.origin != here:
        raise ValueError(
            f"the state holds the residuals of rank {state.origin[0]}, in a group of "
            f"{state.origin[1]}, but this is rank {here[0]} of the world, in a group of {here[1]}: "
            "load the file of this rank, or one made by powersgd.shared_state_dict, which fits any "
            "rank and world size"
        )


def meet(state: PowerSGDState, arrival: Arrival) -> BucketState | None:
    """Look up a bucket; if it is new, or settings may have changed, make sure that ranks agree.

    Args:
        state: The state; takes in what ranks have agreed on, and nothing if they do not agree.
        arrival: The bucket.

    Returns:
        The bucket's part of the state; None for sparse gradients.

    Raises:
        RuntimeError: If there is no process group, or a collective fails (a rank died, a timeout).
        ValueError: On all ranks, if the parameters are another model's, the process group is not
            the state's, loaded residuals are another rank's, a copied state does not fit, or ranks
            differ in settings, plan or kind of file.
    """
    is_settling = state.agreed is None or arrival.is_new
    # Not asked for a new model: the flag may be on its way in a group that has failed since.
    if not is_settling and arrival.is_first and state.change is not None:
        is_settling = state.change.is_set()
    settings = state.agreed
    if settings is not None and not is_settling and state.positions.knows(arrival.parameters):
        bucket = state.find_bucket(arrival.parameters, _key(arrival, settings))
        if bucket is not None or arrival.kind == "sparse":
            return bucket
    terms = _Terms(state, arrival, is_settling)
    require_agreement(terms.collect, arrival.collectives, arrival.buffer.device)
    state.change = None
    meet_model(state, terms.names)
    state.positions.register(arrival.parameters, arrival.kind)
    if is_settling:
        state.adopt(terms.settings, find_home(arrival.collectives))
    return None if terms.plan is None else _take_in(state, arrival, terms, terms.plan)


class _Terms:
    """What this rank has to say of a bucket, and what follows from it."""

    settings: Settings
    specs: tuple[ParameterSpec, ...]
    names: Mapping[str, Tensor] | None = None
    plan: Plan | None = None

    def __init__(self, state: PowerSGDState, arrival: Arrival, is_settling: bool) -> None:
        self._state, self._arrival, self._is_settling = state, arrival, is_settling

    def collect(self) -> dict[str, Any]:
        """Check all that this rank can check alone, and make the plan."""
        state, arrival = self._state, self._arrival
        if arrival.find_names is not None:
            self.names = arrival.find_names()
        model = None if self.names is None else set(self.names.values())
        state.positions.require_same_model(arrival.parameters, model, is_new=arrival.is_new)
        require_same_group(state, arrival.collectives)
        require_home(state, arrival.collectives)
        require_fit(state, self.names)
        self.settings = state.settings() if self._is_settling else state.in_force
        self.specs = tuple(ParameterSpec.of(parameter) for parameter in arrival.parameters)
        if arrival.kind != "sparse":
            self.plan = _make_plan(self.specs, arrival, self.settings)
        return {
            **common_facts(state, self.settings, self.specs),
            "the hook": "batched_powerSGD_hook" if arrival.is_square else "powerSGD_hook",
            "the bucket's dtype": str(arrival.buffer.dtype),
            "whether the bucket's gradients are sparse": arrival.kind == "sparse",
            "whether the bucket is the last": arrival.is_last,
            "whether the steps are powersgd.EAGER": state.steps == EAGER,
        }


def common_facts(
    state: PowerSGDState, settings: Settings, specs: Sequence[ParameterSpec]
) -> dict[str, Any]:
    """Return what ranks must agree on, whatever the front end.

    Args:
        state: The state.
        settings: The settings of the steps to come.
        specs: Of the parameters at hand.

    Returns:
        The facts by name, for `require_agreement`.
    """
    return {
        **settings._asdict(),
        "the process group": find_collectives(state.process_group).name,
        "whether each rank has loaded its own residuals": state.origin is not None,
        "the parameters' shapes": [list(spec.shape) for spec in specs],
        "the parameters' strides": [list(spec.stride) for spec in specs],
    }


def _key(arrival: Arrival, settings: Settings) -> tuple[Any, ...]:
    return (
        arrival.is_square,
        arrival.buffer.dtype,
        arrival.buffer.device,
        settings.matrix_approximation_rank,
        settings.min_compression_rate,
        settings.batch_tensors_with_same_shape,
    )


def _make_plan(specs: Sequence[ParameterSpec], arrival: Arrival, settings: Settings) -> Plan:
    rank = settings.matrix_approximation_rank
    if arrival.is_square:
        return make_square_plan(specs, rank)
    stack = settings.batch_tensors_with_same_shape
    return make_plan(specs, rank, settings.min_compression_rate, stack)


def _take_in(state: PowerSGDState, arrival: Arrival, terms: _Terms, plan: Plan) -> BucketState:
    key = _key(arrival, terms.settings)
    known = state.find_bucket(arrival.parameters, key)
    if known is not None:
        return known
    bucket = BucketState(key, tuple(arrival.parameters), terms.specs, plan)
    add_bucket(state, bucket, arrival.buffer)
    if state.steps != EAGER:
        rehearse(state, plan, arrival.buffer)
    return bucket

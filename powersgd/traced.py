"""The reduction as the compiler sees it: one parameter at a time, inside the backward graph.

With ``torch._dynamo.config.optimize_ddp = "python_reducer"`` and compiled autograd, DDP has no
buckets. It calls its hook for each parameter while the backward pass is traced, so that the hook's
operations and collectives become a part of the graph. Two graphs serve a whole run: plain averaging
before compression starts, and compression after.
"""

# torch.library reads the annotations of a custom operator: no `from __future__ import annotations`.

import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch._guards import TracingContext
from torch.nn.parallel import DistributedDataParallel

from powersgd.agreement import require_agreement
from powersgd.allocation import add_bucket, allocate
from powersgd.arrival import common_facts, find_home, require_home, require_same_group
from powersgd.collectives import Collectives, ProcessGroupCollectives, start_mean_
from powersgd.layout import ParameterSpec, memory_order
from powersgd.memory import BucketState
from powersgd.names import named_parameters
from powersgd.orthogonalization import orthogonalize
from powersgd.owner import find_ddps
from powersgd.plan import make_plan
from powersgd.saving import meet_model, require_fit
from powersgd.state import STATES, PowerSGDState
from powersgd.steps import compute_p, compute_q, reconstruct, replace_zero_rows, residual


class FunctionalCollectives(ProcessGroupCollectives):
    """The collectives that the compiler can see, and so order and merge."""

    def start_mean_(self, tensor: Tensor) -> None:  # type: ignore[override]
        """All-reduce; the compiler puts the wait where the result is needed."""
        share = tensor * (1.0 / self.size())  # divide first, as everywhere
        tensor.copy_(functional.all_reduce(share, "sum", self.group))


@dataclass(eq=False)
class TracedState:
    """What the graphs need of a state.

    Attributes:
        state: The state.
        collectives: Over which it averages.
        epsilon: Added to the norms of Q in orthogonalization.
        buckets: For each parameter a bucket of its own, and the order of its dimensions in memory.
        is_compressing: Whether the next step compresses; the one fact that graphs are guarded by.
        loss_scale: The step's, 0-dim; the operator that counts steps sets it.
        last_trace: The trace that has met the state last.
        last_backward: Autograd's number of the backward pass that was counted last.
        has_warned: Whether a change of settings was met.
    """

    state: PowerSGDState
    collectives: Collectives
    epsilon: float
    buckets: dict[Tensor, tuple[BucketState, tuple[int, ...]]]
    is_compressing: bool
    loss_scale: Tensor
    last_trace: Callable[[], TracingContext | None] = lambda: None
    last_backward: int = -1
    has_warned: bool = False

    def begin_step(self) -> None:
        """Count a step; once, also if graph breaks split its backward into several graphs."""
        backward = torch._C._current_graph_task_id()
        if backward == self.last_backward:
            return
        self.last_backward = backward
        if self.state.has_changed() and not self.has_warned:
            self.has_warned = True
            warnings.warn(
                "settings of a PowerSGDState have changed since its backward was compiled, which "
                "has no effect",
                stacklevel=2,
            )
        if self.is_compressing:
            plans = [bucket.plan for bucket, _ in self.buckets.values()]
            self.state.count(plans, sum(plan.numel for plan in plans))
        self.state.count_iteration()
        self.is_compressing = not self.state.is_warming_up()


@torch.library.custom_op("powersgd::begin_step", mutates_args=("loss_scale",))
def _begin_step(loss_scale: Tensor, handle: int) -> None:
    # Python that runs with the graph and not while it is traced: a number that the graph read
    # itself would be guarded, and each step or scale would compile anew.
    loss_scale.fill_(STATES[handle].loss_scale)
    STATES[handle].traced.begin_step()


@_begin_step.register_fake
def _(loss_scale: Tensor, handle: int) -> None:
    del loss_scale, handle


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_first_of_trace(handle: int) -> bool:
    # Runs while a graph is traced, in plain Python: tells whether the trace meets the state for the
    # first time, and prepares a state that is new or whose model has parameters unfrozen.
    state, context = STATES[handle], TracingContext.get()
    if state.traced is not None and state.traced.last_trace() is context:
        return False
    ddps = find_ddps(state)
    if not ddps:
        raise RuntimeError("PowerSGD found no DDP model with this state among Python's objects")
    trainable = dict.fromkeys(p for ddp in ddps for p in ddp._module_parameters if p.requires_grad)
    new = [p for p in trainable if state.traced is None or p not in state.traced.buckets]
    if new:
        _prepare(state, ddps, new)
    state.traced.last_trace = weakref.ref(context)
    return True


@torch.no_grad()
def _prepare(
    state: PowerSGDState, ddps: Sequence[DistributedDataParallel], parameters: Sequence[Tensor]
) -> None:
    collectives = state.process_group
    if not isinstance(collectives, Collectives):
        collectives = FunctionalCollectives(ddps[-1].process_group)
    names = named_parameters(ddps[-1])
    specs = [ParameterSpec.of(parameter) for parameter in parameters]
    settings = state.settings() if state.traced is None else state.in_force

    def collect() -> dict[str, Any]:
        if len({frozenset(ddp._module_parameters) for ddp in ddps}) > 1:
            raise ValueError(
                f"one PowerSGDState serves one model: it is registered with {len(ddps)} DDP "
                "models; make a new PowerSGDState for each"
            )
        require_same_group(state, collectives)
        require_home(state, collectives)
        state.positions.require_same_model(parameters, set(names.values()), is_new=False)
        require_fit(state, names)
        if not settings.warm_start:
            raise ValueError("warm_start is False, but must be True with DDP's python_reducer")
        return {
            **common_facts(state, settings, specs),
            "the parameters' dtypes": [str(parameter.dtype) for parameter in parameters],
        }

    device = parameters[0].device
    require_agreement(collect, collectives, device)
    meet_model(state, names)
    for kind in dict.fromkeys(str(parameter.dtype) for parameter in parameters):
        state.positions.register([p for p in parameters if str(p.dtype) == kind], kind)
    if state.traced is None:
        state.adopt(settings, find_home(collectives))
        state.traced = TracedState(
            state,
            collectives,
            state.in_force.orthogonalization_epsilon,
            {},
            not state.is_warming_up(),
            torch.ones((), dtype=torch.float32, device=device),
        )
    for parameter, spec in zip(parameters, specs, strict=True):
        state.traced.buckets[parameter] = _add_bucket(state, parameter, spec)


def _add_bucket(
    state: PowerSGDState, parameter: Tensor, spec: ParameterSpec
) -> tuple[BucketState, tuple[int, ...]]:
    plan = make_plan(
        [spec], state.in_force.matrix_approximation_rank, state.in_force.min_compression_rate
    )
    bucket = BucketState(("traced",), (parameter,), (spec,), plan)
    real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    add_bucket(state, bucket, real)
    allocate(state, bucket, real)
    bucket.scale = torch.full_like(state.traced.loss_scale, bucket.settle_scale())
    return bucket, tuple(memory_order(spec))


def reduce_parameter(state: PowerSGDState, gradient: Tensor, parameter: Tensor) -> None:
    """Average one parameter's gradient over the ranks, in place, while it is traced.

    A step that meets an inf or a NaN in a parameter leaves that parameter's part of the state as it
    was, and makes its gradient NaN on all ranks.

    Args:
        state: The state.
        gradient: Shape and strides of ``parameter``; overwritten.
        parameter: A parameter of the DDP model at which the hook is registered.

    Raises:
        RuntimeError: If backward is not being compiled, the DDP model cannot be found, or a
            collective fails.
        ValueError: On all ranks, if the state has no warm start, serves another model or process
            group, holds another rank's residuals or is a copy that does not fit, or if ranks differ
            in settings or models. The compiler wraps it.
    """
    if not torch.compiler.is_compiling():
        raise RuntimeError(
            'DDP\'s "python_reducer" calls this hook outside of torch.compile; set '
            "torch._dynamo.config.compiled_autograd = True and compile the DDP model"
        )
    is_first = _is_first_of_trace(state.handle)
    traced: TracedState = state.traced
    if is_first:
        torch.ops.powersgd.begin_step(traced.loss_scale, state.handle)
    bucket, order = traced.buckets[parameter]
    rows = gradient.permute(order)
    rows = torch.view_as_real(rows) if gradient.is_complex() else rows
    if traced.is_compressing and bucket.plan.groups:
        (shape,) = bucket.plan.groups
        averaged = _compress(traced, bucket, rows.reshape(1, shape.n, shape.m))
        rows.copy_(averaged.view(rows.shape))
    elif rows.numel():
        rows.copy_(_mean(rows, traced))


def _mean(tensor: Tensor, traced: TracedState) -> Tensor:
    mean = tensor.clone()
    start_mean_(mean, traced.collectives)  # the compiler waits
    return mean


def _compress(traced: TracedState, bucket: BucketState, matrix: Tensor) -> Tensor:
    (shape,) = bucket.plan.groups
    assert bucket.q is not None
    assert bucket.spare is not None
    assert bucket.scale is not None
    q, spare = shape.q_block(bucket.q), shape.q_block(bucket.spare)
    old = None if bucket.residual is None else shape.residual_block(bucket.residual)
    merged = matrix if old is None else matrix + old * (traced.loss_scale / bucket.scale)
    p_mean = _mean(compute_p(merged, q), traced)
    p = orthogonalize(p_mean, traced.epsilon / traced.collectives.size())
    q_local = compute_q(merged, p)
    q_mean = _mean(q_local, traced)
    finite = p_mean.isfinite().all() & q_mean.isfinite().all()
    if old is not None:
        old.copy_(torch.where(finite, residual(merged, p, q_local), old))
        bucket.scale.copy_(torch.where(finite, traced.loss_scale, bucket.scale))
    unit = orthogonalize(q_mean, traced.epsilon)
    fresh = spare.roll(1, -1)  # a dead row gets another direction each step
    q.copy_(torch.where(finite, replace_zero_rows(unit, (q + fresh) / 2), q))
    spare.copy_(torch.where(finite, fresh, spare))
    return reconstruct(p, torch.where(finite, q_mean, math.nan))

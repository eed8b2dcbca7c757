"""The phases of a step before there is a step, for a compiler that compiles on the first call."""

from dataclasses import replace

from torch import Tensor

from powersgd.plan import Plan, batch
from powersgd.state import PowerSGDState


def rehearse(state: PowerSGDState, plan: Plan, like: Tensor) -> None:
    """Run the phases on zeros of the shapes to come, so that a compiler compiles them now.

    Args:
        state: The state. Not changed.
        plan: A new bucket's plan.
        like: A tensor of the bucket's dtype and device.
    """
    for group in plan.groups:
        start = group.offsets[0]
        group = replace(group, offsets=tuple(offset - start for offset in group.offsets))
        count, n, m = len(group.members), group.n, group.m
        matrix = batch(like.new_zeros(group.offsets[-1] + n * m), group)
        residual = like.new_zeros(count, n, m) if state.in_force.use_error_feedback else None
        p, q = like.new_zeros(count, group.rank, n), like.new_zeros(count, group.rank, m)
        state.steps.compress_(matrix, residual, q)
        state.steps.project(matrix, p)
        state.steps.decompress_(matrix, residual, p, q, q.clone())

"""Memory for a bucket: what its parameters bring along, random starting factors for the rest."""

import torch
from torch import Tensor

from powersgd.memory import BucketState
from powersgd.state import PowerSGDState


def add_bucket(state: PowerSGDState, bucket: BucketState, like: Tensor) -> None:
    """Take in a new bucket; its parameters bring along what they had in their old buckets.

    Args:
        state: The state.
        bucket: The new bucket, without memory.
        like: A tensor of the dtype and device that its memory gets.
    """
    old = [state.carried(parameter) for parameter in bucket.parameters]
    if not all(carried.is_empty() for carried in old):
        allocate(state, bucket, like)
        left = [carried for carried in old if carried.residual is not None]
        bucket.loss_scale = left[0].loss_scale if left else state.loss_scale
        for parameter, carried in zip(bucket.parameters, old, strict=True):
            bucket.take_up_(parameter, carried)
    state.place_bucket(bucket)


def allocate(state: PowerSGDState, bucket: BucketState, like: Tensor) -> None:
    """Create what the settings ask for and the bucket does not have yet.

    Args:
        state: The state.
        bucket: A bucket of this state.
        like: A tensor of the dtype and device to use.
    """
    settings = state.in_force
    if settings.use_error_feedback and bucket.residual is None:
        bucket.residual = like.new_zeros(bucket.plan.residual_numel)
        bucket.loss_scale = state.loss_scale
    if settings.warm_start and bucket.q is None:
        bucket.q = draw_q(state, bucket, like)
        bucket.spare = bucket.q.clone()


def draw_q(state: PowerSGDState, bucket: BucketState, like: Tensor) -> Tensor:
    """Draw a random, orthonormal Q, the same on all ranks, without touching a global generator.

    The seed is made of the random seed, the step and the parameter's position in the model, so
    that neither the order of the buckets nor their number matters.

    Args:
        state: The state.
        bucket: A bucket of this state.
        like: A tensor of the dtype and device to use.

    Returns:
        Shape ``(bucket.plan.q_numel,)``.
    """
    if not bucket.plan.groups:
        return like.new_empty(0)
    settings = state.in_force
    # A graph's Q is drawn ahead of time.
    step = max(settings.iter, settings.start_powerSGD_iter)
    factors = []
    for group in bucket.plan.groups:
        draws = []
        for member in group.members:
            seed = state.positions.seed(bucket.parameters[member], settings.random_seed, step)
            generator = torch.Generator("cpu").manual_seed(seed)
            draws.append(torch.randn((group.rank, group.m), generator=generator, device="cpu"))
        stack = torch.stack(draws)
        # From pageable memory, the host would wait for the copy.
        stack = stack.pin_memory() if like.is_cuda else stack
        factors.append(stack.to(like, non_blocking=True))
    units = state.steps.orthogonalize_all(factors, settings.orthogonalization_epsilon)
    return torch.cat([unit.flatten() for unit in units])

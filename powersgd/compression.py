"""One bucket through one compressed step: the three phases between its two all-reduces.

It starts no collective, and it changes what the state carries over in the last phase only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from powersgd.allocation import allocate, draw_q
from powersgd.memory import BucketState
from powersgd.phases import Steps
from powersgd.plan import batch, unbatch_
from powersgd.ranges import named_range
from powersgd.state import PowerSGDState
from powersgd.steps import replace_zero_rows
from powersgd.steps import residual as compute_residual


@dataclass
class Compression:
    """What a compressed bucket carries from one phase of the step to the next, lists by group."""

    bucket: BucketState
    index: int  # the bucket's place in the step's order
    buffer: Tensor  # the bucket's gradients
    flat: Tensor  # the buffer that the plan describes: the same one, or padded to a square
    matrices: list[Tensor] = field(default_factory=list)  # gradient plus residual
    factor: float = 1.0  # by which the loss scale has changed since the last good step
    residual: Tensor | None = None  # the old one, in this step's loss scale
    masks: list[Tensor | None] = field(default_factory=list)  # 0 where a parameter was unused
    p: list[Tensor] = field(default_factory=list)  # orthonormal
    q_local: list[Tensor] = field(default_factory=list)  # before the all-reduce
    used: Tensor | None = None  # per parameter that shares a matrix: 1 if this rank used it
    used_by_any: Tensor | None = None  # the same for all ranks
    unused: list[tuple[int, slice]] = field(default_factory=list)  # which may be 0 in `used`
    paid: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)  # of `owed`: see `_pay_`


def compress(
    state: PowerSGDState, bucket: BucketState, buffer: Tensor, may_be_unused: bool, index: int
) -> tuple[Compression, Tensor]:
    """Add the residuals to a bucket's gradients and compute P.

    Args:
        state: The state. Not changed.
        bucket: The bucket's part of the state, of which only missing memory is created.
        buffer: The bucket's gradients, shape ``(numel,)``; residuals are added to them.
        may_be_unused: Whether a parameter whose gradient is zero counts as unused: it gets nothing
            and keeps its residual, because if no rank has used it, its average is thrown away.
        index: The bucket's place in the step's order.

    Returns:
        What the next phases need, and this rank's message: all P, everything uncompressed, which of
        the plan's shared parameters were used, and whether settings have changed, flat.
    """
    plan = bucket.plan
    allocate(state, bucket, buffer)
    q = draw_q(state, bucket, buffer) if bucket.q is None else bucket.q
    flat = buffer
    if plan.numel > buffer.numel():  # the square matrix has room to spare
        flat = torch.nn.functional.pad(buffer, (0, plan.numel - buffer.numel()))
    factor = state.loss_scale / bucket.settle_scale()
    compression = Compression(bucket, index, buffer, flat, factor=factor)
    residuals = bucket.residual
    if residuals is not None and factor != 1:
        residuals = residuals * factor  # not in place: a bad step leaves the state as it was
    compression.residual = residuals
    if plan.shared:
        _find_unused_(compression, may_be_unused)
        residuals = _without_unused(compression)
    _pay_(compression, may_be_unused)
    pieces = []
    for group in plan.groups:
        matrix = batch(flat, group)
        mask = _mask_unused(matrix) if may_be_unused and not plan.shared else None
        residual = None if residuals is None else group.residual_block(residuals)
        p = state.steps.compress_(matrix, residual, group.q_block(q))
        compression.matrices.append(matrix)
        compression.masks.append(mask)
        pieces.append(p if mask is None else p * mask)
    pieces += [flat[offset : offset + numel] for offset, numel in plan.spans]
    pieces += [] if compression.used is None else [compression.used]
    pieces.append(buffer.new_full((1,), state.has_changed()))
    return compression, _flatten(pieces, buffer)


def _is_used(gradient: Tensor) -> Tensor:
    # 0-dim: 0 if all is zero. The first number mostly is not, which saves a look at the others.
    if gradient.is_cpu and gradient.numel() and gradient[(0,) * gradient.dim()] != 0:
        return gradient.new_ones(())
    return gradient.any().to(gradient.dtype)


def _mask_unused(matrix: Tensor) -> Tensor | None:
    if matrix.is_cpu and matrix[:, 0, 0].all():  # mostly so: one look, not one at each matrix
        return None
    used = torch.stack([_is_used(one) for one in matrix])
    return None if used.is_cpu and used.all() else used.view(-1, 1, 1)


def _find_unused_(compression: Compression, may_be_unused: bool) -> None:
    bucket, flat = compression.bucket, compression.flat
    compression.used = flat.new_ones(len(bucket.plan.shared))
    for i, (offset, numel) in enumerate(bucket.plan.shared) if may_be_unused else ():
        used = _is_used(flat[offset : offset + numel])
        if not used.is_cpu or not used:
            compression.unused.append((i, slice(offset, offset + numel)))
            compression.used[i] = used


def _pay_(compression: Compression, may_be_unused: bool) -> None:
    # What is left of residuals of parameters that are compressed no longer.
    for i, left in compression.bucket.owed.items():
        numels = [spec.numel for spec in compression.bucket.specs[: i + 1]]
        gradient = compression.flat[sum(numels[:-1]) : sum(numels)]
        paid = _is_used(gradient) if may_be_unused else gradient.new_ones(())
        if left is not None:
            gradient.add_(left * (paid * compression.factor))
        compression.paid.append((i, gradient, paid))


def _settle_(finite: Tensor, compression: Compression) -> None:
    owed = compression.bucket.owed
    for i, gradient, paid in compression.paid:
        # The average holds what is still owed, if the step was bad: nobody must apply it.
        gradient.masked_fill_(~finite, math.nan)
        left = owed[i]
        if left is not None:
            kept = torch.where(paid != 0, 0.0, compression.factor)
            left.mul_(torch.where(finite, kept, 1.0))
            owed[i] = None if left.is_cpu and not left.any() else left


def _without_unused(compression: Compression) -> Tensor | None:
    # In a shared matrix an unused parameter cannot be masked; it takes part with zeros.
    residual, used = compression.residual, compression.used
    if residual is None or used is None or not compression.unused:
        return residual
    residual = residual.clone()
    for i, where in compression.unused:
        residual[where] *= used[i]
    return residual


def _restore_unused_(finite: Tensor, compression: Compression, old: list[Tensor]) -> None:
    # The factors spill into unused parameters. If any rank used it, DDP takes the average, and what
    # this rank gave is settled like any other; else the average is zero, and nothing was given.
    residual, used, by_any = compression.bucket.residual, compression.used, compression.used_by_any
    if used is None or by_any is None:
        return
    for i, where in compression.unused:
        compression.flat[where] *= by_any[i]
    if residual is None:
        return
    for (i, where), before in zip(compression.unused, old, strict=True):
        settled = before * (compression.factor * (1 - used[i])) + residual[where] * by_any[i]
        torch.where(finite, settled, before, out=residual[where])


def _flatten(pieces: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([p.reshape(-1) for p in pieces]) if pieces else like.new_empty(0)


def project(
    state: PowerSGDState, compression: Compression, message: Tensor, world_size: int
) -> Tensor:
    """Compute this rank's Q from the averaged P, and write the uncompressed averages.

    Args:
        state: The state. Not changed.
        compression: From `compress`.
        message: The mean over ranks of what `compress` returned.
        world_size: Number of ranks.

    Returns:
        This rank's message: all Q, flat.
    """
    plan = compression.bucket.plan
    position = plan.p_numel
    for offset, numel in plan.spans:
        compression.buffer[offset : offset + numel] = message[position : position + numel]
        position += numel
    if plan.shared:
        compression.used_by_any = message[position:-1].sign()
    # The message holds the mean of P, where torch adds its epsilon to the sum.
    epsilon = state.in_force.orthogonalization_epsilon / world_size
    factors = [group.p_block(message) for group in plan.groups]
    with named_range("orthogonalization", compression.index):
        compression.p = state.steps.orthogonalize_all(factors, epsilon) if factors else []
    with named_range("Q", compression.index):
        compression.q_local = _compute_q(state.steps, compression)
    return _flatten(compression.q_local, message)


def _compute_q(steps: Steps, compression: Compression) -> list[Tensor]:
    old, factors = compression.residual, []
    for i, group in enumerate(compression.bucket.plan.groups):
        matrix, p, mask = compression.matrices[i], compression.p[i], compression.masks[i]
        q = steps.project(matrix, p)
        q = q if mask is None else q * mask
        if old is not None:
            q = _refuse_overflow(matrix, group.residual_block(old), p, q)
        factors.append(q)
    return factors


def _refuse_overflow(matrix: Tensor, old: Tensor, p: Tensor, q: Tensor) -> Tensor:
    # A residual whose products overflow would spoil every later step, however small the gradients.
    # So a step that would leave one is made a bad step, by a NaN in Q, which all ranks see.
    limit = torch.finfo(q.dtype).max / 2
    is_half = q.dtype == torch.float16  # close enough to common gradients to look each time
    if not is_half and not (q.is_cpu and q.abs().amax() > limit * 2.0**-15):
        return q
    wide = (tensor.to(torch.float64) for tensor in (matrix, p, q))
    new = compute_residual(*wide).square()
    # The norms of rows and columns bound the next P and Q.
    size = torch.maximum(new.sum(dim=-1).amax(), new.sum(dim=-2).amax()).sqrt()
    # The projection never makes the whole norm grow: once gradients are small, steps are good again
    # and the residual shrinks, also if a single row of it is over the limit.
    has_grown = new.sum() > old.to(torch.float64).square().sum()
    return torch.where((size > limit) & has_grown, math.nan, q)


def decompress_if_(
    finite: Tensor, state: PowerSGDState, compression: Compression, message: Tensor
) -> None:
    """End the step for one bucket: averaged gradients into its buffer, new residuals and Q.

    Args:
        finite: 0-dim bool, equal on all ranks. If False, the compressed gradients become NaN and
            the state stays as it is.
        state: The state.
        compression: From `compress` and `project`.
        message: The mean over ranks of what `project` returned.
    """
    bucket, buffer, flat = compression.bucket, compression.buffer, compression.flat
    old = bucket.residual
    held = [] if old is None else [old[where].clone() for _, where in compression.unused]
    for i, group in enumerate(bucket.plan.groups):
        matrix = compression.matrices[i]
        residual = None if old is None else group.residual_block(old)
        factors = (compression.p[i], compression.q_local[i], group.q_block(message))
        if finite.is_cpu and finite:  # asking a GPU would make the host wait
            state.steps.decompress_(matrix, residual, *factors)
        else:
            _decompress_masked_(finite, state.steps, matrix, residual, *factors)
        unbatch_(flat, group, matrix)
    _restore_unused_(finite, compression, held)
    _settle_(finite, compression)
    if compression.factor != 1:
        bucket.rescaled = (state.loss_scale, finite)
    if flat is not buffer:
        buffer.copy_(flat[: buffer.numel()])
        if old is not None:
            old[buffer.numel() :] = 0  # the padding's, which is nobody's: checkpoints have none
    if bucket.q is not None and bucket.plan.groups:
        _update_q(state, bucket, message, finite)


def _decompress_masked_(
    finite: Tensor,
    steps: Steps,
    matrix: Tensor,
    residual: Tensor | None,
    p: Tensor,
    q_local: Tensor,
    q: Tensor,
) -> None:
    fresh = None if residual is None else torch.empty_like(residual)
    steps.decompress_(matrix, fresh, p, q_local, torch.where(finite, q, math.nan))
    if fresh is not None and residual is not None:
        torch.where(finite, fresh, residual, out=residual)


def _update_q(state: PowerSGDState, bucket: BucketState, q: Tensor, finite: Tensor) -> None:
    assert bucket.q is not None
    assert bucket.spare is not None
    factors = [group.q_block(q) for group in bucket.plan.groups]
    units = state.steps.orthogonalize_all(factors, state.in_force.orthogonalization_epsilon)
    flat = _flatten(units, q)
    if finite.is_cpu and finite and flat[bucket.plan.q_row_offsets].all():
        bucket.q.copy_(flat)  # the common case: no row begins with a zero, so none is dead
        return
    # A dead row gets another random direction each step; half of its last one stays in it, so that
    # a parameter that was unused for a step keeps its warm start.
    rows = []
    for unit, group in zip(units, bucket.plan.groups, strict=True):
        spare = torch.roll(group.q_block(bucket.spare), state.in_force.iter, -1)
        rows.append(replace_zero_rows(unit, (group.q_block(bucket.q) + spare) / 2))
    torch.where(finite, _flatten(rows, q), bucket.q, out=bucket.q)

"""Tiny models whose gradients a test dictates, and the loop that trains them on every rank.

The gradient of ``(parameter * target).sum()`` is ``target``, and targets come from seeds alone:
the ranks and the test make the same ones, so a test knows every input to rounding.
"""

import contextlib
import functools
import gc
import math
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel

import powersgd

from .ranks import watch
from .tolerances import RTOL

MANY_BUCKETS = {"bucket_cap_mb": 0.001}
ONE_BUCKET = {"bucket_cap_mb": 25}
LARGE = (520, 512)  # rows and columns of a matrix that is worth compiling for


class Spec(NamedTuple):
    """One parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    kind: str = "dense"  # or transposed, channels_last, strided, sparse, frozen, tied

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def real_dtype(self) -> torch.dtype:
        return self.dtype.to_real()

    def parameter(self) -> nn.Parameter:
        """Ones in the memory layout of the kind."""
        ones = torch.ones(self.shape, dtype=self.dtype)
        if self.kind == "transposed":
            ones = ones.t().contiguous().t()
        if self.kind == "channels_last":
            ones = ones.to(memory_format=torch.channels_last)
        if self.kind == "strided":
            ones = torch.ones(*self.shape[:-1], 2 * self.shape[-1], dtype=self.dtype)[..., ::2]
        return nn.Parameter(ones, requires_grad=self.kind != "frozen")


@dataclass(frozen=True)
class Batch:
    """What the gradients of one step are, on all ranks.

    ``kind``: ``full``, ``zero``, ``cancel`` (rank 0 has +X, rank 1 has -X), ``rank1`` to ``rank4``
    (the mean over ranks has this rank), ``mean`` (the same on all ranks and in all steps, plus
    noise), ``left`` and ``right`` (rank 1, with nothing in the other half of the columns).
    ``poison`` puts a number into one parameter of the last rank.
    """

    seed: int
    kind: str = "full"
    scale: float = 1.0
    poison: tuple[str, float] | None = None
    skip: tuple[str, ...] = ()
    skip_rank: int | None = None  # None: every rank
    zeros: tuple[str, ...] = ()  # parameters whose gradient is zero, whatever the kind

    def is_used(self, name: str, rank: int) -> bool:
        return name not in self.skip or self.skip_rank not in (None, rank)

    def gradients(self, specs: dict[str, Spec], rank: int, world_size: int) -> dict[str, Tensor]:
        """Name to gradient for the parameters that ``rank`` uses."""
        targets = {}
        for name, spec in specs.items():
            if spec.kind == "frozen" or not self.is_used(name, rank):
                continue
            kind = "zero" if name in self.zeros else self.kind
            target = _gradient(kind, self.seed, name, spec, rank) * self.scale
            targets[name] = target = target.to(spec.dtype)
            if self.poison and self.poison[0] == name and rank == world_size - 1:
                target.view(-1)[target.numel() // 2] = self.poison[1]
        return targets


@functools.lru_cache(maxsize=4096)
def _gradient(kind: str, seed: int, name: str, spec: Spec, rank: int) -> Tensor:
    numel = torch.Size(spec.shape).numel() * (1 + spec.dtype.is_complex)
    columns = numel // spec.rows if spec.rows else 5
    matrix = _matrix(kind, seed, name, rank, spec.rows, columns)
    if spec.dtype.is_complex:
        return torch.view_as_complex(matrix.view(*spec.shape, 2))
    return matrix.reshape(spec.shape)


def _matrix(kind: str, seed: int, name: str, rank: int, n: int, m: int) -> Tensor:
    common, own = _generator(name, seed), _generator(name, seed, rank)
    if kind == "zero":
        return torch.zeros(n, m)
    if kind == "cancel":
        return _normal(common, n, m) * ((rank == 0) - (rank == 1))
    if kind == "mean":
        return _normal(_generator(name), n, m) + 0.5 * _normal(own, n, m)
    if kind in ("left", "right"):
        half = [torch.arange(m) < m // 2, torch.arange(m) >= m // 2][kind == "right"]
        return _normal(common, n, 1) @ (_normal(common, 1, m) * half)
    if kind == "square":  # of rank 1 once it is padded to a square matrix
        side = math.isqrt(n * m - 1) + 1
        left = _normal(common, side, 1)
        left[-1] = 0
        return (left @ _normal(own, 1, side)).flatten()[: n * m].view(n, m)
    if kind.startswith("rank"):
        r = int(kind[4:])
        # The row space turns slowly: what rounding leaves of a step is along Q, and the next P
        # takes it up whole, but the new gradient only by the cosine between Q and its rows.
        right = _normal(_generator(name), r, m) + 0.2 * _normal(common, r, m)
        return _normal(common, n, r) @ (right + 0.2 * _normal(own, r, m))
    return _normal(own, n, m)


def _generator(name: str, *numbers: int) -> torch.Generator:
    seed = sum(ord(letter) * 31**i for i, letter in enumerate(name))
    for number in numbers:
        seed = seed * 1009 + number + 1
    return torch.Generator().manual_seed(seed % 2**62)


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class Dictated(nn.Module):
    """Every parameter gets the gradient that ``forward`` is handed for it."""

    def __init__(self, specs: dict[str, Spec]) -> None:
        super().__init__()
        self.sparse = {name for name, spec in specs.items() if spec.kind == "sparse"}
        self.tied = {name for name, spec in specs.items() if spec.kind == "tied"}
        for name, spec in specs.items():
            if name in self.sparse:
                self.add_module(name, nn.Embedding(*spec.shape, dtype=spec.dtype, sparse=True))
            else:
                self.register_parameter(name, spec.parameter())
        for name in self.tied:
            self.register_parameter(f"{name}_again", getattr(self, name))

    def parameter(self, name: str) -> nn.Parameter:
        found = getattr(self, name)
        return found.weight if name in self.sparse else found

    def forward(self, targets: dict[str, Tensor]) -> Tensor:
        losses = []
        for name, target in targets.items():
            if name in self.sparse:
                rows = target.abs().sum(dim=1).nonzero().squeeze(1)
                losses.append((getattr(self, name)(rows) * target[rows]).sum())
            elif name in self.tied:
                losses.append((getattr(self, name) * (target / 2)).sum())
                losses.append((getattr(self, f"{name}_again") * (target / 2)).sum())
            else:
                losses.append((getattr(self, name) * target.conj()).sum().real)
        return torch.stack([loss.double() for loss in losses]).sum()


@dataclass(frozen=True)
class Case:
    """One training run. ``options`` are PowerSGDState's; ``hook`` None is DDP without a hook."""

    name: str
    specs: dict[str, Spec]
    schedule: Sequence[Batch]
    options: dict[str, Any] = field(default_factory=dict)
    hook: str | None = "powerSGD_hook"
    ddp: dict[str, Any] = field(default_factory=lambda: MANY_BUCKETS)
    fp16: bool = False  # wrap the hook in torch's fp16_compress_wrapper
    members: tuple[int, ...] | None = None  # of a group smaller than the world
    default_group: bool = False
    micro_batches: int = 1
    set_to_none: bool = True
    resumed_at: int = 0  # the state's iter at the start
    uneven: int = 0  # rank w stops `w * uneven` steps before rank 0, under join()

    def length(self, rank: int) -> int:
        return len(self.schedule) - self.uneven * rank

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that bounds how exact a parameter's average can be."""
        return torch.float16 if self.fp16 else self.specs[name].real_dtype

    def inputs(self, step: int, world_size: int) -> list[dict[str, Tensor]]:
        """By rank, the gradients of a step; none for a rank that has left."""
        batch = self.schedule[step]
        every = [batch.gradients(self.specs, rank, world_size) for rank in range(world_size)]
        return [g if step < self.length(rank) else {} for rank, g in enumerate(every)]


class Step(NamedTuple):
    """What one rank saw: by name, its averaged gradient and the residual after the step."""

    outputs: dict[str, Tensor | None]
    residuals: dict[str, Tensor | None]


Outcome = list[list[Step]] | str
"""By rank and step; or the traceback of a rank that raised."""


def run_cases(rank: int, cases: Iterable[Case]) -> dict[str, list[Step] | str | None]:
    """The function for ``run_ranks``: each case in a process group of its own."""
    gc.freeze()  # whoever walks all objects need not walk torch's for every case
    results: dict[str, list[Step] | str | None] = {}
    for case in cases:
        watch(100)  # before the group gives up
        group = dist.new_group(case.members, timeout=timedelta(seconds=120))
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            results[case.name] = None
            continue
        try:
            results[case.name] = list(_train(case, None if case.default_group else group))
        except Exception:
            results[case.name] = traceback.format_exc()
    return results


def by_case(results: list[dict[str, Any]]) -> dict[str, Outcome]:
    """Turn ``run_ranks(run_cases, ...)``'s result, by rank and case, into case to outcome."""
    outcomes: dict[str, Outcome] = {}
    for name in results[0]:
        ranks = [result[name] for result in results if result[name] is not None]
        raised = [rank for rank in ranks if isinstance(rank, str)]
        outcomes[name] = "\n".join(raised) if raised else ranks
    return outcomes


def ranks_of(outcomes: dict[str, Outcome], case: Case) -> Any:
    """The case's steps by rank; skips what did not run with this number of ranks."""
    if case.name not in outcomes:
        pytest.skip("not with this number of ranks")
    outcome = outcomes[case.name]
    if isinstance(outcome, str):
        pytest.fail(outcome, pytrace=False)
    return outcome


def for_each(cases: Sequence[Case]) -> Any:
    """Parametrize a test over cases, named after them."""
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def _train(case: Case, group: dist.ProcessGroup | None) -> Iterator[Step]:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    model = Dictated(case.specs)
    ddp = DistributedDataParallel(model, process_group=group, **case.ddp)
    state = powersgd.PowerSGDState(group, **case.options)
    state.iter = case.resumed_at
    if case.hook:
        hook = getattr(powersgd, case.hook)
        ddp.register_comm_hook(state, fp16_compress_wrapper(hook) if case.fp16 else hook)
    with ddp.join() if case.uneven else contextlib.nullcontext():
        for batch in case.schedule[: case.length(rank)]:
            ddp.zero_grad(set_to_none=case.set_to_none)
            backward(ddp, batch.gradients(case.specs, rank, world_size), case.micro_batches)
            parameters = {name: model.parameter(name) for name in case.specs}
            yield Step(
                {name: _dense(p.grad) for name, p in parameters.items()},
                {name: _dense(state.residual(p)) for name, p in parameters.items()},
            )
    if case.uneven:  # what the others' last steps left here
        residuals = {name: _dense(state.residual(model.parameter(name))) for name in case.specs}
        yield Step({}, residuals)


def backward(ddp: nn.Module, targets: dict[str, Tensor], micro_batches: int = 1) -> None:
    """Run backward for ``targets``, the sum of the micro batches; only the last one averages."""
    fractions = [2.0 ** -(i + 1) for i in range(micro_batches - 1)]
    for fraction in fractions:
        with ddp.no_sync():
            ddp({name: target * fraction for name, target in targets.items()}).backward()
    ddp({name: t * (1 - sum(fractions)) for name, t in targets.items()}).backward()


def _dense(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return tensor.detach().to_dense().clone(memory_format=torch.contiguous_format)


def real(tensor: Tensor) -> Tensor:
    """Double precision, complex numbers as pairs."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def mean_input(case: Case, inputs: list[dict[str, Tensor]], name: str) -> Tensor:
    """The exact mean of one step's gradients; a rank that does not use a parameter counts as 0."""
    total = real(torch.zeros(case.specs[name].shape, dtype=case.specs[name].dtype))
    for gradients in inputs:
        total = total + real(gradients[name]) if name in gradients else total
    return total / len(inputs)


def peak(tensors: Iterable[Tensor | None]) -> float:
    """The largest entry of all."""
    return max(
        (float(real(t).abs().max()) for t in tensors if t is not None and t.numel()), default=0
    )


def is_same(left: Tensor | None, right: Tensor | None) -> bool:
    """Equal to the bit; NaN equals NaN."""
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and bool(
        torch.equal(left.isnan(), right.isnan()) and torch.equal(_finite(left), _finite(right))
    )


def _finite(tensor: Tensor) -> Tensor:
    return torch.where(tensor.isnan(), torch.zeros_like(tensor), tensor)


def assert_equal_on_ranks(case: Case, ranks: list[list[Step]]) -> None:
    """After each step every rank that took it holds the same averages, to the bit."""
    for i in range(len(case.schedule)):
        there = [steps[i].outputs for rank, steps in enumerate(ranks) if i < case.length(rank)]
        for name in case.specs:
            for other in there[1:]:
                assert is_same(there[0][name], other[name]), f"step {i}, {name}"


def assert_exact(case: Case, ranks: list[list[Step]], steps: Iterable[int], scale: float) -> None:
    """In these steps every average equals the mean of the gradients to rounding.

    The rounding is that of the gradients so far (a residual brings it back) and of the residual.
    """
    inputs = [case.inputs(i, len(ranks)) for i in range(len(case.schedule))]
    for i in steps:
        numbers = [steps[min(max(i, 1), len(steps)) - 1].residuals for steps in ranks]
        for past, batch in zip(inputs[: i + 1], case.schedule, strict=False):
            numbers += [] if batch.poison else past
        for name, output in ranks[0][i].outputs.items():
            if output is None:
                continue
            error = peak([real(output) - mean_input(case, inputs[i], name)])
            bound = scale * RTOL[case.dtype(name)] * peak(values.get(name) for values in numbers)
            assert error <= bound, f"step {i}, {name}: {error:.3g} > {bound:.3g}"


def assert_conserved(case: Case, ranks: list[list[Step]]) -> None:
    """Sum of averages + mean residual = sum of mean gradients, to the rounding of every step.

    Roundings are unbiased, so they add up like the square root of the number of steps.
    """
    count = len(case.schedule)
    inputs = [case.inputs(i, len(ranks)) for i in range(count)]
    for name, spec in case.specs.items():
        if spec.kind == "frozen":
            continue
        outputs = [step.outputs[name] for step in ranks[0][:count]]
        missing = sum(mean_input(case, gradients, name) for gradients in inputs)
        missing = missing - sum(real(output) for output in outputs if output is not None)
        for steps in ranks:
            left = steps[-1].residuals[name]
            missing = missing if left is None else missing - real(left) / len(ranks)
        residuals = [step.residuals[name] for steps in ranks for step in steps]
        largest = peak(residuals) + peak(g.get(name) for step in inputs for g in step)
        bound = 0.25 * count**0.5 * RTOL[case.dtype(name)] * largest
        error = peak([missing])
        assert error <= bound, f"{name}: {error:.3g} > {bound:.3g}"


class _Large(nn.Module):
    """Matrices that are large enough to be compiled."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        n, m = LARGE
        shapes = [(n, m), (m, n), (n, m), (40, 30), (n,)]
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.randn(shape, generator=generator) / 30) for shape in shapes]
        )

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d, e = self.weights
        return (x @ a.mT + e).tanh() @ b.mT @ c.mT + d.mean()


def train_large(rank: int, steps: Any, start: int, strict_from: int) -> list[Tensor]:
    """Train past ``start`` with these steps; from step ``strict_from`` on, compiling raises."""
    model = _Large()
    ddp = DistributedDataParallel(model, bucket_cap_mb=2)
    options = {"min_compression_rate": 0.5, "start_powerSGD_iter": start}
    state = powersgd.PowerSGDState(None, 2, **options, steps=steps)
    ddp.register_comm_hook(state, powersgd.powerSGD_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for i in range(start + 6):
        torch.compiler.set_stance("fail_on_recompile" if i >= strict_from else "default")
        ddp(torch.randn(16, LARGE[1], generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]

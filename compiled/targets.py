"""The one list of cases: each step with example inputs. Every compiled form is proved on it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from powersgd import Steps, fused, orthogonalization, steps

SHAPES = ((1, 8, 6, 1), (3, 8, 6, 2), (3, 5, 9, 4), (2, 20, 30, 12))  # batch, n, m, rank
OTHER_DTYPES = (torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Target:
    """One step on one set of inputs.

    Attributes:
        name: What the case is, for test ids and reports.
        step: The eager step.
        inputs: Its positional arguments; a fresh copy for each call of a step that ends in ``_``.
        out: The positions of the arguments that the step writes.
    """

    name: str
    step: Callable[..., Any]
    inputs: tuple[Any, ...]
    out: tuple[int, ...] = ()

    def fresh_inputs(self) -> tuple[Any, ...]:
        """Return inputs that a step may overwrite."""
        return tuple(_clone(value) for value in self.inputs)

    def run(self, form: Callable[..., Any]) -> list[Tensor]:
        """Call one form of the step and collect all that it returns and writes."""
        return self.call(form, self.fresh_inputs())

    def call(self, form: Callable[..., Any], inputs: tuple[Any, ...]) -> list[Tensor]:
        """Call one form of the step on given inputs, which it may overwrite; see `run`."""
        result = form(*inputs)
        returned = [] if result is None else [result] if isinstance(result, Tensor) else result
        return [*returned, *(inputs[i] for i in self.out)]


def every_target() -> Iterator[Target]:
    """Yield all cases: every shape and rank in float32, the first two in the other dtypes."""
    yield from targets()
    for dtype in OTHER_DTYPES:
        yield from targets(dtype, SHAPES[:2])


def targets(
    dtype: torch.dtype = torch.float32,
    shapes: Sequence[tuple[int, int, int, int]] = SHAPES,
) -> Iterator[Target]:
    """Yield every step once for each shape.

    Args:
        dtype: Of all inputs.
        shapes: Of batch, rows, columns and rank.

    Yields:
        The cases.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    for b, n, m, r in shapes:
        matrix, p, q = draw(b, n, m), draw(b, r, n), draw(b, r, m)
        old, own = draw(b, n, m), draw(b, r, m)
        case = f"{b}x{n}x{m}-rank{r}-{str(dtype).removeprefix('torch.')}"
        yield Target(f"compute_p-{case}", steps.compute_p, (matrix, q))
        yield Target(f"orthogonalize-{case}", orthogonalization.orthogonalize, (p,))
        yield Target(
            f"orthogonalize_all-{case}", orthogonalization.orthogonalize_all, ([p, q], 0.0)
        )
        yield Target(f"compute_q-{case}", steps.compute_q, (matrix, p))
        yield Target(f"reconstruct-{case}", steps.reconstruct, (p, q))
        yield Target(f"residual-{case}", steps.residual, (matrix, p, q))
        yield Target(f"compress_-{case}", fused.compress_, (matrix, old, q), out=(0,))
        yield Target(f"compress_alone-{case}", fused.compress_, (matrix, None, q), out=(0,))
        once = fused.compress_at_once_
        yield Target(f"compress_at_once_-{case}", once, (matrix, old, q), out=(0,))
        for name, form in (("", fused.decompress_), ("_at_once", fused.decompress_at_once_)):
            both, alone = (matrix, old, p, own, q), (matrix, None, p, own, q)
            yield Target(f"decompress{name}_-{case}", form, both, out=(0, 1))
            yield Target(f"decompress{name}_alone-{case}", form, alone, out=(0,))
        yield Target(f"project-{case}", fused.project, (matrix, p))
        yield Target(f"replace_zero_rows-{case}", steps.replace_zero_rows, (p, -p))


def run_phases(
    phases: Steps,
    gradient: Tensor,
    residual: Tensor | None,
    p: Tensor,
    q_local: Tensor,
    q: Tensor,
) -> list[Tensor]:
    """Run the three phases of a step on copies of their inputs.

    Args:
        phases: An implementation of them.
        gradient: Shape ``(b, n, m)``, any strides.
        residual: Shape ``(b, n, m)``, or None without error feedback.
        p: Shape ``(b, r, n)``.
        q_local: Shape ``(b, r, m)``.
        q: Shape ``(b, r, m)``.

    Returns:
        P, Q, the averaged gradient and, with error feedback, the new residual.
    """
    matrix = torch.empty_strided(
        gradient.shape, gradient.stride(), dtype=gradient.dtype, device=gradient.device
    )
    matrix.copy_(gradient)
    left = _clone(residual)
    factors = [phases.compress_(matrix, left, q), phases.project(matrix, p)]
    phases.decompress_(matrix, left, p, q_local, q)
    return [*factors, matrix] if left is None else [*factors, matrix, left]


def _clone(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return [_clone(v) for v in value] if isinstance(value, list) else value

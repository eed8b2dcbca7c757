"""The phases through torch.compile."""

import itertools
import logging
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from powersgd import fused
from powersgd.phases import EAGER, Steps

logger = logging.getLogger(__name__)
_numbers = itertools.count()

# Where one compiled pass pays: on CPU a call is dear, and unrolled sums of a large rank are slow.
_LEAST_NUMEL = 1 << 18  # of one matrix: results must not depend on which bucket it is in
_LARGEST_RANK = 8
_LARGEST_RANK_OF_P = 4
_MOST_COLUMNS = 4096  # above, the rows of Q leave the cache between rows of the gradient


class _PerShape:
    """A function that is compiled once for each set of shapes, strides, dtypes and devices.

    Dynamic shapes make kernels that are much slower on CPU. And the compiler counts what it has
    made of one function, over all models of a process, and fails at a limit: each form is made of a
    copy.
    """

    def __init__(self, function: Any, options: dict[str, Any]) -> None:
        self._function = function
        self._options = {"dynamic": False, "fullgraph": True} | options
        self._forms: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, *tensors: Tensor | None) -> Any:
        key = tuple(
            None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors
        )
        if key not in self._forms:
            self._forms[key] = torch.compile(self._copy(), **self._options)
        return self._forms[key](*tensors)

    def _copy(self) -> FunctionType:
        # Code objects are equal if their parts are: the name makes the difference.
        function, name = self._function, f"{self._function.__name__}_{next(_numbers)}"
        code = function.__code__.replace(co_name=name)
        return FunctionType(code, function.__globals__, name, function.__defaults__)


def _take(i: int, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Return one of a batch: torch.compile copies an argument with gaps before it changes it."""
    return tuple(None if t is None else t[i : i + 1] for t in tensors)


class _Compiled:
    """The compiled phases, and where they are used."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._compress_ = _PerShape(fused.compress_, options)
        self._compress_at_once_ = _PerShape(fused.compress_at_once_, options)
        self._project = _PerShape(fused.project, options)
        self._decompress_ = _PerShape(fused.decompress_, options)
        self._decompress_at_once_ = _PerShape(fused.decompress_at_once_, options)
        self._options = options

    def __reduce__(self) -> Any:  # what is compiled stays behind
        return _Compiled, (self._options,)

    def compress_(self, gradient: Tensor, residual: Tensor | None, q: Tensor) -> Tensor:
        is_slower = (
            residual is None
            or gradient[0].numel() < _LEAST_NUMEL
            or q.size(1) > _LARGEST_RANK_OF_P
            or q.size(2) > _MOST_COLUMNS
        )
        if gradient.is_cpu and is_slower:
            return EAGER.compress_(gradient, residual, q)
        form = self._compress_at_once_ if gradient.is_cpu else self._compress_
        tensors = (gradient, residual, q)
        if gradient.is_contiguous():
            p: Tensor = form(*tensors)
            return p
        return torch.cat([form(*_take(i, tensors)) for i in range(gradient.size(0))])

    def project(self, matrix: Tensor, p: Tensor) -> Tensor:
        form = EAGER.project if matrix.is_cpu else self._project
        q: Tensor = form(matrix, p)
        return q

    def decompress_(
        self, matrix: Tensor, residual: Tensor | None, p: Tensor, q_local: Tensor, q: Tensor
    ) -> None:
        tensors = (matrix, residual, p, q_local, q)
        has_large_rank = p.size(1) > _LARGEST_RANK
        if matrix.is_cpu and (has_large_rank or matrix[0].numel() < _LEAST_NUMEL):
            EAGER.decompress_(*tensors)
            return
        form = self._decompress_ if has_large_rank else self._decompress_at_once_
        if matrix.is_contiguous():
            form(*tensors)
        else:
            for i in range(matrix.size(0)):
                form(*_take(i, tensors))

    def try_out(self) -> None:
        shapes = ((2, 2), (2, 2), (1, 2), (1, 2), (1, 2))
        with torch.no_grad():
            self._decompress_at_once_(*(torch.zeros(1, *shape, device="cpu") for shape in shapes))


def compile_steps(**options: Any) -> Steps:
    """Return the steps through ``torch.compile``, for ``PowerSGDState(..., steps=...)``.

    The end of a step, new residual and averaged gradient, becomes one pass over memory up to rank
    8; on CPU its start, old residual and P, too, up to rank 4. On CPU, all else stays as it is in
    `powersgd.EAGER`, whose blocks are faster there than what Inductor generates: Q, larger ranks,
    matrices of less than 512 x 512 elements, P of more than 4096 columns. Each shape is compiled
    once, when the state first meets it, which is before compression starts if
    ``start_powerSGD_iter`` is at least 2.

    Args:
        **options: For ``torch.compile``, such as ``backend``, ``mode`` or ``options``.

    Returns:
        The compiled steps; `powersgd.EAGER`, with a warning, if this machine cannot compile.

    Example:
        >>> state = PowerSGDState(None, steps=compile_steps())  # doctest: +SKIP
    """
    try:
        return _compile(options)
    except Exception as error:  # whatever a missing or broken compiler raises
        warnings.warn(
            f"compile_steps returns the eager steps, because torch.compile failed: {error}",
            stacklevel=2,
        )
        return EAGER


def find_steps() -> Steps:
    """Return the compiled steps if this machine can compile, else `powersgd.EAGER`."""
    try:
        return _compile({})
    except Exception as error:  # whatever a missing or broken compiler raises
        logger.info("The steps are not compiled, because torch.compile failed: %s", error)
        return EAGER


def _compile(options: dict[str, Any]) -> Steps:
    compiled = _Compiled(options)
    compiled.try_out()
    return EAGER._replace(
        compress_=compiled.compress_, project=compiled.project, decompress_=compiled.decompress_
    )

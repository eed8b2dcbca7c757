"""compile_steps: equal to the eager steps, compiled once, before compression starts."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import powersgd
from compiled.targets import run_phases
from powersgd import fused

from .models import LARGE, train_large
from .ranks import run_ranks
from .tolerances import assert_close

N, M = LARGE


def _matrices(count: int, gap: int) -> Tensor:
    size = N * M + gap
    return torch.randn(count * size).as_strided((count, N, M), (size, M, 1))


@pytest.mark.parametrize("r", [1, 3, 8])
@pytest.mark.parametrize(("count", "gap"), [(1, 0), (3, 0), (2, 7)])
@pytest.mark.parametrize("with_residual", [True, False])
def test_compiled_phases_equal_the_eager_ones(
    count: int, gap: int, r: int, with_residual: bool
) -> None:
    compiled, eager = powersgd.compile_steps(), powersgd.EAGER
    for stance in ("default", "fail_on_recompile"):
        gradient = _matrices(count, gap)
        old = torch.randn(count, N, M) if with_residual else None
        q, own, mean = (torch.randn(count, r, M) for _ in range(3))
        with torch.no_grad(), torch.compiler.set_stance(stance):
            p = eager.compress_(gradient.clone(), None, q)
            results = [run_phases(form, gradient, old, p, own, mean) for form in (compiled, eager)]
        for a, e in zip(*results, strict=True):
            assert_close(a, e)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_sum_of_gradient_and_residual_is_exact_also_of_bad_numbers(
    dtype: torch.dtype,
) -> None:
    gradient, old = torch.randn(2, N, M).to(dtype), torch.randn(2, N, M).to(dtype)
    gradient[0, 3, 5], old[1, 2, 2] = torch.inf, torch.nan
    q = torch.randn(2, 2, M).to(dtype)
    total = gradient + old
    p = powersgd.compile_steps().compress_(gradient, old, q)
    assert torch.equal(gradient.nan_to_num(-7), total.nan_to_num(-7))
    is_bad = torch.zeros(2, 2, N, dtype=torch.bool)
    is_bad[0, :, 3] = is_bad[1, :, 2] = True
    assert torch.equal(p.isfinite(), ~is_bad)
    assert_close(p[~is_bad], powersgd.compute_p(total, q)[~is_bad])


@pytest.mark.parametrize(("n", "m"), [(N, M), (256, 256)])
def test_a_matrix_gets_the_same_bits_in_any_batch(n: int, m: int) -> None:
    steps, shapes = powersgd.compile_steps(), ((n, m), (n, m), (2, n), (2, m), (2, m))
    inputs = [torch.randn(4, *shape) for shape in shapes]
    together = run_phases(steps, *inputs)
    alone = [run_phases(steps, *(tensor[i : i + 1] for tensor in inputs)) for i in range(4)]
    for result, parts in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(result, torch.cat(parts))


@pytest.mark.parametrize("r", [1, 2, 4])
def test_the_start_of_a_step_is_one_pass(r: int) -> None:
    matrix, q = torch.randn(1, 512, 1000), torch.randn(1, r, 1000)
    form = torch.compile(fused.compress_at_once_, dynamic=False)
    _, codes = run_and_get_code(form, matrix, matrix.clone(), q)
    assert sum(code.count("for(int64_t") for code in codes) == 2  # rows, and columns within


def _train_twice(rank: int) -> list[list[Tensor]]:
    start = 3
    compiled = train_large(rank, powersgd.compile_steps(), start, strict_from=start)
    return [compiled, train_large(rank, powersgd.EAGER, start, strict_from=start)]


def test_training_compiles_in_the_warm_up_and_equals_eager() -> None:
    """From the first compressed step on, anything left to compile would raise."""
    ranks = run_ranks(_train_twice, 2, timeout_s=200)
    for compiled, eager in ranks:
        for mine, first, plain in zip(compiled, ranks[0][0], eager, strict=True):
            assert torch.equal(mine, first)
            assert_close(mine, plain, scale=10)


def _mix(rank: int) -> str:
    steps = powersgd.compile_steps(backend="eager") if rank else powersgd.EAGER
    with pytest.raises(ValueError, match="ranks disagree on whether the steps are") as caught:
        train_large(rank, steps, 2, strict_from=100)
    dist.barrier()
    return str(caught.value)


def test_all_ranks_must_compile_or_none() -> None:
    assert len(set(run_ranks(_mix, 2))) == 1


@torch._dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=2)
def test_no_number_of_shapes_meets_the_compilers_limits() -> None:
    """All models of a process count together: benchmarks and sweeps have met 256 forms."""
    for _ in range(2):
        steps = powersgd.compile_steps(backend="eager")
        for n in range(N, N + 4):
            matrix, p, q = torch.randn(1, n, M), torch.randn(1, 1, n), torch.randn(1, 1, M)
            steps.decompress_(matrix, None, p, q, q)
            assert_close(matrix, p.mT @ q)


def test_without_a_compiler_it_warns_and_returns_the_eager_steps() -> None:
    broken = {"cpp.cxx": (None, "no-such-compiler"), "fx_graph_cache": False}
    with (
        torch._inductor.config.patch(broken),
        pytest.warns(UserWarning, match="eager steps, because torch.compile failed"),
    ):
        assert powersgd.compile_steps() is powersgd.EAGER


def test_a_state_with_compiled_steps_can_be_copied_and_pickled() -> None:
    state = powersgd.PowerSGDState(None, steps=powersgd.compile_steps())
    for copied in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        matrix, p = torch.randn(1, N, M), torch.randn(1, 2, N)
        assert_close(copied.steps.project(matrix, p), powersgd.EAGER.project(matrix, p))
        assert copied.steps.decompress_.__self__ is copied.steps.project.__self__
        assert copied.steps.decompress_.__self__ is not state.steps.project.__self__

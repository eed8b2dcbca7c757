"""The pure steps: values, identities, and one menu of hard inputs for each."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from powersgd import compute_p, compute_q, orthogonalize, phases, reconstruct, residual, steps
from powersgd.orthogonalization import orthogonalize_all

from .reference import gram_schmidt
from .tolerances import DTYPES, assert_close


def _factor(kind: str, batch: int, r: int, n: int, dtype: torch.dtype) -> Tensor:
    factor = torch.randn(batch, r, n, dtype=torch.float64)
    if kind == "zero":
        factor = factor * 0
    elif kind == "rank 1":
        factor = torch.randn(batch, r, 1, dtype=torch.float64) * factor[:, :1]
    elif kind == "dependent":
        factor[:, -1] = factor[:, 0] * 2 - factor[:, 1 % (r - 1)] if r > 1 else factor[:, 0]
    elif kind == "zero row":
        factor[:, 0] = 0
    elif kind == "tiny":
        factor = factor * (1e-5 if dtype is torch.float16 else 1e-30)
    elif kind == "huge":
        factor = factor * (1e4 if dtype is torch.float16 else 1e30)
    return factor.to(dtype)


KINDS = ("generic", "zero", "rank 1", "dependent", "zero row", "tiny", "huge")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "r", "n"), [(1, 1, 7), (3, 1, 1), (1, 4, 4), (3, 4, 40)])
def test_orthogonalize_gives_orthonormal_or_zero_rows(
    kind: str, batch: int, r: int, n: int, dtype: torch.dtype
) -> None:
    factor = _factor(kind, batch, r, n, dtype)
    before = factor.clone()
    units = orthogonalize(factor)
    assert units.dtype == dtype
    assert units.shape == factor.shape
    assert torch.equal(factor, before)
    gram = units.double() @ units.double().mT
    alive = gram.diagonal(dim1=-2, dim2=-1).round()
    assert set(alive.unique().tolist()) <= {0.0, 1.0}
    expected_rank = {"zero": 0, "rank 1": 1, "dependent": max(1, r - 1), "zero row": r - 1}
    assert alive.sum(-1).tolist() == [expected_rank.get(kind, r)] * batch
    atol = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}.get(dtype, 2e-3)
    torch.testing.assert_close(gram, alive.diag_embed(), rtol=0, atol=atol)
    if kind != "tiny" or dtype is not torch.float16:  # where float16 itself has lost the numbers
        for unit, source in zip(units.double(), factor.double(), strict=True):
            rest = source - source @ unit.mT @ unit  # the span is kept
            assert rest.abs().max() <= 4 * atol * source.abs().max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_orthogonalize_equals_gram_schmidt(dtype: torch.dtype) -> None:
    factor = torch.randn(2, 5, 30, dtype=dtype)
    for unit, source in zip(orthogonalize(factor), factor, strict=True):
        assert_close(unit, gram_schmidt(source.double().T).T, scale=10)


@pytest.mark.parametrize("exponent", [-12, -6, 6, 12])
def test_orthogonalize_does_not_see_the_scale(exponent: int) -> None:
    factor = torch.randn(3, 4, 20)
    assert_close(orthogonalize(factor * 10.0**exponent), orthogonalize(factor))


def test_orthogonalize_keeps_a_badly_conditioned_subspace() -> None:
    """Rows that differ by 1e-4 of their length are independent, not noise."""
    base = torch.randn(1, 100, dtype=torch.float64)
    factor = (base + 1e-4 * torch.randn(3, 100, dtype=torch.float64)).float()
    units = orthogonalize(factor).double()
    torch.testing.assert_close(
        units @ units.mT, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-5
    )


def test_orthogonalize_adds_epsilon_to_the_norm() -> None:
    factor = torch.tensor([[3.0, 4.0], [0.0, 10.0]])
    units = orthogonalize(factor, epsilon=1.0)
    expected = torch.tensor([[3.0, 4.0], [-4.0, 3.0]]) / 5
    lengths = torch.tensor([[5 / 6], [6 / 7]])  # the second row's remainder has length 6
    assert_close(units, expected * lengths)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_orthogonalize_lets_non_finite_through_and_spares_the_rest_of_the_batch(bad: float) -> None:
    factor = torch.randn(2, 2, 6)
    clean = orthogonalize(factor)
    factor[0, 0, 3] = bad
    units = orthogonalize(factor)
    assert units[0, 0].isnan().all()
    assert torch.equal(units[1], clean[1])


def test_orthogonalize_rejects_more_rows_than_columns() -> None:
    with pytest.raises(ValueError, match="r = 3, n = 2"):
        orthogonalize(torch.ones(3, 2))


def test_orthogonalize_all_equals_one_by_one() -> None:
    factors = [torch.randn(2, 3, 9), torch.randn(1, 1, 4), torch.randn(3, 2, 7)]
    for together, factor in zip(orthogonalize_all(factors), factors, strict=True):
        assert_close(together, orthogonalize(factor))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "n", "m", "r"), [(1, 6, 9, 1), (3, 9, 6, 2), (3, 5, 70, 5)])
def test_products_against_float64_loops(
    batch: int, n: int, m: int, r: int, dtype: torch.dtype
) -> None:
    matrix, p, q = (torch.randn(batch, *s).to(dtype) for s in ((n, m), (r, n), (r, m)))
    for i in range(batch):
        mat, p_i, q_i = matrix[i].double(), p[i].double(), q[i].double()
        outer = sum(torch.outer(p_i[k], q_i[k]) for k in range(r))
        assert_close(compute_p(matrix, q)[i], torch.stack([mat @ row for row in q_i]))
        assert_close(compute_q(matrix, p)[i], torch.stack([row @ mat for row in p_i]))
        assert_close(reconstruct(p, q)[i], outer)
        assert_close(residual(matrix, p, q)[i], mat - outer)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("r", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("count", "n", "m"),
    [(2, 9, 12), (2, 10, 1024), (2, 200, 300), (1, 1, 70_000), (1, 1101, 1024), (3, 77, 1000)],
)
def test_phases_equal_the_pure_steps(
    count: int, n: int, m: int, threads: int, r: int, dtype: torch.dtype
) -> None:
    """Tiles and blocks of all kinds: of several matrices, of one, and with rows left over."""
    torch.set_num_threads(threads)
    gradient, old = torch.randn(count, n, m).to(dtype), torch.randn(count, n, m).to(dtype)
    q, q_local, q_mean = (torch.randn(count, min(r, n), m).to(dtype) for _ in range(3))
    matrix, new = gradient.clone(), old.clone()
    p = phases.compress_(matrix, new, q)
    assert torch.equal(matrix, gradient + old)
    assert torch.equal(new, old)
    assert_close(p, compute_p(gradient + old, q))
    unit = orthogonalize(p)
    assert_close(phases.project(matrix, unit), compute_q(matrix, unit))
    merged = matrix.clone()
    phases.decompress_(matrix, new, unit, q_local, q_mean)
    assert_close(matrix, reconstruct(unit, q_mean))
    assert_close(new, residual(merged, unit, q_local))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("r", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("n", "m"), [(16, 9), (9, 31), (24, 40), (77, 1000), (200, 300), (256, 256), (300, 700)]
)
def test_a_matrix_gets_the_same_bits_in_any_batch(
    n: int, m: int, r: int, dtype: torch.dtype
) -> None:
    """Buckets decide what is a batch, and a resumed run may have others."""
    torch.set_num_threads(1)

    def run(inputs: list[Tensor]) -> list[Tensor]:
        matrix, old, q, q_local, p = (tensor.clone() for tensor in inputs)
        factors = [phases.compress_(matrix, old, q), phases.project(matrix, p)]
        phases.decompress_(matrix, old, p, q_local, q)
        return [*factors, matrix, old]

    shapes = ((n, m), (n, m), (r, m), (r, m), (r, n))
    inputs = [torch.randn(5, *shape).to(dtype) for shape in shapes]
    alone = [run([tensor[i : i + 1] for tensor in inputs]) for i in range(5)]
    for together, parts in zip(run(inputs), zip(*alone, strict=True), strict=True):
        assert torch.equal(together, torch.cat(parts))


def test_phases_without_error_feedback() -> None:
    matrix, q = torch.randn(2, 4, 6), torch.randn(2, 1, 6)
    before = matrix.clone()
    p = phases.compress_(matrix, None, q)
    assert torch.equal(matrix, before)
    phases.decompress_(matrix, None, p, q, q)
    assert_close(matrix, reconstruct(p, q))


def test_a_non_finite_entry_shows_in_p_where_q_is_zero() -> None:
    """The reduction relies on it: no flag of its own travels with P."""
    for bad in (math.inf, -math.inf, math.nan):
        for dtype in DTYPES:
            for r in (1, 3, 8):
                matrix, q = torch.randn(1, 40, 50).to(dtype), torch.randn(1, r, 50).to(dtype)
                q[..., 7] = 0
                matrix[0, 3, 7] = bad
                assert not phases.compress_(matrix, None, q)[0, :, 3].isfinite().any()


def test_replace_zero_rows_keeps_nan_rows() -> None:
    factor = torch.tensor([[0.0, 0.0], [math.nan, 0.0], [0.0, 2.0]])
    result = steps.replace_zero_rows(factor, torch.full((3, 2), 5.0))
    assert result[0].tolist() == [5.0, 5.0]
    assert result[1].isnan().tolist() == [True, False]
    assert result[2].tolist() == [0.0, 2.0]


@given(
    n=st.integers(1, 12),
    m=st.integers(1, 12),
    rank=st.integers(1, 12),
    seed=st.integers(0, 2**31),
    exponent=st.integers(-12, 12),
)
def test_one_round_splits_the_matrix(n: int, m: int, rank: int, seed: int, exponent: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(1, n, m, generator=generator, dtype=torch.float64) * 10.0**exponent
    start = torch.randn(1, min(n, m, rank), m, generator=generator, dtype=torch.float64)
    p = orthogonalize(compute_p(matrix, start))
    q = compute_q(matrix, p)
    left = residual(matrix, p, q)
    assert_close(left + reconstruct(p, q), matrix)
    assert left.norm() <= matrix.norm() * (1 + 1e-12)  # a projection never grows
    assert (p @ left).abs().max() <= 1e-12 * matrix.abs().max() * max(n, m)

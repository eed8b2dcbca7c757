"""The plan: exact counts on real models, torch's rule, and where everything lies."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from powersgd.layout import ParameterSpec, matrix_shape, memory_order
from powersgd.plan import batch, make_plan, make_square_plan, unbatch_

RESNET18_CONVS = [
    (64, 3, 3, 3),
    (64, 64, 3, 3), (64, 64, 3, 3), (64, 64, 3, 3), (64, 64, 3, 3),
    (128, 64, 3, 3), (128, 128, 3, 3), (128, 64, 1, 1), (128, 128, 3, 3), (128, 128, 3, 3),
    (256, 128, 3, 3), (256, 256, 3, 3), (256, 128, 1, 1), (256, 256, 3, 3), (256, 256, 3, 3),
    (512, 256, 3, 3), (512, 512, 3, 3), (512, 256, 1, 1), (512, 512, 3, 3), (512, 512, 3, 3),
]  # fmt: skip
RESNET18 = [
    shape for conv in RESNET18_CONVS for shape in (conv, (conv[0],), (conv[0],))
] + [(10, 512), (10,)]  # fmt: skip
LSTM = [(28869, 650), (28869,)] + [
    shape for _ in range(3) for shape in ((2600, 650), (2600, 650), (2600,), (2600,))
]
EVERYTHING = 1e-9  # a compression rate that every matrix reaches


def specs(*shapes: tuple[int, ...]) -> list[ParameterSpec]:
    return [ParameterSpec.of(torch.empty(shape, device="meta")) for shape in shapes]


@pytest.mark.parametrize(
    ("shapes", "numel", "uncompressed", "rank", "sent", "rate"),
    [
        (RESNET18, 11_173_962, 9_610, 1, 45_935, 243.26),
        (RESNET18, 11_173_962, 9_610, 2, 82_260, 135.84),
        (RESNET18, 11_173_962, 9_610, 4, 154_910, 72.13),
        (RESNET18, 11_173_962, 9_610, 7, 263_885, None),
        (LSTM, 28_949_319, 44_469, 1, 93_488, 309.66),
        (LSTM, 28_949_319, 44_469, 2, 142_507, 203.14),
        (LSTM, 28_949_319, 44_469, 4, 240_545, 120.35),
    ],
)
def test_floats_sent_per_step(
    shapes: list[tuple[int, ...]],
    numel: int,
    uncompressed: int,
    rank: int,
    sent: int,
    rate: float | None,
) -> None:
    plan = make_plan(specs(*shapes), rank, EVERYTHING)
    assert plan.numel == numel
    assert plan.uncompressed_numel == uncompressed
    assert plan.sent_numel == sent
    assert rate is None or round(numel / sent, 2) == rate


@pytest.mark.parametrize(
    ("shape", "rank", "rate", "expected"),
    [
        ((10, 10), 1, 4.9, True),  # 20 * 4.9 < 100
        ((10, 10), 1, 5, False),  # 20 * 5 = 100
        ((10, 10), 2, 2.4, True),
        ((10, 10), 2, 2.5, False),
        ((4, 100), 50, 0.9, True),  # r = 4: 104 * 4 * 0.9 < 400
        ((4, 100), 50, 1, False),
        ((100,), 1, 0.1, False),
        ((), 1, 0.1, False),
        ((0, 100), 1, 0.1, False),
    ],
)
def test_torchs_rule(shape: tuple[int, ...], rank: int, rate: float, expected: bool) -> None:
    plan = make_plan(specs(shape), rank, rate)
    assert bool(plan.groups) == expected


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [
        (torch.empty(6, 4, 3, 3), (6, 36)),
        (torch.empty(6, 4, 3, 3).to(memory_format=torch.channels_last), (6, 36)),
        (torch.empty(4, 5).t(), (4, 5)),  # memory of 4 rows
        (torch.empty(5, 4, 3).permute(1, 0, 2), (5, 12)),
        (torch.empty(4, 6)[:, ::2], (4, 3)),  # not dense: laid out row by row
        (torch.empty(1, 6, 7), (1, 42)),
        (torch.empty(6, 1, 3, 3), (6, 9)),
        (torch.empty(6, 5, dtype=torch.complex64), (6, 10)),
        (torch.empty(6), None),
        (torch.empty(()), None),
        (torch.empty(3, 0), None),
    ],
)
def test_matrix_shape_follows_memory(
    parameter: torch.Tensor, expected: tuple[int, int] | None
) -> None:
    assert matrix_shape(ParameterSpec.of(parameter)) == expected


def test_groups_are_evenly_spaced_views() -> None:
    shapes = [(4, 5), (3,), (4, 5), (3,), (4, 5), (7,), (4, 5), (6, 2), (4, 5)]
    plan = make_plan(specs(*shapes), 1, EVERYTHING)
    assert [(g.members, g.spacing) for g in plan.groups] == [
        ((0, 2, 4), 23),
        ((6, 8), 32),
        ((7,), 0),
    ]
    buffer = torch.arange(float(plan.numel))
    for group in plan.groups:
        matrices = batch(buffer, group)
        assert matrices.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        for matrix, offset in zip(matrices, group.offsets, strict=True):
            assert matrix.flatten().tolist() == list(range(offset, offset + group.n * group.m))


def test_stacking_batches_all_of_a_shape_and_writes_back() -> None:
    shapes = [(4, 5), (3,), (4, 5), (7,), (4, 5)]
    plan = make_plan(specs(*shapes), 1, EVERYTHING, stack=True)
    (group,) = plan.groups
    assert (group.members, group.spacing) == ((0, 2, 4), None)
    buffer = torch.arange(float(plan.numel))
    matrices = batch(buffer, group)
    matrices.neg_()
    assert torch.equal(buffer, torch.arange(float(plan.numel)))
    unbatch_(buffer, group, matrices)
    assert (buffer < 0).sum() == 3 * 20 - 1  # all matrices but element 0
    assert make_plan(specs(*shapes[:3]), 1, EVERYTHING, stack=True).groups[0].spacing == 23


def test_square_plan_holds_the_bucket() -> None:
    for numel, side in ((1, 1), (4, 2), (5, 3), (9, 3), (10, 4)):
        plan = make_square_plan(specs((numel,)), rank=2)
        (group,) = plan.groups
        assert (group.n, group.m, group.rank) == (side, side, min(side, 2))
        assert plan.numel == side * side
        assert plan.sent_numel == 2 * side * min(side, 2)
    assert make_square_plan(specs((0,)), rank=2).sent_numel == 0


def test_memory_order_is_the_gradients() -> None:
    transposed, gaps = torch.empty(3, 4).mT, torch.empty(48, 20).T[:, ::2]
    assert memory_order(ParameterSpec.of(transposed)) == [1, 0]
    assert memory_order(ParameterSpec.of(gaps)) == [0, 1]  # DDP lays it out row by row
    assert memory_order(ParameterSpec.of(torch.empty(2, 3, 4))) == [0, 1, 2]


def test_parameters_that_share_a_matrix_tell_whether_they_were_used() -> None:
    plan = make_square_plan(specs((3, 2), (10,)), rank=1)
    assert plan.shared == ((0, 6), (6, 10))
    assert plan.sent_numel == 4 + 4 + 2


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=8),
    rank=st.integers(1, 6),
    rate=st.sampled_from([EVERYTHING, 0.5, 1.0, 2.0]),
    stack=st.booleans(),
)
def test_every_element_is_sent_once(
    shapes: list[tuple[int, ...]], rank: int, rate: float, stack: bool
) -> None:
    plan = make_plan(specs(*shapes), rank, rate, stack)
    covered = torch.zeros(plan.numel)
    for offset, numel in plan.spans:
        covered[offset : offset + numel] += 1
    for group in plan.groups:
        matrices = batch(covered, group)
        matrices += 1
        unbatch_(covered, group, matrices)
    assert (covered == 1).all()
    for name in ("p", "q", "residual"):
        blocks = sorted(
            (getattr(g, f"{name}_offset"), getattr(g, f"{name}_numel")) for g in plan.groups
        )
        assert [start for start, _ in blocks] == [
            0, *itertools.accumulate(n for _, n in blocks)
        ][: len(blocks)]  # fmt: skip
    assert plan.sent_numel == plan.p_numel + plan.q_numel + plan.uncompressed_numel
    assert sum(1 for s in plan.residual_slices if s) == sum(len(g.members) for g in plan.groups)

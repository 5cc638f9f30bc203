"""Low-rank products: equal to float64 within rounding for mixed rows, and each row apart from the others."""

import math
from itertools import accumulate

import pytest
import torch

from pdserve.kernels import lora, native

pytestmark = pytest.mark.usefixtures("cpu_kernel")
RANKS = (4, 9, 16, 64)  # of four slots
MAX_RANK, SLOTS = 64, 6  # one slot has nothing for this layer, and one nothing at all
SHAPES = [(64, 96), (1024, 40), (1500, 1037), (4100, 33)]  # around the chunks of K and the blocks of N


def make_table(in_features: int, out_features: int, dtype: torch.dtype) -> lora.Table:
    random, table = torch.Generator().manual_seed(in_features), lora.Table(SLOTS)
    for slot, rank in enumerate(RANKS):
        a = torch.randn((rank, in_features), generator=random)
        b = torch.randn((rank, out_features), generator=random) / math.sqrt(rank)
        table.set(slot, lora.matrices(a, b, 1 / (3 + slot), dtype))
    table.set(4, lora.matrices(a, b, 1, dtype))
    table.set(4, None)
    return table


def add(x: torch.Tensor, y: torch.Tensor, slots: list[int], table: lora.Table, threads: int = 1) -> torch.Tensor:
    rows = lora.Rows(SLOTS, 400)
    rows.set([0] * 300)  # of a step before
    rows.set(slots)
    torch.set_num_threads(threads)
    return lora.add(x, y.clone(), rows, table, MAX_RANK)


def mixed(count: int) -> list[int]:
    """Slots of rows: runs of several lengths, and alternating ones."""
    runs = [slot for slot, length in ((2, 17), (-1, 5), (0, 1), (3, 33), (4, 3), (1, 16)) for _ in range(length)]
    return [*runs, *(i % 6 - 1 for i in range(count))][:count]


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> None:
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))


@pytest.mark.parametrize("dtype", native.DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_mixed_rows(in_features: int, out_features: int, dtype: torch.dtype) -> None:
    table = make_table(in_features, out_features, dtype)
    for i, count in enumerate((1, 3, 24, 100)):
        slots = mixed(count)
        x, y = torch.randn(count, in_features).to(dtype), torch.randn(count, out_features).to(dtype)
        exact = y.double()
        for row, slot in enumerate(slots):
            if slot >= 0 and (of := table.matrices[slot]) is not None:
                exact[row] += x[row].double() @ of.a_RK.double().T * of.scale @ of.b_RN.double()
        got = add(x, y, slots, table, (1, 3)[i % 2])
        # Half a unit in the last place, and the rounding errors of two sums in float32.
        torch.testing.assert_close(got.double(), exact, rtol=torch.finfo(dtype).eps, atol=2**-17 * in_features**0.5)
        untouched = torch.tensor([slot in (-1, 4) for slot in slots])
        assert torch.equal(got[untouched], y[untouched])
        rows = lora.Rows(SLOTS, 400)
        rows.set(slots)
        reference = lora.add_by_torch(x, y.clone(), rows, table, MAX_RANK)
        torch.testing.assert_close(got, reference, rtol=2 * torch.finfo(dtype).eps, atol=2**-16 * in_features**0.5)


@pytest.mark.parametrize("dtype", native.DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_a_row_does_not_depend_on_the_others(in_features: int, out_features: int, dtype: torch.dtype) -> None:
    """Nor on their adapters, nor on threads. Sums that cancel would show another order of them."""
    table, slots = make_table(in_features, out_features, dtype), mixed(100)
    half = torch.randn(100, in_features // 2)
    x, y = torch.cat([half, -half], 1).to(dtype), torch.zeros(100, out_features, dtype=dtype)
    for of in table.matrices:
        if of is not None:
            of.a_RK[:, in_features // 2 :] = of.a_RK[:, : in_features // 2]
    together = add(x, y, slots, table, 3)
    assert together.abs().max() > 0, "rounding decides the result"
    for i, length in enumerate((1, 2, 5, 16, 31)):
        for first in (0, 17, 43, 69):
            part = slice(first, first + length)
            assert torch.equal(add(x[part], y[part], slots[part], table, 1 + i % 4), together[part])
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    shuffled = add(x[order], y[order], [slots[i] for i in order.tolist()], table, 2)
    assert torch.equal(shuffled, together[order])


@pytest.mark.parametrize("dtype", native.DTYPES)
def test_matrices_of_experts(dtype: torch.dtype) -> None:
    """An expert's are those that a table of its own would have; some experts have none in some slots."""
    in_features, out_features, named = 96, 40, {0: [0, 1, 2], 2: [1], 3: [2, 0]}
    table, own = lora.ExpertTable(3, SLOTS), [lora.Table(SLOTS) for _ in range(3)]
    for slot, experts in named.items():
        rank = RANKS[slot]
        a = torch.randn(len(experts), rank, in_features).to(dtype)
        b = (torch.randn(len(experts), rank, out_features) / rank).to(dtype)
        scales = [1 / (3 + slot + expert) for expert in experts]
        table.set(slot, lora.stack(experts, a, b, scales))
        for at, expert in enumerate(experts):
            own[expert].set(slot, lora.matrices(a[at], b[at], scales[at], dtype))
    table.set(1, table.stacks[0])
    table.set(1, None)
    slots = mixed(60)
    x, y = torch.randn(60, in_features).to(dtype), torch.randn(60, out_features).to(dtype)
    rows = lora.Rows(SLOTS, 400)
    rows.set(slots)
    for expert in range(3):
        expected = add(x, y, slots, own[expert])
        assert torch.equal(lora.add(x, y.clone(), rows, table.of(expert), MAX_RANK), expected)
        assert not torch.equal(expected, y)
        reference = lora.add_by_torch(x, y.clone(), rows, table.of(expert), MAX_RANK)
        torch.testing.assert_close(reference, expected, rtol=2 * torch.finfo(dtype).eps, atol=2**-16 * in_features**0.5)


def test_an_adapter_is_in_one_piece_of_memory() -> None:
    a_RK, b_RN = torch.randn(3, 7, 33), torch.randn(3, 7, 70)
    of = lora.matrices(a_RK[0], b_RN[0], 0.5, torch.bfloat16)
    experts = lora.stack([0, 2, 5], a_RK, b_RN, [1, 2, 3])
    got = lora.together({"q": of, "experts": {"up": experts}})
    assert got.keys() == {"q", "experts"} and isinstance(got["q"], lora.Matrices) and isinstance(got["experts"], dict)
    up, pieces = got["experts"]["up"], set[int]()
    tensors = {got["q"].a_RK: of.a_RK, got["q"].b_RN: of.b_RN, up.a_XRK: experts.a_XRK, up.b_XRN: experts.b_XRN}
    for tensor, expected in tensors.items():
        assert torch.equal(tensor, expected) and tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
        pieces.add(tensor.untyped_storage().data_ptr())
    assert len(pieces) == 1 and lora.together({}) == {}


def test_rows_by_slot() -> None:
    rows = lora.Rows(3, 8)
    rows.set([2, -1, 0, 2, -1, 0])
    assert rows.num_rows == 6 and rows.starts_S.tolist() == [0, 2, 2, 4]
    assert rows.rows_T[:4].tolist() == [2, 5, 0, 3]
    assert rows.slots_T[:6].tolist() == [2, -1, 0, 2, -1, 0]
    rows.set([-1, 1])
    assert rows.starts_S.tolist() == [*accumulate([0, 0, 1, 0])] and rows.rows_T[0] == 1


def test_a_layer_with_other_rows_than_the_step() -> None:
    table = make_table(64, 96, torch.float32)
    with pytest.raises(AssertionError, match="other rows than the step"):
        add(torch.randn(2, 64), torch.randn(2, 96), [0, 1, 2], table)

"""The largest values of rows: equal ones are in the order of their indices, whatever the count."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kernels.largest import largest


@settings(max_examples=100)
@given(
    vocab=st.sampled_from([1, 7, 16, 17, 40, 600]),
    count=st.integers(0, 80),
    distinct=st.sampled_from([1, 2, 5, 1000]),
    forbidden=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_a_stable_sort(vocab: int, count: int, distinct: int, forbidden: bool, seed: int) -> None:
    values_RV = torch.randint(distinct, (3, vocab), generator=torch.Generator().manual_seed(seed)).float()
    if forbidden:
        values_RV[:, 2:] = -torch.inf
    expected = values_RV.sort(dim=-1, descending=True, stable=True)
    values_RK, ids_RK = largest(values_RV, count)
    assert torch.equal(ids_RK, expected.indices[:, :count]) and torch.equal(values_RK, expected.values[:, :count])


@pytest.mark.parametrize("vocab", [512, 32_000])
def test_16_bit_logits(vocab: int) -> None:
    torch.manual_seed(0)
    logprobs_RV = (torch.randn(40, vocab) * 2.5).bfloat16().float().log_softmax(dim=-1)
    _, ids_RK = largest(logprobs_RV, 20)
    for count in (1, 5, 19):
        assert torch.equal(largest(logprobs_RV, count)[1], ids_RK[:, :count])
    assert not torch.equal(logprobs_RV.topk(5).indices, ids_RK[:, :5]), "`topk` is no help here"


def test_a_row_that_is_no_number() -> None:
    values_RK, ids_RK = largest(torch.full((2, 100), torch.nan), 5)
    assert values_RK.isnan().all() and ids_RK.shape == (2, 5)

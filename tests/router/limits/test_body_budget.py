"""The memory of bodies that are being read or wait to be parsed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import Overloaded
from pdserve.router.limits.body_budget import KEY_SHARE, MAX_BYTES, BodyBudget

MIB = 1 << 20


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 4 * MIB), st.booleans()), max_size=400))
def test_no_key_and_not_all_of_them_exceed_their_limits(steps: list[tuple[str, int, bool]]) -> None:
    refused, held = list[str](), list[tuple[str, int]]()
    budget = BodyBudget(has_keys=True, largest=4 * MIB, on_refusal=refused.append)
    for key, size, is_large in steps:
        size = min(size * (16 if is_large else 1), budget.max_bytes_of_key)
        try:
            budget.reserve(key, size)
        except Overloaded as error:
            assert (error.kind, error.retry_after_s, refused.pop()) == ("body_bytes", 1, key)
        else:
            held.append((key, size))
        of_key = sum(one for name, one in held if name == key)
        assert of_key <= MAX_BYTES // KEY_SHARE and budget.num_bytes == sum(one for _, one in held) <= MAX_BYTES
    for one in held:
        budget.release(*one)
    assert budget.num_bytes == 0 and not refused
    for key in "abcd":
        budget.reserve(key, MAX_BYTES // KEY_SHARE)


@pytest.mark.parametrize("has_keys", [False, True])
def test_a_body_of_each_of_some_keys_always_fits(has_keys: bool) -> None:
    budget = BodyBudget(has_keys=has_keys, largest=2 * MAX_BYTES, on_refusal=lambda key: None)
    for key in "abcd" if has_keys else "a":
        budget.reserve(key, 2 * MAX_BYTES)
        with pytest.raises(Overloaded, match="of this API key"):
            budget.reserve(key, 1)
    if has_keys:
        with pytest.raises(Overloaded, match="of all clients"):
            budget.reserve("e", 1)


def test_without_keys_all_is_for_one() -> None:
    BodyBudget(has_keys=False, largest=1, on_refusal=lambda key: None).reserve("anonymous", MAX_BYTES)

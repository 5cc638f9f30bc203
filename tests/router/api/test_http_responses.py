"""JSON that is serialized in slices equals that of one piece."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json

from pdserve.router.api.http_responses import SLICE_ITEMS, sliced_json

LEAVES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text()
# Long lists only of small values: nested in each other they would take gigabytes.
SMALL = LEAVES | st.lists(LEAVES, max_size=3) | st.dictionaries(st.text(), LEAVES, max_size=3)
LONG = st.builds(lambda one, count: [one] * count, SMALL, st.sampled_from([SLICE_ITEMS, SLICE_ITEMS + 1, 600]))
VALUES = st.recursive(
    LEAVES | LONG,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(VALUES)
def test_equals_the_whole(value: Any) -> None:
    assert sliced_json(value) == to_json(value)

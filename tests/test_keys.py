"""Content keys: equal for equal content, different for everything else."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.keys import Layout, block_keys, root_key

LAYOUT = Layout(
    model_fingerprint="m", num_layers=2, num_kv_heads=2, head_dim=8, block_size=16, dtype="bfloat16", itemsize=2
)
ROOT = root_key(LAYOUT.namespace)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.integers(1, 20), st.integers(0, 70))
def test_keys_do_not_depend_on_how_they_are_derived(tokens: list[int], block_size: int, cut: int) -> None:
    whole = block_keys(ROOT, tokens, block_size)
    head = block_keys(ROOT, tokens[: cut - cut % block_size], block_size)
    tail = block_keys(head[-1] if head else ROOT, tokens[len(head) * block_size :], block_size)
    assert head + tail == whole
    assert len(whole) == len(tokens) // block_size and len(set(whole)) == len(whole)


def test_a_partial_block_has_a_key_that_is_nobody_elses() -> None:
    tokens = list(range(20))
    full, partial = block_keys(ROOT, tokens, 16, partial=True)
    assert block_keys(ROOT, tokens, 16) == [full]
    assert partial not in block_keys(ROOT, [*tokens, *[0] * 12], 16), "zeros are not what is missing"
    assert partial != block_keys(ROOT, tokens[:19], 16, partial=True)[1]


def test_a_change_anywhere_before_changes_the_key() -> None:
    tokens = list(range(64))
    changed = [1, *tokens[1:]]
    assert not set(block_keys(ROOT, tokens, 16)) & set(block_keys(ROOT, changed, 16))


@pytest.mark.parametrize(
    "change",
    [
        {"model_fingerprint": "n"},
        {"num_layers": 3},
        {"num_kv_heads": 4},
        {"head_dim": 16},
        {"block_size": 32},
        {"dtype": "float16"},
        {"version": 2},
    ],
)
def test_pools_that_differ_share_no_namespace(change: dict[str, object]) -> None:
    assert replace(LAYOUT, **change).namespace != LAYOUT.namespace  # type: ignore[arg-type]


def test_salts_and_adapters_are_kept_apart() -> None:
    roots = {root_key(LAYOUT.namespace, salt=s, lora=lo) for s, lo in [("", ""), ("a", ""), ("", "a"), ("a", "a")]}
    assert len(roots) == 4


def test_block_bytes() -> None:
    assert LAYOUT.block_bytes == 2 * 2 * 2 * 16 * 8 * 2

"""Block keys: equal for equal content, different for everything else."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.keys import (
    HASH_TOKENS,
    KeyChain,
    Layout,
    block_ends,
    block_keys,
    key_chain,
    pack_tokens,
    prompt_keys,
    root_key,
    unpack_tokens,
)

LAYOUT = Layout(
    model_fingerprint="m", num_layers=2, num_kv_heads=2, head_dim=8, block_size=16, dtype="bfloat16", itemsize=2
)
ROOT = root_key(model_digest=LAYOUT.model_digest)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=70)


@given(TOKENS, st.integers(1, 40), st.integers(0, 70), st.booleans())
def test_keys_are_the_same_whether_computed_at_once_or_in_parts(
    tokens: list[int], block_size: int, cut: int, partial: bool
) -> None:
    whole = block_keys(ROOT, tokens, block_size, partial=partial)
    ends = block_ends(len(tokens), block_size, partial=partial)
    chain = KeyChain(ROOT)
    head = chain.keys(tokens[:cut], [end for end in ends if end <= cut])
    tail = chain.keys(tokens, [end for end in ends if end > cut])
    assert head + tail == whole
    assert len(whole) == (-(-len(tokens) // block_size) if partial else len(tokens) // block_size)
    assert len(set(whole)) == len(whole)


@given(TOKENS, st.integers(1, 70), st.integers(1, 70))
def test_keys_of_different_block_sizes_agree_where_blocks_end_together(tokens: list[int], one: int, other: int) -> None:
    keys = [
        dict(
            zip(block_ends(len(tokens), size, partial=True), block_keys(ROOT, tokens, size, partial=True), strict=True)
        )
        for size in (one, other)
    ]
    together = keys[0].keys() & keys[1].keys()
    assert not tokens or len(tokens) in together
    assert [keys[0][end] for end in together] == [keys[1][end] for end in together]


@given(TOKENS, st.integers(1, 70), st.integers(1, 40), st.integers(0, 70))
def test_keys_before_an_adapter_begins_are_those_of_the_base(
    tokens: list[int], start: int, block_size: int, cut: int
) -> None:
    ends, base = block_ends(len(tokens), block_size, partial=True), KeyChain(ROOT)
    chain = key_chain(LAYOUT.model_digest, "", b"adapter", start)
    head = chain.keys(tokens[:cut], [end for end in ends if end <= cut])
    keys = head + chain.copy().keys(tokens, [end for end in ends if end > cut])
    for end, key, of_base in zip(ends, keys, base.keys(tokens, ends), strict=True):
        assert (key == of_base) == (end <= start)
    packed = chain.pack(tokens)
    assert key_chain(LAYOUT.model_digest, "", b"adapter", start, packed).keys(tokens, ends) == keys
    other = key_chain(LAYOUT.model_digest, "", b"adapter", start + 1).keys(tokens, ends)
    assert [one == two for one, two in zip(keys, other, strict=True)] == [end <= start for end in ends]


def test_a_partial_block_has_a_unique_key() -> None:
    tokens = list(range(20))
    full, partial = block_keys(ROOT, tokens, 16, partial=True)
    assert block_keys(ROOT, tokens, 16) == [full]
    assert partial not in block_keys(ROOT, [*tokens, *[0] * 12], 16), "zero tokens differ from absent tokens"
    assert partial != block_keys(ROOT, tokens[:19], 16, partial=True)[1]


@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 32])
def test_a_changed_token_changes_the_keys_of_all_later_blocks(block_size: int) -> None:
    tokens = list(range(96))
    right = block_keys(ROOT, tokens, block_size)
    for at in range(96):
        changed = [*tokens[:at], 1000, *tokens[at + 1 :]]
        same = at // block_size
        keys = block_keys(ROOT, changed, block_size)
        assert keys[:same] == right[:same] and not set(keys[same:]) & set(right)


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
        {"latent": True},
    ],
)
def test_different_layouts_have_different_namespaces(change: dict[str, Any]) -> None:
    other = replace(LAYOUT, **change)
    assert other.namespace != LAYOUT.namespace
    assert (other.model_digest == LAYOUT.model_digest) == ("model_fingerprint" not in change)
    assert (
        LAYOUT.is_convertible_to(other) == other.is_convertible_to(LAYOUT) == (change.keys() <= {"block_size", "dtype"})
    )


def test_layout_from_message() -> None:
    assert Layout.from_message(SimpleNamespace(**vars(LAYOUT))) == LAYOUT


def test_salts_and_models_have_different_roots() -> None:
    roots = {root_key(model_digest=LAYOUT.model_digest, salt=salt) for salt in ("", "a", "aa")}
    assert len(roots) == 3
    assert root_key(model_digest=replace(LAYOUT, model_fingerprint="n").model_digest) not in roots


def test_block_bytes() -> None:
    assert LAYOUT.block_bytes == 2 * 2 * 2 * 16 * 8 * 2


@given(TOKENS)
def test_packed_tokens_are_unpacked(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert len(packed) == 4 * len(tokens) and unpack_tokens(packed).tolist() == tokens
    with pytest.raises(ValueError, match="are not token ids"):
        unpack_tokens(packed + b"x")


def test_the_hash_unit_is_the_default_block_size() -> None:
    from pdserve.config import EngineConfig

    assert EngineConfig.block_size == HASH_TOKENS, "a default block is one hash unit, so none is hashed twice"


def test_instances_can_make_the_keys_of_a_prompt_from_what_they_are_sent() -> None:
    prompt = [7 * i % 250 for i in range(70)]
    keys, packed = prompt_keys(prompt, b"model", "salt", frozenset({16, 32}))
    root = root_key(model_digest=b"model", salt="salt")
    assert len(packed) == 16 * (len(prompt) // 16), "a hash of each 16 tokens"
    assert {size: KeyChain(root, packed).block_keys(prompt, size) for size in (16, 32)} == keys
    assert {size: len(found) for size, found in keys.items()} == {16: 4, 32: 2}

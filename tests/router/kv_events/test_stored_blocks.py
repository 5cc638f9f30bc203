"""Blocks in the KV store by foreign events: wire forms of vLLM, keys from tokens, and what cannot be followed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdserve.interop.vllm_kv_events import read_batch
from pdserve.keys import block_keys
from pdserve.router.kv_events.stored_blocks import StoredBlocks

ROOT = b"r" * 16
TOKENS = list(range(100, 164))
KEYS = block_keys(ROOT, TOKENS, 16)


def stored(
    hashes: list[Any], parent: Any, tokens: list[int], size: int = 16, medium: str | None = "CPU", **rest: Any
) -> Any:
    fields = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": size}
    return {"type": "BlockStored", **fields, "lora_id": None, "medium": medium, "lora_name": None, **rest}


def removed(hashes: list[Any], medium: str | None = "CPU") -> Any:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}


def as_array(event: dict[str, Any]) -> list[Any]:
    """Return an event as vLLM published it before 0.32."""
    return list(event.values())


def payload(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, events, 0])


@pytest.mark.parametrize("form", [dict, as_array])
@pytest.mark.parametrize("hashes", [[7, -8, 9, 10], [bytes([i]) * 32 for i in range(4)]])
def test_keys_follow_from_tokens_and_parents(form: Any, hashes: list[Any]) -> None:
    blocks = StoredBlocks()

    def apply(*events: Any) -> tuple[list[bytes], list[bytes]]:
        return blocks.apply(read_batch(payload(*map(form, events))), ROOT)

    assert apply(stored(hashes[:2], None, TOKENS[:32])) == ([], KEYS[:2])
    assert apply(stored(hashes[2:], hashes[1], TOKENS[32:])) == ([], KEYS[2:])
    assert apply(removed(hashes[2:3]), removed(hashes[:1], None)) == (KEYS[2:3], [])
    assert apply(removed(hashes[2:3])) == ([], []), "it was removed before"
    assert apply({"type": "AllBlocksCleared"}) == ([KEYS[0], KEYS[1], KEYS[3]], [])


def test_blocks_that_an_engine_offloads_have_the_tokens_of_its_pool() -> None:
    blocks = StoredBlocks()
    assert blocks.apply(read_batch(payload(stored([1, 2], None, TOKENS[:32], medium="GPU"))), ROOT) == ([], [])
    offloaded = [stored([1, 2, 3], None, []), removed([1, 2], "GPU"), removed([2])]
    assert blocks.apply(read_batch(payload(*offloaded)), ROOT) == ([KEYS[1]], [KEYS[0]])
    assert blocks.clear() == [KEYS[0]]


def test_old_events_without_a_medium_are_of_a_pool() -> None:
    array = ["BlockStored", [1], None, TOKENS[:16], 16]
    assert StoredBlocks().apply(read_batch(payload(array, ["BlockRemoved", [1]])), ROOT) == ([], [])


def test_large_blocks_have_a_key_per_16_tokens() -> None:
    blocks = StoredBlocks()
    assert blocks.apply(read_batch(payload(stored([1, 2], None, TOKENS, 32))), ROOT) == ([], KEYS)
    assert blocks.apply(read_batch(payload(removed([2]))), ROOT) == (KEYS[2:], [])


def test_keys_of_instances_are_taken_as_they_are() -> None:
    salted = block_keys(b"s" * 16, TOKENS, 16)
    for extra_keys in (None, [["salt"], None]):
        event = stored(list(salted[:2]), None, TOKENS[:32], extra_keys=extra_keys)
        assert StoredBlocks().apply(read_batch(payload(event)), ROOT) == ([], salted[:2])
    later = stored(list(KEYS[2:]), KEYS[1], TOKENS[32:])  # whose parent was not published here
    assert StoredBlocks().apply(read_batch(payload(later)), ROOT) == ([], KEYS[2:])


@pytest.mark.parametrize(
    "event",
    [
        stored([2], 1, TOKENS[16:32]),  # the parent is unknown
        stored([1], None, TOKENS[:16], lora_name="adapter"),
        stored([1], None, TOKENS[:16], extra_keys=[["salt"]]),
        stored([1], None, TOKENS[:16], group_idx=1, kv_cache_spec_sliding_window=128),
        stored([1], None, []),
    ],
)
def test_blocks_whose_keys_do_not_follow_are_left_out(event: Any) -> None:
    assert StoredBlocks().apply(read_batch(payload(event)), ROOT) == ([], [])


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"\xc1", "not a batch"),
        (b"", "not a batch"),
        (msgspec.msgpack.encode({"ts": 1}), "not a batch"),
        (payload({"type": "BlockMoved"}), "BlockMoved"),
        (payload([]), "not a batch"),
        (payload([[], {}]), "not a batch"),
        (payload(["BlockStored", [1]]), "parent_block_hash"),
        (payload(stored([1.5], None, [])), r"block_hashes\[0\]"),
        (payload(stored([1], None, [-1] * 16)), "token_ids"),
        (payload(stored([1], None, [1 << 32] * 16)), "token_ids"),
        (payload(stored([1], None, [], 0)), "block_size"),
        (payload(stored([1, 2], None, TOKENS[:16])), "16 tokens for 2 blocks of 16"),
    ],
)
def test_malformed_batches_are_errors(message: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_batch(message)


def test_sizes_that_are_no_multiples_of_16_are_errors_and_change_nothing() -> None:
    blocks = StoredBlocks()
    with pytest.raises(ValueError, match="blocks of 8 tokens"):
        blocks.apply(read_batch(payload(stored([1], None, TOKENS[:16]), stored([2], None, TOKENS[:8], 8))), ROOT)
    assert blocks.clear() == []


def test_blocks_of_windows_and_states_are_not_taken_for_those_of_all_tokens() -> None:
    """Their hashes may be the same."""
    blocks, keys = StoredBlocks(), KEYS[:2]
    full: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    others: list[dict[str, Any]] = [
        {"group_idx": 0, "kv_cache_spec_kind": "mamba"},
        {"group_idx": 2, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 128},
    ]
    of_others = [stored(keys, None, TOKENS[:32], **other) for other in others]
    assert blocks.apply(read_batch(payload(*of_others)), ROOT) == ([], [])
    assert blocks.apply(read_batch(payload(stored(keys, None, TOKENS[:32], **full))), ROOT) == ([], keys)
    gone = [removed(keys) | {"group_idx": other["group_idx"]} for other in others]
    assert blocks.apply(read_batch(payload(*gone)), ROOT) == ([], [])
    assert blocks.apply(read_batch(payload(removed(keys) | {"group_idx": 1})), ROOT) == (keys, [])

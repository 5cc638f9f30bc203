"""Types of KV events as vLLM publishes them over ZMQ (as of 0.32): instances publish them, and routers follow publishers.

A batch is an array in msgpack, of time, events and rank. An event is a map whose key `type` is the name of its class. Before
0.32 it was an array of that name and the fields in this order, of which the last ones could be missing. `read_batch` reads
both.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

MEDIUM_POOL = "GPU"  # vLLM's word for an engine's pool, on a CPU too
MEDIUM_STORE = "STORAGE"  # the same for a store behind the engine
NUMBER_BYTES = 8  # of a sequence number, big-endian
END_OF_REPLAY = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)

BlockHash = bytes | int


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Consecutive blocks can be found. `token_ids` are those of all of them; the first one continues the parent.

    Attributes:
        extra_keys: for each block, what its hash depends on besides tokens, such as a salt.
        group_idx: of the layers whose KV it is, by which hashes of several groups differ; None: there is one.
        kv_cache_spec_kind: `full_attention`, `sliding_window`, or `mamba`, a state.
        kv_cache_spec_sliding_window: tokens, if the blocks are those of layers with a window.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[Annotated[int, Meta(ge=0, lt=1 << 32)]]
    block_size: Annotated[int, Meta(ge=1)]
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks cannot be found any more."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True):
    """There are no blocks any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, omit_defaults=True, array_like=True):
    """`ts` is in seconds since 1970."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class _RawBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[dict[str, Any] | list[Any]]


_read_raw = msgspec.msgpack.Decoder(_RawBatch).decode
_FIELDS = {kind.__name__: kind.__struct_fields__ for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}
_OPTIONAL = dict.fromkeys(("lora_id", "medium", "lora_name"))  # which versions before 0.32 may leave out


def read_batch(payload: bytes) -> list[Event]:
    """Return the events of a batch.

    Raises:
        ValueError: it is malformed, or not all blocks have `block_size` tokens. A stored event may also have no tokens at
            all, for blocks that were published before, such as those that vLLM offloads.
    """
    try:
        events = [msgspec.convert(_OPTIONAL | _as_map(event), Event) for event in _read_raw(payload).events]
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a batch of KV events: {error}") from None
    for event in events:
        if isinstance(event, BlockStored) and len(event.token_ids) not in (
            0,
            len(event.block_hashes) * event.block_size,
        ):
            blocks = f"{len(event.block_hashes)} blocks of {event.block_size}"
            raise ValueError(f"BlockStored has {len(event.token_ids)} tokens for {blocks}")
    return events


def _as_map(event: dict[str, Any] | list[Any]) -> dict[str, Any]:
    if isinstance(event, dict):
        return event
    kind = event[0] if event and isinstance(event[0], str) else ""
    return {"type": kind, **dict(zip(_FIELDS.get(kind, ()), event[1:], strict=False))}

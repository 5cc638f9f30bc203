"""Blocks in the KV store according to one publisher of KV events, under the keys that pdserve gives their tokens."""

from collections.abc import Iterable, Sequence

from pdserve.interop.vllm_kv_events import MEDIUM_POOL, AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event
from pdserve.keys import HASH_TOKENS, KEY_BYTES, KeyChain

OTHERS = ("sliding_window", "mamba")  # kinds of KV
MAX_BLOCKS = 1 << 20  # whose keys are known, and of these in the store; the oldest are forgotten first


class StoredBlocks:
    """Follows the events of one publisher.

    The publisher's hashes say nothing here: a block's keys, one for each 16 tokens, are computed from its tokens and from the
    keys of its parent. A hash of 16 bytes that differs from the last of them is taken for the key of a pdserve instance, for
    a request with a salt. Blocks in an engine's pool only serve to identify parents, and blocks that the engine later moves
    to a store: a router cannot send requests to another engine.
    """

    def __init__(self) -> None:
        self._keys: dict[BlockHash, list[bytes]] = {}  # by the publisher's hash, whether the block is there or not
        self._stored: dict[BlockHash, list[bytes]] = {}
        self._others = set[int]()  # groups whose blocks do not serve all later tokens

    def apply(self, events: Iterable[Event], root: bytes) -> tuple[list[bytes], list[bytes]]:
        """Follow the events of a batch, and return the keys (removed, added).

        Args:
            root: key of no tokens.

        Raises:
            ValueError: a block's size is no multiple of 16 tokens. Nothing has changed.
        """
        events = list(events)
        for event in events:
            if isinstance(event, BlockStored) and event.block_size % HASH_TOKENS:
                raise ValueError(
                    f"blocks of {event.block_size} tokens; only multiples of {HASH_TOKENS} can be followed"
                )
        removed: list[bytes] = []
        added: dict[bytes, None] = {}
        for event in events:
            gone: Iterable[BlockHash] = ()
            match event:
                case BlockStored() if event.group_idx is not None and event.kv_cache_spec_kind in OTHERS:
                    self._others.add(event.group_idx)
                case BlockRemoved() if event.group_idx in self._others:
                    pass
                case BlockStored():
                    self._learn(event, root)
                    if not _is_pool(event.medium):
                        added |= dict.fromkeys(self._add(event.block_hashes))
                        gone = list(self._stored)[: max(0, len(self._stored) - MAX_BLOCKS)]
                case BlockRemoved():
                    gone = () if _is_pool(event.medium) else event.block_hashes
                case AllBlocksCleared():
                    gone = list(self._stored)
            for name in gone:
                for key in self._stored.pop(name, ()):
                    added.pop(key, None)
                    removed.append(key)
        return removed, list(added)

    def clear(self) -> list[bytes]:
        """Forget everything, and return the keys of the blocks that were in the store."""
        keys = [key for keys in self._stored.values() for key in keys]
        self._keys.clear()
        self._stored.clear()
        return keys

    def _add(self, hashes: Sequence[BlockHash]) -> list[bytes]:
        """Record that blocks are in the store, and return the keys of those that are known."""
        known = {name: self._keys[name] for name in hashes if name in self._keys}
        self._stored |= known
        return [key for keys in known.values() for key in keys]

    def _learn(self, event: BlockStored, root: bytes) -> None:
        """Compute the keys of the event's blocks, unless they depend on more than tokens, or the parent is unknown."""
        depends_on_more = event.lora_id is not None or event.lora_name
        if not event.token_ids or depends_on_more or event.kv_cache_spec_sliding_window is not None:
            return
        parent: bytes | None = root
        if any(event.extra_keys or ()):  # only a pdserve instance's hash tells the key
            parent = None
        elif event.parent_block_hash is not None:
            known = self._keys.get(event.parent_block_hash)
            parent = known[-1] if known else _own_key(event.parent_block_hash)
        ends = range(HASH_TOKENS, event.block_size + 1, HASH_TOKENS)
        for i, name in enumerate(event.block_hashes):
            own = _own_key(name)
            if parent is None and own is None:
                return
            tokens = event.token_ids[i * event.block_size : (i + 1) * event.block_size]
            keys = [] if parent is None else KeyChain(parent).keys(tokens, ends)
            self._keys.pop(name, None)  # so that it counts as new
            self._keys[name] = keys = [own] if own is not None and own not in keys[-1:] else keys
            parent = keys[-1]
        while len(self._keys) > MAX_BLOCKS:
            del self._keys[next(iter(self._keys))]


def _own_key(name: BlockHash) -> bytes | None:
    """Return a hash that may be a key of a pdserve instance: those of vLLM have 32 bytes, or are integers."""
    return name if isinstance(name, bytes) and len(name) == KEY_BYTES else None


def _is_pool(medium: str | None) -> bool:
    return medium is None or medium.upper() == MEDIUM_POOL

"""Content addresses of KV blocks: equal keys mean equal bytes, whoever computed them.

key_i = H(key_{i-1}, tokens of block i), with the root derived from everything that decides what the KV of a token looks
like. H is BLAKE2b truncated to 16 bytes. The last block of a prompt may be partial; its key hashes its token count too,
so a whole prompt is addressable.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

KEY_BYTES = 16
LAYOUT_VERSION = 1  # of a block's bytes: [num_layers, 2, num_kv_heads, block_size, head_dim]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What one block's bytes mean. Two pools exchange KV only if their layouts, and so their namespaces, are equal."""

    model_fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    itemsize: int  # bytes
    version: int = LAYOUT_VERSION

    @property
    def block_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim * self.itemsize

    @property
    def namespace(self) -> bytes:
        """A 16-byte digest of all fields."""
        return _digest(json.dumps(asdict(self), sort_keys=True).encode())


def root_key(namespace: bytes, *, salt: str = "", lora: str = "") -> bytes:
    """The key before the first block. Salt and LoRA keep tenants and adapters apart."""
    return _digest(namespace, len(salt.encode()).to_bytes(4, "little"), salt.encode(), lora.encode())


def block_keys(parent: bytes, tokens: Sequence[int], block_size: int, *, partial: bool = False) -> list[bytes]:
    """Keys of the blocks that `tokens` fill, `parent` being the key before them.

    With `partial`, a last block that is not full gets a key as well.
    """
    ids = np.asarray(tokens, dtype="<u4")
    keys: list[bytes] = []
    stop = len(ids) if partial else len(ids) - len(ids) % block_size
    for start in range(0, stop, block_size):
        block = ids[start : start + block_size]
        parent = _digest(parent, len(block).to_bytes(4, "little"), block.tobytes())
        keys.append(parent)
    return keys


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()

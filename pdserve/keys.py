"""Content addresses of KV blocks: equal keys in one namespace mean equal bytes, whoever computed them.

A block's key is that of all tokens up to its end, hashed 16 at a time whatever the block size:

    key of 16 × n tokens        = H(key of 16 × (n - 1) tokens, 16, the last 16 tokens)
    key of 16 × n + rest tokens = H(key of 16 × n tokens, rest, the last tokens)        rest < 16

H is BLAKE2b truncated to 16 bytes; the root, the key of no tokens, comes from the weights and the request's salt. So any two
pools of the same weights give the same name to the same tokens, and one can ask for what the other has stored. What the bytes
look like (block size, dtype, order) is in the namespace, which is beside the key in every store and header. The last block
of a prompt may be partial: every number of tokens has a key.
"""

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace

KEY_BYTES = 16
HASH_TOKENS = 16
TOKEN_BYTES = 4  # little-endian
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

    @property
    def weights(self) -> bytes:
        """A 16-byte digest of the model alone, the same for all its layouts."""
        return _digest(self.model_fingerprint.encode())

    def converts_to(self, other: "Layout") -> bool:
        """Whether these are the same numbers, but for the block size and the rounding to a dtype."""
        return replace(self, block_size=other.block_size, dtype=other.dtype, itemsize=other.itemsize) == other

    @classmethod
    def like(cls, message: object) -> "Layout":
        """From anything with the same attributes, such as a frame's."""
        return cls(**{field.name: getattr(message, field.name) for field in fields(cls)})


def root_key(*, weights: bytes, salt: str = "", lora: str = "") -> bytes:
    """The key of no tokens. Salt and LoRA keep tenants and adapters apart."""
    return _digest(weights, len(salt.encode()).to_bytes(4, "little"), salt.encode(), lora.encode())


class KeyChain:
    """Keys of the beginnings of one list of tokens, which may grow at its end."""

    def __init__(self, root: bytes) -> None:
        self._whole = [root]  # keys of 0, 16, 32, … tokens

    def keys(self, tokens: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        """The key of the first n tokens, for each n of `ends`, which ascend."""
        if ends:
            self._extend(tokens, ends[-1] // HASH_TOKENS)
        return [self._key(tokens, end) for end in ends]

    def _extend(self, tokens: Sequence[int], count: int) -> None:
        first = len(self._whole) - 1
        data = _as_bytes(tokens[first * HASH_TOKENS : count * HASH_TOKENS])
        for start in range(0, len(data), HASH_TOKENS * TOKEN_BYTES):
            self._whole.append(_token_key(self._whole[-1], data[start : start + HASH_TOKENS * TOKEN_BYTES]))

    def _key(self, tokens: Sequence[int], end: int) -> bytes:
        whole, rest = divmod(end, HASH_TOKENS)
        if not rest:
            return self._whole[whole]
        return _token_key(self._whole[whole], _as_bytes(tokens[end - rest : end]))


def block_ends(num_tokens: int, block_size: int, *, partial: bool = False) -> list[int]:
    """Where the blocks of so many tokens end. With `partial`, a last one that is not full counts as well."""
    ends = list(range(block_size, num_tokens + 1, block_size))
    return [*ends, num_tokens] if partial and num_tokens % block_size else ends


def block_keys(root: bytes, tokens: Sequence[int], block_size: int, *, partial: bool = False) -> list[bytes]:
    """Keys of the blocks that `tokens` fill. With `partial`, a last block that is not full gets a key as well."""
    return KeyChain(root).keys(tokens, block_ends(len(tokens), block_size, partial=partial))


def _as_bytes(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def _token_key(before: bytes, ids: bytes) -> bytes:
    return _digest(before, (len(ids) // TOKEN_BYTES).to_bytes(4, "little"), ids)


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()

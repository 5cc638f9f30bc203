"""Content-addressed block keys: within one namespace, equal keys mean equal bytes, on every instance.

A block's key is the hash of all tokens up to the block's end, computed in units of 16 tokens whatever the block size:

    key of 16 × n tokens        = H(key of 16 × (n - 1) tokens, 16, the last 16 tokens)
    key of 16 × n + rest tokens = H(key of 16 × n tokens, rest, the last tokens)        rest < 16

H is BLAKE2b truncated to 16 bytes. The root, the key of no tokens, is derived from the model, the request's salt and its
adapter's digest. An adapter that begins later is in the keys from that token on: the key of the units before it is replaced
by H(key, digest, place in the unit), and the blocks before it are those of the base.

So pools of the same model give the same tokens the same key even if their block sizes differ, and one can request what the
other has stored. The byte format (block size, dtype, layout version) is identified by the namespace, which
accompanies the key in every store and header. The last block of a prompt may be partial: every number of tokens has a key.
"""

import hashlib
import json
import math
import sys
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeAlias

Tokens: TypeAlias = "array[int]"
KEY_BYTES = 16
HASH_TOKENS = 16
TOKEN_BYTES = 4  # little-endian
_HASH = hashlib.blake2b(digest_size=KEY_BYTES)  # of nothing: a copy takes half as long as a new one
_UNIT_LENGTH = HASH_TOKENS.to_bytes(4, "little")
assert array("I").itemsize == TOKEN_BYTES and sys.byteorder == "little", (
    "token ids of this machine differ from the format"
)
LAYOUT_VERSION = (
    1  # of the byte format of a block: sections of [num_layers, K and V or latent, heads, block_size, head_dim]
)

# Of the states of recurrent layers: a state is all that the next token needs of the tokens before it, as if it reached but
# the last one of these. A block of this group has the state after its last token, and no rows.
STATE_WINDOW = 2


@dataclass(frozen=True, kw_only=True)
class Section:
    """Part of a block: the rows of layers that have as many heads of one size."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    latent: bool = False  # one row per token, from which all heads' K and V follow, instead of K and V
    window: int = 0  # tokens that may attend to a row of a group of its own, see `Layout.groups`


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Byte format of one block. Two pools exchange KV directly only if their layouts, and so their namespaces, are equal.

    Most models have one section, which the fields name. `more` has those of layers with other rows, behind it in the block,
    or with another window, in blocks of their own.
    """

    model_fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: str
    itemsize: int  # bytes
    numerics: str = ""  # class within which equal tokens give equal bits; see engine/numerics.py
    version: int = LAYOUT_VERSION
    rank: int = 0  # tensor parallelism: the block has the KV heads of this one of `ranks` devices
    ranks: int = 1
    latent: bool = False
    window: int = 0
    more: tuple[Section, ...] = ()

    @cached_property
    def groups(self) -> "tuple[Layout, ...]":
        """The layouts of the blocks of each group: of the sections that have one window, in order. Most models have one."""
        parts = dict[int, list[Section]]()
        for part in self.sections:
            parts.setdefault(part.window, []).append(part)
        if len(parts) == 1:
            return (self,)
        return tuple(replace(self, **asdict(first), more=tuple(more)) for first, *more in parts.values())

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The parts of a block, in order."""
        first = Section(**{field.name: getattr(self, field.name) for field in fields(Section)})
        return first, *self.more

    @cached_property
    def shapes(self) -> list[tuple[int, int, int, int, int]]:
        """Of each section: layers, 2 for K and V or 1 for latent rows, heads in the block, tokens, numbers of a row."""
        return [
            (
                part.num_layers,
                1 if part.latent else 2,
                max(1, part.num_kv_heads // self.ranks),
                self.block_size,
                part.head_dim,
            )
            for part in self.sections
        ]

    @cached_property
    def heads(self) -> range:
        """KV heads in the first section. Ranks share a head if there are fewer heads than ranks."""
        first = self.rank * self.num_kv_heads // self.ranks
        return range(first, first + max(1, self.num_kv_heads // self.ranks))

    @property
    def is_divisible(self) -> bool:
        """True if all ranks have as many heads. Otherwise there are no such blocks, nor of several shapes on ranks."""
        heads, ranks = self.num_kv_heads, self.ranks
        shapes = {(part.num_kv_heads, part.head_dim, part.latent) for part in self.sections}
        return 0 <= self.rank < ranks and not (heads % ranks and ranks % heads) and not (len(shapes) > 1 < ranks)

    @cached_property
    def block_numbers(self) -> int:
        """Numbers in a block, of all sections."""
        return sum(map(math.prod, self.shapes))

    @cached_property
    def block_bytes(self) -> int:
        return self.block_numbers * self.itemsize

    @cached_property
    def bytes_on_all_ranks(self) -> int:
        return self.block_bytes * self.ranks

    @property
    def namespace(self) -> bytes:
        """A 16-byte digest of all fields."""
        values = asdict(self)
        if self.ranks == 1:  # as before there were ranks
            del values["rank"], values["ranks"]
        if not self.latent:  # as before there were latent rows
            del values["latent"]
        if not self.more:  # as before there were several sections
            del values["more"]
        for part in (values, *values.get("more", ())):  # as before there were windows
            if not any(one.window for one in self.sections):
                del part["window"]
        return _digest(json.dumps(values, sort_keys=True).encode())

    @cached_property
    def model_digest(self) -> bytes:
        """A 16-byte digest of the model alone, the same for all its layouts."""
        return _digest(self.model_fingerprint.encode())

    def is_convertible_to(self, other: "Layout") -> bool:
        """Return whether both describe the same values, apart from the block size, the ranks and rounding.

        States are of one format only.
        """
        if any(part.window == STATE_WINDOW for part in self.sections):
            return False
        if "int8" in (self.dtype, other.dtype) and self.dtype != other.dtype:
            return False
        rounded = replace(self, dtype=other.dtype, itemsize=other.itemsize, numerics=other.numerics)
        return replace(rounded, block_size=other.block_size, rank=other.rank, ranks=other.ranks) == other

    def is_exact_for(self, other: "Layout") -> bool:
        """Return whether values of this layout are, bit for bit, those that a pool with the other one would compute."""
        return self.dtype == other.dtype and self.numerics == other.numerics

    @classmethod
    def from_message(cls, message: object) -> "Layout":
        """Build a layout from an object with the same attributes, such as a `pb.Layout`."""
        values = _attributes(message, cls)
        more = tuple(Section(**_attributes(part, Section)) for part in values["more"])
        return cls(**values | {"ranks": values["ranks"] or 1, "more": more})


def _attributes(message: object, of: type[Layout] | type[Section]) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in fields(of)}


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return token ids as bytes, as they are hashed and sent."""
    return token_array(tokens).tobytes()


def unpack_tokens(data: bytes) -> Tokens:
    """Return the token ids of `pack_tokens`.

    Raises:
        ValueError: the length is impossible.
    """
    if len(data) % TOKEN_BYTES:
        raise ValueError(f"{len(data)} bytes are not token ids of {TOKEN_BYTES} bytes")
    tokens = token_array()
    tokens.frombytes(data)
    return tokens


def token_array(tokens: Iterable[int] = ()) -> Tokens:
    """Return token ids in 4 bytes each, in the byte order of the machine, which is that of keys and frames.

    Raises:
        ValueError: an id is negative or needs more bytes.
    """
    try:
        return array("I", tokens)
    except OverflowError as error:
        raise ValueError(f"token ids go from 0 to {(1 << 8 * TOKEN_BYTES) - 1}") from error


def root_key(*, model_digest: bytes, salt: str = "", adapter: bytes = b"") -> bytes:
    """Return the key of no tokens. The salt separates tenants, and the adapter's digest what its weights compute."""
    return _digest(model_digest, len(salt.encode()).to_bytes(4, "little"), salt.encode(), adapter)


class KeyChain:
    """Computes the keys of prefixes of one token list, which may grow at its end. Intermediate hashes are cached.

    Args:
        packed: what `pack` of another chain of these tokens returned; empty if there is none.
        adapter: digest of an adapter that begins at token `start`; that of one that begins at 0 is in the root.

    Raises:
        ValueError: the length of `packed` is impossible.
    """

    def __init__(self, root: bytes, packed: bytes = b"", adapter: bytes = b"", start: int = 0) -> None:
        self._adapter, self._start = adapter, start if adapter else -1
        if len(packed) % KEY_BYTES:
            raise ValueError(f"{len(packed)} bytes are not keys of {KEY_BYTES} bytes")
        # Keys of the first 0, 16, 32, … tokens.
        self._unit_keys = [root]
        for at in range(0, len(packed), KEY_BYTES):
            self._unit_keys.append(packed[at : at + KEY_BYTES])

    @property
    def adapter_start(self) -> int:
        """Position of the first token that has the adapter; 0 if all have it, or there is none."""
        return max(0, self._start)

    @property
    def root(self) -> bytes:
        """The key of no tokens."""
        return self._unit_keys[0]

    def copy(self) -> "KeyChain":
        """Return an independent copy, for tokens that continue differently."""
        chain = KeyChain(self._unit_keys[0], adapter=self._adapter, start=self._start)
        chain._unit_keys = self._unit_keys[:]
        return chain

    def pack(self, tokens: Sequence[int]) -> bytes:
        """Return the cached hashes of all of `tokens` as bytes, from which another process makes the chain."""
        self._extend(tokens, len(tokens) // HASH_TOKENS)
        return b"".join(self._unit_keys[1:])

    def block_keys(self, tokens: Sequence[int], block_size: int) -> list[bytes]:
        """Return the keys of the full blocks of `tokens`."""
        if block_size % HASH_TOKENS:
            return self.keys(tokens, range(block_size, len(tokens) + 1, block_size))
        self._extend(tokens, len(tokens) // HASH_TOKENS)
        units = block_size // HASH_TOKENS
        return self._unit_keys[units : len(tokens) // HASH_TOKENS + 1 : units]

    def keys(self, tokens: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        """Return the key of the first n tokens for each n in `ends`, which must ascend."""
        if ends:
            self._extend(tokens, ends[-1] // HASH_TOKENS)
        return [self._key(tokens, end) for end in ends]

    def _extend(self, tokens: Sequence[int], count: int) -> None:
        first = len(self._unit_keys) - 1
        if first < (turn := self._start // HASH_TOKENS) < count:
            self._extend(tokens, first := turn)
        data, size = pack_tokens(tokens[first * HASH_TOKENS : count * HASH_TOKENS]), HASH_TOKENS * TOKEN_BYTES
        key, append, new_hash = self._parent(first), self._unit_keys.append, _HASH.copy
        for start in range(0, len(data), size):  # as `_token_key`, without its calls: a prompt has thousands of units
            unit_hash = new_hash()
            unit_hash.update(key + _UNIT_LENGTH + data[start : start + size])
            append(key := unit_hash.digest())

    def _parent(self, units: int) -> bytes:
        """Return what the next unit is chained to: the key of `units` units, with the adapter if that begins there."""
        key = self._unit_keys[units]
        turn, rest = divmod(self._start, HASH_TOKENS)
        return _digest(key, self._adapter, rest.to_bytes(4, "little")) if units == turn else key

    def _key(self, tokens: Sequence[int], end: int) -> bytes:
        units, rest = divmod(end, HASH_TOKENS)
        if not rest:
            return self._unit_keys[units]
        parent = self._parent(units) if end > self._start else self._unit_keys[units]
        return _token_key(parent, pack_tokens(tokens[end - rest : end]))


def key_chain(model_digest: bytes, salt: str, adapter: bytes = b"", start: int = 0, packed: bytes = b"") -> KeyChain:
    """Return the chain of a request, whose adapter begins at token `start`. Raises ValueError, as `KeyChain`."""
    if not start:
        return KeyChain(root_key(model_digest=model_digest, salt=salt, adapter=adapter), packed)
    return KeyChain(root_key(model_digest=model_digest, salt=salt), packed, adapter, start)


def prompt_keys(
    prompt: Sequence[int],
    model_digest: bytes,
    salt: str,
    block_sizes: Collection[int],
    adapter: bytes = b"",
    start: int = 0,
) -> tuple[dict[int, list[bytes]], bytes]:
    """Return the keys of a prompt's full blocks by block size, and the hashes from which instances make them."""
    chain = key_chain(model_digest, salt, adapter, start)
    packed, keys = chain.pack(prompt), dict[int, list[bytes]]()
    for size in block_sizes:
        keys[size] = chain.block_keys(prompt, size)
    return keys, packed


def group_key(key: bytes, group: int) -> bytes:
    """Return the name of a block's key in events of a further group of the pool, of that index."""
    return key[:-1] + bytes([key[-1] ^ group])


def block_ends(num_tokens: int, block_size: int, *, partial: bool = False) -> list[int]:
    """Return the end positions of the blocks of `num_tokens` tokens, with `partial` including a last one that is not full."""
    ends = list(range(block_size, num_tokens + 1, block_size))
    return [*ends, num_tokens] if partial and num_tokens % block_size else ends


def block_keys(root: bytes, tokens: Sequence[int], block_size: int, *, partial: bool = False) -> list[bytes]:
    """Return the keys of the full blocks of `tokens`, with `partial` including a last one that is not full."""
    return KeyChain(root).keys(tokens, block_ends(len(tokens), block_size, partial=partial))


def _token_key(parent: bytes, ids: bytes) -> bytes:
    return _digest(parent, (len(ids) // TOKEN_BYTES).to_bytes(4, "little"), ids)


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=KEY_BYTES).digest()

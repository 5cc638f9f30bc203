"""The 64 bytes in front of every stored block, by which a load tells its own block from anything else.

    offset  bytes
         0      8  magic
         8      4  version of this header
        12      4  version of the layout (what the payload's bytes mean)
        16     16  namespace
        32     16  key
        48      8  length of the payload: a block's, or with a codec what that makes of it
        56      8  xxh3_64 of the payload

The first 48 bytes follow from what the reader wants, and a header fits if those are equal and the length is a possible
one. xxh3 runs at memory speed and guards against accidents: torn writes, flipped bits, mixed-up names. It does not guard
against someone who can write to the store and means harm; keep such people out of the store.
"""

import struct
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from pdserve.keys import Layout

HEADER_BYTES: Final = 64
HEADER_VERSION: Final = 1
MAGIC: Final = b"pdserveK"

_FRONT = struct.Struct("<8sII16s")
_LENGTH = struct.Struct("<Q")
_LENGTH_AT = 48
_CHECKSUM_AT = 56
_SPAN_BYTES = 128 << 10  # copied, then hashed while in the cache

Buffer = bytes | bytearray | memoryview
Row = npt.NDArray[np.uint8]


class Seal:
    """Makes and checks the headers of one pool's blocks.

    Args:
        namespace, lengths: of blocks that are stored by a codec, and that its payloads can have; else those of the layout.
    """

    def __init__(self, layout: Layout, namespace: bytes | None = None, lengths: range | None = None) -> None:
        self.block_bytes = layout.block_bytes
        self._before_key = _FRONT.pack(MAGIC, HEADER_VERSION, layout.version, namespace or layout.namespace)
        self._lengths = lengths or range(layout.block_bytes, layout.block_bytes + 1)

    def pack(self, key: bytes, payload: Buffer | Row) -> bytes:
        """The header of `payload` stored under `key`."""
        return self.pack_checksum(key, len(payload), checksum(payload))

    def pack_checksum(self, key: bytes, length: int, digest: bytes) -> bytes:
        """The same for a payload of which the checksum is known."""
        return self._before_key + key + _LENGTH.pack(length) + digest

    def fits(self, header: bytes, key: bytes) -> bool:
        """Whether this header announces our block `key`: same magic, versions, namespace and key, a possible length."""
        return (
            len(header) == HEADER_BYTES
            and header[:_LENGTH_AT] == self._before_key + key
            and payload_length(header) in self._lengths
        )


def payload_length(header: bytes) -> int:
    """How many bytes the payload has, as the header says."""
    length: int = _LENGTH.unpack_from(header, _LENGTH_AT)[0]
    return length


def intact(header: bytes, payload: Buffer | Row) -> bool:
    """Whether the payload is the one that the header was made for."""
    return announces(header, checksum(payload))


def announces(header: bytes, digest: bytes) -> bool:
    """Whether the header was made for a payload of this checksum."""
    return header[_CHECKSUM_AT:] == digest


def copy(target: Row, source: Buffer | Row, hasher: xxhash.xxh3_64) -> None:
    """Copies `source` to the front of `target`, and has `hasher` read what is there then, whatever becomes of the source."""
    array = source if isinstance(source, np.ndarray) else np.frombuffer(source, np.uint8)
    for start in range(0, len(array), _SPAN_BYTES):
        span = array[start : start + _SPAN_BYTES]
        copied = target[start : start + len(span)]
        copied[:] = span
        hasher.update(copied)  # type: ignore[arg-type]  # an array is a buffer; typed so from 3.12 on


def fill(target: Row, read: Callable[[memoryview, int], int]) -> bytes | None:
    """Has `read(memory, at)` fill `target` with the bytes from `at` on, a part at a time.

    Returns:
        The checksum of what is in `target` then; None if there were fewer bytes.
    """
    hasher = xxhash.xxh3_64()
    for start in range(0, len(target), _SPAN_BYTES):
        span = target[start : start + _SPAN_BYTES]
        if read(span.data, start) != len(span):
            return None
        hasher.update(span)  # type: ignore[arg-type]  # an array is a buffer; typed so from 3.12 on
    return hasher.digest()


def checksum(payload: Buffer | Row) -> bytes:
    return xxhash.xxh3_64_digest(payload)  # type: ignore[arg-type]  # an array is a buffer; typed so from 3.12 on

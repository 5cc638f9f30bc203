"""The 64-byte header in front of every stored block, which identifies and protects the block.

    offset  bytes
         0      8  magic
         8      4  version of this header
        12      4  version of the layout (the format of the payload)
        16     16  namespace
        32     16  key
        48      8  payload length: that of a block, or of what a codec makes of it
        56      8  xxh3_64 of the payload

A reader computes the first 48 bytes from the block it requests. A header matches if these bytes are equal and the length is
a valid one. xxh3 runs at memory speed and detects accidents: torn writes, flipped bits, mixed-up names. It does not protect
against a malicious writer; restrict write access to the store.
"""

import struct
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from pdserve.keys import Layout

HEADER_BYTES: Final = 64
HEADER_VERSION: Final = 1
NAME: Final = slice(16, 48)  # where a header has namespace and key
CHECKSUM: Final = slice(56, 64)
MAGIC: Final = b"pdserveK"

_PREFIX = struct.Struct("<8sII16s")
_LENGTH = struct.Struct("<Q")
_LENGTH_AT = 48

Buffer = bytes | bytearray | memoryview
Row = npt.NDArray[np.uint8]


class HeaderFormat:
    """Packs and checks the headers of one pool's blocks.

    Args:
        layout: the pool's layout; its version, namespace and block length are the defaults.
        namespace: the namespace to use instead of the layout's, for blocks stored with a codec.
        lengths: the payload lengths that are valid with that codec.
    """

    def __init__(self, layout: Layout, namespace: bytes | None = None, lengths: range | None = None) -> None:
        self.block_bytes = layout.block_bytes
        self._prefix = _PREFIX.pack(MAGIC, HEADER_VERSION, layout.version, namespace or layout.namespace)
        self._lengths = lengths or range(layout.block_bytes, layout.block_bytes + 1)

    def pack(self, key: bytes, payload: Buffer | Row) -> bytes:
        """Return the header of `payload` stored under `key`."""
        return self.pack_checksum(key, len(payload), checksum(payload))

    def pack_checksum(self, key: bytes, length: int, digest: bytes) -> bytes:
        """Return the header of a payload whose length and checksum are given."""
        return self._prefix + key + _LENGTH.pack(length) + digest

    def matches(self, header: bytes, key: bytes) -> bool:
        """Return True if this is a header for block `key`: same magic, versions, namespace and key, a valid length."""
        return (
            len(header) == HEADER_BYTES
            and header[:_LENGTH_AT] == self._prefix + key
            and _LENGTH.unpack_from(header, _LENGTH_AT)[0] in self._lengths
        )


def payload_length(header: bytes) -> int:
    """Return the payload length in bytes that the header states."""
    length: int = _LENGTH.unpack_from(header, _LENGTH_AT)[0]
    return length


def is_intact(header: bytes, payload: Buffer | Row) -> bool:
    """Return True if the payload's checksum is the header's."""
    return header[CHECKSUM] == checksum(payload)


def checksum(payload: Buffer | Row) -> bytes:
    return xxhash.xxh3_64_digest(payload)  # type: ignore[arg-type]  # an array is a buffer; typed so from 3.12 on

"""Codecs for `?codec=` of a connector URL: compression of KV blocks on their way to the store and back.

    none         the pool row itself; costs nothing
    lz4, zstd    lossless; a block that would not become shorter is stored uncompressed
    auto         of none, lz4 and zstd the one that stores blocks fastest now (`codec_choice.py`)
    fp8, int8    lossy: one byte per number, and one scale per layer, K or V, and head of the block

A codec other than `none` is part of the namespace under which a connector stores, so blocks of different codecs never mix.

Byte-plane splitting before lz4 or zstd was measured on the demo model's KV and on normally distributed noise. With zstd it
saves 1 % of bfloat16 and takes twice the time, because zstd's entropy coder already exploits the structure. With lz4 it
saves 10 % of bfloat16 and becomes slower than zstd, which saves twice as much. So byte planes are not used.
"""

import hashlib
import importlib
import math
import threading
import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from pdserve.errors import SetupError, install
from pdserve.keys import KEY_BYTES, Layout
from pdserve.kv_transfer.codec_choice import CodecChoice
from pdserve.kv_transfer.header import Buffer, Row

ZSTD_LEVEL: Final = 1  # higher levels save 1 % more and take a third longer


class Undecodable(Exception):
    """The payload was not produced by this codec for a block of this layout."""


class Codec(ABC):
    """Encodes and decodes blocks of one layout. Thread-safe.

    Attributes:
        name: the value of `?codec=`.
        lossy: decoded blocks differ from encoded ones. Encoding and decoding a decoded block changes nothing further.
        is_identity: the payload is the row itself.
        keeps_rows: a payload as long as a block is the row itself.
        namespace: the namespace under which encoded blocks are stored.
        payload_lengths: the possible payload lengths in bytes. Never longer than a block.
    """

    name: str
    lossy: ClassVar[bool] = False
    is_identity: ClassVar[bool] = False
    keeps_rows: ClassVar[bool] = True
    payload_lengths: range

    def __init__(self, layout: Layout) -> None:
        """Raises `SetupError` if a library is missing or the codec does not support the layout."""
        self.namespace = hashlib.blake2b(layout.namespace + self.name.encode(), digest_size=KEY_BYTES).digest()

    def choose(self, num_blocks: int) -> "Codec":
        """Return the codec for storing a number of blocks in one operation, whose payloads this one decodes."""
        return self

    def record(self, chosen: "Codec", num_blocks: int, seconds: float) -> None:
        """Learn how long an operation took that stored a number of blocks with the chosen codec, in seconds."""
        return None

    @abstractmethod
    def encode(self, row: Row) -> Row:
        """Return the payload of a row, uint8 [length]. May be the row itself."""

    @abstractmethod
    def decode(self, payload: Buffer) -> Row:
        """Return the row, uint8 [block_bytes], of a payload whose length is one of `payload_lengths`.

        Raises:
            Undecodable: the payload was not produced by `encode`. Detecting that takes no more memory than decoding.
        """


class Plain(Codec):
    """No compression."""

    name = "none"
    is_identity = True

    def __init__(self, layout: Layout) -> None:
        self.namespace = layout.namespace
        self.payload_lengths = range(layout.block_bytes, layout.block_bytes + 1)

    def encode(self, row: Row) -> Row:
        return row

    def decode(self, payload: Buffer) -> Row:
        return np.frombuffer(payload, np.uint8)


class _Compressed(Codec):
    """Base of the lossless codecs. A payload as long as a block is the block, uncompressed."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._block_bytes = layout.block_bytes
        self.payload_lengths = range(1, layout.block_bytes + 1)

    def encode(self, row: Row) -> Row:
        payload = self._compress(row)
        return np.frombuffer(payload, np.uint8) if len(payload) < self._block_bytes else row

    def decode(self, payload: Buffer) -> Row:
        row = payload if len(payload) == self._block_bytes else self._decompress(payload)
        if len(row) != self._block_bytes:
            raise Undecodable
        return np.frombuffer(row, np.uint8)

    @abstractmethod
    def _compress(self, row: Row) -> bytes: ...

    @abstractmethod
    def _decompress(self, payload: Buffer) -> bytes:
        """Raises `Undecodable` instead of producing more than `_block_bytes` bytes."""


class Lz4(_Compressed):
    name = "lz4"

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._lz4 = _import_library("lz4.block", self.name)

    def _compress(self, row: Row) -> bytes:
        payload: bytes = self._lz4.compress(row, store_size=False)
        return payload

    def _decompress(self, payload: Buffer) -> bytes:
        try:
            row: bytes = self._lz4.decompress(payload, uncompressed_size=self._block_bytes)
        except self._lz4.LZ4BlockError:
            raise Undecodable from None
        return row


class Zstd(_Compressed):
    name = "zstd"

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._zstd = _import_library("zstandard", self.name)
        self._thread_local = threading.local()  # compressors and decompressors are not thread-safe

    def _compress(self, row: Row) -> bytes:
        if not hasattr(self._thread_local, "compressor"):
            self._thread_local.compressor = self._zstd.ZstdCompressor(level=ZSTD_LEVEL)
        payload: bytes = self._thread_local.compressor.compress(row)
        return payload

    def _decompress(self, payload: Buffer) -> bytes:
        if not hasattr(self._thread_local, "decompressor"):
            self._thread_local.decompressor = self._zstd.ZstdDecompressor()
        try:
            # The decompressor allocates as many bytes as the payload states.
            if self._zstd.frame_content_size(payload) != self._block_bytes:
                raise Undecodable
            row: bytes = self._thread_local.decompressor.decompress(payload, allow_extra_data=False)
        except self._zstd.ZstdError:
            raise Undecodable from None
        return row


class Auto(Codec):
    """The fastest of the lossless codecs. A payload shorter than a block begins with the codec's number."""

    name = "auto"

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._block_bytes = layout.block_bytes
        self._codecs = Plain(layout), _Numbered(1, Lz4(layout)), _Numbered(2, Zstd(layout))
        self._by_name: dict[str, Codec] = {codec.name: codec for codec in self._codecs}
        self._choice = CodecChoice(self._by_name)
        self._lock = threading.Lock()
        self.payload_lengths = range(2, layout.block_bytes + 1)

    def choose(self, num_blocks: int) -> Codec:
        with self._lock:
            return self._by_name[self._choice.choose(num_blocks * self._block_bytes)]

    def record(self, chosen: Codec, num_blocks: int, seconds: float) -> None:
        with self._lock:
            self._choice.record(chosen.name, num_blocks * self._block_bytes, seconds, time.monotonic())

    def encode(self, row: Row) -> Row:
        return self.choose(1).encode(row)

    def decode(self, payload: Buffer) -> Row:
        if len(payload) == self._block_bytes:
            return np.frombuffer(payload, np.uint8)
        if not 0 < payload[0] < len(self._codecs):
            raise Undecodable
        return self._codecs[payload[0]].decode(payload)


class _Numbered(Codec):
    """Puts a number in front of the payloads of another codec."""

    def __init__(self, number: int, codec: Codec) -> None:
        self.name, self.namespace, self.payload_lengths = codec.name, codec.namespace, codec.payload_lengths
        self._number, self._codec = number, codec

    def encode(self, row: Row) -> Row:
        payload = np.empty(len(row), np.uint8)
        encoded = self._codec.encode(row)
        if len(encoded) + 1 >= len(row):
            return row
        payload[0], payload[1 : len(encoded) + 1] = self._number, encoded
        return payload[: len(encoded) + 1]

    def decode(self, payload: Buffer) -> Row:
        return self._codec.decode(memoryview(payload)[1:])


class _Quantized(Codec):
    """Base of the lossy codecs: a scale per layer, K or V, and head, in the pool's dtype; then one code per number.

    The scale is the largest magnitude of the head. That number gets the largest code and is restored exactly, so encoding a
    decoded block gives the same scales and codes. A head that contains an infinity or a NaN is decoded as NaN as a whole:
    such KV is meaningless and must not look valid.
    """

    lossy = True
    keeps_rows = False
    max_code: ClassVar[float]

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        types = _import_library("ml_dtypes", self.name)
        supported = {"float32": np.float32, "float16": np.float16, "bfloat16": types.bfloat16}
        if layout.dtype not in supported:
            raise SetupError(f"codec={self.name} supports KV in {', '.join(supported)}, not in {layout.dtype}.")
        self._dtype = np.dtype(supported[layout.dtype])
        self._parts: list[tuple[int, slice, slice, slice]] = []  # of each section: heads, numbers, scales, codes
        first = at = 0
        for shape in layout.shapes:
            heads, numbers = shape[0] * 2 * shape[2], math.prod(shape)
            codes_at = at + heads * layout.itemsize
            stop, end = first + numbers, codes_at + numbers
            self._parts.append((heads, slice(first, stop), slice(at, codes_at), slice(codes_at, end)))
            first, at = stop, end
        self._code_dtype = np.dtype(self._get_code_type(types))
        codes = np.arange(256, dtype=np.uint8).view(self._code_dtype)
        self._decoded_codes: npt.NDArray[np.float32] = codes.astype(np.float32) / np.float32(self.max_code)
        self.payload_lengths = range(at, at + 1)

    def encode(self, row: Row) -> Row:
        payload = np.empty(self.payload_lengths[0], np.uint8)
        for heads, numbers, scales_at, codes_at in self._parts:
            values = row.view(self._dtype)[numbers].reshape(heads, -1).astype(np.float32)
            payload[scales_at], payload[codes_at] = self._encoded(values)
        return payload

    def _encoded(self, values: npt.NDArray[np.float32]) -> tuple[Row, Row]:
        scales = np.abs(values).max(axis=1, keepdims=True)  # NaN if the head contains one
        non_finite = ~np.isfinite(scales[:, 0])
        values[non_finite], scales[non_finite] = 0, np.nan
        values /= np.where(scales > 0, scales, 1)
        values *= self.max_code
        if np.issubdtype(self._code_dtype, np.integer):
            np.rint(values, out=values)
        codes = values.astype(self._code_dtype)
        return scales.astype(self._dtype).view(np.uint8).ravel(), codes.view(np.uint8).ravel()

    def decode(self, payload: Buffer) -> Row:
        data = np.frombuffer(payload, np.uint8)
        rows = list[Row]()
        for heads, _, scales_at, codes_at in self._parts:
            scales = data[scales_at].view(self._dtype).astype(np.float32).reshape(-1, 1)
            values = np.take(self._decoded_codes, data[codes_at]).reshape(heads, -1)
            with np.errstate(all="ignore"):
                values *= scales
                rows.append(values.astype(self._dtype).view(np.uint8).ravel())
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    @abstractmethod
    def _get_code_type(self, types: Any) -> Any:
        """Return the dtype of a code; `types` is the module `ml_dtypes`."""


class Fp8(_Quantized):
    """e4m3: a mantissa of three bits keeps the relative precision of small numbers beside large ones."""

    name = "fp8"
    max_code = 448.0

    def _get_code_type(self, types: Any) -> Any:
        return types.float8_e4m3fn


class Int8(_Quantized):
    """255 equal steps: a smaller error for numbers near the largest."""

    name = "int8"
    max_code = 127.0

    def _get_code_type(self, types: Any) -> Any:
        return np.int8


CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Plain, Lz4, Zstd, Auto, Fp8, Int8)}


def _import_library(module: str, codec: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise SetupError(
            f"codec={codec} needs the package {package}, which is not installed: {install('codecs')}."
        ) from None

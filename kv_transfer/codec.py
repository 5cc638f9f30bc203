"""`?codec=` of a connector URL: what becomes of a block's bytes on their way to the store and back.

    none         the pool's row itself; costs nothing
    lz4, zstd    lossless; a block that would not get shorter is stored as it is
    fp8, int8    lossy: one byte per number, and a scale for each layer, K or V, and head of the block

A codec other than `none` is part of the namespace under which a connector stores, so blocks of different codecs never meet.

Splitting numbers into planes of equal bytes before lz4 or zstd was measured, on the demo model's KV and on normal noise. With
zstd it saves 1 % of bfloat16 and takes twice the time, because zstd's entropy coder has seen the planes already. With lz4 it
saves 10 % of bfloat16 and becomes slower than zstd, which saves twice that. So there are no planes.
"""

import hashlib
import importlib
import threading
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from pdserve.errors import SetupError
from pdserve.keys import KEY_BYTES, Layout
from pdserve.kv_transfer.header import Buffer, Row

ZSTD_LEVEL: Final = 1  # higher ones save 1 % more and take a third longer


class Undecodable(Exception):
    """These bytes were not made by this codec for such a block."""


class Codec(ABC):
    """Encodes and decodes blocks of one layout; on any number of threads at once.

    Attributes:
        name: in the URL.
        lossy: what is decoded differs from what was encoded. Encoding and decoding it once more changes nothing further.
        as_is: the payload is the row.
        namespace: of blocks that are stored so.
        lengths: that a payload can have, in bytes. Never more than a block's.
    """

    name: ClassVar[str]
    lossy: ClassVar[bool] = False
    as_is: ClassVar[bool] = False
    lengths: range

    def __init__(self, layout: Layout) -> None:
        """Raises `SetupError` where a library is missing, or the layout is none that this codec can do."""
        self.namespace = hashlib.blake2b(layout.namespace + self.name.encode(), digest_size=KEY_BYTES).digest()

    @abstractmethod
    def encode(self, row: Row) -> Row:
        """The payload of a row, uint8. May be the row itself."""

    @abstractmethod
    def decode(self, payload: Buffer) -> Row:
        """The row, uint8 [block_bytes], of a payload whose length is one of `lengths`.

        Raises:
            Undecodable: it was not made by `encode`. Takes no more memory for that than for one that was.
        """


class Plain(Codec):
    name = "none"
    as_is = True

    def __init__(self, layout: Layout) -> None:
        self.namespace = layout.namespace
        self.lengths = range(layout.block_bytes, layout.block_bytes + 1)

    def encode(self, row: Row) -> Row:
        return row

    def decode(self, payload: Buffer) -> Row:
        return np.frombuffer(payload, np.uint8)


class _Compressed(Codec):
    """Lossless. A payload as long as a block is the block, uncompressed."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._block_bytes = layout.block_bytes
        self.lengths = range(1, layout.block_bytes + 1)

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
        """Raises `Undecodable` rather than make more than `_block_bytes` bytes."""


class Lz4(_Compressed):
    name = "lz4"

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._lz4 = _library("lz4.block", self.name)

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
        self._zstd = _library("zstandard", self.name)
        self._of_thread = threading.local()  # its objects are for one thread at a time

    def _compress(self, row: Row) -> bytes:
        if not hasattr(self._of_thread, "compressor"):
            self._of_thread.compressor = self._zstd.ZstdCompressor(level=ZSTD_LEVEL)
        payload: bytes = self._of_thread.compressor.compress(row)
        return payload

    def _decompress(self, payload: Buffer) -> bytes:
        if not hasattr(self._of_thread, "decompressor"):
            self._of_thread.decompressor = self._zstd.ZstdDecompressor()
        try:
            # It would make as much room as the payload says.
            if self._zstd.frame_content_size(payload) != self._block_bytes:
                raise Undecodable
            row: bytes = self._of_thread.decompressor.decompress(payload, allow_extra_data=False)
        except self._zstd.ZstdError:
            raise Undecodable from None
        return row


class _Scaled(Codec):
    """Lossy: the largest magnitude of each layer, K or V, and head, in the pool's dtype; then one code for each number.

    The largest magnitude has the largest code and comes back exactly, so what was decoded has the same scales and codes. A
    head with an infinity or a NaN in it comes back as NaN, as a whole: such KV says nothing, and should not look as if.
    """

    lossy = True
    largest: ClassVar[float]  # code

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        types = _library("ml_dtypes", self.name)
        known = {"float32": np.float32, "float16": np.float16, "bfloat16": types.bfloat16}
        if layout.dtype not in known:
            raise SetupError(f"codec={self.name} is for KV in {', '.join(known)}, not in {layout.dtype}.")
        self._dtype = np.dtype(known[layout.dtype])
        self._heads = layout.num_layers * 2 * layout.num_kv_heads
        self._code = np.dtype(self._code_type(types))
        codes = np.arange(256, dtype=np.uint8).view(self._code)
        self._levels: npt.NDArray[np.float32] = codes.astype(np.float32) / np.float32(self.largest)
        self._scale_bytes = self._heads * layout.itemsize
        length = self._scale_bytes + layout.block_bytes // layout.itemsize
        self.lengths = range(length, length + 1)

    def encode(self, row: Row) -> Row:
        values = row.view(self._dtype).reshape(self._heads, -1).astype(np.float32)
        scales = np.abs(values).max(axis=1, keepdims=True)  # NaN if there is one
        broken = ~np.isfinite(scales[:, 0])
        values[broken], scales[broken] = 0, np.nan
        values /= np.where(scales > 0, scales, 1)
        values *= self.largest
        if np.issubdtype(self._code, np.integer):
            np.rint(values, out=values)
        payload = np.empty(self.lengths[0], np.uint8)
        payload[: self._scale_bytes] = scales.astype(self._dtype).view(np.uint8).ravel()
        payload[self._scale_bytes :] = values.astype(self._code).view(np.uint8).ravel()
        return payload

    def decode(self, payload: Buffer) -> Row:
        data = np.frombuffer(payload, np.uint8)
        scales = data[: self._scale_bytes].view(self._dtype).astype(np.float32).reshape(-1, 1)
        values = np.take(self._levels, data[self._scale_bytes :]).reshape(self._heads, -1)
        with np.errstate(all="ignore"):
            values *= scales
            row: Row = values.astype(self._dtype).view(np.uint8).ravel()
        return row

    @abstractmethod
    def _code_type(self, types: Any) -> Any:
        """The type of a code, given the module `ml_dtypes`."""


class Fp8(_Scaled):
    """e4m3: three bits of mantissa, so that small numbers keep their precision beside large ones."""

    name = "fp8"
    largest = 448.0

    def _code_type(self, types: Any) -> Any:
        return types.float8_e4m3fn


class Int8(_Scaled):
    """255 equal steps: the smaller error for numbers near the largest."""

    name = "int8"
    largest = 127.0

    def _code_type(self, types: Any) -> Any:
        return np.int8


CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Plain, Lz4, Zstd, Fp8, Int8)}


def _library(module: str, codec: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise SetupError(
            f"codec={codec} needs the package {package}, which is not installed: pip install 'pdserve[codecs]'."
        ) from None

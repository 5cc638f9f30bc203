"""Adapters in the KV store, for instances that have no folder with them: by digest, and checked against it.

    lengths of both files · adapter_config.json · adapter_model.safetensors ─► chunks, each as long as a block of KV

An adapter is there only while an instance asks for it: one that has its folder stores it then, with a short lease. Each
transfer has a connector of its own, in the thread that reads adapters, so no request waits for one.
"""

import logging
import mmap
import re
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

import numpy as np

from pdserve.adapters.checkpoint import AdapterError, Files
from pdserve.errors import SetupError
from pdserve.keys import KEY_BYTES, Layout
from pdserve.kv_transfer.connector import Connector, Outcome, PoolMemory, Result, first_failure
from pdserve.kv_transfer.header import Row
from pdserve.kv_transfer.registry import connect

log = logging.getLogger(__name__)

LEASE_S = 60.0  # the instances that lack the adapter are told at once
READ_BYTES = 16 << 20  # loaded together
_LENGTHS = struct.Struct("<QQ")
_WHY = {
    Outcome.MISSING: "the KV store does not have it",
    Outcome.CORRUPT: "what the KV store has of it is corrupt",
    Outcome.FULL: "the KV store has no room for it",
}


class StoreError(AdapterError):
    """An adapter was not stored, or not loaded. `outcome` is one of `Outcome`."""

    def __init__(self, digest: bytes, outcome: Outcome, why: str = "") -> None:
        super().__init__(f"adapter {digest.hex()}: {why or _WHY.get(outcome, 'the KV store does not answer')}")
        self.outcome = outcome


class Copy:
    """The files of an adapter that came from the KV store, in a file without a name, for others who may ask for it.

    Raises:
        OSError: there is no room for it in the folder of temporary files.
    """

    def __init__(self, files: Files) -> None:
        self._path, self._config_bytes = files.path, len(files.config)
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as this object
        self._file.write(files.config + files.weights)
        self._file.flush()

    def read(self) -> Files:
        """Return the files. Any thread may call it."""
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return Files(self._path, data[: self._config_bytes], data[self._config_bytes :])


class AdapterStore:
    """The KV store, as far as it has adapters.

    Args:
        url: of the instance's connector.
        chunk_bytes: length of a block of the pool, so that what divides its space by that length has room.
    """

    def __init__(self, url: str, chunk_bytes: int) -> None:
        self._url = re.sub(r"(?<=[?&])codec=[^&,]*&?", "", url)  # those are for numbers, and some round
        self._chunk_bytes = chunk_bytes
        self._layout = Layout(
            model_fingerprint="adapters",
            num_layers=1,
            num_kv_heads=1,
            head_dim=chunk_bytes,
            block_size=1,
            dtype="uint8",
            itemsize=1,
            latent=True,
        )

    def put(self, digest: bytes, files: Files) -> None:
        """Store the files of an adapter. Blocks. Raises StoreError."""
        data = b"".join((_LENGTHS.pack(len(files.config), len(files.weights)), files.config, files.weights))
        rows = np.zeros((-(-len(data) // self._chunk_bytes), self._chunk_bytes), np.uint8)
        rows.reshape(-1)[: len(data)] = np.frombuffer(data, np.uint8)
        started, chunks = time.monotonic(), range(len(rows))
        with self._attached(digest, rows) as connector:
            _check(digest, connector.store(_keys(digest, chunks), chunks, lease_s=LEASE_S).result())
        _log("stored in", digest, len(data), started)

    def get(self, digest: bytes, path: Path) -> Files:
        """Return the files of an adapter, which may be anything: the caller compares the digest. Blocks. Raises StoreError.

        Args:
            path: of `Files`.
        """
        rows = np.empty((max(1, READ_BYTES // self._chunk_bytes), self._chunk_bytes), np.uint8)
        data, length, lengths, started = bytearray(), _LENGTHS.size, (0, 0), time.monotonic()
        with self._attached(digest, rows) as connector:
            while len(data) < length:
                first = len(data) // self._chunk_bytes
                chunks = range(first, min(first + len(rows), -(-length // self._chunk_bytes)))
                ids = range(len(chunks))
                _check(digest, connector.load(_keys(digest, chunks), ids).result())
                data += rows[: len(chunks)].data
                if len(data) >= _LENGTHS.size and not any(lengths):
                    lengths = _LENGTHS.unpack_from(data)
                    length += sum(lengths)
        _log("loaded from", digest, length, started)
        middle = _LENGTHS.size + lengths[0]
        return Files(path, bytes(data[_LENGTHS.size : middle]), bytes(data[middle:length]))

    @contextmanager
    def _attached(self, digest: bytes, rows: Row) -> Iterator[Connector]:
        try:
            connector = connect(self._url)
            if connector.in_place:
                raise StoreError(digest, Outcome.UNAVAILABLE, f"{connector.scheme}:// has no store to take it from")
            connector.attach(PoolMemory(rows, self._layout))
        except SetupError as error:
            raise StoreError(digest, Outcome.UNAVAILABLE, str(error)) from error
        try:
            yield connector
        finally:
            connector.close()


def _keys(digest: bytes, chunks: range) -> list[bytes]:
    return [blake2b(digest + chunk.to_bytes(4, "little"), digest_size=KEY_BYTES).digest() for chunk in chunks]


def _check(digest: bytes, result: Result) -> None:
    if (outcome := first_failure(result.outcomes)) is not Outcome.OK:
        raise StoreError(digest, outcome)


def _log(what: str, digest: bytes, num_bytes: int, started: float) -> None:
    seconds = time.monotonic() - started
    log.info("adapter %s: %d bytes %s the KV store in %.3f s", digest.hex(), num_bytes, what, seconds)

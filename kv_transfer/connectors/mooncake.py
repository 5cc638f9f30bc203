"""`mooncake://master:50051?segment=4GiB`: Mooncake Store, a store in the memory of many machines (`pdserve[mooncake]`).

    <namespace>-<key>    one object: header, payload. Mooncake makes an object visible when it is complete.

A `mooncake_master` holds the locations of objects; bytes are transferred directly between its clients. URL parameters:

    protocol    tcp or rdma
    devices     network devices to use; by default detected by Mooncake
    segment     memory that this instance contributes to the store, by default none; its objects are lost with the instance
    host        address at which peers reach this instance; by default the one from which it reaches the master
    metadata    the service through which clients discover each other; by default a peer-to-peer handshake

Blocks are copied through staging buffers, because Mooncake may still read or write after the deadline, when the pool rows
may belong to another sequence. Mooncake evicts by its own policy and does not support leases of given length.
"""

import importlib
import math
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import numpy as np

from pdserve.errors import SetupError
from pdserve.kv_transfer.batched import BatchedConnector
from pdserve.kv_transfer.blocks import Incoming, Outgoing
from pdserve.kv_transfer.connector import Capabilities, Outcome
from pdserve.kv_transfer.header import HEADER_BYTES, Row, payload_length
from pdserve.kv_transfer.url import Query, split

_DEFAULT_PORT = 50051  # of a master
_STAGING_BYTES = 16 << 20  # per worker thread
_BATCH_OBJECTS = 64  # per call; batches of a few thousand fail
_POLL_INTERVAL_S = 0.002
_LOCAL_BUFFER_BYTES = 1 << 20  # for API calls that are not used here
_NO_SPACE = -200  # Mooncake error codes, from mooncake-store/include/types.h
_LEASE_EXPIRED = -707
_MISSING = (-703, -704, _LEASE_EXPIRED)  # being written; not found

T = TypeVar("T")


class MooncakeError(Exception):
    """Mooncake returned an error code."""


class MooncakeConnector(BatchedConnector):
    """Stores each block as one Mooncake object."""

    scheme: ClassVar[str] = "mooncake"
    libraries: ClassVar[tuple[str, ...]] = ("mooncake",)
    faults = (MooncakeError,)

    @property
    def capabilities(self) -> Capabilities:
        # Payloads bypass the master, and its client stops a relay in the same interpreter.
        return replace(super().capabilities, keeps_leases=False, relayable=False)

    def configure(self, query: Query) -> None:
        parts = split(self.url)
        if not parts.hostname or not re.fullmatch(r"/?", parts.path):
            raise SetupError(f"{self.url!r} is not of the form mooncake://master:{_DEFAULT_PORT}.")
        self._master = (parts.hostname, parts.port or _DEFAULT_PORT)
        self._segment = query.size("segment", 0)
        self._protocol = query.choice("protocol", ["tcp", "rdma"], "tcp")
        self._devices = query.text("devices", "")
        self._host = query.text("host", "")
        self._metadata = query.text("metadata", "P2PHANDSHAKE")

    def open(self) -> None:
        self._value_bytes = HEADER_BYTES + self.payload_lengths[-1]
        self._group_blocks = max(1, min(_BATCH_OBJECTS, _STAGING_BYTES // self._value_bytes))
        self._thread_local = threading.local()
        self._buffers: list[Row] = []
        host, port = self._master
        own_address = _address_towards(host, port, self.timeout)
        self._store: Any = _import(self.timeout).MooncakeDistributedStore()
        code = self._store.setup(
            self._host or own_address,
            self._metadata,
            self._segment,
            _LOCAL_BUFFER_BYTES,
            self._protocol,
            self._devices,
            f"{host}:{port}",
        )
        if code != 0 or self._store.batch_is_exist(["-"]) != [0]:
            self._store.close()
            raise SetupError(f"No Mooncake master answers at {host}:{port} (code {code}).")

    def shut(self) -> None:
        for buffer in self._buffers:
            self._store.unregister_buffer(buffer.ctypes.data)
        self._store.close()

    def put_many(self, blocks: Sequence[Outgoing], lease_s: float) -> None:
        for group in self._groups(blocks):
            found = self._exist([block.key for block in group])
            absent = []
            for block, is_stored in zip(group, found, strict=True):
                if is_stored:
                    block.present()
                else:
                    absent.append(block)
            self._put(absent)

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        staging = self._staging()
        for group in self._groups(blocks):
            # Without duplicates: of two equal names, Mooncake fills only one buffer.
            names = list(dict.fromkeys(self._name(block.key) for block in group))
            lengths = self._read(names, _addresses(staging, len(names)))
            found = dict(zip(names, zip(staging, lengths, strict=False), strict=True))
            for block in group:
                value, length = found[self._name(block.key)]
                if length > 0:
                    block.accept(value[: min(length, HEADER_BYTES)].tobytes(), [value[HEADER_BYTES:length]])
                elif length in _MISSING:
                    block.missing()
                else:
                    self._log_code(length)

    def _read(self, names: list[str], addresses: list[int]) -> list[int]:
        """Read values to their addresses, and return the length or the error code of each.

        Mooncake may replace a value that is read for longer than its lease of 5 s, so such a read is repeated once.
        """
        sizes = [self._value_bytes] * len(names)
        lengths: list[int] = self._store.batch_get_into(names, addresses, sizes)
        late = [i for i, length in enumerate(lengths) if length == _LEASE_EXPIRED]
        if late:
            again = self._store.batch_get_into(
                [names[i] for i in late], [addresses[i] for i in late], sizes[: len(late)]
            )
            for i, length in zip(late, again, strict=True):
                lengths[i] = length
        return lengths

    def contains_many(self, keys: Sequence[bytes]) -> Iterator[bool]:
        for start in range(0, len(keys), _BATCH_OBJECTS):
            yield from self._exist(keys[start : start + _BATCH_OBJECTS])

    def delete_many(self, keys: Sequence[bytes]) -> None:
        for start in range(0, len(keys), _BATCH_OBJECTS):
            # Forced: otherwise an object that was queried recently is kept for a while.
            self._store.batch_remove([self._name(key) for key in keys[start : start + _BATCH_OBJECTS]], True)

    def _put(self, blocks: Sequence[Outgoing]) -> None:
        if not blocks:
            return
        staging, sizes = self._staging(), []
        for block, value in zip(blocks, staging, strict=False):
            header = block.copy_to(value[HEADER_BYTES:])
            value[:HEADER_BYTES] = np.frombuffer(header, np.uint8)
            sizes.append(min(self._value_bytes, HEADER_BYTES + payload_length(header)))
        names = [self._name(block.key) for block in blocks]
        codes = self._store.batch_put_from(names, _addresses(staging, len(blocks)), sizes)
        for block, code in zip(blocks, codes, strict=True):
            if code == _NO_SPACE:
                block.failed(Outcome.FULL)
            elif code < 0:
                self._log_code(code)
        self._wait_until_visible([block for block, code in zip(blocks, codes, strict=True) if code == 0])

    def _wait_until_visible(self, blocks: Sequence[Outgoing]) -> None:
        """Mark blocks as stored once they are visible.

        Mooncake also accepts a put while another client is writing the same object, and that client may die before it ends.
        """
        while blocks and blocks[0].in_time():
            waiting = []
            for block, is_visible in zip(blocks, self._exist([block.key for block in blocks]), strict=True):
                if is_visible:
                    block.stored()
                else:
                    waiting.append(block)
            blocks = waiting
            if blocks:
                time.sleep(_POLL_INTERVAL_S)

    def _exist(self, keys: Sequence[bytes]) -> list[bool]:
        codes = self._store.batch_is_exist([self._name(key) for key in keys])
        if min(codes, default=0) < 0:
            raise MooncakeError(f"code {min(codes)}")
        return [code == 1 for code in codes]

    def _log_code(self, code: int) -> None:
        self._limited_log.warning(f"Mooncake returned error code {code}", kind=str(code))

    def _staging(self) -> Row:
        """Return this thread's registered buffer, uint8 [group_blocks, value_bytes]."""
        try:
            buffer: Row = self._thread_local.buffer
        except AttributeError:
            buffer = self._thread_local.buffer = np.zeros((self._group_blocks, self._value_bytes), np.uint8)
            code = self._store.register_buffer(buffer.ctypes.data, buffer.nbytes)
            if code != 0:
                raise MooncakeError(f"the staging buffer cannot be registered: code {code}") from None
            self._buffers.append(buffer)
        return buffer

    def _name(self, key: bytes) -> str:
        return f"{self.namespace.hex()}-{key.hex()}"

    def _groups(self, blocks: Sequence[T]) -> Iterator[Sequence[T]]:
        for start in range(0, len(blocks), self._group_blocks):
            yield blocks[start : start + self._group_blocks]


def _addresses(staging: Row, count: int) -> list[int]:
    return [staging.ctypes.data + i * staging.strides[0] for i in range(count)]


def _import(timeout: float) -> Any:
    seconds = str(math.ceil(timeout))
    for name, value in {
        "MC_LOG_LEVEL": "ERROR",  # otherwise it warns about each block without space; these are counted anyway
        "MC_RPC_TIMEOUT_MS": str(int(timeout * 1000)),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        "MC_STORE_CLIENT_SETUP_RETRIES": "2",
    }.items():
        os.environ.setdefault(name, value)  # read once per process, by the first connector
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise SetupError(
            f"Mooncake cannot be imported: {error}. Install pdserve[mooncake], and libibverbs1 from the system's packages."
        ) from error


def _address_towards(host: str, port: int, timeout: float) -> str:
    """Return the local address of a connection to the master. Raises `SetupError` if it cannot be reached.

    Mooncake's own connection attempts take long and hold the interpreter's lock.
    """
    try:
        with socket.create_connection((host, port), timeout) as probe:
            return str(probe.getsockname()[0])
    except OSError as error:
        raise SetupError(f"No Mooncake master answers at {host}:{port}: {error}.") from error

"""`mooncake://master:50051?segment=4GiB`: Mooncake Store, memory of many machines as one store (extra `pdserve[mooncake]`).

    <namespace>-<key>    one object: header, payload. Mooncake shows an object when all of it is there.

A `mooncake_master` knows where objects are; the bytes go directly between its clients, over `protocol` tcp or rdma (on
these `devices`; found by Mooncake if none are named). `segment` is the memory that this instance gives to the store, none
by default: what lies there goes with the instance. `host` is the address under which others reach this instance, by default
the one from which it reaches the master. `metadata` is where clients find each other, by default among themselves.

Blocks pass through memory of our own: Mooncake may still read or write when the deadline has passed, and the rows belong to
somebody else by then. It evicts as it sees fit, and knows no leases of ours.
"""

import importlib
import math
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from pdserve.errors import SetupError
from pdserve.kv_transfer.blocks import Incoming, Outgoing
from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.header import HEADER_BYTES, Row, payload_length
from pdserve.kv_transfer.threaded import BatchedConnector
from pdserve.kv_transfer.url import Query, split

_PORT = 50051  # of a master
_STAGING_BYTES = 16 << 20  # of each worker
_BATCH = 64  # objects; batches of a few thousand fail
_LOOK_EVERY_S = 0.002
_LOCAL_BUFFER_BYTES = 1 << 20  # for calls that we do not make
_FULL = -200  # Mooncake's error codes, of mooncake-store/include/types.h
_MISSING = (-703, -704)  # being written; not there

T = TypeVar("T")


class MooncakeError(Exception):
    """Mooncake answers with an error code."""


class MooncakeConnector(BatchedConnector):
    scheme: ClassVar[str] = "mooncake"
    keeps_leases: ClassVar[bool] = False
    relayed: ClassVar[bool] = False  # bytes do not go through the master, and its client lets no relay of Python's run
    faults = (MooncakeError,)

    def configure(self, query: Query) -> None:
        parts = split(self.url)
        if not parts.hostname or not re.fullmatch(r"/?", parts.path):
            raise SetupError(f"{self.url!r} is not of the form mooncake://master:{_PORT}.")
        self._master = (parts.hostname, parts.port or _PORT)
        self._segment = query.size("segment", 0)
        self._protocol = query.choice("protocol", ["tcp", "rdma"], "tcp")
        self._devices = query.text("devices", "")
        self._host = query.text("host", "")
        self._metadata = query.text("metadata", "P2PHANDSHAKE")

    def open(self) -> None:
        self._value_bytes = HEADER_BYTES + self.payload_lengths[-1]
        self._group = max(1, min(_BATCH, _STAGING_BYTES // self._value_bytes))
        self._of_thread = threading.local()
        self._buffers: list[Row] = []
        host, port = self._master
        ours = _address_towards(host, port, self.timeout)
        self._store: Any = _import(self.timeout).MooncakeDistributedStore()
        code = self._store.setup(
            self._host or ours,
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
            there = self._exist([block.key for block in group])
            absent = []
            for block, found in zip(group, there, strict=True):
                if found:
                    block.present()
                else:
                    absent.append(block)
            self._put(absent)

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        staging = self._staging()
        for group in self._groups(blocks):
            names = list(dict.fromkeys(self._name(block.key) for block in group))  # of two equal ones it fills one
            sizes = [self._value_bytes] * len(names)
            lengths = self._store.batch_get_into(names, _addresses(staging, len(names)), sizes)
            found = dict(zip(names, zip(staging, lengths, strict=False), strict=True))
            for block in group:
                value, length = found[self._name(block.key)]
                if length > 0:
                    block.accept(value[: min(length, HEADER_BYTES)].tobytes(), [value[HEADER_BYTES:length]])
                elif length in _MISSING:
                    block.missing()
                else:
                    self._complain(length)

    def contains_many(self, keys: Sequence[bytes]) -> Iterator[bool]:
        for start in range(0, len(keys), _BATCH):
            yield from self._exist(keys[start : start + _BATCH])

    def delete_many(self, keys: Sequence[bytes]) -> None:
        for start in range(0, len(keys), _BATCH):
            # By force: whoever has looked at an object keeps it for a while otherwise.
            self._store.batch_remove([self._name(key) for key in keys[start : start + _BATCH]], True)

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
            if code == _FULL:
                block.failed(Outcome.FULL)
            elif code < 0:
                self._complain(code)
        self._await([block for block, code in zip(blocks, codes, strict=True) if code == 0])

    def _await(self, blocks: Sequence[Outgoing]) -> None:
        """Mooncake also says yes to an object that somebody else is about to write, who may die over it."""
        while blocks and blocks[0].in_time():
            waiting = []
            for block, found in zip(blocks, self._exist([block.key for block in blocks]), strict=True):
                if found:
                    block.stored()
                else:
                    waiting.append(block)
            blocks = waiting
            if blocks:
                time.sleep(_LOOK_EVERY_S)

    def _exist(self, keys: Sequence[bytes]) -> list[bool]:
        codes = self._store.batch_is_exist([self._name(key) for key in keys])
        if min(codes, default=0) < 0:
            raise MooncakeError(f"code {min(codes)}")
        return [code == 1 for code in codes]

    def _complain(self, code: int) -> None:
        self._complaints.add(f"Mooncake answers with code {code}", kind=str(code))

    def _staging(self) -> Row:
        """This thread's memory, uint8 [blocks of a group, header and payload]."""
        try:
            buffer: Row = self._of_thread.buffer
        except AttributeError:
            buffer = self._of_thread.buffer = np.zeros((self._group, self._value_bytes), np.uint8)
            code = self._store.register_buffer(buffer.ctypes.data, buffer.nbytes)
            if code != 0:
                raise MooncakeError(f"memory cannot be registered: code {code}") from None
            self._buffers.append(buffer)
        return buffer

    def _name(self, key: bytes) -> str:
        return f"{self.namespace.hex()}-{key.hex()}"

    def _groups(self, blocks: Sequence[T]) -> Iterator[Sequence[T]]:
        for start in range(0, len(blocks), self._group):
            yield blocks[start : start + self._group]


def _addresses(staging: Row, count: int) -> list[int]:
    return [staging.ctypes.data + i * staging.strides[0] for i in range(count)]


def _import(timeout: float) -> Any:
    seconds = str(math.ceil(timeout))
    for name, value in {
        "MC_LOG_LEVEL": "ERROR",  # it warns of each block that finds no room; those are counted
        "MC_RPC_TIMEOUT_MS": str(int(timeout * 1000)),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        "MC_STORE_CLIENT_SETUP_RETRIES": "2",
    }.items():
        os.environ.setdefault(name, value)  # read once, by the first connector of a process
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise SetupError(
            f"Mooncake cannot be imported: {error}. Install pdserve[mooncake], and libibverbs1 from the system's packages."
        ) from error


def _address_towards(host: str, port: int, timeout: float) -> str:
    """Ours, as the master sees it. Tries the connection: Mooncake's own tries take long, and keep the interpreter's lock."""
    try:
        with socket.create_connection((host, port), timeout) as probe:
            return str(probe.getsockname()[0])
    except OSError as error:
        raise SetupError(f"No Mooncake master answers at {host}:{port}: {error}.") from error

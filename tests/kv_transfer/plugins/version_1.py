"""Connectors as another package has written them for version 1 of the contract: capabilities are class attributes."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ClassVar

from pdserve.kv_transfer.connector import Connector, Outcome, PoolMemory, Result, Stats
from pdserve.kv_transfer.header import HEADER_BYTES, HeaderFormat
from pdserve.kv_transfer.threaded import ThreadedConnector

# mypy: ignore-errors
# Its types were those of version 1, which are gone.

values: dict[str, bytes] = {}  # of both connectors, by URL, namespace and key


class Threaded(ThreadedConnector):
    API_VERSION: ClassVar[int] = 1
    scheme: ClassVar[str] = "v1-threaded"
    follows: ClassVar[bool] = True
    keeps_leases: ClassVar[bool] = False
    relayed: ClassVar[bool] = False

    def put(self, name, header, payload, lease_s):
        values[self.url + name] = b"".join((header, payload))

    def get(self, name):
        return values.get(self.url + name)

    def contains(self, name):
        return self.url + name in values

    def delete(self, name):
        values.pop(self.url + name, None)


class Plain(Connector):
    API_VERSION: ClassVar[int] = 1
    scheme: ClassVar[str] = "v1-plain"
    skips_hanging: ClassVar[bool] = True

    def __init__(self, url: str) -> None:
        self.url = url
        self.timeout = 7.0
        self.follows = False  # as an attribute of the instance
        self.connectors: list[Connector] = []

    def attach(self, memory: PoolMemory) -> None:
        self.memory, self.counters = memory, Stats()
        layout = memory.layout
        lengths = range(layout.block_bytes, layout.block_bytes + 1)
        self.header_format = HeaderFormat(layout, layout.namespace, lengths)
        self.thread = ThreadPoolExecutor(1)

    def store(self, keys, block_ids, *, lease_s):
        self.memory.check(keys, block_ids)
        return self._submit(self._store, list(keys), list(block_ids))

    def load(self, keys, block_ids, *, tickets=()):
        self.memory.check(keys, block_ids)
        return self._submit(self._load, list(keys), list(block_ids))

    def match(self, keys):
        return self._submit(self._match, list(keys))

    def release(self, keys, *, tickets=()):
        pass

    def stats(self):
        return self.counters.plus(Stats())

    def close(self):
        self.thread.shutdown()

    def settle(self):
        self._submit(len, []).result()

    def tamper(self, key, offset):
        value = bytearray(values[self._name(key)])
        value[HEADER_BYTES + offset] ^= 0xFF
        values[self._name(key)] = bytes(value)

    def _submit(self, work, *arguments):
        future = Future()
        future.set_running_or_notify_cancel()
        self.thread.submit(lambda: future.set_result(work(*arguments)))
        return future

    def _store(self, keys, rows):
        started = time.perf_counter()
        for key, row in zip(keys, rows, strict=True):
            payload = self.memory.rows[row].tobytes()
            values[self._name(key)] = self.header_format.pack(key, payload) + payload
        return self._count("store", [Outcome.OK] * len(keys), started)

    def _load(self, keys, rows):
        started = time.perf_counter()
        return self._count("load", [self._load_one(key, row) for key, row in zip(keys, rows, strict=True)], started)

    def _load_one(self, key, row):
        value = values.get(self._name(key))
        if value is None:
            return Outcome.MISSING
        payload = value[HEADER_BYTES:]
        if value[:HEADER_BYTES] != self.header_format.pack(key, payload):
            del values[self._name(key)]
            return Outcome.CORRUPT
        self.memory.rows[row] = memoryview(payload)
        return Outcome.OK

    def _match(self, keys):
        found = [self._name(key) in values for key in keys]
        return (*found, False).index(False)

    def _count(self, direction, outcomes, started):
        result = Result(outcomes, time.perf_counter() - started)
        self.counters.bytes[direction] += outcomes.count(Outcome.OK) * self.memory.layout.block_bytes
        self.counters.count(direction, result)
        return result

    def _name(self, key):
        return f"{self.url}/{self.memory.layout.namespace.hex()}/{key.hex()}"

"""Mistakes about what is in a store, and about what a connector does to its process.

`BROKEN` lists the rule that finds each.
"""

import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pdserve.errors import SetupError
from pdserve.kv_transfer.blocks import Incoming, Outgoing
from pdserve.kv_transfer.connector import Result, Stats
from pdserve.kv_transfer.connectors.memory import MemoryConnector
from pdserve.kv_transfer.header import HEADER_BYTES
from pdserve.kv_transfer.threaded import Full
from pdserve.kv_transfer.url import Query

if TYPE_CHECKING:
    from tests.kv_transfer.broken_clients import OK, WireConnector
else:
    from pdserve_broken_clients import OK, WireConnector


# What is there.


class ChecksFirst(WireConnector):
    """Takes all blocks of an operation for stored if the first one is."""

    def put_many(self, blocks: Sequence[Outgoing], lease_s: float) -> None:
        if blocks and self.renew(self._name(blocks[0].key), lease_s):
            for block in blocks:
                block.present()
        else:
            super().put_many(blocks, lease_s)


class RemembersMatched(WireConnector):
    """Does not ask again for what it has found once."""

    def open(self) -> None:
        self._found: set[str] = set()
        super().open()

    def contains(self, name: str) -> bool:
        if name not in self._found and super().contains(name):
            self._found.add(name)
        return name in self._found


class CountsLaterChunks(WireConnector):
    """Counts the keys that are there behind the first 64, not the leading ones."""

    def contains_many(self, keys: Sequence[bytes]) -> Iterable[bool]:
        later = sum(super().contains_many(keys[64:]))
        return [*super().contains_many(keys[:64]), *[True] * later]


class LooksBeforeReading(WireConnector):
    """Takes it for a fault if a value is gone that was there a moment ago."""

    def get(self, name: str) -> bytes | None:
        if not self.contains(name):
            return None
        time.sleep(0.005)
        value = super().get(name)
        if value is None:
            raise FileNotFoundError(name)
        return value


class SendsAtClose(WireConnector):
    """Collects values for all connectors of the process, and sends them when one is closed."""

    unsent: ClassVar[dict[str, tuple[float, bytes]]] = {}

    def _call(self, op: bytes, name: str, lease_s: float = 0.0, value: bytes = b"") -> tuple[int, bytes]:
        if op == b"P":
            self.unsent[name] = lease_s, value
        if name not in self.unsent:
            return super()._call(op, name, lease_s, value)
        if op == b"D":
            del self.unsent[name]
        return OK, self.unsent[name][1] if op == b"G" else b""

    def shut(self) -> None:
        for name in list(self.unsent):
            lease_s, value = self.unsent.pop(name)
            super()._call(b"P", name, lease_s, value)
        super().shut()


class ExpectsWholeValues(WireConnector):
    """Takes as many bytes of a value as a block has."""

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        for block in blocks:
            value = self.get(self._name(block.key))
            if value is None:
                block.missing()
            else:
                block.accept(
                    value[:HEADER_BYTES], [np.frombuffer(value, np.uint8, self.payload_lengths[0], HEADER_BYTES)]
                )


class StoresWholePages(WireConnector):
    """Stores the whole pages of 4 KiB of a block."""

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        super().put(name, header, payload[: len(payload) & -4096], lease_s)


# Names.


class EndsNamesAtNul(WireConnector):
    """Takes a key for a text that ends with a NUL."""

    def _call(self, op: bytes, name: str, lease_s: float = 0.0, value: bytes = b"") -> tuple[int, bytes]:
        namespace, slash, key = name.partition("/")
        text = bytes.fromhex(key).partition(b"\0")[0] if slash else b""
        return super()._call(op, f"{namespace}/{text.hex()}", lease_s, value)


class SaltsNames(WireConnector):
    """Makes names that are others in each process, as `hash` of a text is."""

    def _call(self, op: bytes, name: str, lease_s: float = 0.0, value: bytes = b"") -> tuple[int, bytes]:
        return super()._call(op, f"{name}/{os.getpid()}", lease_s, value)


class DeletesByPrefix(MemoryConnector):
    """Deletes all values whose names begin like the given one."""

    def delete(self, name: str) -> None:
        for one in [one for one in list(self._store.values) if one.startswith(name[:-2])]:
            super().delete(one)


# Leases and space.


class TakesLatestLease(MemoryConnector):
    """Sets the lease of a block to that of its latest store, though an earlier one asked for more."""

    def renew(self, name: str, lease_s: float) -> bool:
        if name not in self._store.values:
            return False
        self._store.leases[name] = time.monotonic() + lease_s
        return True


class ProlongShortens(MemoryConnector):
    """Lets a lease end when the latest of those who prolong it says, though an earlier one asked for more.

    The thread that has a long lease comes behind the other one with a short one, as may be on a busy machine.
    """

    def prolong_many(self, keys: Sequence[bytes], lease_s: float) -> None:
        if lease_s > 1:
            time.sleep(0.02)
        for key in keys:
            self._store.leases[self._name(key)] = time.monotonic() + lease_s


class KeepsPartOfRefused(MemoryConnector):
    """Leaves the beginning of a value for which there is no space."""

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        try:
            super().put(name, header, payload, lease_s)
        except Full:
            self._store.values[name] = header + payload[:100]
            raise


class StaysFull(MemoryConnector):
    """Refuses everything once it was full."""

    def configure(self, query: Query) -> None:
        super().configure(query)
        self._is_full = False

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        if self._is_full:
            raise Full
        try:
            super().put(name, header, payload, lease_s)
        except Full:
            self._is_full = True
            raise


class CountsDeleted(MemoryConnector):
    """Counts the bytes of deleted values as used."""

    def delete(self, name: str) -> None:
        self._store.values.pop(name, None)


# The process, and the caller.


class OpensForLoads(WireConnector):
    """Opens a file with every tenth value, and closes all of them in the end."""

    def open(self) -> None:
        self._gets, self._files = itertools.count(1), list[int]()
        super().open()

    def get(self, name: str) -> bytes | None:
        if next(self._gets) % 10 == 0:
            self._files.append(os.open(os.devnull, os.O_RDONLY))
        return super().get(name)

    def shut(self) -> None:
        for file in self._files:
            os.close(file)
        super().shut()


class ForgetsTimers(WireConnector):
    """Starts a timer for every tenth value that it loads, and never stops one before the end."""

    def open(self) -> None:
        self._gets, self._timers = itertools.count(1), list[threading.Timer]()
        super().open()

    def get(self, name: str) -> bytes | None:
        if next(self._gets) % 10 == 0:
            self._timers.append(threading.Timer(600, lambda: None))
            self._timers[-1].daemon = True
            self._timers[-1].start()
        return super().get(name)

    def shut(self) -> None:
        for timer in self._timers:
            timer.cancel()
        super().shut()


class SetsTimeOutOfAll(WireConnector):
    """Sets the time-out of all new sockets of the process."""

    def open(self) -> None:
        socket.setdefaulttimeout(4.0)
        super().open()


class ChangesFolder(WireConnector):
    """Works in another folder."""

    def open(self) -> None:
        os.chdir("/")
        super().open()


class LogsEverything(WireConnector):
    """Has all libraries of the process write all of their messages, to find a fault of its own."""

    def open(self) -> None:
        logging.root.setLevel(1)
        super().open()


class SetsVariables(WireConnector):
    """Has other libraries of the process, and its children, use no proxy."""

    def open(self) -> None:
        os.environ["NO_PROXY"] = "*"
        super().open()


class CountsMilliseconds(MemoryConnector):
    """Counts milliseconds where seconds are due."""

    def stats(self) -> Stats:
        stats = super().stats()
        stats.seconds = {direction: 1000 * seconds for direction, seconds in stats.seconds.items()}
        return stats


class CountsNoSeconds(MemoryConnector):
    """Counts blocks and bytes only."""

    def stats(self) -> Stats:
        stats = super().stats()
        stats.seconds = dict.fromkeys(stats.seconds, 0.0)
        return stats


class ProlongWaits(MemoryConnector):
    """Makes the caller of `prolong` wait for the store."""

    def prolong(self, keys: Sequence[bytes], *, lease_s: float, tickets: Sequence[bytes] = ()) -> None:
        self.match(keys).result()
        super().prolong(keys, lease_s=lease_s)


# What blocks contain, and where they are in a pool.


class ReadsToMark(WireConnector):
    """Takes a mark of its protocol for the end of a value, wherever it is."""

    def get(self, name: str) -> bytes | None:
        value = super().get(name)
        return value and value.partition(b"\r\nEND\r\n")[0]


class ZerosAreNothing(WireConnector):
    """Takes a block of zeros for one that has not been computed."""

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        if any(payload):
            super().put(name, header, payload, lease_s)


class ComparesBeginnings(MemoryConnector):
    """Keeps one copy of blocks that begin alike."""

    def open(self) -> None:
        self._first = dict[bytes, memoryview]()
        super().open()

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        first = self._first.setdefault(bytes(payload[:1024]), memoryview(bytes(payload)))
        super().put(name, header, first, lease_s)


class RowsInTwoBytes(WireConnector):
    """Keeps the number of a row in two bytes."""

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> Future[Result]:
        return super().store(keys, [row & 0xFFFF for row in block_ids], lease_s=lease_s)

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        return super().load(keys, [row & 0xFFFF for row in block_ids], tickets=tickets)


# Attaching.


class ConnectsLater(WireConnector):
    """Connects with the first operation."""

    def open(self) -> None:
        self._thread_local, self._sockets = threading.local(), []


class AttachRaisesFault(ConnectsLater):
    """Raises the fault itself from `attach`."""

    def open(self) -> None:
        super().open()
        self.contains("probe")


class AttachWaits(WireConnector):
    """Waits for the first answer without a time-out."""

    def open(self) -> None:
        try:
            with contextlib.closing(socket.create_connection(self._address)) as first:
                self._send(first, b"C", "probe")
                self._receive_start(first)
        except OSError as error:
            raise SetupError(f"No wire server answers: {error}.") from error
        super().open()


# Class, the rule that finds it, and part of the detail that the kit reports.
BROKEN: list[tuple[type, str, str]] = [
    (ChecksFirst, "stored-again", "saw 1 ok, 3 missing"),
    (RemembersMatched, "stored-again", "which no load finds, not to match, saw 3 that do"),
    (CountsLaterChunks, "large-operations", "97 leading keys of 128, the next one being missing, saw 127"),
    (LooksBeforeReading, "deleted-blocks", "deleted meanwhile to be complete or missing, saw unavailable"),
    (SendsAtClose, "between-processes", "only after it had closed its connector"),
    (ExpectsWholeValues, "flipped-bytes", "saw its future raise ValueError"),
    (StoresWholePages, "round-trip", "4 corrupt"),
    (EndsNamesAtNul, "similar-keys", "corrupt"),
    (SaltsNames, "between-processes", "names may differ between processes"),
    (DeletesByPrefix, "similar-keys", "missing"),
    (TakesLatestLease, "leases-under-pressure", "leased blocks to stay"),
    (ProlongShortens, "prolonged-lease", "with prolonged leases to stay in a full store, saw"),
    (KeepsPartOfRefused, "leases-under-pressure", "each block of a full store to be correct or missing, saw corrupt"),
    (StaysFull, "leases-under-pressure", "were deleted from a full store, saw 8 full"),
    (CountsDeleted, "leases-under-pressure", "were deleted from a full store, saw 8 full"),
    (OpensForLoads, "random-loads", "open files after 500 loads to be enough"),
    (ForgetsTimers, "random-loads", "threads after 500 loads to be enough"),
    (SetsTimeOutOfAll, "clean-close", "saw socket.setdefaulttimeout(4.0)"),
    (SetsVariables, "clean-close", "saw changes of NO_PROXY"),
    (ChangesFolder, "clean-close", "saw os.chdir('/')"),
    (LogsEverything, "clean-close", "saw logging.root.setLevel(1)"),
    (CountsMilliseconds, "counts", "that have passed to be counted"),
    (ReadsToMark, "any-content", "corrupt"),
    (ZerosAreNothing, "any-content", "missing"),
    (ComparesBeginnings, "any-content", "corrupt"),
    (RowsInTwoBytes, "large-pools", "wrong bytes"),
    (CountsNoSeconds, "counts", "the seconds of stores and loads to be counted"),
    (ProlongWaits, "caller-never-waits", "expected prolong to return while the store hangs"),
    (ConnectsLater, "attaching", "while the store is gone, saw it succeed"),
    (AttachRaisesFault, "attaching", "to raise SetupError while the store is gone, saw Connection"),
    (AttachWaits, "attaching", "attach to end while the store hangs, saw it wait"),
]

# The kit reports these after its wait limits, which tests reduce.
SLOW_TO_DETECT = (ProlongWaits, AttachWaits)

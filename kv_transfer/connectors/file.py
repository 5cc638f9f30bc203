"""`file:///path?fsync=0&max_bytes=100GiB&max_age=86400`: a store in a directory, local or shared (NFS, Lustre, …).

    path/<namespace>/<first 2 hex digits of key>/<key>     one block: header, payload
    path/tmp/                                              blocks being written

A block is written under tmp/ and renamed when complete, so what has its name is whole. Without `fsync=1`, a crash of the
machine can leave a file whose bytes never reached the disk; its checksum tells. A file's modification time is the end of
its lease, or its last use if that is later.

Nothing is removed unless `max_bytes` or `max_age` (seconds since the last use) say so: then the files longest unused go
first, never one with a lease. Several instances may do that at once; a reader that has opened a file keeps it.
"""

import contextlib
import errno
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar
from urllib.parse import unquote

import numpy as np

from pdserve.errors import SetupError
from pdserve.kv_transfer.blocks import Incoming, Outgoing
from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.fence import Expired
from pdserve.kv_transfer.header import HEADER_BYTES, payload_length
from pdserve.kv_transfer.threaded import BatchedConnector
from pdserve.kv_transfer.url import Query, split

LEFTOVER_AGE_S = 600.0  # a write that takes longer than this has no writer any more
_SWEEP_EVERY_S = 60.0
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_WOULD_WAIT = {errno.EAGAIN, errno.EOPNOTSUPP}

T = TypeVar("T")


class FileConnector(BatchedConnector):
    scheme: ClassVar[str] = "file"

    def configure(self, query: Query) -> None:
        parts = split(self.url)
        if parts.netloc not in ("", "localhost") or not parts.path.strip("/"):
            raise SetupError(f"{self.url!r} needs an absolute path behind three slashes, such as file:///mnt/kv.")
        self._root = unquote(parts.path).rstrip("/")
        self._temporary = f"{self._root}/tmp"
        self._fsync = query.flag("fsync", False)
        self._janitor = Janitor(self._root, query.size("max_bytes", None), query.seconds("max_age", None))

    def open(self) -> None:
        self._folder = f"{self._root}/{self.namespace.hex()}"
        # A block is read into these first. A read from a dead file server can hang for ever, and must not end in a row
        # that the caller has been told to take back. The second copy is from the processor's cache.
        self._staging = threading.local()
        try:
            os.makedirs(self._folder, exist_ok=True)
            os.makedirs(self._temporary, exist_ok=True)
            probe = self._temporary_name()
            os.close(_create(probe))
            os.unlink(probe)
            _remove_leftovers(self._temporary)
            # Files in memory know no such flag, and never make a reader wait.
            self._no_wait = 0 if _in_memory(self._root) else os.RWF_NOWAIT
        except OSError as error:
            raise SetupError(f"file://{self._root} cannot be written to: {error.strerror}.") from error
        self._janitor.start_if_due()

    def shut(self) -> None:
        self._janitor.join()

    def put_many(self, blocks: Sequence[Outgoing], lease_s: float) -> None:
        for block in blocks:
            path = self._path(block.key)
            if self._renew(path, lease_s):
                block.present()
                continue
            try:
                self._write(block, path, lease_s)
            except OSError as error:
                if error.errno not in _NO_SPACE:
                    raise
                block.failed(Outcome.FULL)
        self._janitor.start_if_due(len(blocks) * self.payload_lengths[-1])

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        for block in blocks:
            try:
                fd = os.open(self._path(block.key), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                block.missing()
                continue
            try:
                self._read(block, fd)
            finally:
                os.close(fd)

    def contains_many(self, keys: Sequence[bytes]) -> Iterable[bool]:
        return (self._modified(self._path(key)) is not None for key in keys)

    def delete_many(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            _unlink(self._path(key))

    def _write(self, block: Outgoing, path: str, lease_s: float) -> None:
        header, payload = block.read()
        temporary = self._temporary_name()
        try:
            fd = _in_folder(temporary, lambda: _create(temporary))
            try:
                _write_all(fd, header, payload)
                _set_time(fd, time.time() + lease_s)
                if self._fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            if not block.in_time():  # the row may have changed while it was written
                raise Expired
            _in_folder(path, lambda: os.rename(temporary, path))
        except BaseException:
            _unlink(temporary)
            raise
        if self._fsync:
            _sync_folder(os.path.dirname(path))
        block.stored()

    def _read(self, block: Incoming, fd: int) -> None:
        try:
            buffer = self._staging.buffer
        except AttributeError:  # this thread's first block
            # One byte more than the longest: a longer file is as wrong as a shorter one.
            buffer = self._staging.buffer = np.zeros(HEADER_BYTES + self.payload_lengths[-1] + 1, np.uint8)
        outcome = self._read_straight(block, fd)
        if outcome is None:
            end = _read_all(fd, buffer.data)
            outcome = block.accept(buffer[: min(end, HEADER_BYTES)].tobytes(), [buffer[HEADER_BYTES:end]])
        if outcome is Outcome.OK and self._janitor.active and os.fstat(fd).st_mtime < time.time():
            _set_time(fd, time.time())

    def _read_straight(self, block: Incoming, fd: int) -> Outcome | None:
        """From the system's cache into the row. None if not all of it is there, or the file is not as it should be."""
        try:
            header = os.pread(fd, HEADER_BYTES, 0)
            if len(header) < HEADER_BYTES or os.fstat(fd).st_size != HEADER_BYTES + payload_length(header):
                return None
            return block.read_by(header, lambda part, at: os.preadv(fd, [part], HEADER_BYTES + at, self._no_wait))
        except OSError as error:
            if error.errno not in _WOULD_WAIT:
                raise
            return None

    def _renew(self, path: str, lease_s: float) -> bool:
        """Whether the file is there; if so, its lease is at least `lease_s` long now."""
        modified = self._modified(path)
        if modified is None:
            return False
        end = time.time() + lease_s
        try:
            if modified < end:
                _set_time(path, end)
        except FileNotFoundError:
            return False
        return True

    def _modified(self, path: str) -> float | None:
        """None too for a file of an impossible length, which the next store replaces."""
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return None
        return status.st_mtime if status.st_size - HEADER_BYTES in self.payload_lengths else None

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._folder}/{name[:2]}/{name}"

    def _temporary_name(self) -> str:
        return f"{self._temporary}/{uuid.uuid4().hex}"


class Janitor:
    """Keeps a store near its size and below its age, in a thread of its own: once a minute, and whenever this instance has
    stored an eighth of the size."""

    def __init__(self, root: str, max_bytes: int | None, max_age: float | None) -> None:
        self.active = max_bytes is not None or max_age is not None
        self._root = root
        self._max_bytes = max_bytes
        self._max_age = max_age
        self._next = 0.0
        self._stored = 0  # bytes, since the last sweep
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start_if_due(self, stored: int = 0) -> None:
        with self._lock:
            self._stored += stored
            much = self._max_bytes is not None and self._stored > self._max_bytes / 8
            under_way = self._thread is not None and self._thread.is_alive()
            if not self.active or under_way or not (much or time.monotonic() >= self._next):
                return
            self._next, self._stored = time.monotonic() + _SWEEP_EVERY_S, 0
            self._thread = threading.Thread(target=self.sweep, name="kv-file-janitor", daemon=True)
            self._thread.start()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def sweep(self) -> None:
        """Removes what is too old, then the longest unused until the rest is within the size."""
        now = time.time()
        files = sorted(_files(self._root), key=lambda file: file.modified)
        total = sum(file.bytes for file in files)
        for file in files:
            if file.modified > now:
                return  # this one and all after it are leased
            too_old = self._max_age is not None and now - file.modified > self._max_age
            too_much = self._max_bytes is not None and total > self._max_bytes
            if not too_old and not too_much:
                return
            _unlink(file.path)
            total -= file.bytes


@dataclass(frozen=True)
class _File:
    path: str
    modified: float
    bytes: int


def _files(root: str) -> Iterator[_File]:
    """Every block, of all namespaces. Others may remove files and folders meanwhile."""
    for namespace in _entries(root):
        if len(namespace.name) == 32:
            for prefix in _entries(namespace.path):
                yield from _listed(prefix.path)


def _listed(folder: str) -> Iterator[_File]:
    for entry in _entries(folder):
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat()
            yield _File(entry.path, status.st_mtime, status.st_size)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _remove_leftovers(folder: str) -> None:
    """Files of writers that died. Their times lie in the future by a lease, or are those of the last write."""
    for file in _listed(folder):
        if time.time() - file.modified > LEFTOVER_AGE_S:
            _unlink(file.path)


def _in_folder(path: str, action: Callable[[], T]) -> T:
    """Runs `action`, which needs the folder of `path`, and makes that folder if it is not there."""
    try:
        return action()
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return action()


def _create(path: str) -> int:
    # For this user only: a prompt can be read back from its KV.
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _write_all(fd: int, header: bytes, payload: memoryview) -> None:
    written = os.writev(fd, [header, payload]) - len(header)
    if written < 0:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    while written < len(payload):
        written += os.write(fd, payload[written:])


def _read_all(fd: int, buffer: memoryview) -> int:
    """How many bytes there were, up to the buffer's length."""
    total = 0
    while total < len(buffer):
        count = os.preadv(fd, [buffer[total:]], total)
        if count == 0:
            break
        total += count
    return total


def _in_memory(path: str) -> bool:
    """Whether a file system holds its files in memory, so that reading never waits."""
    device = os.stat(path).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo") as mounts:
        found = [line.split() for line in mounts]
    return any(words[2] == name and words[words.index("-") + 1] in ("tmpfs", "ramfs") for words in found)


def _set_time(file: int | str, modified: float) -> None:
    os.utime(file, (time.time(), modified))


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""`file:///path?fsync=0&max_bytes=100GiB&max_age=86400`: a store in a directory, local or shared (NFS, Lustre, …).

    path/<namespace>/<first 2 hex digits of key>/<key>     one block: header, payload
    path/tmp/                                              blocks being written

A block is written under tmp/ and renamed when complete, so a file with its final name is complete. Without `fsync=1`, a
crash of the machine can leave a file whose bytes never reached the disk, which its checksum detects. A file's modification
time is the end of its lease, or its last use if that is later. Files and the folders made for them are readable for this
user only; a folder that exists keeps its permissions.

Blocks are evicted only if `max_bytes` or `max_age` (seconds since the last use) is given: least recently used files first,
never one with a lease. Several instances may evict at the same time; a reader that has opened a file can still read it.
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

STALE_TEMP_AGE_S = 600.0  # the writer of an older temporary file is considered dead
_SWEEP_INTERVAL_S = 60.0
_NO_SPACE_ERRNOS = {errno.ENOSPC, errno.EDQUOT}
_WOULD_BLOCK_ERRNOS = {errno.EAGAIN, errno.EOPNOTSUPP}

T = TypeVar("T")


class FileConnector(BatchedConnector):
    """Stores each block in a file."""

    scheme: ClassVar[str] = "file"

    def configure(self, query: Query) -> None:
        parts = split(self.url)
        if parts.netloc not in ("", "localhost") or not parts.path.strip("/"):
            raise SetupError(f"{self.url!r} must have an absolute path after three slashes, such as file:///mnt/kv.")
        self._root = unquote(parts.path).rstrip("/")
        self._temp_folder = f"{self._root}/tmp"
        self._fsync = query.flag("fsync", False)
        self._evictor = Evictor(self._root, query.size("max_bytes", None), query.seconds("max_age", None))

    def open(self) -> None:
        self._folder = f"{self._root}/{self.namespace.hex()}"
        # Per-thread buffers into which blocks are read first. A read from a dead file server can hang, and must not write
        # late into a row that the caller has taken back. The second copy reads from the CPU cache.
        self._staging = threading.local()
        try:
            _make_folder(self._folder)
            _make_folder(self._temp_folder)
            probe = self._temporary_path()
            os.close(_create(probe))
            os.unlink(probe)
            _remove_stale_files(self._temp_folder)
            # File systems in memory do not support the flag, and never block a reader.
            self._read_flags = 0 if _is_in_memory(self._root) else os.RWF_NOWAIT
        except OSError as error:
            raise SetupError(f"file://{self._root} is not writable: {error.strerror}.") from error
        self._evictor.start_if_due()

    def shut(self) -> None:
        self._evictor.join()

    def put_many(self, blocks: Sequence[Outgoing], lease_s: float) -> None:
        for block in blocks:
            path = self._path(block.key)
            if self._renew(path, lease_s):
                block.present()
                continue
            try:
                self._write(block, path, lease_s)
            except OSError as error:
                if error.errno not in _NO_SPACE_ERRNOS:
                    raise
                block.failed(Outcome.FULL)
        self._evictor.start_if_due(len(blocks) * self.payload_lengths[-1])

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
        return (self._get_mtime(self._path(key)) is not None for key in keys)

    def delete_many(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            _unlink(self._path(key))

    def _write(self, block: Outgoing, path: str, lease_s: float) -> None:
        header, payload = block.read()
        temporary = self._temporary_path()
        try:
            fd = _with_parent_folder(temporary, lambda: _create(temporary))
            try:
                _write_all(fd, header, payload)
                _set_mtime(fd, time.time() + lease_s)
                if self._fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            if not block.in_time():  # the row may have changed during the write
                raise Expired
            _with_parent_folder(path, lambda: os.rename(temporary, path))
        except BaseException:
            _unlink(temporary)
            raise
        if self._fsync:
            _fsync_folder(os.path.dirname(path))
        block.stored()

    def _read(self, block: Incoming, fd: int) -> None:
        try:
            buffer = self._staging.buffer
        except AttributeError:  # first block of this thread
            # One byte more than the longest payload, to detect files that are too long.
            buffer = self._staging.buffer = np.zeros(HEADER_BYTES + self.payload_lengths[-1] + 1, np.uint8)
        outcome = self._read_from_page_cache(block, fd)
        if outcome is None:
            end = _read_all(fd, buffer.data)
            outcome = block.accept(buffer[: min(end, HEADER_BYTES)].tobytes(), [buffer[HEADER_BYTES:end]])
        if outcome is Outcome.OK and self._evictor.is_enabled and os.fstat(fd).st_mtime < time.time():
            _set_mtime(fd, time.time())

    def _read_from_page_cache(self, block: Incoming, fd: int) -> Outcome | None:
        """Read a block from the page cache into the row. None if it is not all cached, or the file is invalid."""
        try:
            header = os.pread(fd, HEADER_BYTES, 0)
            if len(header) < HEADER_BYTES or os.fstat(fd).st_size != HEADER_BYTES + payload_length(header):
                return None
            return block.read_by(
                header, lambda part, offset: os.preadv(fd, [part], HEADER_BYTES + offset, self._read_flags)
            )
        except OSError as error:
            if error.errno not in _WOULD_BLOCK_ERRNOS:
                raise
            return None

    def _renew(self, path: str, lease_s: float) -> bool:
        """Extend the lease of a file to at least `lease_s` seconds. Returns False if there is no such file."""
        mtime = self._get_mtime(path)
        if mtime is None:
            return False
        lease_end = time.time() + lease_s
        try:
            if mtime < lease_end:
                _set_mtime(path, lease_end)
        except FileNotFoundError:
            return False
        return True

    def _get_mtime(self, path: str) -> float | None:
        """Return a file's modification time. None if it is missing or has an invalid length; the next store replaces it."""
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return None
        return status.st_mtime if status.st_size - HEADER_BYTES in self.payload_lengths else None

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._folder}/{name[:2]}/{name}"

    def _temporary_path(self) -> str:
        return f"{self._temp_folder}/{uuid.uuid4().hex}"


class Evictor:
    """Evicts blocks to keep the store near `max_bytes` and below `max_age`, in a background thread.

    A sweep starts once a minute, and when this instance has stored an eighth of `max_bytes` since the last one. Both are
    checked in `start_if_due`.
    """

    def __init__(self, root: str, max_bytes: int | None, max_age: float | None) -> None:
        self.is_enabled = max_bytes is not None or max_age is not None
        self._root = root
        self._max_bytes = max_bytes
        self._max_age = max_age
        self._next_sweep = 0.0
        self._stored_bytes = 0  # since the last sweep
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start_if_due(self, stored_bytes: int = 0) -> None:
        """Start a sweep if one is due and none is running. `stored_bytes`: stored since the last call."""
        with self._lock:
            self._stored_bytes += stored_bytes
            over_threshold = self._max_bytes is not None and self._stored_bytes > self._max_bytes / 8
            is_running = self._thread is not None and self._thread.is_alive()
            if not self.is_enabled or is_running or not (over_threshold or time.monotonic() >= self._next_sweep):
                return
            self._next_sweep, self._stored_bytes = time.monotonic() + _SWEEP_INTERVAL_S, 0
            self._thread = threading.Thread(target=self.sweep, name="kv-file-evictor", daemon=True)
            self._thread.start()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def sweep(self) -> None:
        """Remove files that are too old, then least recently used ones until the rest fits into `max_bytes`."""
        now = time.time()
        files = sorted(_files(self._root), key=lambda file: file.mtime)
        total_bytes = sum(file.size for file in files)
        for file in files:
            if file.mtime > now:
                return  # this file and all later ones are leased
            too_old = self._max_age is not None and now - file.mtime > self._max_age
            too_large = self._max_bytes is not None and total_bytes > self._max_bytes
            if not too_old and not too_large:
                return
            _unlink(file.path)
            total_bytes -= file.size


@dataclass(frozen=True)
class _File:
    path: str
    mtime: float
    size: int


def _files(root: str) -> Iterator[_File]:
    """Iterate over the blocks of all namespaces. Files and folders may be removed by other processes meanwhile."""
    for namespace in _scan(root):
        if len(namespace.name) == 32:
            for prefix in _scan(namespace.path):
                yield from _list_files(prefix.path)


def _list_files(folder: str) -> Iterator[_File]:
    for entry in _scan(folder):
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat()
            yield _File(entry.path, status.st_mtime, status.st_size)


def _scan(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _remove_stale_files(folder: str) -> None:
    """Remove temporary files of dead writers. Their mtime is that of the last write, or later by a lease."""
    for file in _list_files(folder):
        if time.time() - file.mtime > STALE_TEMP_AGE_S:
            _unlink(file.path)


def _with_parent_folder(path: str, action: Callable[[], T]) -> T:
    """Run `action`, which needs the parent folder of `path`. Creates the folder if it is missing."""
    try:
        return action()
    except FileNotFoundError:
        _make_folder(os.path.dirname(path))
        return action()


def _make_folder(path: str) -> None:
    """Create a folder for this user only, as `_create` does, and so those above it that are missing."""
    if not os.path.isdir(path):
        _make_folder(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):  # by another process meanwhile, or no folder: the next access fails
            os.mkdir(path, 0o700)


def _create(path: str) -> int:
    # Readable for this user only: a prompt can be reconstructed from its KV.
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _write_all(fd: int, header: bytes, payload: memoryview) -> None:
    written = os.writev(fd, [header, payload]) - len(header)
    if written < 0:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    while written < len(payload):
        written += os.write(fd, payload[written:])


def _read_all(fd: int, buffer: memoryview) -> int:
    """Read a file from its start. Returns the number of bytes read, at most the buffer's length."""
    total = 0
    while total < len(buffer):
        count = os.preadv(fd, [buffer[total:]], total)
        if count == 0:
            break
        total += count
    return total


def _is_in_memory(path: str) -> bool:
    """Return True if the path is on a file system in memory, where reads never block."""
    device = os.stat(path).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo") as mounts:
        found = [line.split() for line in mounts]
    return any(words[2] == name and words[words.index("-") + 1] in ("tmpfs", "ramfs") for words in found)


def _set_mtime(file: int | str, mtime: float) -> None:
    os.utime(file, (time.time(), mtime))


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _fsync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

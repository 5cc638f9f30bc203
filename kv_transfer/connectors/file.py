"""`file:///path?fsync=0&max_bytes=100GiB&max_age=86400`: a store in a directory, local or shared (NFS, Lustre, …).

    path/<namespace>/<first 2 hex digits of key>/<key>     one block: header, payload
    path/tmp/                                              blocks being written

A block is written under tmp/ and renamed when complete, so a file with its final name is complete. Without `fsync=1`, a
crash of the machine can leave a file whose bytes never reached the disk, which its checksum detects. A file's modification
time is the end of its lease, or its last use if that is later. Files and the folders made for them are readable for this
user only; a folder that exists keeps its permissions. Only regular files of this user (or of whom the file server makes the
owner of what it writes) or of root are blocks.

Blocks are evicted only if `max_bytes` or `max_age` (seconds since the last use) is given: least recently used files first,
never one with a lease. Several instances may evict at the same time; a reader that has opened a file can still read it.
A time further ahead than any lease comes from a clock that was wrong: such a file has no lease, and goes first. Hosts that
share a store need clocks that agree to a few seconds: by as much as they differ, a lease ends earlier or later.
"""

import contextlib
import errno
import logging
import os
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar
from urllib.parse import unquote

import numpy as np

from pdserve.errors import SetupError
from pdserve.kv_transfer.batched import MAX_LEASE_S, BatchedConnector
from pdserve.kv_transfer.blocks import Expired, Incoming, Outgoing
from pdserve.kv_transfer.connector import Capabilities, Outcome, Stats
from pdserve.kv_transfer.header import HEADER_BYTES, payload_length
from pdserve.kv_transfer.rate_limited_log import RateLimitedLog
from pdserve.kv_transfer.url import Query, split

log = logging.getLogger(__name__)

_MAX_AHEAD_S = MAX_LEASE_S + 60.0  # of a lease, on a host whose clock is behind
STALE_TEMP_AGE_S = 600.0  # the writer of an older temporary file is considered dead
_SWEEP_INTERVAL_S = 60.0
_NO_SPACE_ERRNOS = {errno.ENOSPC, errno.EDQUOT}
# Of a link, a socket or a FIFO in a block's place.
_NO_BLOCK_ERRNOS = {errno.ENOENT, errno.ELOOP, errno.ENXIO}
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW  # a FIFO must not be waited for
_WOULD_BLOCK_ERRNOS = {errno.EAGAIN, errno.EOPNOTSUPP}

T = TypeVar("T")


class FileConnector(BatchedConnector):
    """Stores each block in a file."""

    scheme: ClassVar[str] = "file"

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, prolongs=True)

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
            self._owners = {0, self._probe_owner()}
            self._evictor.remove_stale_files(self._temp_folder)
            # File systems in memory do not support the flag, and never block a reader.
            self._read_flags = 0 if _is_in_memory(self._root) else os.RWF_NOWAIT
        except OSError as error:
            raise SetupError(f"file://{self._root} is not writable: {error.strerror}.") from error
        for folder in (self._root, self._folder, self._temp_folder):
            _warn_if_others_may_write(folder, self._owners)
        self._evictor.start_if_due()

    def shut(self) -> None:
        self._evictor.join()

    def stats(self) -> Stats:
        stats = super().stats()
        if self._evictor.failures:
            stats.count_failures("evict", Outcome.UNAVAILABLE, self._evictor.failures)
        return stats

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
            path = self._path(block.key)
            try:
                fd = os.open(path, _OPEN_FLAGS)
            except OSError as error:
                if error.errno not in _NO_BLOCK_ERRNOS:
                    raise
                block.missing()
                continue
            try:
                if not self._is_block(os.fstat(fd)):
                    block.missing()
                elif self._read(block, fd) is Outcome.CORRUPT:
                    self._delete_if_same(path, fd)
            finally:
                os.close(fd)

    def contains_many(self, keys: Sequence[bytes]) -> Iterable[bool]:
        return (self._get_mtime(self._path(key)) is not None for key in keys)

    def prolong_many(self, keys: Sequence[bytes], lease_s: float) -> None:
        for key in keys:
            self._renew(self._path(key), lease_s)

    def delete_many(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            _unlink(self._path(key))

    def delete_corrupt(self, blocks: Sequence[Incoming]) -> None:
        """Do nothing: `get_many` has deleted them, as long as it had the files open and could tell them from others."""

    def _delete_if_same(self, path: str, fd: int) -> None:
        """Delete a file if it is the one that is open. It is renamed first, since another may take its name at any time."""
        taken = self._temporary_path()
        try:
            if not os.path.samestat(os.lstat(path), os.fstat(fd)):
                return
            os.rename(path, taken)
            if not os.path.samestat(os.lstat(taken), os.fstat(fd)):
                with contextlib.suppress(FileExistsError):
                    os.link(taken, path)
        except FileNotFoundError:
            return
        _unlink(taken)

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
            if self._renew(path, lease_s):  # another writer was faster, and its lease may be longer
                _unlink(temporary)
                block.present()
                return
            _with_parent_folder(path, lambda: os.rename(temporary, path))
        except BaseException:
            _unlink(temporary)
            raise
        if self._fsync:
            _fsync_folder(os.path.dirname(path))
        block.stored()

    def _read(self, block: Incoming, fd: int) -> Outcome:
        try:
            buffer = self._staging.buffer
        except AttributeError:  # first block of this thread
            # One byte more than the longest payload, to detect files that are too long.
            buffer = self._staging.buffer = np.zeros(HEADER_BYTES + self.payload_lengths[-1] + 1, np.uint8)
        outcome = self._read_from_page_cache(block, fd)
        if outcome is None:
            end = _read_all(fd, buffer.data)
            outcome = block.accept(buffer[: min(end, HEADER_BYTES)].tobytes(), [buffer[HEADER_BYTES:end]])
        now = time.time()
        if outcome is Outcome.OK and self._evictor.is_enabled and not _is_leased(os.fstat(fd).st_mtime, now):
            _set_mtime(fd, now)
        return outcome

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
        now = time.time()
        try:
            if mtime < now + lease_s or mtime > now + _MAX_AHEAD_S:
                _set_mtime(path, now + lease_s)
        except FileNotFoundError:
            return False
        return True

    def _get_mtime(self, path: str) -> float | None:
        """Return a block's modification time. None if it is missing or has an invalid length; the next store replaces it."""
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return None
        is_block = self._is_block(status) and status.st_size - HEADER_BYTES in self.payload_lengths
        return status.st_mtime if is_block else None

    def _is_block(self, status: os.stat_result) -> bool:
        """Return True for a regular file that was not put there by another user."""
        return stat.S_ISREG(status.st_mode) and status.st_uid in self._owners

    def _probe_owner(self) -> int:
        """Create and remove a file. Returns its owner, which a file server may set to another user than this process's."""
        probe = self._temporary_path()
        fd = _create(probe)
        try:
            return os.fstat(fd).st_uid
        finally:
            os.close(fd)
            os.unlink(probe)

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._folder}/{name[:2]}/{name}"

    def _temporary_path(self) -> str:
        return f"{self._temp_folder}/{uuid.uuid4().hex}"


class Evictor:
    """Evicts blocks to keep the store near `max_bytes` and below `max_age`, in a background thread.

    A sweep starts once a minute, and when this instance has stored an eighth of `max_bytes` since the last one. Both are
    checked in `start_if_due`.

    Attributes:
        failures: files and folders that could not be removed or listed so far. They are passed over.
    """

    def __init__(self, root: str, max_bytes: int | None, max_age: float | None) -> None:
        self.is_enabled = max_bytes is not None or max_age is not None
        self._root = root
        self._max_bytes = max_bytes
        self._max_age = max_age
        self.failures = 0
        self._limited_log = RateLimitedLog("file")
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
            self._thread = threading.Thread(target=self._run, name="kv-file-evictor", daemon=True)
            self._thread.start()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def sweep(self) -> None:
        """Remove what dead writers left, files that are too old, then least recently used ones until the rest fits into
        `max_bytes`."""
        self.remove_stale_files(f"{self._root}/tmp")
        now = time.time()
        files = sorted(self._files(), key=lambda file: (file.mtime <= now + _MAX_AHEAD_S, file.mtime))
        total_bytes = sum(file.size for file in files)
        for file in files:
            if _is_leased(file.mtime, now):
                return  # this file and all later ones are leased
            too_old = self._max_age is not None and not now - self._max_age <= file.mtime <= now
            too_large = self._max_bytes is not None and total_bytes > self._max_bytes
            if not too_old and not too_large:
                return
            if self._succeeds(_unlink, file.path):
                total_bytes -= file.size

    def remove_stale_files(self, folder: str) -> None:
        """Remove temporary files of dead writers. Their mtime is that of the last write, or later by a lease."""
        now = time.time()
        for file in self._list_files(folder):
            if not now - STALE_TEMP_AGE_S <= file.mtime <= now + _MAX_AHEAD_S:
                self._succeeds(_unlink, file.path)

    def _run(self) -> None:
        try:
            self.sweep()
        except Exception:
            self.failures += 1
            log.exception("file: a sweep of %s ended early", self._root)

    def _files(self) -> Iterator["_File"]:
        """Iterate over the blocks of all namespaces. Files and folders may be removed by other processes meanwhile."""
        for namespace in self._list(self._root):
            if len(namespace.name) == 32:
                for prefix in self._list(namespace.path):
                    yield from self._list_files(prefix.path)

    def _list_files(self, folder: str) -> Iterator["_File"]:
        for entry in self._list(folder):
            statuses = list[os.stat_result]()
            self._succeeds(lambda path, found=statuses: found.append(os.lstat(path)), entry.path)  # type: ignore[misc]
            yield from (_File(entry.path, status.st_mtime, status.st_size) for status in statuses)

    def _list(self, folder: str) -> list[os.DirEntry[str]]:
        entries: list[os.DirEntry[str]] = []
        self._succeeds(lambda path: entries.extend(_scan(path)), folder)
        return entries

    def _succeeds(self, action: Callable[[str], object], path: str) -> bool:
        """Return True if the action succeeds, or the file is not there. Any other error is logged and counted."""
        try:
            action(path)
        except FileNotFoundError:
            return True
        except OSError as error:
            self.failures += 1
            self._limited_log.warning(f"{path} is left where it is: {error.strerror}", kind=str(error.errno))
            return False
        return True


def _is_leased(mtime: float, now: float) -> bool:
    """Return True for the time of a lease: in the future, and not so far that a clock must have been wrong."""
    return now < mtime <= now + _MAX_AHEAD_S


def _warn_if_others_may_write(folder: str, owners: set[int]) -> None:
    status = os.stat(folder)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or status.st_uid not in owners:
        log.warning(
            "file: others may write to %s (mode %o, user %d), and can delete blocks: chmod 700 and chown it to this user",
            folder,
            stat.S_IMODE(status.st_mode),
            status.st_uid,
        )


@dataclass(frozen=True)
class _File:
    path: str
    mtime: float
    size: int


def _scan(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


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

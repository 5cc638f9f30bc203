"""Files and batches of clients in a directory: per API key, bounded in bytes. Used by one router, or by several in turn.

    <folder>/<key>/file-<id>.json     the file's object, as OpenAI's API returns it; written last, so that a file is whole
    <folder>/<key>/file-<id>.data     its content
    <folder>/<key>/batch_<id>.json    a batch's object

Ids begin with the time, by which they are thus sorted, and end in random digits; those of answers begin with their batch's
time, and end in a digest of its id. A path is made of nothing else that a client sends.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pdserve.errors import NotFound, Overloaded, SetupError, TooLarge
from pdserve.lines.untrusted import read_json

Json = dict[str, Any]
FILE, BATCH = "file-", "batch_"  # how their ids begin
ID = re.compile(rf"(?:{FILE}|{BATCH})[0-9a-f]{{24}}")
TIME_DIGITS = 12  # of an id: milliseconds since 1970
ENTRY_BYTES = 4096  # that each file counts besides its content


class FileStore:
    """The files and batches under one folder. Thread-safe.

    Args:
        max_bytes: of the contents of all files together.
        is_shared: there are several API keys. Then each may have as much as is free for the others, and no more.

    Raises:
        SetupError: the folder cannot be written.
    """

    def __init__(self, folder: Path, max_bytes: int, *, is_shared: bool = False) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._is_shared = is_shared
        self._reserved: Counter[str] = Counter()  # bytes that are being uploaded, by key
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".writable").touch()
        except OSError as error:
            raise SetupError(f"--batch-folder {folder}: {error.strerror}") from error

    def reserve(self, key: str, num_bytes: int) -> None:
        """Keep room for an upload until `release`. Raises Overloaded if there is none, and TooLarge if there never is."""
        if num_bytes > self._max_bytes:
            raise TooLarge(f"the body is larger than {self._max_bytes} bytes", kind="body_too_large")
        self._count(key, num_bytes)  # first, so that of two at once at most one finds the room
        try:
            self._check_room(key, num_bytes, reserved=num_bytes)
        except Overloaded:
            self.release(key, num_bytes)
            raise

    def release(self, key: str, num_bytes: int) -> None:
        self._count(key, -num_bytes)

    def check_room(self, key: str, num_bytes: int) -> None:
        """Raise Overloaded unless the key may store this many further bytes."""
        self._check_room(key, num_bytes, reserved=0)

    def add_file(self, key: str, name: str, purpose: str, source: BinaryIO) -> Json:
        """Store a copy of an open file, for which room is reserved, and return its object."""
        file_id = new_id(FILE)
        source.seek(0)
        with self.data_path(key, file_id).open("wb") as target:
            shutil.copyfileobj(source, target)
        return self.complete_file(key, file_id, name, purpose)

    def complete_file(self, key: str, file_id: str, name: str, purpose: str) -> Json:
        """Make the object of a file whose content is written, and return it."""
        size = self.data_path(key, file_id).stat().st_size
        file = {"id": file_id, "object": "file", "bytes": size, "created_at": int(time.time()), "filename": name}
        self.save(key, file | {"purpose": purpose, "status": "processed"})
        return self.load(key, file_id)

    def save(self, key: str, item: Json) -> None:
        """Write the object of a file or batch, which replaces an earlier one at once."""
        path = self._path(key, item["id"], ".json")
        temporary = path.with_suffix(f".{secrets.token_hex(4)}.new")  # two threads may save the same batch
        try:
            temporary.write_text(json.dumps(item))
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def load(self, key: str, item_id: str, prefix: str = "") -> Json:
        """Return the object of a file or batch. Raises NotFound if the key has none with this id and its prefix."""
        if not item_id.startswith(prefix):
            raise _unknown(item_id)
        try:
            item: Json = read_json(self._path(key, item_id, ".json").read_text())
        except (OSError, ValueError):  # ValueError: it was damaged, for example by a power failure
            raise _unknown(item_id) from None
        return item

    def ids(self, key: str, prefix: str) -> list[str]:
        """Return the ids that begin like this, in any order; those of newer objects are greater."""
        return [path.stem for path in (self._folder / key).glob(f"{prefix}*.json")]

    def delete_file(self, key: str, file_id: str) -> None:
        """Delete a file. Raises NotFound if the key has none with this id."""
        self.load(key, file_id, FILE)
        self._path(key, file_id, ".json").unlink(missing_ok=True)
        self.data_path(key, file_id).unlink(missing_ok=True)

    def data_path(self, key: str, file_id: str) -> Path:
        """Return the path of a file's content, in a folder that exists."""
        return self._path(key, file_id, ".data")

    def all_batches(self) -> Iterator[tuple[str, Json]]:
        """Return every batch with its key."""
        for path in self._folder.glob(f"*/{BATCH}*.json"):
            with contextlib.suppress(NotFound):
                yield path.parent.name, self.load(path.parent.name, path.stem)

    def _count(self, key: str, num_bytes: int) -> None:
        with self._lock:
            self._reserved[key] += num_bytes

    def _check_room(self, key: str, num_bytes: int, reserved: int) -> None:
        """Raise Overloaded unless there is room; `reserved` of the bytes are reserved already."""
        used = Counter({folder.name: _size(folder) for folder in self._folder.iterdir() if folder.is_dir()})
        with self._lock:
            used.update(self._reserved)
        used[key] -= reserved
        free = self._max_bytes - used.total() - num_bytes
        if free < 0:
            message = f"the files of this router have {used.total()} bytes of {self._max_bytes}"
        elif self._is_shared and used[key] + num_bytes > free:
            message = f"the files of this API key have {used[key]} bytes, and may have no more than are free for others"
        else:
            return
        raise Overloaded(f"{message}; delete files that are not needed", kind="files_full", retry_after_s=60)

    def _path(self, key: str, item_id: str, suffix: str) -> Path:
        if not ID.fullmatch(item_id):
            raise _unknown(item_id)
        folder = self._folder / key
        folder.mkdir(exist_ok=True)
        return folder / f"{item_id}{suffix}"


def new_id(prefix: str) -> str:
    return f"{prefix}{time.time_ns() // 1_000_000:0{TIME_DIGITS}x}{secrets.token_hex(6)}"


def _size(folder: Path) -> int:
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                total += entry.stat().st_size + ENTRY_BYTES
            except FileNotFoundError:  # deleted meanwhile
                continue
    return total


def _unknown(item_id: str) -> NotFound:
    return NotFound(f"this API key has no {item_id[:100]!r}", kind="file_not_found", param="id")

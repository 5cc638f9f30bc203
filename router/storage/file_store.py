"""Files and batches of clients in a directory: per API key, bounded in bytes. Used by one router, or by several in turn.

    <folder>/<key>/file-<id>.json     the file's object, as OpenAI's API returns it; written last, so that a file is whole
    <folder>/<key>/file-<id>.data     its content
    <folder>/<key>/batch_<id>.json    a batch's object

Ids begin with the time, by which they are thus sorted, and end in random digits. A path is made of nothing else that a client
sends.
"""

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pdserve.errors import NotFound, Overloaded, SetupError

Json = dict[str, Any]
ID = re.compile(r"(?:file-|batch_)[0-9a-f]{24}")


class FileStore:
    """The files and batches under one folder.

    Args:
        max_bytes: of the contents of all files together.

    Raises:
        SetupError: the folder cannot be written.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".writable").touch()
        except OSError as error:
            raise SetupError(f"--batch-folder {folder}: {error.strerror}") from error

    def add_file(self, key: str, name: str, purpose: str, source: BinaryIO) -> Json:
        """Store a copy of an open file and return its object. Raises Overloaded if there is no room."""
        file_id = new_id("file-")
        self.check_room(source.seek(0, os.SEEK_END))
        source.seek(0)
        with self.data_path(key, file_id).open("wb") as target:
            shutil.copyfileobj(source, target)
        return self.complete_file(key, file_id, name, purpose)

    def check_room(self, num_bytes: int) -> None:
        """Raise Overloaded unless this many further bytes may be stored."""
        used = sum(path.stat().st_size for path in self._folder.glob("*/*.data"))
        if used + num_bytes > self._max_bytes:
            message = (
                f"the files of this router have {used} bytes of {self._max_bytes}; delete files that are not needed"
            )
            raise Overloaded(message, kind="files_full", retry_after_s=60)

    def complete_file(self, key: str, file_id: str, name: str, purpose: str) -> Json:
        """Make the object of a file whose content is written, and return it."""
        size = self.data_path(key, file_id).stat().st_size
        file = {"id": file_id, "object": "file", "bytes": size, "created_at": int(time.time()), "filename": name}
        self.save(key, file | {"purpose": purpose, "status": "processed"})
        return self.load(key, file_id)

    def save(self, key: str, item: Json) -> None:
        """Write the object of a file or batch, which replaces an earlier one at once."""
        path = self._path(key, item["id"], ".json")
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(item))
        os.replace(temporary, path)

    def load(self, key: str, item_id: str) -> Json:
        """Return the object of a file or batch. Raises NotFound if the key has none with this id."""
        try:
            item: Json = json.loads(self._path(key, item_id, ".json").read_text())
        except OSError:
            raise _unknown(item_id) from None
        return item

    def ids(self, key: str, prefix: str) -> list[str]:
        """Return the ids that begin like this, the newest first."""
        return sorted((path.stem for path in (self._folder / key).glob(f"{prefix}*.json")), reverse=True)

    def delete_file(self, key: str, file_id: str) -> None:
        """Delete a file. Raises NotFound if the key has none with this id."""
        self.load(key, file_id)
        self._path(key, file_id, ".json").unlink(missing_ok=True)
        self.data_path(key, file_id).unlink(missing_ok=True)

    def data_path(self, key: str, file_id: str) -> Path:
        """Return the path of a file's content, in a folder that exists."""
        return self._path(key, file_id, ".data")

    def all_batches(self) -> Iterator[tuple[str, Json]]:
        """Return every batch with its key."""
        for folder in self._folder.iterdir():
            if folder.is_dir():
                for batch_id in self.ids(folder.name, "batch_"):
                    yield folder.name, self.load(folder.name, batch_id)

    def _path(self, key: str, item_id: str, suffix: str) -> Path:
        if not ID.fullmatch(item_id):
            raise _unknown(item_id)
        folder = self._folder / key
        folder.mkdir(exist_ok=True)
        return folder / f"{item_id}{suffix}"


def new_id(prefix: str) -> str:
    return f"{prefix}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(6)}"


def _unknown(item_id: str) -> NotFound:
    return NotFound(f"this API key has no {item_id[:100]!r}", kind="file_not_found", param="id")

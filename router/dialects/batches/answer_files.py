"""The files that a batch's answers go to: one of answers with status 200, one of errors. Clients see them once it has ended.

Their ids follow from the batch's, so an interrupted batch finds them again.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import BinaryIO

from pdserve.batch.lines import read_done
from pdserve.router.dialects.batches.file_store import BATCH, FILE, TIME_DIGITS, FileStore, Json

NAMES = ("output", "error")
ROOM_BYTES = 1 << 20  # of answers between two looks at how much room is left


class AnswerFiles:
    """Appends answers to the files of one batch. Its methods block, and are called one at a time.

    Args:
        key: the API key that the batch belongs to.

    Raises:
        OSError: of all methods: a file cannot be read or written.
    """

    def __init__(self, store: FileStore, key: str, batch_id: str) -> None:
        self._store, self._key, self._batch_id = store, key, batch_id
        self._files: dict[str, BinaryIO] = {}
        self._stack = ExitStack()
        self._unchecked = ROOM_BYTES

    def open(self) -> tuple[dict[int, str | None], dict[str, int]]:
        """Return the custom ids of the answers so far by their lines' numbers, and the counts of successes and failures.

        Raises:
            ValueError: a file has something else than answers.
        """
        done: dict[int, str | None] = {}
        counts: dict[str, int] = {}
        for name, count in zip(NAMES, ("completed", "failed"), strict=True):
            path = self._store.data_path(self._key, self._file_id(name))
            file = self._files[name] = self._stack.enter_context(path.open("a+b"))
            file.seek(0)
            before = len(done)
            done |= read_done(file)
            counts[count] = len(done) - before
        return done, counts

    def append(self, line: Json) -> str:
        """Write an answer; return the name of its count. Raises Overloaded if there is no room."""
        is_success = line["response"] is not None and line["response"]["status_code"] == 200
        data = json.dumps(line, ensure_ascii=False).encode() + b"\n"
        self._unchecked += len(data)
        if self._unchecked >= ROOM_BYTES:
            self._store.check_room(self._key, len(data))
            self._unchecked = 0
        file = self._files["output" if is_success else "error"]
        file.write(data)
        file.flush()
        return "completed" if is_success else "failed"

    def close(self) -> None:
        self._stack.close()

    def publish(self) -> Iterator[tuple[str, str]]:
        """Make the files that have answers visible; return the name and id of each. The others are deleted."""
        for name in NAMES:
            file_id = self._file_id(name)
            path = self._store.data_path(self._key, file_id)
            if path.exists() and path.stat().st_size:
                self._store.complete_file(self._key, file_id, f"{self._batch_id}_{name}.jsonl", "batch_output")
                yield name, file_id
            else:
                path.unlink(missing_ok=True)

    def delete(self) -> None:
        """Delete all answers."""
        for name in NAMES:
            self._store.data_path(self._key, self._file_id(name)).unlink(missing_ok=True)

    def _file_id(self, name: str) -> str:
        time = self._batch_id.removeprefix(BATCH)[:TIME_DIGITS]
        return FILE + time + hashlib.blake2b(f"{self._batch_id} {name}".encode(), digest_size=6).hexdigest()

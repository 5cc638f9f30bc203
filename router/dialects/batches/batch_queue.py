"""Answers the batches of all clients, one after the other for each API key, through the router's endpoints.

    validating ──► in_progress ──► completed          failed: a line is no request, or the answers cannot be written
         │              │
         └──► failed    └──► cancelling ──► cancelled

A batch's requests take the same way as others of its key: quotas, the fair queue, the same errors. A batch that was
interrupted goes on when a router with the same folder starts.
"""

import asyncio
import fcntl
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from starlette.requests import Request
from starlette.types import Message

from pdserve.batch.lines import (
    ENDPOINTS,
    BatchRequest,
    InvalidLine,
    check_lines,
    error_line,
    parse_lines,
    read_lines,
)
from pdserve.batch.runner import run_batch
from pdserve.errors import Conflict, InvalidParameter, Overloaded, RequestError
from pdserve.router.api.http_responses import InternalError
from pdserve.router.api.streaming import ClientConnection
from pdserve.router.dialects.batches.answer_files import AnswerFiles
from pdserve.router.dialects.batches.file_store import BATCH, FILE, FileStore, Json, new_id
from pdserve.router.web.endpoint import Endpoint

log = logging.getLogger(__name__)

OPEN_STATES = ("validating", "in_progress", "cancelling")
MAX_REQUESTS = 50_000  # of a batch, as at OpenAI
MAX_LINE_BYTES = 4 << 20
MAX_OPEN = 50  # batches of a key
SAVE_S = 1.0  # between two updates of a running batch's object
RETRY_S = 10.0  # between two attempts to write the state of a batch that has ended
SLICE_S = 0.01  # of work in a thread, after which it leaves the interpreter to the event loop for as long
Item = TypeVar("Item")


class BatchQueue:
    """The batches of a router. Lives on one event loop, and reads and writes files in threads."""

    def __init__(self, store: FileStore, concurrency: int, endpoints: Mapping[str, Endpoint]) -> None:
        """`endpoints` are the router's by path; they may come later, but before a batch starts."""
        self.store = store
        self._endpoints = endpoints
        self._concurrency = concurrency
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by batch id
        self._ending = set[asyncio.Task[Any] | None]()  # those of batches that have ended
        self._keys: dict[str, str] = {}  # of these batches
        self._counts: dict[str, Json] = {}  # of those that are being answered
        self._checks: dict[str, asyncio.Lock] = {}  # by key: files are validated one after the other,
        self._turns: dict[str, asyncio.Lock] = {}  # and answered so
        self._resuming: asyncio.Task[None] | None = None
        # Of its own, because files that are validated may take the threads for minutes.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="batch-files")
        self._closing = threading.Event()

    def resume(self) -> None:
        """Go on with the batches that were interrupted."""
        self._resuming = asyncio.create_task(self._resume())

    async def _resume(self) -> None:
        for _, key, batch in await self._in_thread(self._open_batches):
            if batch["id"] not in self._tasks:
                self._start(key, batch)

    def _open_batches(self) -> list[tuple[int, str, Json]]:
        """Return the batches that have not ended, with the times of their creation and their keys, the oldest first."""
        batches = self._paced(self.store.all_batches())
        found = [(batch["created_at"], key, batch) for key, batch in batches if batch["status"] in OPEN_STATES]
        return sorted(found, key=itemgetter(0))

    def create(self, key: str, file_id: str, endpoint: str, metadata: Json) -> Json:
        """Start a batch.

        Raises:
            NotFound: there is no such file.
            InvalidParameter: for another endpoint.
            Overloaded: the key has `MAX_OPEN` batches that have not ended.
        """
        self.store.load(key, file_id, FILE)
        if [*self._keys.values()].count(key) >= MAX_OPEN:
            message = f"this API key has {MAX_OPEN} batches that have not ended; wait for one to end, or cancel one"
            raise Overloaded(message, kind="too_many_batches", retry_after_s=60)
        if endpoint not in ENDPOINTS:
            raise InvalidParameter("endpoint", f"endpoint must be {' or '.join(ENDPOINTS)}")
        now = int(time.time())
        batch: Json = {
            "id": new_id(BATCH),
            "object": "batch",
            "endpoint": endpoint,
            "input_file_id": file_id,
            "completion_window": "24h",
            "status": "validating",
            "errors": None,
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "in_progress_at": None,
            "expires_at": None,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": metadata,
        }
        self.store.save(key, batch)
        self._start(key, batch)
        return batch

    def load(self, key: str, batch_id: str) -> Json:
        """Return a batch as it is now. Raises NotFound."""
        batch = self.store.load(key, batch_id, BATCH)
        if batch_id in self._counts:
            batch["request_counts"] = {**self._counts[batch_id]}
        return batch

    def cancel(self, key: str, batch_id: str) -> Json:
        """Stop a batch; the answers so far become its output file. Raises Conflict if it has ended."""
        batch = self.load(key, batch_id)
        if batch["status"] not in OPEN_STATES:
            raise Conflict(f"the batch is {batch['status']} already", kind="batch_ended", param="batch_id")
        batch |= {"status": "cancelling", "cancelling_at": int(time.time())}
        self.store.save(key, batch)
        if (task := self._tasks.get(batch_id)) is not None:
            task.cancel()
        else:
            self._start(key, batch)  # it was another router's, which is gone if the lock is free
        return batch

    async def close(self) -> None:
        """Interrupt all batches, which another start resumes."""
        tasks = [task for task in (*self._tasks.values(), *self._ending, self._resuming) if task is not None]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        self._closing.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown()

    async def _in_thread(self, function: Callable[..., Item], *arguments: Any) -> Item:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def _start(self, key: str, batch: Json) -> None:
        batch_id = batch["id"]
        self._keys[batch_id] = key
        task = self._tasks[batch_id] = asyncio.create_task(self._run(key, batch_id))

        def end(_: object) -> None:
            if self._tasks.get(batch_id, task) is task:  # else it was cancelled at its end, and another task ends it
                for of_batches in (self._tasks, self._keys, self._counts):
                    of_batches.pop(batch_id, None)

        task.add_done_callback(end)

    async def _run(self, key: str, batch_id: str) -> None:
        try:
            async with self._checks.setdefault(key, asyncio.Lock()):
                await self._step(key, batch_id, {"validating": self._validate})
            async with self._turns.setdefault(key, asyncio.Lock()):
                await self._step(key, batch_id, {"in_progress": self._answer, "cancelling": self._end_cancelled})
        except asyncio.CancelledError:
            if batch_id in self._tasks:  # by `cancel`; otherwise the router ends
                await self._end_cancelled(key, batch_id)
        except (OSError, ValueError, RequestError) as error:
            log.warning("%s failed: %s", batch_id, error)
            reason = (isinstance(error, OSError) and error.strerror) or str(error)  # without the path on this machine
            await self._fail(key, batch_id, [{"code": "batch_failed", "message": reason, "line": None}])

    async def _step(self, key: str, batch_id: str, steps: Mapping[str, Callable[..., Any]]) -> None:
        """Take the step of the batch's status, unless another router holds its lock. The file is deleted once it has ended.

        One that opened the file before it was deleted gets the lock afterwards, and then sees that the batch has ended.
        """
        if self.store.load(key, batch_id)["status"] not in steps:
            return
        with _locked(self.store.data_path(key, batch_id).with_suffix(".lock")) as is_held:
            if is_held and (step := steps.get(self.store.load(key, batch_id)["status"])) is not None:
                await step(key, batch_id)

    async def _validate(self, key: str, batch_id: str) -> None:
        batch = self.store.load(key, batch_id)
        path = self._source(key, batch)
        count, errors = await self._in_thread(self._check, path, batch["endpoint"])
        if errors:
            data = [{"code": error.code, "message": str(error), "line": error.line} for error in errors]
            await self._fail(key, batch_id, data)
            return
        counts = {"total": count, "completed": 0, "failed": 0}
        batch |= {"status": "in_progress", "in_progress_at": int(time.time()), "request_counts": counts}
        self.store.save(key, batch)

    async def _answer(self, key: str, batch_id: str) -> None:
        """Append the missing answers to the batch's files."""
        batch, files = self.store.load(key, batch_id), AnswerFiles(self.store, key, batch_id)
        counts = self._counts[batch_id] = batch["request_counts"]
        writing, saved_at = asyncio.Lock(), time.monotonic()
        with self._source(key, batch).open("rb") as lines, closing(files):
            done, so_far = await asyncio.to_thread(files.open)
            counts |= so_far

            async def write(line: Json) -> None:
                nonlocal saved_at
                async with writing:
                    counts[await asyncio.to_thread(files.append, line)] += 1
                    if time.monotonic() - saved_at >= SAVE_S:
                        saved_at = time.monotonic()
                        self.store.save(key, batch)

            parsed = _each(self._requests(lines, batch["endpoint"]))
            unanswered = await run_batch(parsed, done, self._sender(key), write, self._concurrency)
            for text in unanswered:
                number = int(text.partition(":")[0].removeprefix("line "))
                await write(error_line(InvalidLine(number, text.partition(": ")[2], "no_answer")))
        await self._end(key, batch_id, "completed")

    def _source(self, key: str, batch: Json) -> Path:
        """Return the path of the batch's input. Raises NotFound if it has been deleted."""
        self.store.load(key, batch["input_file_id"], FILE)
        return self.store.data_path(key, batch["input_file_id"])

    def _check(self, path: Path, endpoint: str) -> tuple[int, list[InvalidLine]]:
        with path.open("rb") as file:
            return check_lines(self._requests(file, endpoint), MAX_REQUESTS)

    def _requests(self, file: BinaryIO, endpoint: str) -> Iterator[BatchRequest | InvalidLine]:
        return parse_lines(self._paced(read_lines(file, MAX_LINE_BYTES)), (endpoint,), MAX_LINE_BYTES)

    def _paced(self, items: Iterable[Item]) -> Iterator[Item]:
        """Return the items, in a thread, with pauses in which the event loop has the interpreter; none after the close."""
        began = time.monotonic()
        for item in items:
            yield item
            if (took := time.monotonic() - began) > SLICE_S:
                if self._closing.wait(took):
                    return
                began = time.monotonic()

    def _sender(self, key: str) -> Callable[[BatchRequest], Any]:
        """Return a function that calls a request's endpoint, as if the key had sent it."""

        async def send(request: BatchRequest) -> tuple[int, str, Json]:
            request_id = new_id("batch_req-")
            data = await asyncio.to_thread(_as_json, request.body)
            body = [{"type": "http.request", "body": data, "more_body": False}]

            async def receive() -> Message:
                if body:
                    return body.pop()
                await asyncio.Event().wait()  # this client never disconnects
                raise AssertionError("the event is never set")

            scope = {
                "type": "http",
                "method": "POST",
                "path": request.url,
                "headers": [(b"content-type", b"application/json")],
                "query_string": b"",
                "state": {"key": key, "request_id": request_id, "client": ClientConnection()},
            }
            endpoint = self._endpoints[request.url]
            error: RequestError
            try:
                response = await endpoint.respond(Request(scope, receive))
                answer: Json = await asyncio.to_thread(json.loads, bytes(response.body))
                return response.status_code, request_id, answer
            except RequestError as refusal:
                error = refusal.with_traceback(None)
            except Exception:  # of this line: the others have answers all the same
                log.exception("line %d of a batch failed", request.line)
                error = InternalError()
            return error.status, request_id, {**endpoint.body_of(error, request_id)}

        return send

    async def _end_cancelled(self, key: str, batch_id: str) -> None:
        await self._end(key, batch_id, "cancelled")

    async def _fail(self, key: str, batch_id: str, errors: list[Json]) -> None:
        fields = {"errors": {"object": "list", "data": [{"param": None, **error} for error in errors]}}
        self._tasks.pop(batch_id, None)
        try:
            await asyncio.to_thread(self._finish, key, batch_id, "failed", **fields)
        except OSError as error:  # such as a full disk, on which the answers make room
            log.warning("%s loses its answers: %s", batch_id, error)
            AnswerFiles(self.store, key, batch_id).delete()
            await self._end(key, batch_id, "failed", **fields)

    async def _end(self, key: str, batch_id: str, status: str, **fields: Any) -> None:
        """End the batch as soon as that can be written, which it cannot on a full disk.

        From here on its task is not cancelled: that would leave the batch as it is.
        """
        self._tasks.pop(batch_id, None)
        task = asyncio.current_task()
        self._ending.add(task)
        try:
            while True:
                try:
                    return await asyncio.to_thread(self._finish, key, batch_id, status, **fields)
                except OSError as error:
                    log.warning("%s is %s, which cannot be written yet: %s", batch_id, status, error)
                await asyncio.sleep(RETRY_S)
        finally:
            self._ending.discard(task)

    def _finish(self, key: str, batch_id: str, status: str, **fields: Any) -> None:
        """End the batch, and make its answers visible."""
        batch = self.load(key, batch_id)
        for name, file_id in AnswerFiles(self.store, key, batch_id).publish():
            batch[f"{name}_file_id"] = file_id
        self.store.save(key, batch | {"status": status, f"{status}_at": int(time.time()), **fields})
        self.store.data_path(key, batch_id).with_suffix(".lock").unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock of a file, if it is free."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _as_json(body: Json) -> bytes:
    """Return a body as JSON, whatever its line holds: what is wrong with it, its endpoint says."""
    return json.dumps(body).encode()


async def _each(items: Iterator[Item]) -> AsyncIterator[Item]:
    while (item := await asyncio.to_thread(next, items, None)) is not None:
        yield item

"""Answers the batches of all clients, one after the other for each API key, through the handlers of the router's endpoints.

A batch's requests take the same way as others of its key: quotas, the fair queue, the same errors. A batch that was
interrupted goes on when a router with the same folder starts.
"""

import asyncio
import fcntl
import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.types import Message

from pdserve.batch.lines import ENDPOINTS, BatchRequest, InvalidLine, error_line, parse_lines, read_done
from pdserve.batch.runner import run_batch
from pdserve.errors import Conflict, InvalidParameter, RequestError
from pdserve.router.client_connection import ClientConnection
from pdserve.router.storage.file_store import FileStore, Json, new_id
from pdserve.router.web.endpoint import Handler

log = logging.getLogger(__name__)

OPEN_STATES = ("in_progress", "cancelling")
WINDOW_S = 24 * 3600


class BatchQueue:
    """The batches of a router. Lives on one event loop.

    Attributes:
        handlers: the handlers of the endpoints by path; set before a batch starts.
    """

    def __init__(self, store: FileStore, concurrency: int) -> None:
        self.store = store
        self.handlers: Mapping[str, Handler] = {}
        self._concurrency = concurrency
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by batch id
        self._turns: dict[str, asyncio.Lock] = {}  # by key

    def resume(self) -> None:
        """Go on with the batches that were interrupted."""
        for key, batch in self.store.all_batches():
            if batch["status"] in OPEN_STATES:
                self._start(key, batch)

    def create(self, key: str, file_id: str, endpoint: str, metadata: Json) -> Json:
        """Start a batch. Raises NotFound if there is no such file, and BadRequest for another endpoint."""
        self.store.load(key, file_id)
        if endpoint not in ENDPOINTS:
            raise InvalidParameter("endpoint", f"endpoint must be {' or '.join(ENDPOINTS)}")
        now = int(time.time())
        batch: Json = {
            "id": new_id("batch_"),
            "object": "batch",
            "endpoint": endpoint,
            "input_file_id": file_id,
            "completion_window": "24h",
            "status": "in_progress",
            "errors": None,
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "in_progress_at": now,
            "expires_at": now + WINDOW_S,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": metadata,
        }
        self.store.save(key, batch)
        self._start(key, batch)
        return batch

    def cancel(self, key: str, batch_id: str) -> Json:
        """Stop a batch; the answers so far become its output file. Raises Conflict if it has ended."""
        batch = self.store.load(key, batch_id)
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
        tasks = [*self._tasks.values()]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, key: str, batch: Json) -> None:
        task = self._tasks[batch["id"]] = asyncio.create_task(self._run(key, batch["id"]))
        task.add_done_callback(lambda _: self._tasks.pop(batch["id"], None))

    async def _run(self, key: str, batch_id: str) -> None:
        try:
            with (self.store.data_path(key, batch_id).with_suffix(".lock")).open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:  # another router runs it
                    return
                async with self._turns.setdefault(key, asyncio.Lock()):
                    await self._answer(key, batch_id)
        except asyncio.CancelledError:
            if batch_id in self._tasks:  # by `cancel`; otherwise the router ends
                self._finish(key, batch_id, "cancelled")
        except (OSError, ValueError, RequestError) as error:
            log.warning("%s failed: %s", batch_id, error)
            failure = {"code": "batch_failed", "message": str(error), "param": None, "line": None}
            errors = {"object": "list", "data": [failure]}
            self._finish(key, batch_id, "failed", errors=errors)

    async def _answer(self, key: str, batch_id: str) -> None:
        """Append the missing answers to the batch's own file, and then split it."""
        batch = self.store.load(key, batch_id)
        if batch["status"] == "cancelling":
            self._finish(key, batch_id, "cancelled")
            return
        counts, path = batch["request_counts"], self.store.data_path(key, batch_id)
        source = self.store.data_path(key, batch["input_file_id"])
        with source.open("rb") as lines, path.open("a+b") as answers:
            counts["total"] = await asyncio.to_thread(_num_lines, source)
            answers.seek(0)
            done = read_done(answers)
            counts |= _count(path)

            def write(line: Json) -> None:
                answers.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
                answers.flush()
                counts["completed" if _is_success(line) else "failed"] += 1
                self.store.save(key, batch)

            self.store.save(key, batch)
            parsed = parse_lines(lines, (batch["endpoint"],))
            unanswered = await run_batch(parsed, done, self._sender(key), write, self._concurrency)
            for text in unanswered:
                number = int(text.partition(":")[0].removeprefix("line "))
                write(error_line(InvalidLine(number, text.partition(": ")[2], "no_answer")))
        self._tasks.pop(batch_id, None)  # from here on it is not cancelled
        await asyncio.to_thread(self._finish, key, batch_id, "completed")

    def _sender(self, key: str) -> Callable[[BatchRequest], Any]:
        """Return a function that calls the handler of a request's endpoint, as if the key had sent it."""

        async def send(request: BatchRequest) -> tuple[int, str, Json]:
            request_id = new_id("batch_req-")
            raw = await asyncio.to_thread(lambda: json.dumps(request.body).encode())
            body = [{"type": "http.request", "body": raw, "more_body": False}]

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
            try:
                response = await self.handlers[request.url](Request(scope, receive))
            except RequestError as error:
                return error.status, request_id, error.body()
            return response.status_code, request_id, await asyncio.to_thread(json.loads, bytes(response.body))

        return send

    def _finish(self, key: str, batch_id: str, status: str, **fields: Any) -> None:
        """Split the answers into output and error file, and end the batch."""
        batch, path = self.store.load(key, batch_id), self.store.data_path(key, batch_id)
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        for name, wanted in (("output", True), ("error", False)):
            data = b"".join(line for line in whole if _is_success(json.loads(line)) is wanted)
            if data:
                file_id = new_id("file-")
                self.store.data_path(key, file_id).write_bytes(data)
                self.store.complete_file(key, file_id, f"{batch_id}_{name}.jsonl", "batch_output")
                batch[f"{name}_file_id"] = file_id
        self.store.save(key, batch | {"status": status, f"{status}_at": int(time.time()), **fields})
        path.unlink(missing_ok=True)
        path.with_suffix(".lock").unlink(missing_ok=True)


def _is_success(line: Json) -> bool:
    return line["response"] is not None and line["response"]["status_code"] == 200


def _num_lines(path: Path) -> int:
    with path.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _count(path: Path) -> dict[str, int]:
    with path.open("rb") as lines:
        results = [_is_success(json.loads(line)) for line in lines]
    return {"completed": sum(results), "failed": len(results) - sum(results)}

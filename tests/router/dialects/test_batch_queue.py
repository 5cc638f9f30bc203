"""/v1/files and /v1/batches with OpenAI's client, on top of a scripted backend."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock, patch

import httpx
import openai
import pytest

from pdserve.config import RouterConfig
from pdserve.errors import Overloaded, SetupError
from pdserve.router.api import chat, parsing
from pdserve.router.dialects.batches import batch_queue, file_store
from pdserve.router.dialects.batches.answer_files import AnswerFiles
from pdserve.router.dialects.batches.file_store import FileStore
from pdserve.router.limits.key_file import load_api_keys
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.admission import AdmissionController
from pdserve.router.web.app import create_app

if TYPE_CHECKING:
    from tests.router.conftest import ScriptedBackend

MAX_BYTES = 200_000
CHAT: Any = "/v1/chat/completions"


@pytest.fixture
def serve(
    tokenizer: Tokenizer,
    backend: ScriptedBackend,
    metrics: Metrics,
    tmp_path: Path,
    serving: Callable[..., AbstractContextManager[str]],
) -> Callable[..., AbstractContextManager[str]]:
    """`with serve() as url` runs a router with two keys and a folder for batches; each call is a new process's."""

    @contextmanager
    def run(on_closed: Callable[[], object] = lambda: None) -> Iterator[str]:
        config = RouterConfig(
            model="demo",
            api_key="one,two",
            batch_folder=str(tmp_path),
            max_batch_bytes=str(MAX_BYTES),
            batch_concurrency=2,
        )
        admission = AdmissionController(load_api_keys(config.api_key), config, metrics, time.monotonic)
        app = create_app(config, tokenizer, backend, admission, list, backend.log.latest, dict)
        loops: list[asyncio.AbstractEventLoop] = []

        async def remember_loop(scope: Any, receive: Any, send: Any) -> None:
            if not loops:
                loops.append(asyncio.get_running_loop())
                app.start()
            await app(scope, receive, send)

        with serving(remember_loop) as url, client(url, "one") as any_client:
            any_client.models.list()
            yield url
            asyncio.run_coroutine_threadsafe(app.close(), loops[0]).result(600)
            on_closed()

    return run


def client(url: str, key: str = "one") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def batch_file(*names: str) -> bytes:
    body = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}
    lines = [{"custom_id": name, "method": "POST", "url": CHAT, "body": body} for name in names]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def start(official: openai.OpenAI, data: bytes) -> Any:
    file = official.files.create(file=("in.jsonl", data), purpose="batch")
    return official.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"})


def ended(official: openai.OpenAI, batch_id: str) -> Any:
    deadline = time.monotonic() + 600
    while (batch := official.batches.retrieve(batch_id)).status in ("validating", "in_progress", "cancelling"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
    return batch


def num_completed(official: openai.OpenAI, batch_id: str) -> int:
    counts = official.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed


def answers(official: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    lines = [json.loads(line) for line in official.files.content(file_id).read().splitlines()]
    return {line["custom_id"] or line["id"]: line for line in lines}


def test_a_batch(serve: Callable[[], AbstractContextManager[str]], backend: ScriptedBackend) -> None:
    unknown = batch_file("unknown").replace(b'"demo"', b'"gpt"')
    with serve() as url, client(url) as official:
        batch = start(official, batch_file("a", "b") + b"\n" + batch_file("c") + unknown)
        assert batch.status == "validating" and batch.metadata == {"a": "b"}
        assert batch.expires_at is None, "nothing expires"
        batch = ended(official, batch.id)
        assert (batch.status, batch.request_counts.model_dump()) == (
            "completed",
            {"total": 4, "completed": 3, "failed": 1},
        )
        output, errors = answers(official, batch.output_file_id), answers(official, batch.error_file_id)
        assert output.keys() == {"a", "b", "c"} and errors.keys() == {"unknown"}
        response = output["a"]["response"]
        assert response["status_code"] == 200
        assert response["body"]["choices"][0]["message"]["content"] == " Paris."
        assert errors["unknown"]["response"]["body"]["error"]["code"] == "model_not_found"
        assert [one.id for one in official.batches.list()] == [batch.id]
        later = official.files.create(file=("later.jsonl", b"x\n"), purpose="batch")
        files = [one.id for one in official.files.list()]
        assert len(files) == 4 and (files[0], files[-1]) == (later.id, batch.input_file_id), "the newest first"
        outputs = {batch.output_file_id, batch.error_file_id}
        assert {one.id for one in official.files.list(purpose="batch_output", limit=1)} == outputs
        with pytest.raises(openai.ConflictError, match="the batch is completed already"):
            official.batches.cancel(batch.id)


def test_the_errors_of_lines_are_those_of_their_endpoints(serve: Callable[[], AbstractContextManager[str]]) -> None:
    data = batch_file("a").replace(CHAT.encode(), b"/v1/messages")  # without max_tokens
    with serve() as url, client(url) as official:
        file = official.files.create(file=("in.jsonl", data), purpose="batch")
        endpoint: Any = "/v1/messages"
        batch = official.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
        response = answers(official, ended(official, batch.id).error_file_id)["a"]["response"]
    assert response["status_code"] == 400
    error = {"type": "invalid_request_error", "message": "max_tokens is required"}
    assert response["body"] == {"type": "error", "error": error, "request_id": response["request_id"]}


def test_a_field_of_an_upload_that_would_be_ignored_is_refused(
    serve: Callable[[], AbstractContextManager[str]],
) -> None:
    message = r"unknown field 'expires_after\[anchor\]'; the form takes file and purpose"
    with serve() as url, client(url) as official, pytest.raises(openai.BadRequestError, match=message):
        expiry: Any = {"anchor": "created_at", "seconds": 3600}
        official.files.create(file=("a.jsonl", b"x\n"), purpose="batch", expires_after=expiry)


def test_pages_of_a_listing(serve: Callable[[], AbstractContextManager[str]]) -> None:
    with serve() as url, client(url) as official:
        names = [f"{i}.jsonl" for i in range(5)]
        for name in names:
            official.files.create(file=(name, b"x\n"), purpose="batch")
        page = official.files.list(limit=2)
        assert [one.filename for one in page.data] == ["4.jsonl", "3.jsonl"] and page.has_more
        assert [one.filename for one in page] == names[::-1], "the client asks for the other pages"
        oldest = official.files.list(limit=2, order="asc")
        assert [one.filename for one in oldest.data] == names[:2] and [one.filename for one in oldest] == names
        with pytest.raises(openai.BadRequestError, match='order must be "asc" or "desc", not '):
            official.files.list(extra_query={"order": "up"})
        with pytest.raises(openai.BadRequestError, match="limit must be from 1 to 100, not '0'"):
            official.files.list(limit=0)


def test_bodies_and_listings_are_read_in_threads(
    serve: Callable[[], AbstractContextManager[str]], threads_of: Callable[..., list[threading.Thread]]
) -> None:
    with serve() as url, client(url) as official:
        official.files.create(file=("a.jsonl", b"x\n"), purpose="batch")
        threads, parsing_in = threads_of(FileStore, "load"), threads_of(parsing, "parse_json")
        [serving] = [one for one in threading.enumerate() if one.name.endswith("(run)")]
        assert official.files.list().data
        with pytest.raises(openai.BadRequestError):
            official.batches.create(input_file_id="i" * 40_000, endpoint="/v1/completions", completion_window="24h")
        assert threads and parsing_in and serving not in threads
        assert {one.name.partition("_")[0] for one in parsing_in} == {"parse"}


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"this is not JSON\n" + batch_file("a"), (1, "invalid_json")),
        (batch_file("a") + batch_file("b").replace(CHAT.encode(), b"/v1/completions"), (2, "invalid_url")),
        (batch_file("a", "a"), (2, "duplicate_custom_id")),
        (batch_file(*"abcd"), (4, "too_many_requests")),
        (batch_file("a") + b" " * 1001 + batch_file("b"), (2, "line_too_long")),
        (b"\n \n", (1, "empty_file")),
        (b"x\n" * 3, (3, "invalid_json")),
    ],
)
def test_a_file_with_a_line_that_is_no_request_fails_as_a_whole(
    serve: Callable[[], AbstractContextManager[str]],
    backend: ScriptedBackend,
    monkeypatch: pytest.MonkeyPatch,
    data: bytes,
    error: tuple[int, str],
) -> None:
    monkeypatch.setattr(batch_queue, "MAX_REQUESTS", 3)
    monkeypatch.setattr(batch_queue, "MAX_LINE_BYTES", 1000)
    with serve() as url, client(url) as official:
        batch = ended(official, start(official, data).id)
        assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
        last = batch.errors.data[-1]
        assert (last.line, last.code) == error and last.message.startswith(f"line {error[0]}: ")
    assert not backend.requests


def test_a_line_that_cannot_be_answered_fails_alone(serve: Callable[[], AbstractContextManager[str]]) -> None:
    """By a fault of the router itself, too. What is no JSON, as no router would read it, is named before the batch starts."""

    def parse(body: Any, *others: Any) -> Any:
        if body.user == "unlucky":
            raise ZeroDivisionError
        return parse_chat(body, *others)

    parse_chat = chat.parse_chat
    deep = batch_file("deep").replace(b'"hello"', b"[" * 150 + b"]" * 150)
    unlucky = batch_file("unlucky").replace(b'"model"', b'"user": "unlucky", "model"')
    with serve() as url, client(url) as official, patch.object(chat, "parse_chat", parse):
        batch = ended(official, start(official, batch_file("a") + deep + unlucky + batch_file("b")).id)
        assert batch.status == "completed" and answers(official, batch.output_file_id).keys() == {"a", "b"}
        errors = {name: line["response"] for name, line in answers(official, batch.error_file_id).items()}
        found = {name: (one["status_code"], one["body"]["error"]["code"]) for name, one in errors.items()}
        assert found == {"deep": (400, found["deep"][1]), "unlucky": (500, "internal_error")}
        for line in (batch_file("\ud800"), batch_file("half").replace(b'"hello"', b'"\\ud800"')):
            batch = ended(official, start(official, batch_file("a") + line).id)
            assert (batch.status, batch.errors.data[0].code, batch.errors.data[0].line) == ("failed", "invalid_json", 2)


def test_a_key_has_a_bounded_number_of_open_batches_which_hold_no_files(
    serve: Callable[..., AbstractContextManager[str]],
    backend: ScriptedBackend,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Callable[..., None],
) -> None:
    monkeypatch.setattr(batch_queue, "MAX_OPEN", 4)
    backend.script.hang = True
    backend.script.chunks = [[]]
    with serve() as url, client(url, "one") as one, client(url, "two") as two:
        batches = [start(one, batch_file("a")) for _ in range(4)]
        with pytest.raises(openai.RateLimitError, match="4 batches that have not ended"):
            start(one, batch_file("a"))
        other = start(two, batch_file("b"))
        eventually(lambda: len(backend.streams) == 2)
        assert num_open_locks() <= 2, "one of each key"
        for official, batch in [*((one, batch) for batch in batches), (two, other)]:
            official.batches.cancel(batch.id)
            assert ended(official, batch.id).status == "cancelled"


def num_open_locks() -> int:
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            count += os.readlink(descriptor).endswith(".lock")
    return count


@pytest.mark.parametrize(
    "metadata",
    [{str(i): "v" for i in range(17)}, {"k" * 65: "v"}, {"k": "v" * 513}, {"k": 1}],
)
def test_metadata_has_the_limits_of_openai(
    serve: Callable[[], AbstractContextManager[str]], metadata: dict[str, Any]
) -> None:
    with serve() as url, client(url) as official:
        file = official.files.create(file=("in.jsonl", batch_file("a")), purpose="batch")
        with pytest.raises(openai.BadRequestError) as caught:
            official.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata=metadata)
        assert "metadata" in str(caught.value)


def test_ids_of_batches_are_no_ids_of_files(serve: Callable[[], AbstractContextManager[str]]) -> None:
    with serve() as url, client(url) as official:
        batch = ended(official, start(official, batch_file("a")).id)
        for call in (
            lambda: official.files.retrieve(batch.id),
            lambda: official.files.content(batch.id),
            lambda: official.files.delete(batch.id),
            lambda: official.batches.retrieve(batch.input_file_id),
            lambda: official.batches.cancel(batch.input_file_id),
            lambda: official.batches.create(input_file_id=batch.id, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        assert official.batches.retrieve(batch.id).status == "completed"


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), None])
def test_a_batch_whose_answers_find_no_room_fails(
    serve: Callable[[], AbstractContextManager[str]], monkeypatch: pytest.MonkeyPatch, failure: OSError | None
) -> None:
    with serve() as url, client(url) as official:
        if failure is None:
            official.files.create(file=("large", bytes(MAX_BYTES // 3)), purpose="batch")
            monkeypatch.setattr("pdserve.router.dialects.batches.answer_files.ROOM_BYTES", 1)
            monkeypatch.setattr(file_store, "ENTRY_BYTES", MAX_BYTES // 32)
        else:
            monkeypatch.setattr(AnswerFiles, "append", Mock(side_effect=failure))
        batch = ended(official, start(official, batch_file("a", "b")).id)
        assert batch.status == "failed"
        expected = "No space left" if failure else "delete files that are not needed"
        assert expected in batch.errors.data[0].message


def test_a_batch_that_is_cancelled_while_it_ends_ends(
    serve: Callable[[], AbstractContextManager[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it fails between the two halves of the cancellation: after its state is read, and before that is written."""
    fails, is_cancelled, has_failed = threading.Event(), threading.Event(), threading.Event()
    save = FileStore.save

    def save_in_turn(store: FileStore, key: str, item: dict[str, Any]) -> None:
        if item.get("status") == "failed":
            fails.set()
            assert is_cancelled.wait(600)
        elif item.get("status") == "cancelling":
            is_cancelled.set()
            assert has_failed.wait(600)
        save(store, key, item)
        if item.get("status") == "failed":
            has_failed.set()

    monkeypatch.setattr(AnswerFiles, "append", Mock(side_effect=ValueError("damaged")))
    monkeypatch.setattr(FileStore, "save", save_in_turn)
    with serve() as url, client(url) as official:
        batch = start(official, batch_file("a"))
        assert fails.wait(600)
        assert official.batches.cancel(batch.id).status == "cancelling"
        assert ended(official, batch.id).status == "cancelled"


@pytest.mark.parametrize("status", ["completed", "cancelled"])
def test_a_batch_that_ends_on_a_full_disk_keeps_its_answers(
    serve: Callable[[], AbstractContextManager[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: str
) -> None:
    """Its end is written once there is room again."""
    refused, save, append, goes_on = list[str](), FileStore.save, AnswerFiles.append, threading.Event()

    def save_later(store: FileStore, key: str, item: dict[str, Any]) -> None:
        if item.get("status") == status and len(refused) < 3:
            refused.append(item["id"])
            raise OSError(errno.ENOSPC, "No space left on device")
        save(store, key, item)

    def append_later(files: AnswerFiles, line: dict[str, Any]) -> str:
        assert goes_on.wait(600)
        return append(files, line)

    monkeypatch.setattr(AnswerFiles, "append", append_later)
    monkeypatch.setattr(batch_queue, "RETRY_S", 0.01)
    monkeypatch.setattr(FileStore, "save", save_later)
    with serve() as url, client(url) as official:
        batch = start(official, batch_file("a", "b"))
        if status == "cancelled":
            official.batches.cancel(batch.id)
        goes_on.set()
        batch = ended(official, batch.id)
        assert batch.status == status and refused == [batch.id] * 3
        if status == "completed":
            assert answers(official, batch.output_file_id).keys() == {"a", "b"}
    assert not [*tmp_path.rglob("*.new")]


async def resume(store: FileStore) -> None:
    """Go on with the batches of a store, to their ends."""
    batch_queue.BatchQueue(store, 1, {}).resume()
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(tasks)


@pytest.mark.parametrize("status", ["validating", "in_progress"])
def test_a_batch_whose_input_was_deleted_says_so(tmp_path: Path, status: str) -> None:
    """It does not say where this machine keeps its files."""
    store = FileStore(tmp_path, MAX_BYTES)
    counts = {"total": 1, "completed": 0, "failed": 0}
    batch = {"id": "batch_" + "0" * 24, "status": status, "created_at": 1, "request_counts": counts, "endpoint": CHAT}
    store.save("one", batch | {"input_file_id": "file-" + "1" * 24})
    asyncio.run(resume(store))
    [error] = store.load("one", str(batch["id"]))["errors"]["data"]
    assert error["message"] == f"this API key has no 'file-{'1' * 24}'"


def test_an_ended_batch_is_not_answered_again(tmp_path: Path) -> None:
    """Another router read its state before it ended, and takes its lock afterwards."""
    store = FileStore(tmp_path, MAX_BYTES)
    batch = {"id": "batch_" + "0" * 24, "status": "completed", "created_at": 1, "request_counts": {}}
    store.save("one", batch)
    with patch.object(FileStore, "all_batches", lambda self: [("one", batch | {"status": "in_progress"})]):
        asyncio.run(resume(store))
    assert store.load("one", str(batch["id"])) == batch


def test_room_is_kept_for_uploads_and_for_other_keys(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 100_000, is_shared=True)
    store.reserve("one", 40_000)
    with pytest.raises(Overloaded, match="of this API key have 40000 bytes"):
        store.reserve("one", 20_000)
    store.reserve("two", 25_000)
    with pytest.raises(Overloaded, match="of this API key have 0 bytes"):
        store.reserve("three", 20_000)
    store.release("one", 40_000)
    store.reserve("three", 20_000)
    alone = FileStore(tmp_path, 100_000)
    alone.reserve("one", 60_000)
    alone.reserve("one", 40_000)
    with pytest.raises(Overloaded, match="of this router have 100000 bytes of 100000"):
        alone.reserve("one", 1)


def test_keys_are_apart(serve: Callable[[], AbstractContextManager[str]]) -> None:
    with serve() as url, client(url) as one, client(url, "two") as two:
        batch = ended(one, start(one, batch_file("a")).id)
        assert not [*two.files.list()] and not [*two.batches.list()]
        for call in (
            lambda: two.batches.retrieve(batch.id),
            lambda: two.files.retrieve(batch.output_file_id),
            lambda: two.files.content(batch.output_file_id),
            lambda: two.files.delete(batch.input_file_id),
            lambda: two.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
            lambda: one.files.retrieve("..%2F..%2Fetc"),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        assert one.files.delete(batch.input_file_id).deleted
        with pytest.raises(openai.NotFoundError):
            one.files.retrieve(batch.input_file_id)


def test_a_batch_goes_on_after_a_restart_and_can_be_cancelled(
    serve: Callable[..., AbstractContextManager[str]], backend: ScriptedBackend, eventually: Callable[..., None]
) -> None:
    gate = threading.Semaphore(2)  # the number of answers before the router stops: one chunk each
    backend.generates([50], gate=gate)
    with serve(on_closed=lambda: gate.release(10)) as url, client(url) as official:
        batch = start(official, batch_file(*"abcdef"))
        eventually(lambda: num_completed(official, batch.id) == 2)
    backend.generates([50])
    with serve() as url, client(url) as official:
        batch = ended(official, batch.id)
        assert batch.request_counts.model_dump() == {"total": 6, "completed": 6, "failed": 0}
        assert answers(official, batch.output_file_id).keys() == {*"abcdef"}
        backend.script.hang = True
        backend.script.chunks = [[]]
        before = len(backend.streams)
        batch = start(official, batch_file("x", "y"))
        eventually(lambda: len(backend.streams) == before + 2)
        assert official.batches.cancel(batch.id).status == "cancelling"
        batch = ended(official, batch.id)
        assert (batch.status, batch.output_file_id) == ("cancelled", None)
        eventually(lambda: all(stream.cancelled for stream in backend.streams[-2:]))


def test_what_is_refused(serve: Callable[[], AbstractContextManager[str]]) -> None:
    with serve() as url, client(url) as official:
        with pytest.raises(openai.BadRequestError, match="purpose must be"):
            official.files.create(file=("a", b"x"), purpose="fine-tune")
        with pytest.raises(openai.APIStatusError, match="larger than 200000 bytes") as caught:
            official.files.create(file=("a", b"x" * 300_000), purpose="batch")
        assert caught.value.status_code == 413
        file = official.files.create(file=("a", b"x" * 80_000), purpose="batch")
        with pytest.raises(openai.RateLimitError, match="delete files that are not needed"):
            official.files.create(file=("b", b"x" * 80_000), purpose="batch")
        parts = iter([b"--b\r\n", b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'])
        headers = {"Authorization": "Bearer one", "Content-Type": "multipart/form-data; boundary=b"}
        chunked = httpx.post(f"{url}/v1/files", content=parts, headers=headers)
        assert (chunked.status_code, chunked.json()["error"]["code"]) == (411, "length_required")
        with pytest.raises(openai.BadRequestError, match="endpoint must be"):
            official.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
        with pytest.raises(openai.NotFoundError):
            official.batches.create(input_file_id="file-1", endpoint=CHAT, completion_window="24h")
        for content, kind in (
            (b"x", "text/plain"),
            (b"x", "multipart/form-data"),
            (b"a=b", "application/x-www-form-urlencoded"),
        ):
            headers = {"Authorization": "Bearer one", "Content-Type": kind}
            assert httpx.post(f"{url}/v1/files", content=content, headers=headers).status_code == 400
        form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\na-b\r\n--b--\r\n'
        for charset, status in (("utf-8", 400), ("UTF8", 400), ("punycode", 415), ("undefined", 415), ("made-up", 415)):
            headers["Content-Type"] = f'multipart/form-data; boundary=b; charset="{charset}"'
            answer = httpx.post(f"{url}/v1/files", content=form, headers=headers)
            assert (answer.status_code, "UTF-8" in answer.text) == (status, status == 415), answer.text


def test_without_a_folder(
    tokenizer: Tokenizer, backend: ScriptedBackend, metrics: Metrics, make_client: Any, tmp_path: Path
) -> None:
    config = RouterConfig(model="demo")
    admission = AdmissionController([], config, metrics, time.monotonic)
    app = create_app(config, tokenizer, backend, admission, list, backend.log.latest, dict)
    for path in ("/v1/files", "/v1/batches", "/v1/batches/batch_1"):
        reply = make_client(app).get(path)
        assert reply.status_code == 404 and "--batch-folder" in reply.json()["error"]["message"]
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"--batch-folder .*: Not a directory"):
        FileStore(tmp_path / "file" / "inside", 1)

"""/v1/files and /v1/batches with OpenAI's client, on top of a scripted backend."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from pdserve.config import RouterConfig
from pdserve.errors import SetupError
from pdserve.router.api import parsing
from pdserve.router.batches.batch_queue import BatchQueue
from pdserve.router.batches.endpoints import BatchEndpoints
from pdserve.router.limits.key_file import load_api_keys
from pdserve.router.storage.file_store import FileStore
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.admission import AdmissionController
from pdserve.router.web.app import create_app, generation_handlers

if TYPE_CHECKING:
    from tests.router.conftest import ScriptedBackend

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
        config = RouterConfig(model="demo", api_key="one,two", batch_folder=str(tmp_path), max_batch_bytes="20000")
        admission = AdmissionController(load_api_keys(config.api_key), config, metrics, time.monotonic)
        queue = BatchQueue(FileStore(tmp_path, 20_000), 2)
        further = [BatchEndpoints(queue, admission.parse_queue)]
        app = create_app(config, tokenizer, backend, admission, list, backend.log.latest, dict, further=further)
        queue.handlers = generation_handlers(app)
        loops: list[asyncio.AbstractEventLoop] = []

        async def remember_loop(scope: Any, receive: Any, send: Any) -> None:
            if not loops:
                loops.append(asyncio.get_running_loop())
                queue.resume()
            await app(scope, receive, send)

        with serving(remember_loop) as url, client(url, "one") as any_client:
            any_client.models.list()
            yield url
            asyncio.run_coroutine_threadsafe(queue.close(), loops[0]).result(600)
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
    while (batch := official.batches.retrieve(batch_id)).status in ("in_progress", "cancelling"):
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
    wrong = b"this is not JSON\n" + batch_file("other").replace(CHAT.encode(), b"/v1/completions")
    unknown = batch_file("unknown").replace(b'"demo"', b'"gpt"')
    with serve() as url, client(url) as official:
        batch = start(official, batch_file("a", "b", "c") + wrong + unknown)
        assert batch.status == "in_progress" and batch.metadata == {"a": "b"}
        batch = ended(official, batch.id)
        assert (batch.status, batch.request_counts.model_dump()) == (
            "completed",
            {"total": 6, "completed": 3, "failed": 3},
        )
        output, errors = answers(official, batch.output_file_id), answers(official, batch.error_file_id)
        assert output.keys() == {"a", "b", "c"} and errors.keys() == {"batch_req_4", "other", "unknown"}
        response = output["a"]["response"]
        assert response["status_code"] == 200
        assert response["body"]["choices"][0]["message"]["content"] == " Paris."
        assert errors["batch_req_4"]["error"]["code"] == "invalid_json"
        assert errors["unknown"]["response"]["body"]["error"]["code"] == "model_not_found"
        assert [one.id for one in official.batches.list()] == [batch.id]
        assert len([*official.files.list()]) == 3
        with pytest.raises(openai.ConflictError, match="the batch is completed already"):
            official.batches.cancel(batch.id)


def test_pages_of_a_listing(serve: Callable[[], AbstractContextManager[str]]) -> None:
    with serve() as url, client(url) as official:
        names = [f"{i}.jsonl" for i in range(5)]
        for name in names:
            official.files.create(file=(name, b"x\n"), purpose="batch")
        page = official.files.list(limit=2)
        assert [one.filename for one in page.data] == ["4.jsonl", "3.jsonl"] and page.has_more
        assert [one.filename for one in page] == names[::-1], "the client asks for the other pages"
        with pytest.raises(openai.BadRequestError, match="limit must be from 1 to 100, not '0'"):
            official.files.list(limit=0)


def test_bodies_and_listings_are_read_in_threads(
    serve: Callable[[], AbstractContextManager[str]], threads_of: Callable[..., list[threading.Thread]]
) -> None:
    with serve() as url, client(url) as official:
        official.files.create(file=("a.jsonl", b"x\n"), purpose="batch")
        threads, parsing_in = threads_of(FileStore, "load"), threads_of(parsing, "validate")
        [serving] = [one for one in threading.enumerate() if one.name.endswith("(run)")]
        assert official.files.list().data
        with pytest.raises(openai.BadRequestError):
            official.batches.create(input_file_id="i" * 40_000, endpoint="/v1/completions", completion_window="24h")
        assert threads and parsing_in and serving not in threads
        assert {one.name.partition("_")[0] for one in parsing_in} == {"parse"}


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
        with pytest.raises(openai.APIStatusError, match="larger than 20000 bytes") as caught:
            official.files.create(file=("a", b"x" * 30_000), purpose="batch")
        assert caught.value.status_code == 413
        file = official.files.create(file=("a", b"x" * 15_000), purpose="batch")
        with pytest.raises(openai.RateLimitError, match="delete files that are not needed"):
            official.files.create(file=("b", b"x" * 15_000), purpose="batch")
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


def test_without_a_folder(
    tokenizer: Tokenizer, backend: ScriptedBackend, metrics: Metrics, make_client: Any, tmp_path: Path
) -> None:
    config = RouterConfig(model="demo")
    admission = AdmissionController([], config, metrics, time.monotonic)
    further = [BatchEndpoints(None, admission.parse_queue)]
    app = create_app(config, tokenizer, backend, admission, list, backend.log.latest, dict, further=further)
    for path in ("/v1/files", "/v1/batches", "/v1/batches/batch_1"):
        reply = make_client(app).get(path)
        assert reply.status_code == 404 and "--batch-folder" in reply.json()["error"]["message"]
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"--batch-folder .*: Not a directory"):
        FileStore(tmp_path / "file" / "inside", 1)

"""Conversations by `previous_response_id`, with OpenAI's client, and the stores of responses."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import openai
import pytest
import redis

from pdserve.config import RouterConfig
from pdserve.errors import SetupError, Unavailable
from pdserve.router.dialects.responses import output, response_store
from pdserve.router.dialects.responses.response_store import (
    MemoryStore,
    RedisStore,
    ResponseStore,
    StoredResponse,
    open_store,
)
from pdserve.router.limits.key_file import load_api_keys
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.admission import AdmissionController
from pdserve.router.web.app import create_app
from pdserve.router.web.application import Application

if TYPE_CHECKING:
    from tests.router.conftest import ScriptedBackend

Serving = Callable[..., AbstractContextManager[str]]


@pytest.fixture
def stateful(tokenizer: Tokenizer, backend: ScriptedBackend, metrics: Metrics) -> Application:
    """An application with two keys that keeps responses in memory."""
    config = RouterConfig(model="demo", api_key="one,two", response_store="memory", max_stored_responses=3)
    admission = AdmissionController(load_api_keys(config.api_key), config, metrics, lambda: 0.0)
    return create_app(config, tokenizer, backend, admission, list, backend.log.latest, dict)


def client(url: str, key: str = "one") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def test_a_conversation_continues_by_id(
    stateful: Application, serving: Serving, backend: ScriptedBackend, tokenizer: Tokenizer
) -> None:
    backend.generates([*tokenizer.encode(" Paris."), 0], "stop")
    with serving(stateful) as url, client(url) as one:
        first: Any = one.responses.create(model="demo", input="hello", instructions="be brief")
        assert first.store is True
        with one.responses.stream(model="demo", input="more", previous_response_id=first.id) as stream:
            second = stream.until_done().get_final_response()
        third = one.responses.create(model="demo", input="again", previous_response_id=second.id)
        assert (second.previous_response_id, third.previous_response_id) == (first.id, second.id)
        answer = {"role": "assistant", "content": " Paris."}
        turns = [{"role": "user", "content": text} for text in ("hello", "more", "again")]
        conversations = [
            [{"role": "system", "content": "be brief"}, turns[0]],
            [turns[0], answer, turns[1]],  # instructions are of one response only
            [turns[0], answer, turns[1], answer, turns[2]],
        ]
        assert [request.prompt for request in backend.requests] == [*map(tokenizer.render_chat, conversations)]
        items: Any = one.responses.input_items
        newest, *others = [(item.role, item.content[0].text) for item in items.list(third.id, limit=2)]  # in pages
        assert newest == ("user", "again") and others[-1] == ("user", "hello") and len(others) == 4
        oldest = items.list(second.id, order="asc", limit=1)
        assert (oldest.data[0].content[0].text, oldest.data[0].id, oldest.has_more) == ("hello", oldest.last_id, True)
        rest = items.list(second.id, order="asc", after=oldest.last_id)
        assert [item.content[0].type for item in rest] == ["output_text", "input_text"]
        for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg_1"}):
            with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
                items.list(second.id, **wrong)
        kept = one.responses.retrieve(second.id)
        with pytest.raises(openai.BadRequestError, match="a kept response is not streamed; leave stream out"):
            one.responses.retrieve(second.id, stream=True)
        assert (kept.output_text, kept.status, kept.usage) == (" Paris.", "completed", second.usage)
        one.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            one.responses.retrieve(second.id)
        with pytest.raises(openai.NotFoundError, match="may have expired"):
            one.responses.create(model="demo", input="x", previous_response_id=second.id)
        assert one.responses.create(model="demo", input="x", previous_response_id=third.id).output_text == " Paris."


def test_calls_and_reasoning_are_items(
    backend: ScriptedBackend, metrics: Metrics, reasoning_tokenizer: Tokenizer, serving: Serving
) -> None:
    assert backend.info is not None
    backend.info = replace(backend.info, max_model_len=4096, common_model_len=4096)
    text = '<think>\nHm.\n</think>\n\nLook: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    backend.generates([*reasoning_tokenizer.encode(text), 0], "stop")
    config = RouterConfig(model="demo", api_key="one", response_store="memory")
    admission = AdmissionController(load_api_keys(config.api_key), config, metrics, lambda: 0.0)
    app = create_app(config, reasoning_tokenizer, backend, admission, list, backend.log.latest, dict)
    tools: Any = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    with serving(app) as url, client(url) as one:
        first: Any = one.responses.create(model="demo", input="hello", tools=tools)
        call = next(item for item in first.output if item.type == "function_call")
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "2"}]
        second = one.responses.create(model="demo", input=result, tools=tools, previous_response_id=first.id)
        items: Any = [*one.responses.input_items.list(second.id, order="asc")]
    assert [item.type for item in items] == ["message", "reasoning", "message", "function_call", "function_call_output"]
    assert [items[0].role, items[0].content[0].text] == ["user", "hello"]
    assert items[1].content[0].text == "Hm." and items[2].content[0].text.strip() == "Look:"
    assert (items[3].name, items[3].call_id, json.loads(items[3].arguments)) == ("f", call.call_id, {"a": 1})
    assert (items[4].call_id, items[4].output) == (call.call_id, "2")
    assert len({item.id for item in items}) == len(items)


def test_keys_are_apart_and_store_false_keeps_nothing(stateful: Application, serving: Serving) -> None:
    with serving(stateful) as url, client(url) as one, client(url, "two") as two:
        kept = one.responses.create(model="demo", input="hello")
        for forbidden in (
            lambda: two.responses.retrieve(kept.id),
            lambda: two.responses.delete(kept.id),
            lambda: two.responses.input_items.list(kept.id),
            lambda: two.responses.create(model="demo", input="x", previous_response_id=kept.id),
        ):
            with pytest.raises(openai.NotFoundError):
                forbidden()
        assert one.responses.retrieve(kept.id).id == kept.id
        dropped: Any = one.responses.create(model="demo", input="hello", store=False)
        assert dropped.store is False
        with pytest.raises(openai.NotFoundError):
            one.responses.retrieve(dropped.id)


def test_without_a_store(url: str) -> None:
    with client(url) as official:
        answer: Any = official.responses.create(model="demo", input="hello")
        assert answer.store is False
        kept: Any = official.responses.create(model="demo", input="hello", store=True)
        assert kept.store is False
        with pytest.raises(openai.BadRequestError, match="--response-store"):
            official.responses.create(model="demo", input="hello", previous_response_id="resp_1")
        with pytest.raises(openai.NotFoundError):
            official.responses.retrieve("resp_1")


def stored(name: str, text: str = "") -> StoredResponse:
    return StoredResponse({"id": name, "text": text}, [{"role": "user", "content": text}])


async def ids(store: ResponseStore, key: str, names: str) -> str:
    """Return those of the names that the store has."""
    return "".join([name for name in names if await store.get(key, name) is not None])


def check_store(store: ResponseStore, expire: Callable[[], object]) -> None:
    """Check a store that holds two responses of a key."""

    async def run() -> None:
        await store.put("alice", stored("a", "漢"))
        await store.put("bob", stored("b"))
        assert await store.get("alice", "a") == stored("a", "漢")
        assert await ids(store, "bob", "ab") == "b"
        await store.put("alice", stored("c"))
        await store.put("alice", stored("a", "new"))
        await store.put("alice", stored("d"))
        assert (await ids(store, "alice", "abcd"), await ids(store, "bob", "abcd")) == ("ad", "b")
        assert await store.get("alice", "a") == stored("a", "new")
        assert await store.delete("alice", "a") and not await store.delete("alice", "a")
        assert not await store.delete("alice", "b")
        assert (await ids(store, "alice", "abcd"), await ids(store, "bob", "abcd")) == ("d", "b")
        expire()
        assert not await ids(store, "alice", "abcd") + await ids(store, "bob", "abcd")
        await store.close()

    asyncio.run(run())


def test_the_store_in_memory() -> None:
    times = [0.0]
    check_store(MemoryStore(2, 10.0, lambda: times[0]), lambda: times.__setitem__(0, 10.0))

    async def run() -> None:
        small = MemoryStore(100, 10.0, lambda: 0.0, max_bytes=1000)
        for name in "abcdefghij":
            await small.put(name, stored(name, "x" * 100))
        assert await small.get("a", "a") is None and await small.get("j", "j") is not None

    asyncio.run(run())


def test_the_key_with_the_most_bytes_loses_its_oldest_responses() -> None:
    async def run() -> None:
        store = MemoryStore(100, 10.0, lambda: 0.0, max_bytes=2000)
        for name in "abc":
            await store.put("alice", stored(name))
        for name in "defghij":
            await store.put("mallory", stored(name, "x" * 300))
        assert await ids(store, "alice", "abc") == "abc"
        assert await ids(store, "mallory", "defghij") in ("ij", "j")
        await store.put("mallory", stored("k", "x" * 3000))
        assert (await ids(store, "alice", "abc"), await ids(store, "mallory", "ijk")) == ("abc", "")

    asyncio.run(run())


def test_a_key_has_a_bounded_number_of_bytes_in_redis(redis_server: Any) -> None:
    async def run() -> None:
        store = RedisStore(redis_server.url, "bytes", 100, 10.0, max_bytes=2000)
        await store.put("alice", stored("a"))
        for name in "bcdefg":
            await store.put("mallory", stored(name, "x" * 300))
        kept = await ids(store, "mallory", "bcdefg")
        assert kept in ("fg", "g") and await ids(store, "alice", "a") == "a"
        for name in kept:
            assert await store.delete("mallory", name)
        for name in "hi":  # what was deleted does not count, nor what is stored again
            for _ in range(5):
                await store.put("mallory", stored(name, "x" * 300))
        assert await ids(store, "mallory", "hi") == "hi"
        for own in (":all", ":bytes", ":bytes:all"):  # the store's own entries are no responses
            assert await store.get("mallory", own) is None and not await store.delete("mallory", own)
        for name in "jklmnopqr":
            await store.put("mallory", stored(name, "x" * 300))
        assert await ids(store, "mallory", "hijklmnopqr") in ("qr", "r")
        await store.close()

    asyncio.run(run())


@pytest.mark.parametrize("metadata", [{str(i): "v" for i in range(17)}, {"k" * 65: "v"}, {"k": "v" * 513}])
def test_metadata_has_the_limits_of_openai(stateful: Application, serving: Serving, metadata: dict[str, str]) -> None:
    with serving(stateful) as url, client(url) as one, pytest.raises(openai.BadRequestError, match="metadata"):
        one.responses.create(model="demo", input="hello", metadata=metadata)


def test_the_store_in_redis(redis_server: Any) -> None:
    client: Any = redis.Redis.from_url(redis_server.url)

    def expire() -> None:
        keys = client.keys("pdserve:responses:*")
        assert keys and all(0 < client.ttl(key) <= 10 for key in keys)
        client.delete(*keys)

    check_store(RedisStore(redis_server.url, "demo", 2, 10.0), expire)


def test_what_is_no_response_counts_as_missing(redis_server: Any) -> None:
    async def found(value: bytes) -> StoredResponse | None:
        store = RedisStore(redis_server.url, "demo", 2, 10.0)
        with closing(redis.Redis.from_url(redis_server.url)) as client:
            client.set("pdserve:responses:{demo/garbled}:one", value)
        try:
            return await store.get("garbled", "one")
        finally:
            await store.close()

    for value in (
        b"",
        b"no JSON",
        b"\xff",
        b"[]",
        b'{"response": {}}',
        b'{"response": [], "messages": []}',
        b"[" * 10**5,
    ):
        assert asyncio.run(found(value)) is None
    later = b'{"response": {"id": "one"}, "messages": [], "of_a_later_version": 1}'
    assert asyncio.run(found(later)) == StoredResponse({"id": "one"}, [])


def test_a_redis_that_does_not_answer_and_invalid_settings() -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        asyncio.run(RedisStore("redis://127.0.0.1:1/0", "demo", 2, 10.0).get("key", "id"))
    with pytest.raises(SetupError, match="must be memory, or the URL of a Redis"):
        open_store(RouterConfig(response_store="disk"))
    with pytest.raises(ValueError, match="not shared by --workers"):
        RouterConfig(response_store="memory", workers=2)


def test_a_long_conversation_is_read_written_and_rendered_in_threads(
    stateful: Application, make_client: Any, backend: ScriptedBackend, threads_of: Callable[..., list[threading.Thread]]
) -> None:
    """The client's event loop, which is also the server's, runs in this thread. The second body is short."""
    assert backend.info is not None
    backend.info = replace(backend.info, max_model_len=100_000, common_model_len=100_000)
    backend.generates([5])
    watched = [
        (response_store, "_encode"),
        (response_store, "_decode"),
        (Tokenizer, "encode"),
        (output, "conversation"),
    ]
    threads = [threads_of(*one) for one in watched]
    one, headers = make_client(stateful), {"Authorization": "Bearer one"}
    first = one.post("/v1/responses", {"input": "a" * 40_000, "max_output_tokens": 1}, headers=headers).json()
    body = {"input": "more", "previous_response_id": first["id"], "max_output_tokens": 1}
    assert one.post("/v1/responses", body, headers=headers).status_code == 200
    assert len(backend.requests[1].prompt) > len(backend.requests[0].prompt)
    assert all(threads) and all(threading.current_thread() not in one for one in threads)

"""Admission over HTTP: limits of keys, and the queue while the maximum number of requests is running."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from starlette.types import Message

from pdserve.config import RouterConfig
from pdserve.errors import Overloaded
from pdserve.router.api.streaming import ClientConnection
from pdserve.router.backend import ServedAdapter
from pdserve.router.instances.fleet import Fleet
from pdserve.router.limits.key_file import ApiKey
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.admission import AdmissionController
from pdserve.router.web.application import Application
from pdserve.router.web.parse_queue import ParseQueue

if TYPE_CHECKING:
    from tests.router.conftest import Client, ScriptedBackend

PROMPT: dict[str, Any] = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 20}


def sample(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
def keys_file(tmp_path: Path) -> str:
    path = tmp_path / "keys.toml"
    path.write_text(
        '[alice]\nkey = "a"\nrequests = "3/h"\ntokens = "50/h"\n[bob]\nkey = "b"\nweight = 3\n'
        '[carol]\nkey = "c"\nconcurrency = 2\n'
    )
    return str(path)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_embeddings_have_the_salt_of_their_key(
    make_app: Callable[..., Application],
    make_client: type[Client],
    tokenizer: Tokenizer,
    keys_file: str,
    backend: ScriptedBackend,
    path: str,
    body: dict[str, Any],
) -> None:
    client = make_client(make_app(tokenizer, keys_file=keys_file))
    for key in "bc":
        assert client.post(path, body, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    salts = {request.salt for request in backend.requests}
    assert len(salts) == 2 and "" not in salts


def test_a_key_sees_the_adapters_that_are_declared_for_it(
    make_app: Callable[..., Application],
    make_client: type[Client],
    tokenizer: Tokenizer,
    tmp_path: Path,
    backend: ScriptedBackend,
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[all]\nkey = "a"\n[some]\nkey = "b"\nadapters = ["sql"]\n[none]\nkey = "c"\nadapters = []\n')
    assert backend.info is not None
    adapters = {name: ServedAdapter(name.encode().ljust(16), name) for name in ("sql", "chat")}
    backend.info = replace(backend.info, adapters=adapters)
    client = make_client(make_app(tokenizer, keys_file=str(keys)))
    for key, visible in (("a", {"sql", "chat"}), ("b", {"sql"}), ("c", set[str]())):
        headers = {"Authorization": f"Bearer {key}"}
        listed = client.request("GET", "/v1/models", headers=headers).json()["data"]
        assert {card["id"] for card in listed} == {"demo", *visible}
        for name in ("sql", "chat"):
            status = 200 if name in visible else 404
            assert client.request("GET", f"/v1/models/{name}", headers=headers).status_code == status
            assert client.post("/tokenize", {"model": name, "prompt": "a"}, headers=headers).status_code == status
            answer = client.post("/v1/completions", {**PROMPT, "model": name}, headers=headers)
            assert answer.status_code == status
            assert status == 200 or answer.json()["error"]["code"] == "model_not_found"
    assert [request.adapter_name for request in backend.requests] == ["sql", "chat", "sql"]


def test_a_refused_request_counts_and_one_too_many_is_not_read(
    make_app: Callable[..., Application], make_client: type[Client], tokenizer: Tokenizer, keys_file: str
) -> None:
    client = make_client(make_app(tokenizer, lambda: 1000.0, keys_file=keys_file))

    def post(**body: Any) -> httpx.Response:
        return client.post(
            "/v1/completions", {**PROMPT, "max_tokens": 1, **body}, headers={"Authorization": "Bearer a"}
        )

    left = []
    for wrong in ({"temperature": "hot"}, {"model": "other"}, {"n": 0}):
        refused = post(**wrong)
        assert refused.status_code in (400, 404)
        left.append(refused.headers["x-ratelimit-remaining-requests"])
    assert left == ["2", "1", "0"]
    for body in ({}, {"temperature": "hot"}):
        assert (one_too_many := post(**body)).status_code == 429
        assert one_too_many.json()["error"]["code"] == "rate_limit_requests" and one_too_many.headers["retry-after"]
        assert one_too_many.headers["x-ratelimit-reset-requests"] == refused.headers["x-ratelimit-reset-requests"]


def test_what_a_full_router_does_not_read_costs_nothing(
    make_app: Callable[..., Application],
    make_client: type[Client],
    tokenizer: Tokenizer,
    keys_file: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = make_client(make_app(tokenizer, lambda: 1000.0, keys_file=keys_file))

    def refuse(*_: object) -> None:
        raise Overloaded("full", kind="max_requests", retry_after_s=1)

    monkeypatch.setattr(ParseQueue, "run", refuse)
    for _ in range(4):
        refused = client.post("/v1/completions", PROMPT, headers={"Authorization": "Bearer a"})
        assert refused.json()["error"]["code"] == "max_requests"
        assert refused.headers["x-ratelimit-remaining-requests"] == "3"


def test_uploads_and_batches_count_as_requests(
    make_app: Callable[..., Application],
    make_client: type[Client],
    tokenizer: Tokenizer,
    keys_file: str,
    tmp_path: Path,
) -> None:
    client = make_client(make_app(tokenizer, lambda: 1000.0, keys_file=keys_file, batch_folder=str(tmp_path)))

    def send(path: str, key: str = "a") -> tuple[int, str | None]:
        body: dict[str, Any] = {
            "json": {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}
        }
        if path == "/v1/files":
            body = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}}
        answer = client.request("POST", path, headers={"Authorization": f"Bearer {key}"}, **body)
        return answer.status_code, answer.headers.get("x-ratelimit-remaining-requests")

    assert [send("/v1/files"), send("/v1/batches"), send("/v1/files")] == [(200, "2"), (404, "1"), (200, "0")]
    assert send("/v1/files") == send("/v1/batches") == (429, "0")
    assert [send("/v1/files", key) for key in "bc"] == [(200, None)] * 2, "these have no such limit"


def test_limits_of_keys(
    make_app: Callable[..., Application],
    make_client: type[Client],
    tokenizer: Tokenizer,
    keys_file: str,
    metrics: Metrics,
    backend: ScriptedBackend,
) -> None:
    # The clock stands still, so nothing comes back meanwhile.
    client = make_client(make_app(tokenizer, lambda: 1000.0, keys_file=keys_file, api_key="k"))

    def post(key: str, **body: Any) -> httpx.Response:
        return client.post("/v1/completions", {**PROMPT, **body}, headers={"Authorization": f"Bearer {key}"})

    first = post("a")
    used = first.json()["usage"]["total_tokens"]
    assert first.status_code == 200 and first.headers["x-ratelimit-limit-requests"] == "3"
    assert first.headers["x-ratelimit-remaining-tokens"] == str(50 - 23), "the most that it may use is taken at first"
    second = post("a", max_tokens=50)
    assert (second.status_code, second.json()["error"]["code"]) == (429, "rate_limit_tokens")
    assert second.json()["error"]["type"] == "rate_limit_error"
    assert int(second.headers["retry-after"]) == used * 3600 / 50, "the time until the bucket is full"
    assert second.headers["x-ratelimit-remaining-tokens"] == str(50 - used), "the unused tokens were returned"
    assert [post("a", max_tokens=1).status_code for _ in range(3)] == [200, 200, 429]
    refused = post("a", max_tokens=1)
    assert refused.json()["error"]["code"] == "rate_limit_requests" and 0 < int(refused.headers["retry-after"]) <= 1200
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    too_many = post("c", n=3)
    assert (too_many.status_code, too_many.json()["error"]["code"]) == (400, "too_many_choices")
    for key in ("b", "c", "k"):
        other = post(key, n=2)
        assert other.status_code == 200 and not [name for name in other.headers if name.startswith("x-ratelimit")]
    assert sample(metrics, "pdserve_key_refusals_total", key="alice", reason="rate_limit_requests") == 2
    assert sample(metrics, "pdserve_key_tokens_total", key="alice") == used + 2 * 4 <= 50
    assert sample(metrics, "pdserve_key_requests_under_way", key="key-1") == 0
    assert sample(metrics, "pdserve_refusals_total", reason="rate_limit_tokens") == 1
    assert len(backend.requests) == 3 + 3 * 2, "refused requests do not reach the backend"


def test_beams_count_as_choices(
    make_app: Callable[..., Application],
    make_client: type[Client],
    tokenizer: Tokenizer,
    keys_file: str,
    metrics: Metrics,
) -> None:
    """Instances compute each of them, whatever number of answers is asked for."""
    client = make_client(make_app(tokenizer, lambda: 1000.0, keys_file=keys_file))

    def search(key: str, width: int, **body: Any) -> httpx.Response:
        fields = {**PROMPT, "use_beam_search": True, "beam_width": width, **body}
        return client.post("/v1/completions", fields, headers={"Authorization": f"Bearer {key}"})

    refused = search("c", 3)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "too_many_choices")
    assert search("c", 2).status_code == 200
    first = search("a", 2)
    assert first.headers["x-ratelimit-remaining-tokens"] == str(50 - 3 - 2 * 20), "the most that it may use"
    assert sample(metrics, "pdserve_key_tokens_total", key="alice") == 3 + 2, "a token of each beam"
    assert search("a", 3).json()["error"]["code"] == "rate_limit_tokens"


def test_embeddings_hold_no_place_for_a_client_that_has_left(app: Application, metrics: Metrics) -> None:
    """It may have left while the texts were parsed."""
    client = ClientConnection()
    client.disconnect()
    body = [{"type": "http.request", "body": b'{"input": "a"}'}]

    async def receive() -> Message:
        return body.pop()

    async def send(message: Message) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": "/v1/embeddings", "query_string": b"", "headers": []}
    asyncio.run(app({**scope, "state": {"client": client}}, receive, send))
    assert sample(metrics, "pdserve_key_requests_under_way", key="anonymous") == 0


class Callers:
    """Concurrent requests of several keys on one event loop."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self.tasks: list[asyncio.Task[tuple[int, str]]] = []

    def call(self, key: str, name: str, **body: Any) -> asyncio.Task[tuple[int, str]]:
        self.tasks.append(asyncio.create_task(self._call(key, name, {**PROMPT, **body})))
        return self.tasks[-1]

    async def _call(self, key: str, name: str, body: dict[str, Any]) -> tuple[int, str]:
        """Return status and error code. Cancelling the task disconnects the client."""
        client, status, text = ClientConnection(), 0, b""

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": json.dumps(body).encode()}

        async def send(message: Any) -> None:
            nonlocal status, text
            status, text = message.get("status", status), text + message.get("body", b"")

        headers = [(b"authorization", f"Bearer {key}".encode()), (b"x-request-id", name.encode())]
        request = {"method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        scope = {"type": "http", **request, "state": {"client": client}}
        serving = asyncio.create_task(self._app({**scope, "app": self._app}, receive, send))
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            client.disconnect()
            await serving
            raise
        return status, json.loads(text).get("error", {}).get("code", "")


@asynccontextmanager
async def callers(app: Application) -> AsyncIterator[Callers]:
    made = Callers(app)
    try:
        yield made
    finally:
        for task in made.tasks:
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(600):
        while not condition():
            await asyncio.sleep(0.001)


def test_queued_requests_are_admitted_in_fair_order(
    make_app: Callable[..., Application],
    tokenizer: Tokenizer,
    keys_file: str,
    metrics: Metrics,
    backend: ScriptedBackend,
) -> None:
    app = make_app(tokenizer, keys_file=keys_file, api_key="k", max_requests=3, max_queue=8)
    backend.generates([5], finish_reason=None, hang=True)

    def waiting(key: str) -> int:
        return int(sample(metrics, "pdserve_key_requests_waiting", key=key))

    def order() -> list[str]:
        return [request.request_id for request in backend.requests]

    async def waits(key: str, number: int) -> None:
        await until(lambda: waiting(key) == number)

    async def scenario() -> None:
        async with asyncio.timeout(600), callers(app) as clients:
            running = [clients.call("k", f"k{i}") for i in range(2)]
            clients.call("b", "first")  # a key that runs nothing need not wait
            await until(lambda: len(backend.requests) == 3)
            for i in range(5):
                clients.call("k", f"greedy{i}")
                await waits("key-1", i + 1)
            several = clients.call("b", "several", n=2)
            await waits("bob", 1)
            leaving = clients.call("b", "leaving")
            await waits("bob", 2)
            leaving.cancel()
            await waits("bob", 1)
            for i in range(2):
                clients.call("b", f"b{i}")
                await waits("bob", i + 2)
            # The queue is full with eight: the next request of bob displaces the last one of the greedy key.
            clients.call("b", "b2")
            assert await clients.tasks[7] == (429, "max_requests") and "greedy4" not in order()
            assert waiting("key-1") == 4 and waiting("bob") == 4
            running[0].cancel()
            await until(lambda: sample(metrics, "pdserve_key_requests_under_way", key="key-1") == 1)
            assert len(order()) == 3, "several needs two places and is not overtaken"
            running[1].cancel()
            await until(lambda: len(order()) >= 5)  # more, since the other key runs nothing now
            assert order()[3:5] == ["several-0", "several-1"]
            several.cancel()
            while waiting("key-1") + waiting("bob"):
                for task, name in zip(clients.tasks, NAMES, strict=True):
                    if name in order():
                        task.cancel()
                await asyncio.sleep(0.001)
        assert not waiting("key-1") and not waiting("bob")

    NAMES = [
        "k0",
        "k1",
        "first",
        "greedy0",
        "greedy1",
        "greedy2",
        "greedy3",
        "greedy4",
        "several",
        "leaving",
        "b0",
        "b1",
        "b2",
    ]
    asyncio.run(scenario())
    later = order()[5:]
    assert sorted(later) == ["b0", "b1", "b2", "greedy0", "greedy1", "greedy2", "greedy3"]
    assert {"b0", "b1", "b2"} <= set(later[:5]), "their key has three times the weight"
    for key in ("key-1", "bob"):
        assert sample(metrics, "pdserve_key_requests_under_way", key=key) == 0


def test_longer_outputs_lower_a_keys_share(
    make_app: Callable[..., Application],
    tokenizer: Tokenizer,
    keys_file: str,
    metrics: Metrics,
    backend: ScriptedBackend,
) -> None:
    app = make_app(tokenizer, keys_file=keys_file, api_key="k", max_requests=4)

    async def scenario() -> None:
        async with asyncio.timeout(600), callers(app) as clients:
            backend.generates([5], finish_reason=None, hang=True)
            clients.call("k", "holder-of-k")  # a key that runs nothing would not wait
            clients.call("c", "holder-of-c")
            await until(lambda: len(backend.requests) == 2)
            backend.generates([5] * 50)
            assert await clients.call("k", "short", max_tokens=50) == (200, "")
            backend.generates([5])
            assert await clients.call("c", "longer", prompt=[5] * 20) == (200, "")
            backend.generates([5], finish_reason=None, hang=True)
            holder, _ = clients.call("b", "first"), clients.call("b", "second")
            await until(lambda: len(backend.requests) == 6)
            clients.call("k", "next-of-k")
            await until(lambda: waiting() == ["key-1"])
            clients.call("c", "next-of-c")
            await until(lambda: len(waiting()) == 2)
            holder.cancel()
            await until(lambda: len(backend.requests) == 7)

    def waiting() -> list[str]:
        return [key for key in ("key-1", "carol") if sample(metrics, "pdserve_key_requests_waiting", key=key)]

    asyncio.run(scenario())
    assert backend.requests[-1].request_id == "next-of-c"


def test_within_a_key_the_lowest_priority_goes_first(
    make_app: Callable[..., Application], tokenizer: Tokenizer, metrics: Metrics, backend: ScriptedBackend
) -> None:
    app = make_app(tokenizer, max_requests=1)
    assert backend.info is not None
    backend.info = replace(backend.info, supports_priorities=True)
    backend.generates([5], finish_reason=None, hang=True)

    async def scenario() -> None:
        async with asyncio.timeout(600), callers(app) as clients:
            running = clients.call("", "holder")
            await until(lambda: len(backend.requests) == 1)
            for number, priority in enumerate((2, 0, -1, 0), 1):
                clients.call("", f"{number}-of-{priority}", priority=priority)
                await until(
                    lambda: sample(metrics, "pdserve_key_requests_waiting", key="anonymous") == len(clients.tasks) - 1
                )
            while waiting := len(clients.tasks) - len(backend.requests):
                running.cancel()
                await until(lambda waiting=waiting: len(clients.tasks) - len(backend.requests) < waiting)  # type: ignore[misc]  # a lambda with a default
                running = clients.tasks[int(backend.requests[-1].request_id[0])]

    asyncio.run(scenario())
    assert [request.request_id for request in backend.requests] == ["holder", "3-of--1", "2-of-0", "4-of-0", "1-of-2"]


def test_keys_share_no_kv_after_a_reset_either() -> None:
    keys = [ApiKey(name, name.encode(), kv_salt=name * 8) for name in ("a", "b")]
    config = RouterConfig(model="model")
    fleet = Fleet("router", "model", 1e9, lambda: 0.0)
    admission = AdmissionController(keys, config, Metrics(fleet), lambda: 0.0)
    salts = [*admission.kv_salts.values()]
    for epoch in (1000, 1001):
        admission.begin_epoch(epoch)
        salts += admission.kv_salts.values()
    assert len(set(salts)) == len(salts) == 9

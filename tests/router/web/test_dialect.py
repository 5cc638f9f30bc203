"""/v1/completions and /v1/chat/completions: whole answers, content types and large bodies."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.application import Application
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.router.conftest import Client, ScriptedBackend

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "demo", "prompt": "hello"}
CHATTING: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}


def test_a_completion(client: Client, backend: ScriptedBackend, tokenizer: Tokenizer) -> None:
    hello = len(tokenizer.encode("hello"))
    backend.script.cached_tokens = 1
    before = int(time.time())
    response = client.post(COMPLETIONS, HELLO)
    answer = response.json()
    assert response.status_code == 200
    assert answer.pop("id") == response.headers["x-request-id"]
    assert before <= answer.pop("created") <= time.time()
    assert answer == {
        "object": "text_completion",
        "model": "demo",
        "choices": [{"index": 0, "text": " Paris.", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": hello,
            "completion_tokens": 2,
            "total_tokens": hello + 2,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }
    assert [stream.cancelled for stream in backend.streams] == [False]


def test_a_chat(client: Client) -> None:
    answer = client.post(CHAT, CHATTING).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    message = {"role": "assistant", "content": " Paris.", "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]


def test_the_default_content_type_of_curl_is_accepted(client: Client) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    response = client.request("POST", COMPLETIONS, content=json.dumps(HELLO).encode(), headers=headers)
    assert response.json()["choices"][0]["text"] == " Paris."


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", "application/xml"])
def test_other_content_types_are_rejected(client: Client, kind: str) -> None:
    response = client.request("POST", COMPLETIONS, content=b"{}", headers={"Content-Type": kind})
    assert response.status_code == 415
    assert response.json()["error"]["message"] == "the body must be JSON, with Content-Type: application/json"


def test_compressed_bodies_are_rejected(client: Client) -> None:
    body = gzip.compress(json.dumps(HELLO).encode())
    for coding in ("gzip", "br, gzip", "x" * 5000):
        response = client.request("POST", COMPLETIONS, content=body, headers={"Content-Encoding": coding})
        assert response.status_code == 415 and len(response.content) < 500
        error = response.json()["error"]
        assert error["message"].startswith("the body must not be compressed: leave out Content-Encoding")
        assert (error["code"], error["param"]) == ("unsupported_content_encoding", "Content-Encoding")
    assert client.post(COMPLETIONS, HELLO, headers={"Content-Encoding": "identity"}).status_code == 200


def test_a_large_body_is_parsed_in_a_thread(client: Client, backend: ScriptedBackend, monkeypatch: Any) -> None:
    """The answer is the same as without the thread."""
    monkeypatch.setattr("pdserve.router.web.parse_queue.LARGE_BODY", 10)
    assert client.post(COMPLETIONS, HELLO).json()["choices"][0]["text"] == " Paris."
    assert client.post(COMPLETIONS, {**HELLO, "n": 0}).status_code == 400


PATHS = [(COMPLETIONS, HELLO), ("/v1/embeddings", {"model": "demo", "input": "hello"})]


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_requests_wait_for_the_first_instance(
    tokenizer: Tokenizer,
    make_app: Callable[..., Application],
    backend: ScriptedBackend,
    serving: Callable[..., AbstractContextManager[str]],
    caplog: pytest.LogCaptureFixture,
    path: str,
    body: dict[str, Any],
) -> None:
    app, info = make_app(tokenizer, no_instance_timeout=3600), backend.info
    backend.info = None
    budget = app._dialects[0].service.admission.body_budget
    size = len(httpx.Request("POST", "http://localhost", json=body).content)
    with serving(app) as url, ThreadPoolExecutor() as threads, httpx.Client(base_url=url, timeout=600) as client:
        assert client.post(path, json={**body, "model": 5}).status_code == 400  # at once
        with pytest.raises(httpx.ReadTimeout):
            client.post(path, json=body, timeout=0.5)
        asked = [threads.submit(client.post, path, json=body) for _ in range(2)]
        wait_until(lambda: budget.num_bytes == 2 * size, "two wait, and who has left does not")
        backend.info = info
        assert [one.result().status_code for one in asked] == [200, 200]
        assert budget.num_bytes == 0
    assert caplog.text.count("no instance has registered yet: requests wait for one for up to 3600 s") == 1


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_no_instance_in_time(
    tokenizer: Tokenizer,
    make_app: Callable[..., Application],
    make_client: type[Client],
    backend: ScriptedBackend,
    seconds: float,
) -> None:
    backend.info = None
    client = make_client(make_app(tokenizer, no_instance_timeout=seconds))
    response = client.post(COMPLETIONS, HELLO)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["message"] == "no instance has registered yet"

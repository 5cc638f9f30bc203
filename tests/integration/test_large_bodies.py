"""Large bodies are parsed beside the router, with the same answers."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.cli.deployment import Deployment
from pdserve.router.web.parse_queue import HUGE_BODY

TOOL = {"name": "weather", "description": "The weather", "parameters": {"type": "object", "properties": {}}}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
FUNCTIONS: Any = {"tools": [{"type": "function", "function": TOOL}]}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hello", "max_tokens": 4, "temperature": 0, "logprobs": 2, "n": 2, "seed": 1}),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 4, "temperature": 0, "stream": True, "odd": 1}),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 4, "guided_choice": ["one", "two"], "seed": 1}),
    ("/v1/completions", {"prompt": [[{}]]}),
    ("/v1/completions", {"prompt": "hello", "model": "other"}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, **FUNCTIONS, "stream": True}),
    ("/v1/chat/completions", {**CHAT, **FUNCTIONS, "tool_choice": "required", "max_tokens": 60}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 4, "temperature": 0, "metadata": {"a": "b"}}),
    ("/v1/responses", {"input": "hi", "previous_response_id": "resp_1"}),
    ("/v1/messages", CHAT),
    ("/v1/messages/count_tokens", {"messages": CHAT["messages"]}),
    ("/v1/embeddings", {"input": "hi"}),
    ("/tokenize", {"prompt": "hello", "return_token_strs": True}),
    ("/detokenize", {"tokens": [7, 8, 9]}),
    ("/v1/batches", {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}),
]
PADDING = b" " * HUGE_BODY
# What differs between two answers to the same body.
OWN = {"id", "created", "created_at", "completed_at", "item_id", "usage", "call_id", "obfuscation", "request_id"}


@pytest.fixture(scope="module")
def deployment(deploy: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    flags = ["--unknown-fields", "ignore", "--response-store", "memory"]
    flags += ["--batch-folder", str(tmp_path_factory.mktemp("batches"))]
    with deploy(model="demo", prefill=0, decode=0, both=1, flags={"router": flags}) as deployment:
        yield deployment


def ask(deployment: Deployment, path: str, body: dict[str, Any], padding: bytes = b"") -> tuple[int, list[Any]]:
    """Return the status and the parts of the answer, without what is its own."""
    content, headers = json.dumps(body).encode() + padding, {"Content-Type": "application/json"}
    reply = httpx.post(deployment.url + path, content=content, headers=headers, timeout=600)
    if "event-stream" not in reply.headers["content-type"]:
        return reply.status_code, [without_own(reply.json())]
    text = "".join(
        str(choice.get("text") or choice.get("delta", {}).get("content"))
        for line in reply.text.split("\n")
        if line.startswith("data: {")
        for choice in json.loads(line.removeprefix("data: "))["choices"]
    )
    return reply.status_code, [text]


def without_own(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: without_own(value) for name, value in part.items() if name not in OWN}
    return [without_own(one) for one in part] if isinstance(part, list) else part


def num_parsers(deployment: Deployment) -> int:
    """Return how many processes the router's own children have."""
    pid = deployment.child("router").pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(len(Path(f"/proc/{one}/task/{one}/children").read_text().split()) for one in children)


def test_a_large_body_has_the_answer_of_a_small_one(deployment: Deployment) -> None:
    small = [ask(deployment, path, body) for path, body in BODIES]
    before = num_parsers(deployment)
    for (path, body), expected in zip(BODIES, small, strict=True):
        assert ask(deployment, path, body, PADDING) == expected, (path, body)
    assert num_parsers(deployment) > before, "a process of the router's child has parsed them"
    assert {status for status, _ in small} == {200, 400, 404}
    counts = httpx.get(f"{deployment.url}/metrics").text
    assert "pdserve_ignored_fields_total 2.0" in counts, "the dropped field of the small and of the large body"


def test_a_kept_response_is_continued_by_a_large_body(deployment: Deployment) -> None:
    first = httpx.post(f"{deployment.url}/v1/responses", json={"input": "hi", "max_output_tokens": 4}, timeout=600)
    body = {"input": "and you?", "previous_response_id": first.json()["id"], "max_output_tokens": 4, "temperature": 0}
    status, small = ask(deployment, "/v1/responses", body)
    assert status == 200 and small[0]["store"]
    content, headers = json.dumps(body).encode() + PADDING, {"Content-Type": "application/json"}
    large = httpx.post(f"{deployment.url}/v1/responses", content=content, headers=headers, timeout=600).json()
    assert without_own(large) == small[0]
    items = httpx.get(f"{deployment.url}/v1/responses/{large['id']}/input_items?order=asc").json()["data"]
    assert [item["role"] for item in items] == ["user", "assistant", "user"]

"""Whatever a client sends, the answer is an answer or an error in words, never a mistake of ours.

The examples are the same in every run; `scripts/fuzz` draws new ones, and many more.
"""

import asyncio
import json
import os
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette

from pdserve.router.openapi import BODIES as SHAPES

EXAMPLES = int(os.environ.get("PDSERVE_FUZZ_EXAMPLES", "0"))
UNHEALTHY = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
BOUND = settings(max_examples=EXAMPLES or 40, derandomize=not EXAMPLES, deadline=None, suppress_health_check=UNHEALTHY)
HANGS_S = 600
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
MESSAGES: list[Any] = [
    {"role": "user", "content": "hello"},
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "x", "tool_call_id": "1"},
    {"role": "system", "content": "be brief"},
]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": MESSAGES[:1]},
    "/v1/responses": {"input": "hello"},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1, 2]},
    "/admin/instances/{instance_id}/role": {"role": "decode"},
}
# What each field may hold, and what is nearly that; any other JSON comes beside it.
LIKELY: dict[str, list[Any]] = {
    "prompt": ["", "hello", ["a", "b"], [1, 2], [[1], [2, 3]], [], [[]], [10**9], [-1]],
    "messages": [MESSAGES, MESSAGES[:2], [], [{}]],
    "input": ["hello", MESSAGES[:2], []],
    "tokens": [[], [1], [-1], [10**9]],
    "model": ["demo", "other"],
    "stop": ["", "a", ["a", ""], ["x"] * 20],
    "logit_bias": [{"1": 5}, {"x": 1}, {"1": 1000}],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"schema": {}}},
    ],
    "guided_regex": ["a+", "("],
    "guided_json": [{}, {"type": "integer"}, {"type": 7}, "{"],
    "guided_choice": [["a"], []],
    "tools": [[TOOL], [TOOL, TOOL], []],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "look"}}],
    "stream_options": [{"include_usage": True}, {}],
    "text": [{"format": {"type": "text"}}, {"format": {"type": "json_schema", "name": "n", "schema": {}}}],
    "role": ["prefill", "both", ""],
}
NUMBERS = st.integers(-2, 30) | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=8)
JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=5), one, max_size=3), max_leaves=6
)


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """A good body with a few fields in which anything may stand."""
    names = [field.alias or name for name, field in SHAPES[path].model_fields.items()]
    chosen = draw(st.lists(st.sampled_from(names), max_size=4, unique=True))
    return {**GOOD[path], **{name: draw(st.sampled_from(LIKELY.get(name, [1, True])) | JSON) for name in chosen}}


@pytest.fixture
def told(app: Starlette) -> Callable[[str, bytes], None]:
    """Posts a body and checks the answer: it comes, and an error says what was wrong, in OpenAI's format."""

    async def post(path: str, raw: bytes) -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        headers = {"Content-Type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://router", headers=headers) as http:
            return await asyncio.wait_for(http.post(path.format(instance_id="p0"), content=raw), HANGS_S)

    def tell(path: str, raw: bytes) -> None:
        response = asyncio.run(post(path, raw))
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            error = response.json()["error"]
            assert error["message"] and error["type"] and error["code"]
        assert "internal_error" not in response.text, response.text  # which may stand at the end of a stream

    return tell


@pytest.mark.parametrize("path", SHAPES)
@given(data=st.data())
@BOUND
def test_anything_in_any_field(told: Callable[[str, bytes], None], path: str, data: st.DataObject) -> None:
    told(path, json.dumps(data.draw(bodies(path))).encode())


@pytest.mark.parametrize("path", SHAPES)
@given(raw=st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
@BOUND
def test_any_bytes(told: Callable[[str, bytes], None], path: str, raw: bytes) -> None:
    told(path, raw)


def test_the_schema_describes_what_there_is(app: Starlette) -> None:
    """Every path that takes a body says its shape, and every reference leads somewhere."""

    async def get() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as http:
            return await http.get("/openapi.json")

    schema = asyncio.run(get()).json()
    assert schema["openapi"].startswith("3.1")
    shaped = {path for path, methods in schema["paths"].items() if "requestBody" in methods.get("post", {})}
    assert shaped == set(SHAPES)
    assert {"/v1/models", "/debug/requests/{request_id}"} <= schema["paths"].keys() and "/" not in schema["paths"]
    text = json.dumps(schema)
    references = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert references <= schema["components"]["schemas"].keys() and "CompletionBody" in references

"""Fuzzing: every body gets an answer or a client error in OpenAI's format, never a server error.

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

from pdserve.router.api.parsing import Body
from pdserve.router.api.schemas import (
    NO_OPS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    RoleBody,
    TokenizeBody,
)
from pdserve.router.dialects.messages.schemas import MessagesBody
from pdserve.router.dialects.responses.schemas import ResponseBody
from pdserve.router.web.application import Application
from tests.examples import examples

EXAMPLES = int(os.environ.get("PDSERVE_FUZZ_EXAMPLES", "0"))
SUPPRESSED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
FUZZ_SETTINGS = settings(
    max_examples=EXAMPLES or 40, derandomize=not EXAMPLES, deadline=None, suppress_health_check=SUPPRESSED
)
TIMEOUT_S = 600
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOL_CHOICES: list[Any] = [{"type": "any"}, {"type": []}, {}]  # of Anthropic's API
MESSAGES: list[Any] = [
    {"role": "user", "content": "hello"},
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "x", "tool_call_id": "1"},
    {"role": "system", "content": "be brief"},
]
MODELS: dict[str, type[Body]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponseBody,
    "/v1/messages": MessagesBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/admin/instances/{instance_id}/role": RoleBody,
}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": MESSAGES[:1]},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": MESSAGES[:2], "max_tokens": 4},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1, 2]},
    "/admin/instances/{instance_id}/role": {"role": "decode"},
}
# Valid and nearly valid values of each field; arbitrary JSON is drawn as well.
VALUES_OF: dict[str, list[Any]] = {
    "prompt": ["", "hello", ["a", "b"], [1, 2], [[1], [2, 3]], [], [[]], [10**9], [-1]],
    "messages": [MESSAGES, MESSAGES[:2], [], [{}]],
    "input": ["hello", MESSAGES[:2], []],
    "tokens": [[], [1], [-1], [10**9]],
    "model": ["demo", "other"],
    "system": ["be brief", [{"type": "text", "text": "a"}], [{}]],
    "thinking": [{"type": "disabled"}, {}],
    "stop_sequences": [["a"], [""]],
    "metadata": [{"user_id": "a"}, {"user_id": 1}],
    "stop": ["", "a", ["a", ""], ["x"] * 20],
    "allowed_token_ids": [[3], [], [10**9]],
    "bad_words": [["a"], [""], ["x"] * 500],
    "truncate_prompt_tokens": [1, 0, -1, -2],
    "chat_template": ["{{ 1 }}", ""],
    "chat_template_kwargs": [{}, {"messages": 1}],
    "reasoning_effort": ["low", "most"],
    "continue_final_message": [True],
    "logit_bias": [{"1": 5}, {"x": 1}, {"1": 1000}],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"schema": {}}},
    ],
    "guided_regex": ["a+", "("],
    "guided_json": [{}, {"type": "integer"}, {"type": 7}, "{"],
    "guided_choice": [["a"], []],
    "tools": [[TOOL], [TOOL, TOOL], [], [{"name": "look", "input_schema": {}}], [{}], [{"type": []}]],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "look"}}, *TOOL_CHOICES],
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
    """Draw a valid body with arbitrary values in a few fields."""
    names = [field.alias or name for name, field in MODELS[path].model_fields.items()]
    chosen = draw(st.lists(st.sampled_from(names), max_size=4, unique=True))
    return {**GOOD[path], **{name: draw(st.sampled_from(VALUES_OF.get(name, [1, True])) | JSON) for name in chosen}}


@pytest.fixture
def check_answer(app: Application) -> Callable[[str, bytes], None]:
    """check_answer(path, raw) posts a body; it must be answered in time, and an error must be a client error."""

    async def post(path: str, raw: bytes) -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        headers = {"Content-Type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as http:
            return await asyncio.wait_for(http.post(path.format(instance_id="p0"), content=raw), TIMEOUT_S)

    def check(path: str, raw: bytes) -> None:
        response = asyncio.run(post(path, raw))
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            error = response.json()["error"]
            assert error["message"] and error["type"] and (error.get("code") or path == "/v1/messages")
        assert "internal_error" not in response.text, response.text  # may also be the last event of a stream

    return check


@pytest.mark.parametrize("path", MODELS)
@given(data=st.data())
@FUZZ_SETTINGS
def test_anything_in_any_field(check_answer: Callable[[str, bytes], None], path: str, data: st.DataObject) -> None:
    check_answer(path, json.dumps(data.draw(bodies(path))).encode())


@pytest.mark.parametrize("path", MODELS)
@given(raw=st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
@FUZZ_SETTINGS
def test_any_bytes(check_answer: Callable[[str, bytes], None], path: str, raw: bytes) -> None:
    check_answer(path, raw)


FIELDS = [*CompletionBody.model_fields, *ChatBody.model_fields, *ResponseBody.model_fields, *MessagesBody.model_fields]
FIELDS += [*NO_OPS, "tokens", "typo"]
TEXTS = st.text(st.characters(), max_size=8)  # with halves of surrogate pairs
RAW_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.just("demo")
VALUES = st.recursive(
    RAW_SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "include_usage"]) | TEXTS, inner)
    ),
    max_leaves=8,
)
RAW_BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5) | VALUES
START = st.sampled_from(
    [{}, GOOD["/v1/completions"], GOOD["/v1/chat/completions"], {"tokens": [1]}, {"input": "hello"}]
)


@pytest.mark.parametrize("path", [path for path in MODELS if "{" not in path])
def test_arbitrary_fields_and_surrogates(client: Any, path: str) -> None:
    @settings(max_examples=examples(1.5), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(START, RAW_BODIES)
    def check(start: dict[str, object], body: object) -> None:
        whole = {**start, **body} if isinstance(body, dict) else body
        response = client.request("POST", path, content=json.dumps(whole).encode())
        assert response.status_code in (200, 400, 404), response.text
        if response.status_code != 200:
            assert response.json()["error"]["message"]

    check()

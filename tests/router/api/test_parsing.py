"""Request bodies: JSON, unknown and unsupported fields, and wrong types."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.router.api.parsing import NoOps
from pdserve.router.api.schemas import NO_OPS, ChatBody, CompletionBody

if TYPE_CHECKING:
    from tests.router.conftest import Client

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "demo", "prompt": "hello"}
CHATTING: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}
ExpectError = Callable[..., dict[str, Any]]


@pytest.mark.parametrize(
    ("path", "body", "no_ops"), [(COMPLETIONS, HELLO, CompletionBody.no_ops), (CHAT, CHATTING, ChatBody.no_ops)]
)
def test_unsupported_fields_are_accepted_only_without_effect(
    client: Client, expect_error: ExpectError, path: str, body: dict[str, Any], no_ops: NoOps
) -> None:
    accepted = {name: value for name, values in no_ops.items() for value in (None, *values)[-1:]}
    assert client.post(path, {**body, **accepted}).status_code == 200
    assert client.post(path, {**body, **dict.fromkeys(NO_OPS)}).status_code == 200
    for name in NO_OPS:
        error = expect_error(path, {**body, name: "something else"})
        assert error["message"].startswith(f"{name} is not supported; ")
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"length_penalty": 0.5}, "length_penalty needs use_beam_search: true"),
        ({"best_of": 2}, "best_of needs use_beam_search: true; to sample, ask for n choices and pick one yourself"),
        ({"request_id": "a"}, "request_id is not supported; send it in the X-Request-Id header"),
        ({"functions": [1]}, "functions is not supported; leave it out or send []"),
    ],
)
def test_the_error_says_what_to_send(expect_error: ExpectError, field: dict[str, Any], message: str) -> None:
    assert expect_error(COMPLETIONS, {**HELLO, **field})["message"] == message


def test_labels_have_no_effect(client: Client) -> None:
    labels = {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k", "store": False}
    assert client.post(COMPLETIONS, {**HELLO, **labels}).status_code == 200


@pytest.mark.parametrize(
    ("field", "param", "message"),
    [
        ({"temprature": 1}, "temprature", "unknown field 'temprature'; did you mean 'temperature'?"),
        ({"max_token": 1}, "max_token", "unknown field 'max_token'; did you mean 'max_tokens'?"),
        ({"qqq": 1}, "qqq", "unknown field 'qqq'"),
        (
            {"max_completion_tokens": 1},
            "max_completion_tokens",
            "unknown field 'max_completion_tokens'; did you mean 'max_tokens'?",
        ),
        ({"max_tokens": "5"}, "max_tokens", "max_tokens must be a valid integer, not a string"),
        ({"max_tokens": True}, "max_tokens", "max_tokens must be a valid integer, not a boolean"),
        ({"logprobs": True}, "logprobs", "logprobs must be a valid integer, not a boolean"),
        ({"stream": "yes"}, "stream", "stream must be a valid boolean, not a string"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "stream_options.include_obfuscation must be false, not true",
        ),
        (
            {"stream": True, "stream_options": {"usage": True}},
            "stream_options.usage",
            "unknown field 'stream_options.usage'",
        ),
    ],
)
def test_unknown_fields_and_wrong_types(
    expect_error: ExpectError, field: dict[str, Any], param: str, message: str
) -> None:
    error = expect_error(COMPLETIONS, {**HELLO, **field})
    assert (error["message"], error["param"]) == (message, param)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "the body is empty; it must be a JSON object"),
        (b"{", "the body is not valid JSON: "),
        (b"\xff{}", "the body is not valid JSON: "),
        (b"[1]", "the body must be a JSON object, not a list"),
        (b'{"prompt": "a", "temperature": NaN}', "the body holds NaN, which is not a number in JSON"),
        (b'{"prompt": "a", "top_p": -Infinity}', "the body holds -Infinity, which is not a number in JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', "the body holds '1e999', and a number must be finite"),
        (b'{"prompt": "a", "metadata": {"a": [-2e400]}}', "the body holds '-2e400', and a number must be finite"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "the body is not valid JSON: "),
        (b"[" * 9000 + b"]" * 9000, "the body is nested too deeply"),
    ],
)
def test_not_json(client: Client, raw: bytes, message: str) -> None:
    response = client.request("POST", COMPLETIONS, content=raw, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)


def test_long_client_text_is_cut_in_errors(client: Client) -> None:
    for body in ({"model": "m" * 5000, "prompt": "a"}, {"prompt": "a", "f" * 5000: 1}):
        assert len(client.post(COMPLETIONS, body).content) < 500


def test_long_names_of_template_variables_leave_no_trace(client: Client) -> None:
    before = len(re._cache)  # type: ignore[attr-defined]  # where a pattern of a client's would stay
    for i in range(9):
        body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {f"a{i}" + "a" * 10_000: 1}}
        response = client.post("/v1/chat/completions", body)
        assert response.status_code == 400 and len(response.content) < 500
    assert len(re._cache) < before + 9  # type: ignore[attr-defined]


def test_a_body_that_is_nested_too_deeply(client: Client) -> None:
    for depth in (300, 700, 900, 990, 3000):
        deep = '{"a":' * depth + "1" + "}" * depth
        for field in ("guided_json", "metadata"):
            raw = f'{{"prompt": "hello", "{field}": {deep}}}'.encode()
            response = client.request("POST", COMPLETIONS, content=raw)
            assert response.status_code in (200, 400), response.text


def test_half_a_surrogate_pair(client: Client, expect_error: ExpectError) -> None:
    error = expect_error(COMPLETIONS, {"prompt": "a", "\ud800": 1})
    assert error["message"] == "the body holds half of a surrogate pair, which is not a character"
    assert client.post(COMPLETIONS, {"prompt": "\U0001f600 as a pair of escapes"}).status_code == 200

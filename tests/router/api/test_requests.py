"""What a body means: every field, its default, and the sentence for every mistake, through the HTTP endpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.request import SamplingParams
from pdserve.router.api.schemas import NEUTRAL, ChatBody, CompletionBody, ResponseBody
from pdserve.router.backend import ModelInfo
from pdserve.router.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tests.router.conftest import Client, ScriptedBackend

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
HELLO = {"model": "demo", "prompt": "hello"}
CHATTING = {"model": "demo", "messages": MESSAGES}


def refusal(client: Client, path: str, body: object, status: int = 400) -> dict[str, Any]:
    response = client.post(path, body)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


# ---- what is asked of the backend -----------------------------------------------------------------------------


def test_defaults(client: Client, backend: ScriptedBackend, tokenizer: Tokenizer) -> None:
    assert client.post(COMPLETIONS, {"prompt": "hello"}).status_code == 200
    [request] = backend.requests
    assert request.prompt == tokenizer.encode("hello")
    assert request.sampling == SamplingParams(max_tokens=16, temperature=1.0, seed=request.sampling.seed)
    assert request.salt == ""
    assert request.received is not None


@pytest.mark.parametrize(
    ("body", "header", "session"),
    [
        ({}, "", ""),
        ({"user": "u"}, "", "u"),
        ({"user": "u", "prompt_cache_key": "k"}, "", "k"),
        ({"user": "u", "prompt_cache_key": "k"}, "h", "h"),
    ],
)
def test_the_session_is_the_most_explicit_one(
    client: Client, backend: ScriptedBackend, body: dict[str, Any], header: str, session: str
) -> None:
    client.post(COMPLETIONS, {"prompt": "hello", **body}, headers={"X-Session-Id": header} if header else {})
    assert backend.requests[0].session == session


def test_chat_may_fill_the_context(client: Client, backend: ScriptedBackend) -> None:
    client.post(CHAT, CHATTING)
    [request] = backend.requests
    assert request.sampling.max_tokens == 256 - len(request.prompt)


def test_completions_default_shrinks_to_what_is_left(client: Client, backend: ScriptedBackend) -> None:
    client.post(COMPLETIONS, {"prompt": [5] * 250})
    assert backend.requests[0].sampling.max_tokens == 6


def test_every_parameter_arrives(client: Client, backend: ScriptedBackend) -> None:
    sampling: dict[str, Any] = {
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 11,
        "stop_token_ids": [5, 6],
        "ignore_eos": True,
        "logprobs": 3,
        "frequency_penalty": 0.25,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"7": -100, "12": 0.5},
    }
    response = client.post(COMPLETIONS, {**HELLO, **sampling, "cache_salt": "tenant"})
    assert response.status_code == 200, response.text
    [request] = backend.requests
    assert request.sampling == SamplingParams(
        **{**sampling, "stop_token_ids": (5, 6), "logit_bias": {7: -100.0, 12: 0.5}}
    )
    assert request.salt == "tenant"


def test_a_priority_is_taken_where_instances_know_it(client: Client, backend: ScriptedBackend) -> None:
    assert client.post(COMPLETIONS, {**HELLO, "priority": 0}).status_code == 200
    refused = client.post(COMPLETIONS, {**HELLO, "priority": 1})
    assert refused.status_code == 400 and "--scheduling-policy priority" in refused.json()["error"]["message"]
    assert backend.info is not None
    backend.info = replace(backend.info, by_priority=True)
    assert client.post(COMPLETIONS, {**HELLO, "priority": -7}).status_code == 200
    assert [request.priority for request in backend.requests] == [0, -7]
    refused = client.post(COMPLETIONS, {**HELLO, "priority": 2**31})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"


def test_a_whole_number_is_a_temperature_and_minus_one_is_no_top_k(client: Client, backend: ScriptedBackend) -> None:
    assert client.post(COMPLETIONS, {**HELLO, "temperature": 0, "top_k": -1}).status_code == 200
    assert backend.requests[0].sampling.temperature == 0
    assert backend.requests[0].sampling.top_k == 0


def test_without_a_seed_each_request_draws_its_own(client: Client, backend: ScriptedBackend) -> None:
    for _ in range(3):
        client.post(COMPLETIONS, HELLO)
    assert len({request.sampling.seed for request in backend.requests}) == 3


@pytest.mark.parametrize("seed", [5, 2**63 - 1])
def test_each_choice_has_its_seed_and_id(client: Client, backend: ScriptedBackend, seed: int) -> None:
    body = {"prompt": ["hello", "world"], "n": 2, "seed": seed}
    answer = client.post(COMPLETIONS, body).json()
    seeds = [request.sampling.seed for request in backend.requests]
    assert seeds == [seed, (seed + 1) % 2**63] * 2, "a prompt gets the same seeds in a batch as alone"
    assert [request.request_id for request in backend.requests] == [f"{answer['id']}-{i}" for i in range(4)]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", ["hello"]),
        (["hello", "fox"], ["hello", "fox"]),
        ([7, 8], [[7, 8]]),
        ([[7, 8], [9]], [[7, 8], [9]]),
        (["hello", [9]], ["hello", [9]]),
    ],
)
def test_forms_of_a_prompt(
    client: Client, backend: ScriptedBackend, tokenizer: Tokenizer, prompt: object, expected: list[str | list[int]]
) -> None:
    assert client.post(COMPLETIONS, {"prompt": prompt}).status_code == 200
    ids = [tokenizer.encode(one) if isinstance(one, str) else one for one in expected]
    assert [request.prompt for request in backend.requests] == ids


def test_messages_are_rendered(client: Client, backend: ScriptedBackend, tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": "three", "refusal": None, "tool_calls": []},
        {"role": "user", "content": "four"},
    ]
    response = client.post(CHAT, {"messages": messages})
    assert response.status_code == 200, response.text
    expected = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "four"},
    ]
    assert backend.requests[0].prompt == tokenizer.render_chat(expected)


# ---- fields that are known but not supported ------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, HELLO), (CHAT, CHATTING)])
def test_unsupported_fields_pass_at_their_neutral_value_only(client: Client, path: str, body: dict[str, Any]) -> None:
    neutral = {name: right for name, values in NEUTRAL.items() for right in (None, *values)[-1:]}
    assert client.post(path, {**body, **neutral}).status_code == 200
    assert client.post(path, {**body, **dict.fromkeys(NEUTRAL)}).status_code == 200
    for name in NEUTRAL:
        error = refusal(client, path, {**body, name: "something else"})
        assert error["message"].startswith(f"{name} is not supported; ")
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"length_penalty": 0.5}, "length_penalty is not supported; leave it out or send 1"),
        ({"best_of": 2}, "best_of is not supported; ask for n choices and pick one yourself"),
        ({"request_id": "a"}, "request_id is not supported; send it in the X-Request-Id header"),
        ({"suffix": "."}, 'suffix is not supported; leave it out or send ""'),
        ({"store": True}, "store is not supported; leave it out or send false"),
    ],
)
def test_the_sentence_says_what_to_send(client: Client, field: dict[str, Any], message: str) -> None:
    assert refusal(client, COMPLETIONS, {**HELLO, **field})["message"] == message


def test_labels_have_no_effect(client: Client) -> None:
    labels = {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k", "store": False}
    assert client.post(COMPLETIONS, {**HELLO, **labels}).status_code == 200


def test_no_field_is_both_supported_and_unsupported() -> None:
    assert not set(NEUTRAL) & (set(CompletionBody.model_fields) | set(ChatBody.model_fields))


# ---- mistakes -------------------------------------------------------------------------------------------------


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
        ({"temperature": -1}, "temperature", "temperature must be a number from 0 to 100, not -1.0"),
        ({"top_p": 0}, "top_p", "top_p must be above 0 and at most 1, not 0.0"),
        ({"top_p": 1.5}, "top_p", "top_p must be above 0 and at most 1, not 1.5"),
        ({"top_k": -2}, "top_k", "top_k must be 0 (off) or a positive whole number, not -2"),
        ({"min_p": 2}, "min_p", "min_p must be from 0 to 1, not 2.0"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, not 0"),
        ({"max_tokens": -5}, "max_tokens", "max_tokens must be at least 1, not -5"),
        ({"max_tokens": "5"}, "max_tokens", "max_tokens must be a valid integer, not a string"),
        ({"max_tokens": True}, "max_tokens", "max_tokens must be a valid integer, not a boolean"),
        ({"min_tokens": 99}, "min_tokens", "min_tokens must be from 0 to max_tokens, not 99"),
        ({"seed": -1}, "seed", "seed must be from 0 to 2^63 - 1, not -1"),
        ({"seed": 2**63}, "seed", f"seed must be from 0 to 2^63 - 1, not {2**63}"),
        ({"n": 0}, "n", "n must be at least 1, not 0"),
        ({"n": 9}, "n", "9 choices are more than the 8 choices that one request may ask for"),
        ({"stop": ""}, "stop", "a stop string must have 1 to 256 characters"),
        ({"stop": ["x" * 257]}, "stop", "a stop string must have 1 to 256 characters"),
        ({"stop": ["x"] * 17}, "stop", "stop may hold at most 16 strings, not 17"),
        ({"stop": 5}, "stop", "stop must be a string or a list of strings"),
        (
            {"stop_token_ids": [999]},
            "stop_token_ids",
            "stop_token_ids holds the token id 999; this model knows 0 to 299",
        ),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids", "stop_token_ids must be at most 64 ids, not 65"),
        (
            {"cache_salt": ""},
            "cache_salt",
            "cache_salt must not be empty; leave it out to share the cache with everybody",
        ),
        ({"stream_options": {}}, "stream_options", "stream_options has a meaning only with stream: true"),
        (
            {"stream": True, "stream_options": {"usage": True}},
            "stream_options.usage",
            "unknown field 'stream_options.usage'",
        ),
        ({"presence_penalty": 2.5}, "presence_penalty", "presence_penalty must be a number from -2 to 2, not 2.5"),
        ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty must be above 0, at most 10, not 0.0"),
        ({"logprobs": 21}, "logprobs", "logprobs must be from 0 to 20, not 21"),
        ({"logprobs": True}, "logprobs", "logprobs must be a valid integer, not a boolean"),
        (
            {"logprobs": 0, "echo": True},
            "echo",
            "echo together with logprobs is not supported: there are none of the prompt; leave out one of the two",
        ),
        ({"logit_bias": {"1": 101}}, "logit_bias", "logit_bias must be of numbers from -100 to 100, not 101.0"),
        ({"logit_bias": {"300": 1}}, "logit_bias", "logit_bias holds the token id 300; this model knows 0 to 299"),
        (
            {"logit_bias": {"a": 1}},
            "logit_bias",
            "logit_bias maps token ids, such as \"276\", to numbers; 'a' is no token id",
        ),
        ({"stream": "yes"}, "stream", "stream must be a valid boolean, not a string"),
    ],
)
def test_parameters_out_of_range(client: Client, field: dict[str, Any], param: str, message: str) -> None:
    error = refusal(client, COMPLETIONS, {**HELLO, **field})
    assert (error["message"], error["param"]) == (message, param)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([""], "the prompt is empty"),
        (["a", ""], "the prompt is empty"),
        ([[1], []], "the prompt is empty"),
        (
            None,
            "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids",
        ),
        (
            [1, "a"],
            "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids",
        ),
        (
            [True],
            "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids",
        ),
        ([5, 300], "prompt holds the token id 300; this model knows 0 to 299"),
        ([-1], "prompt holds the token id -1; this model knows 0 to 299"),
        (["a"] * 9, "9 prompts with 1 choices each are more than the 8 choices that one request may ask for"),
        ("\ud800", "the body holds half of a surrogate pair, which is not a character"),
    ],
)
def test_prompts_that_cannot_be(client: Client, prompt: object, message: str) -> None:
    assert refusal(client, COMPLETIONS, {"prompt": prompt})["message"] == message


def test_a_missing_prompt(client: Client) -> None:
    assert refusal(client, COMPLETIONS, {"model": "demo"})["message"].startswith("prompt must be a string")


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (
            {"prompt": [5] * 300},
            "prompt",
            "this model's context is 256 tokens; the prompt has 300, which leaves no room for an answer",
        ),
        (
            {"prompt": [5] * 256},
            "prompt",
            "this model's context is 256 tokens; the prompt has 256, which leaves no room for an answer",
        ),
        (
            {"prompt": [5] * 200, "max_tokens": 100},
            "max_tokens",
            "this model's context is 256 tokens; you asked for 300 (200 in the prompt, 100 for the answer)",
        ),
        (
            {"prompt": [[5], [5] * 200], "max_tokens": 100},
            "max_tokens",
            "this model's context is 256 tokens; you asked for 300 (200 in the prompt, 100 for the answer)",
        ),
    ],
)
def test_longer_than_the_context(client: Client, body: dict[str, Any], param: str, message: str) -> None:
    error = refusal(client, COMPLETIONS, body)
    assert error["message"] == message
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


def test_up_to_the_context_is_fine(client: Client) -> None:
    assert client.post(COMPLETIONS, {"prompt": [5] * 200, "max_tokens": 56}).status_code == 200


def test_a_chat_longer_than_the_context(client: Client) -> None:
    error = refusal(client, CHAT, {"messages": [{"role": "user", "content": "漢" * 300}]})
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_another_model(client: Client, path: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        COMPLETIONS: HELLO,
        CHAT: CHATTING,
        "/tokenize": HELLO,
        "/detokenize": {"tokens": [5]},
    }
    error = refusal(client, path, {**bodies[path], "model": "gpt"}, status=404)
    assert error["message"] == "the model 'gpt' does not exist; this router serves 'demo'"
    assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must hold at least one message"),
        ("hello", "messages must be a valid list, not a string"),
        (["hello"], "messages[0] must be a valid dictionary or instance of Message, not a string"),
        ([{"content": "a"}], "messages[0].role is required"),
        (
            [{"role": "function", "content": "a"}],
            "messages[0].role must be system, developer, user, assistant or tool, not 'function'",
        ),
        ([{"role": "user"}], "messages[0].content must be a string or a list of text parts, not null"),
        (
            [{"role": "user", "content": 5}],
            "messages[0].content must be a string or a list of text parts, not a number",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            'messages[0].content[0] must be a text part, {"type": "text", "text": "…"}; \'image_url\' is not supported',
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}],
            "messages[0].content[0] has an unknown field 'b'",
        ),
        ([{"role": "user", "content": "a", "tone": "b"}], "unknown field 'messages[0].tone'"),
        (
            [{"role": "assistant", "content": "a", "tool_calls": [{}]}],
            "messages[0].tool_calls[0].id is required",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}],
            "the model's chat template refuses these messages: the system message must come first",
        ),
        ([{"role": "user", "content": "\udfff"}], "the body holds half of a surrogate pair, which is not a character"),
    ],
)
def test_messages_that_cannot_be(client: Client, messages: object, message: str) -> None:
    assert refusal(client, CHAT, {"messages": messages})["message"] == message


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"top_logprobs": 1}, "top_logprobs has a meaning only with logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be from 0 to 20, not 21"),
        ({"logprobs": 5}, "logprobs must be a valid boolean, not a number"),
    ],
)
def test_logprobs_of_chats_that_cannot_be(client: Client, field: dict[str, Any], message: str) -> None:
    assert refusal(client, CHAT, {**CHATTING, **field})["message"] == message


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("field", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json": {"type": "object"}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": json.dumps(SCHEMA)}, {"json": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"json_object": True, "regex": None}}, {"json": {"type": "object"}}),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"grammar": 'root ::= "a"'}),
    ],
)
def test_grammars_arrive(client: Client, backend: ScriptedBackend, field: dict[str, Any], grammar: object) -> None:
    for path, body in ((COMPLETIONS, HELLO), (CHAT, CHATTING)):
        assert client.post(path, {**body, **field}).status_code == 200
        sent = backend.requests[-1].sampling.grammar
        assert (json.loads(sent) if sent else None) == grammar


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "response_format and guided_regex exclude each other; send one of them",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format must be "),
        ({"response_format": {"type": "xml"}}, "response_format.type must be "),
        ({"guided_choice": []}, "guided_choice must be a list of strings, none of them empty"),
        ({"guided_choice": "a"}, "guided_choice must be a list of strings"),
        ({"guided_json": "{"}, "guided_json must be a JSON schema, as an object or as JSON in a string"),
        ({"guided_grammar": 5}, "guided_grammar must be a string in EBNF"),
        (
            {"structured_outputs": {"xml": 1}},
            "structured_outputs has no 'xml'; it takes json, regex, choice, grammar, json",
        ),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object must be true, or left out"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos and guided_regex contradict each other: "),
        ({"guided_regex": "a", "min_tokens": 1}, "min_tokens and guided_regex contradict each other: "),
        ({"guided_regex": "a" * 70000}, "the body is larger than"),
    ],
)
def test_grammars_that_cannot_be(client: Client, field: dict[str, Any], message: str) -> None:
    assert client.post(COMPLETIONS, {**HELLO, **field}).json()["error"]["message"].startswith(message)


def test_instances_that_can_follow_no_grammar(client: Client, backend: ScriptedBackend) -> None:
    assert backend.info is not None
    backend.info = replace(backend.info, grammars=False)
    error = refusal(client, CHAT, {**CHATTING, "response_format": {"type": "json_object"}})
    assert error["message"].startswith(
        "response_format needs xgrammar on all instances: pip install 'pdserve[structured]'"
    )


def test_chat_takes_one_limit(client: Client, backend: ScriptedBackend) -> None:
    error = refusal(client, CHAT, {**CHATTING, "max_tokens": 5, "max_completion_tokens": 6})
    assert error["message"].startswith("max_tokens (deprecated) and max_completion_tokens contradict each other")
    for limit in ({"max_tokens": 5}, {"max_completion_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": 5}):
        assert client.post(CHAT, {**CHATTING, **limit}).status_code == 200
    assert [request.sampling.max_tokens for request in backend.requests] == [5, 5, 5]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "the body is empty; it must be a JSON object"),
        (b"{", "the body is not valid JSON: "),
        (b"\xff{}", "the body is not valid JSON: "),
        (b"[1]", "the body must be a JSON object, not a list"),
        (b'{"prompt": "a", "temperature": NaN}', "the body holds NaN, which is not a number in JSON"),
        (b'{"prompt": "a", "top_p": -Infinity}', "the body holds -Infinity, which is not a number in JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature must be a finite number"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "the body is not valid JSON: "),
        (b"[" * 9000 + b"]" * 9000, "the body is nested too deeply"),
    ],
)
def test_not_json(client: Client, raw: bytes, message: str) -> None:
    response = client.request("POST", COMPLETIONS, content=raw, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)


def test_long_words_of_the_client_are_cut_in_errors(client: Client) -> None:
    for body in ({"model": "m" * 5000, "prompt": "a"}, {"prompt": "a", "f" * 5000: 1}):
        assert len(client.post(COMPLETIONS, body).content) < 500


def test_a_body_that_is_nested_too_deeply(client: Client) -> None:
    for depth in (300, 700, 900, 990, 3000):
        deep = '{"a":' * depth + "1" + "}" * depth
        for field in ("guided_json", "metadata"):
            raw = f'{{"prompt": "hello", "{field}": {deep}}}'.encode()
            response = client.request("POST", COMPLETIONS, content=raw)
            assert response.status_code in (200, 400), response.text


def test_half_a_surrogate_pair_anywhere(client: Client) -> None:
    error = refusal(client, COMPLETIONS, {"prompt": "a", "\ud800": 1})
    assert error["message"] == "the body holds half of a surrogate pair, which is not a character"
    assert client.post(COMPLETIONS, {"prompt": "\U0001f600 as a pair of escapes"}).status_code == 200


# ---- anything at all ------------------------------------------------------------------------------------------

FIELDS = [*CompletionBody.model_fields, *ChatBody.model_fields, *ResponseBody.model_fields, *NEUTRAL, "tokens", "typo"]
TEXTS = st.text(st.characters(), max_size=8)  # with halves of surrogate pairs
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.just("demo")
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "include_usage"]) | TEXTS, inner)
    ),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5) | VALUES
START = st.sampled_from([{}, HELLO, CHATTING, {"tokens": [1]}, {"input": "hello"}])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/responses", "/tokenize", "/detokenize"])
def test_no_body_is_a_server_error(client: Client, path: str) -> None:
    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(START, BODIES)
    def check(start: dict[str, object], body: object) -> None:
        whole = {**start, **body} if isinstance(body, dict) else body
        response = client.request("POST", path, content=json.dumps(whole).encode())
        assert response.status_code in (200, 400, 404), response.text
        if response.status_code != 200:
            assert response.json()["error"]["message"]

    check()


def test_no_instance_yet(client: Client, backend: ScriptedBackend) -> None:
    backend.info = None
    response = client.post(COMPLETIONS, HELLO)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["message"] == "no instance has registered yet"


def test_ids_past_the_tokenizer_but_within_the_model_are_fine(client: Client, backend: ScriptedBackend) -> None:
    backend.info = ModelInfo("demo", 256, 400, frozenset([0]), b"weights", frozenset([16]))
    assert client.post(COMPLETIONS, {"prompt": [399]}).status_code == 200

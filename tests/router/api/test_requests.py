"""Bodies as requests to the backend: every field, its default, and the error for every invalid value."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pdserve.request import SamplingParams
from pdserve.router.backend import ModelInfo
from pdserve.router.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tests.router.conftest import Client, ScriptedBackend

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "demo", "prompt": "hello"}
CHATTING: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}
Events = Callable[[httpx.Response], list[dict[str, Any]]]
ExpectError = Callable[..., dict[str, Any]]


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


def test_the_default_max_tokens_shrinks_to_the_rest_of_the_context(client: Client, backend: ScriptedBackend) -> None:
    client.post(COMPLETIONS, {"prompt": [5] * 250})
    assert backend.requests[0].sampling.max_tokens == 6


def test_every_parameter_arrives(client: Client, backend: ScriptedBackend, tokenizer: Tokenizer) -> None:
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
        "allowed_token_ids": [9, 3, 9],
        "bad_words": ["Paris", " x"],
    }
    response = client.post(COMPLETIONS, {**HELLO, **sampling, "cache_salt": "tenant"})
    assert response.status_code == 200, response.text
    [request] = backend.requests
    assert request.sampling == SamplingParams(
        **{**sampling, "stop_token_ids": (5, 6), "logit_bias": {7: -100.0, 12: 0.5}, "allowed_token_ids": (3, 9)}
        | {"bad_words": tuple(tuple(tokenizer.encode(word)) for word in ("Paris", " Paris", "x"))}
    )
    assert request.salt == "tenant"


def test_a_word_without_tokens_does_not_exclude_spaces(
    tokenizer_dir: Path,
    make_app: Callable[..., Any],
    make_client: type[Client],
    backend: ScriptedBackend,
    tmp_path: Path,
) -> None:
    shutil.copytree(tokenizer_dir, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    drops = {"normalizer": {"type": "Replace", "pattern": {"String": "\u200b"}, "content": ""}}
    file.write_text(json.dumps(json.loads(file.read_text()) | drops))
    client = make_client(make_app(Tokenizer(tmp_path)))
    assert client.post(COMPLETIONS, {**HELLO, "bad_words": ["\u200b"]}).status_code == 200
    assert backend.requests[0].sampling.bad_words == ()


def test_a_priority_needs_instances_that_schedule_by_it(client: Client, backend: ScriptedBackend) -> None:
    assert client.post(COMPLETIONS, {**HELLO, "priority": 0}).status_code == 200
    refused = client.post(COMPLETIONS, {**HELLO, "priority": 1})
    assert refused.status_code == 400 and "--scheduling-policy priority" in refused.json()["error"]["message"]
    assert backend.info is not None
    backend.info = replace(backend.info, supports_priorities=True)
    assert client.post(COMPLETIONS, {**HELLO, "priority": -7}).status_code == 200
    assert [request.priority for request in backend.requests] == [0, -7]
    refused = client.post(COMPLETIONS, {**HELLO, "priority": 2**31})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"


def test_an_integer_temperature_and_a_top_k_of_minus_one(client: Client, backend: ScriptedBackend) -> None:
    assert client.post(COMPLETIONS, {**HELLO, "temperature": 0, "top_k": -1}).status_code == 200
    assert backend.requests[0].sampling.temperature == 0
    assert backend.requests[0].sampling.top_k == 0


def test_seeds_below_zero(client: Client, backend: ScriptedBackend) -> None:
    for seed in (-1, -1, -2, -(2**63), 2**63 - 1):
        assert client.post(COMPLETIONS, {**HELLO, "seed": seed}).status_code == 200
    first, second, *others = (request.sampling.seed for request in backend.requests)
    assert first != second, "-1 is none, as in vLLM"
    assert others == [2**63 - 2, 0, 2**63 - 1]


def test_whole_numbers_may_be_written_with_a_fraction(client: Client, backend: ScriptedBackend) -> None:
    whole = {"max_tokens": 8.0, "n": 2.0, "top_k": 5.0, "seed": 3.0, "temperature": 1.0}
    assert client.post(COMPLETIONS, {**HELLO, **whole}).status_code == 200
    assert [(one.sampling.max_tokens, one.sampling.seed) for one in backend.requests] == [(8, 3), (8, 4)]
    refused = client.post(COMPLETIONS, {**HELLO, "max_tokens": 8.5}).json()["error"]
    assert refused["message"] == "max_tokens must be a valid integer, not 8.5"
    assert client.post(COMPLETIONS, {**HELLO, "max_tokens": 1e300}).status_code == 400


@pytest.mark.parametrize(("length", "kept"), [(3, 3), (1000, 40), (-1, 40), (1, 1)])
def test_a_prompt_is_cut_at_its_beginning(client: Client, backend: ScriptedBackend, length: int, kept: int) -> None:
    prompt = list(range(2, 42))
    body = {"prompt": prompt, "truncate_prompt_tokens": length, "max_tokens": 5}
    assert client.post(COMPLETIONS, body).json()["usage"]["prompt_tokens"] == kept
    assert list(backend.requests[0].prompt) == prompt[-kept:]


def test_what_fits_of_a_long_prompt(client: Client, backend: ScriptedBackend) -> None:
    body = {"prompt": [2] * 1000, "truncate_prompt_tokens": -1, "max_tokens": 5}
    assert client.post(COMPLETIONS, body).status_code == 200
    assert len(backend.requests[0].prompt) == 256 - 5


def test_a_suffix_needs_tokens_for_it(expect_error: ExpectError) -> None:
    for prompt in ("a", ""):
        error = expect_error(COMPLETIONS, {"prompt": prompt, "suffix": "b"})
        assert error["param"] == "suffix" and "filling in the middle" in error["message"]
    for field in ({"echo": True}, {"truncate_prompt_tokens": 3}):
        error = expect_error(COMPLETIONS, {"prompt": "a", "suffix": "b", **field})
        assert error["param"] == next(iter(field)) and "cannot be combined" in error["message"]


def test_the_echo_of_a_prompt_that_is_cut(client: Client, tokenizer: Tokenizer) -> None:
    body = {"prompt": "hello world", "truncate_prompt_tokens": 1, "echo": True}
    last = tokenizer.decode(tokenizer.encode("hello world")[-1:])
    assert client.post(COMPLETIONS, body).json()["choices"][0]["text"] == f"{last} Paris."


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<|start|>b")])
def test_special_tokens_in_the_answer(
    client: Client, backend: ScriptedBackend, tokenizer: Tokenizer, skip: bool, text: str
) -> None:
    backend.generates(tokenizer.encode("a<|start|>b"))
    for stream in (False, True):
        response = client.post(COMPLETIONS, {**HELLO, "skip_special_tokens": skip, "stream": stream})
        texts = re.findall(r'"text": ?"([^"]*)"', response.text)
        assert "".join(texts) == text


def test_a_missing_seed_is_random(client: Client, backend: ScriptedBackend) -> None:
    for _ in range(3):
        client.post(COMPLETIONS, HELLO)
    assert len({request.sampling.seed for request in backend.requests}) == 3


@pytest.mark.parametrize("seed", [5, 2**63 - 1])
def test_each_choice_has_its_seed_and_id(client: Client, backend: ScriptedBackend, seed: int) -> None:
    body = {"prompt": ["hello", "world"], "n": 2, "seed": seed}
    answer = client.post(COMPLETIONS, body).json()
    seeds = [request.sampling.seed for request in backend.requests]
    assert seeds == [seed, (seed + 1) % 2**63] * 2, "batching does not change the seeds of a prompt"
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


@pytest.mark.parametrize(
    ("field", "param", "message"),
    [
        ({"temperature": -1}, "temperature", "temperature must be from 0 to 100, not -1.0"),
        ({"top_p": 0}, "top_p", "top_p must be above 0 and at most 1, not 0.0"),
        ({"top_p": 1.5}, "top_p", "top_p must be above 0 and at most 1, not 1.5"),
        ({"top_k": -2}, "top_k", "top_k must be from 0 to 2^31 - 1, not -2"),
        ({"min_p": 2}, "min_p", "min_p must be from 0 to 1, not 2.0"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, not 0"),
        ({"max_tokens": -5}, "max_tokens", "max_tokens must be at least 1, not -5"),
        ({"min_tokens": 99}, "min_tokens", "min_tokens must be from 0 to max_tokens, not 99"),
        ({"seed": -(2**63) - 1}, "seed", f"seed must be from 0 to 2^63 - 1, not {-(2**63) - 1}"),
        ({"seed": 2**63}, "seed", f"seed must be from 0 to 2^63 - 1, not {2**63}"),
        ({"n": 0}, "n", "n must be at least 1, not 0"),
        ({"n": 9}, "n", "9 choices exceed the limit of 8 choices per request"),
        ({"stop": ""}, "stop", "a stop string must have 1 to 256 characters"),
        ({"stop": ["x" * 257]}, "stop", "a stop string must have 1 to 256 characters"),
        ({"stop": ["x"] * 17}, "stop", "stop may hold at most 16 strings, not 17"),
        ({"stop": 5}, "stop", "stop must be a string or a list of strings"),
        (
            {"stop_token_ids": [999]},
            "stop_token_ids",
            "stop_token_ids holds the token id 999; this model's ids are 0 to 299",
        ),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids", "stop_token_ids must be of at most 64 entries, not 65"),
        (
            {"cache_salt": ""},
            "cache_salt",
            "cache_salt must not be empty; leave it out to share the cache with all requests that have none",
        ),
        ({"stream_options": {}}, "stream_options", "stream_options requires stream: true"),
        ({"presence_penalty": 2.5}, "presence_penalty", "presence_penalty must be from -2 to 2, not 2.5"),
        ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty must be above 0 and at most 10, not 0.0"),
        ({"logprobs": 21}, "logprobs", "logprobs must be from 0 to 20, not 21"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "prompt_logprobs must be from 0 to 20, not 21"),
        (
            {"prompt_logprobs": 1, "stream": True},
            "prompt_logprobs",
            "prompt_logprobs are not part of a stream; leave out stream, or send echo and logprobs to /v1/completions",
        ),
        (
            {"logit_bias": {"1": 101}},
            "logit_bias",
            "logit_bias must be of at most 1024 entries with values from -100 to 100, not 101.0",
        ),
        ({"logit_bias": {"300": 1}}, "logit_bias", "logit_bias holds the token id 300; this model's ids are 0 to 299"),
        (
            {"truncate_prompt_tokens": 0},
            "truncate_prompt_tokens",
            "truncate_prompt_tokens must be at least 1, or -1 for all that fit, not 0",
        ),
        ({"bad_words": [" "]}, "bad_words", "bad_words must be strings that are not blank"),
        (
            {"bad_words": [chr(97 + i) + chr(97 + j) for i in range(17) for j in range(17)]},
            "bad_words",
            "bad_words must be at most 256 strings of at most 256 characters each",
        ),
        (
            {"bad_words": ["a" * 257]},
            "bad_words",
            "bad_words must be at most 256 strings of at most 256 characters each",
        ),
        ({"allowed_token_ids": []}, "allowed_token_ids", "allowed_token_ids is empty; leave it out to allow all"),
        (
            {"allowed_token_ids": [300]},
            "allowed_token_ids",
            "allowed_token_ids holds the token id 300; this model's ids are 0 to 299",
        ),
        (
            {"allowed_token_ids": [3], "guided_regex": "a"},
            "allowed_token_ids",
            "allowed_token_ids and structured output exclude each other; send one of the two",
        ),
        (
            {"logit_bias": {"a": 1}},
            "logit_bias",
            "logit_bias maps token ids, such as \"276\", to numbers; 'a' is not a token id",
        ),
        (
            {"logit_bias": {"7": 1, "07": 2}},
            "logit_bias",
            "logit_bias maps token ids, such as \"276\", to numbers; '07' is not a token id",
        ),
    ],
)
def test_parameters_out_of_range(expect_error: ExpectError, field: dict[str, Any], param: str, message: str) -> None:
    error = expect_error(COMPLETIONS, {**HELLO, **field})
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
        ([5, 300], "prompt holds the token id 300; this model's ids are 0 to 299"),
        ([-1], "prompt holds the token id -1; this model's ids are 0 to 299"),
        (["a"] * 9, "9 prompts with 1 choices each exceed the limit of 8 choices per request"),
        ("\ud800", "the body holds half of a surrogate pair, which is not a character"),
    ],
)
def test_invalid_prompts(expect_error: ExpectError, prompt: object, message: str) -> None:
    assert expect_error(COMPLETIONS, {"prompt": prompt})["message"] == message


def test_a_missing_prompt(expect_error: ExpectError) -> None:
    assert expect_error(COMPLETIONS, {"model": "demo"})["message"].startswith("prompt must be a string")


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
def test_longer_than_the_context(expect_error: ExpectError, body: dict[str, Any], param: str, message: str) -> None:
    error = expect_error(COMPLETIONS, body)
    assert error["message"] == message
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


def test_prompt_and_answer_may_fill_the_context(client: Client) -> None:
    assert client.post(COMPLETIONS, {"prompt": [5] * 200, "max_tokens": 56}).status_code == 200


def test_a_chat_longer_than_the_context(expect_error: ExpectError) -> None:
    error = expect_error(CHAT, {"messages": [{"role": "user", "content": "漢" * 300}]})
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_an_unknown_model(expect_error: ExpectError, path: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        COMPLETIONS: HELLO,
        CHAT: CHATTING,
        "/tokenize": HELLO,
        "/detokenize": {"tokens": [5]},
    }
    error = expect_error(path, {**bodies[path], "model": "gpt"}, status=404)
    assert error["message"] == "the model 'gpt' does not exist; this router serves 'demo'"
    assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"top_logprobs": 1}, "top_logprobs requires logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be from 0 to 20, not 21"),
        ({"logprobs": 5}, "logprobs must be a valid boolean, not a number"),
    ],
)
def test_invalid_logprobs_of_a_chat(expect_error: ExpectError, field: dict[str, Any], message: str) -> None:
    assert expect_error(CHAT, {**CHATTING, **field})["message"] == message


def test_a_chat_takes_either_name_of_max_tokens(
    client: Client, expect_error: ExpectError, backend: ScriptedBackend
) -> None:
    error = expect_error(CHAT, {**CHATTING, "max_tokens": 5, "max_completion_tokens": 6})
    assert error["message"].startswith("max_tokens (deprecated) and max_completion_tokens contradict each other")
    for limit in ({"max_tokens": 5}, {"max_completion_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": 5}):
        assert client.post(CHAT, {**CHATTING, **limit}).status_code == 200
    assert [request.sampling.max_tokens for request in backend.requests] == [5, 5, 5]


def test_a_chat_by_default_leaves_the_choice_among_all_instances(client: Client, backend: ScriptedBackend) -> None:
    assert backend.info is not None
    for common, length in (
        (200, 200),
        (2, 256),
    ):  # tokens for which every instance has room; the prompt has more than 2
        backend.info = replace(backend.info, common_model_len=common)
        assert client.post(CHAT, CHATTING).status_code == 200
        request = backend.requests[-1]
        assert len(request.prompt) + request.sampling.max_tokens == length
    assert client.post(CHAT, {**CHATTING, "max_tokens": 220}).status_code == 200


def test_ids_beyond_the_tokenizer_but_within_the_model_are_accepted(client: Client, backend: ScriptedBackend) -> None:
    backend.info = ModelInfo("demo", 256, 256, 400, frozenset([0]), b"digest", frozenset([16]))
    assert client.post(COMPLETIONS, {"prompt": [399]}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_echo(client: Client, events: Events, tokenizer: Tokenizer, stream: bool, text_of: Callable[..., str]) -> None:
    prompts = [tokenizer.encode("hello"), tokenizer.encode("world")]
    response = client.post(COMPLETIONS, {"prompt": prompts, "n": 2, "echo": True, "stream": stream})
    answers = events(response) if stream else [response.json()]
    assert [text_of(answers, i) for i in range(4)] == ["hello Paris."] * 2 + ["world Paris."] * 2


def test_bad_words_that_the_model_cannot_generate_are_left_out(
    client: Client, backend: ScriptedBackend, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer may know more tokens than the model has, and normalise a word to nothing."""
    assert backend.info is not None
    encode, last = tokenizer.encode, backend.info.vocab_size - 1

    def other(text: str, **options: Any) -> list[int]:
        return {"extra": [last + 1], " extra": [3, last + 1], "last": [last], "\u200b": []}.get(text) or (
            [] if "\u200b" in text else encode(text, **options)
        )

    monkeypatch.setattr(tokenizer, "encode", other)
    words = ["extra", "last", "\u200b"]
    assert client.post(COMPLETIONS, {"prompt": "hello", "bad_words": words}).status_code == 200
    assert backend.requests[0].sampling.bad_words == ((last,), tuple(encode(" last")))

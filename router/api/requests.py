"""Validates a parsed body against the served model and builds one `RoutedRequest` for each choice that it asks for.

Completions are parsed here, chats in `chat.py`.

A request begins as a draft: a `RoutedRequest` with what the HTTP request tells besides its body.
"""

import hashlib
import json
import random
import secrets
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from pdserve.errors import BadRequest, InvalidParameter, NotFound
from pdserve.keys import KEY_BYTES, prompt_keys
from pdserve.request import MAX_BAD_WORDS, SamplingParams, check_length
from pdserve.router.api.beams import HARMLESS, beam_settings, check_no_beam_settings
from pdserve.router.api.generation import Generation
from pdserve.router.api.grammars import FIELDS as GRAMMAR_FIELDS
from pdserve.router.api.grammars import parse_grammar
from pdserve.router.api.parsing import or_default, quote
from pdserve.router.api.schemas import (
    BODY_PARAMS,
    CompletionBody,
    SamplingBody,
    StreamOptions,
)
from pdserve.router.backend import ModelInfo
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.text.tokenizer import Tokenizer

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGPROBS_OF_ANSWER = 1 << 18  # the top tokens included: of all prompts with all choices, and so of whole outputs
MAX_PRIORITY = 2**31 - 1
DEFAULT_COMPLETION_TOKENS = 16
NO_STREAM_OPTIONS = StreamOptions()


def parse_completion(
    body: CompletionBody, draft: RoutedRequest, tokenizer: Tokenizer, info: ModelInfo, max_n: int
) -> Generation:
    """Parse a body of /v1/completions; it may ask for at most `max_n` choices.

    Raises:
        BadRequest: the served model cannot do what the body asks for.
        NotFound: the body names another model.
    """
    check_model(body.model, info.name)
    texts = prompt_forms(body.prompt, may_be_empty=bool(body.suffix))
    n = num_choices(body.n, len(texts), max_n)
    prompts = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in texts]
    for prompt in prompts:
        check_token_ids(prompt, info.vocab_size)
    if body.suffix:
        _check_suffix(body)
        prompts = [tokenizer.fill_in_middle(prompt, body.suffix) for prompt in prompts]
    prompts = [truncate(prompt, body.truncate_prompt_tokens, body.max_tokens or 1, info) for prompt in prompts]
    remaining = info.max_model_len - max(map(len, prompts))
    max_tokens, echo_only = body.max_tokens, bool(body.echo) and body.max_tokens == 0
    if max_tokens is None:
        max_tokens = max(1, min(DEFAULT_COMPLETION_TOKENS, remaining))
    max_tokens += echo_only
    sampling = sampling_params(body, max_tokens, body.logprobs, grammar_of(body, info), info, tokenizer)
    if body.echo and body.logprobs is not None:
        sampling = structs.replace(sampling, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    generation = build(body, draft, prompts, n, sampling, info, chat=False)
    if body.echo:
        is_whole = body.truncate_prompt_tokens is None
        pairs = zip(texts, prompts, strict=True)
        generation.echo = tuple(
            text if isinstance(text, str) and is_whole else tokenizer.decode(ids) for text, ids in pairs
        )
        generation.echo_only = echo_only
    return generation


def with_adapter(name: str | None, draft: RoutedRequest, info: ModelInfo) -> tuple[RoutedRequest, ModelInfo]:
    """Return the draft and the model of a request that may name an adapter: to what follows, this is the model's name."""
    if name is None or (adapter := info.adapters.get(name)) is None:
        return draft, info
    return structs.replace(draft, adapter=adapter.digest, adapter_name=name), replace(info, name=name)


def check_model(requested: str | None, served: str) -> None:
    """Raise NotFound unless the request names the served model or none."""
    if requested is not None and requested != served:
        message = f"the model {quote(requested)} does not exist; this router serves {served!r}"
        raise NotFound(message, kind="model_not_found", param="model")


def check_token_ids(ids: Collection[int], vocab_size: int, param: str = "prompt") -> None:
    """Raise BadRequest for the first id outside of the model's vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        token_id = next(one for one in ids if not 0 <= one < vocab_size)
        message = f"{param} holds the token id {token_id}; this model's ids are 0 to {vocab_size - 1}"
        raise BadRequest(message, kind="invalid_token_id", param=param)


def build(
    body: SamplingBody,
    draft: RoutedRequest,
    prompts: list[list[int]],
    n: int,
    sampling: SamplingParams,
    info: ModelInfo,
    chat: bool,
    multi_turn: bool = False,
) -> Generation:
    """Return what the body asks for, once its values have been checked. Raises BadRequest."""
    sampling.validate()
    if sampling.stop_token_ids:
        check_token_ids(sampling.stop_token_ids, info.vocab_size, "stop_token_ids")
    if info.classifies:
        message = f"{info.name} generates nothing, it classifies texts: use /classify, /score or /rerank"
        raise BadRequest(message, kind="not_generative", param="model")
    for prompt in prompts:
        check_length(len(prompt), sampling.max_tokens, info.max_model_len)
    if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
        _check_num_logprobs(prompts, n, sampling, is_whole=not body.stream)
    options = NO_STREAM_OPTIONS if body.stream_options is None else body.stream_options
    if body.stream_options is not None and not body.stream:
        raise InvalidParameter("stream_options", "stream_options requires stream: true")
    if body.cache_salt == "":
        message = "cache_salt must not be empty; leave it out to share the cache with all requests that have none"
        raise InvalidParameter("cache_salt", message)
    if body.priority:
        _check_priority(body.priority, info)
    draft = structs.replace(
        draft,
        priority=body.priority or 0,
        # The most explicit name of related requests.
        session=draft.session or body.session_id or body.prompt_cache_key or body.user or "",
        multi_turn=multi_turn and not draft.alone,
        leaves_nothing=draft.alone or body.store is False,
        whole=not body.stream and not body.stop,
    )
    return Generation(
        id=draft.request_id,
        chat=chat,
        model=info.name,
        prompts=prompts,
        requests=build_requests(draft, prompts, n, sampling, info, body.cache_salt or ""),
        stops=() if body.stop is None else _stop_strings(body.stop),
        include_stop=bool(body.include_stop_str_in_output),
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
        skip_special_tokens=body.skip_special_tokens is not False,
        logprobs=sampling.logprobs is not None,
        prompt_logprobs=body.prompt_logprobs,
        created=int(time.time()),
    )


# Fields of a body with sampling parameters → what reads their values: (value, grammar, model, tokenizer) → value. Only
# those that a body sets are read.
Read = Callable[[Any, str, ModelInfo, Tokenizer], object]


def sampling_params(
    body: SamplingBody,
    max_tokens: int,
    logprobs: int | None,
    grammar: str,
    info: ModelInfo,
    tokenizer: Tokenizer,
) -> SamplingParams:
    """Return the sampling parameters of a body, which `build` validates."""
    given, values = body.model_fields_set, dict[str, Any]()
    for name, read in FIELDS.items():
        if name in given and (value := getattr(body, name)) is not None:
            values[name] = value if read is None else read(value, grammar, info, tokenizer)
    seed = random.getrandbits(63) if body.seed is None or body.seed == -1 else body.seed
    seed += 2**63 if -(2**63) <= seed < 0 else 0
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, logprobs=logprobs, grammar=grammar, **values)
    if body.prompt_logprobs is not None and body.stream:
        message = (
            "prompt_logprobs are not part of a stream; leave out stream, or send echo and logprobs to /v1/completions"
        )
        raise InvalidParameter("prompt_logprobs", message)
    if body.use_beam_search:
        sampling = structs.replace(sampling, **beam_settings(body, sampling, info))
    elif not given.isdisjoint(HARMLESS):
        check_no_beam_settings(body)
    return sampling


def grammar_of(body: SamplingBody, info: ModelInfo) -> str:
    """Return the grammar of structured output; empty if none is requested."""
    return "" if GRAMMAR_FIELDS.isdisjoint(body.model_fields_set) else parse_grammar(body, info)


def _logit_bias(biases: dict[str, float], _: str, info: ModelInfo, tokenizer: Tokenizer) -> dict[int, float]:
    for name in biases:
        if not (name.isascii() and name.isdigit() and len(name) < 10 and name == str(int(name))):
            message = f'logit_bias maps token ids, such as "276", to numbers; {quote(name)} is not a token id'
            raise InvalidParameter("logit_bias", message)
    by_id = {int(name): value for name, value in biases.items()}
    check_token_ids(by_id, info.vocab_size, "logit_bias")
    return by_id


def _allowed_token_ids(ids: list[int], grammar: str, info: ModelInfo, _: Tokenizer) -> tuple[int, ...]:
    name = "allowed_token_ids"
    if not ids:
        raise InvalidParameter(name, f"{name} is empty; leave it out to allow all")
    if grammar:
        raise InvalidParameter(name, f"{name} and structured output exclude each other; send one of the two")
    check_token_ids(ids, info.vocab_size, name)
    return tuple(sorted(set(ids)))


def _bad_words(words: Sequence[str], _: str, info: ModelInfo, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, also those that it has after a space.

    Words of which a tokenizer leaves nothing, or with tokens that the model lacks, are never generated, and left out.
    """
    if len(words) > MAX_BAD_WORDS or any(
        len(word) > MAX_STOP_CHARS for word in words
    ):  # before each is tokenized twice
        message = f"bad_words must be at most {MAX_BAD_WORDS} strings of at most {MAX_STOP_CHARS} characters each"
        raise InvalidParameter("bad_words", message)
    found = dict[tuple[int, ...], None]()
    for word in words:
        if not word.strip():
            raise InvalidParameter("bad_words", "bad_words must be strings that are not blank")
        plain, spaced = (
            tuple(tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)) for prefix in ("", " ")
        )
        found[plain] = None
        if plain and spaced[-len(plain) :] != plain:
            found[spaced] = None
    return tuple(ids for ids in found if ids and max(ids) < info.vocab_size)


FIELDS: dict[str, Read | None] = {
    **dict.fromkeys(BODY_PARAMS),
    "top_k": lambda value, *_: 0 if value == -1 else value,
    "stop_token_ids": lambda value, *_: tuple(value),
    "prompt_logprobs": None,
    "logit_bias": _logit_bias,
    "allowed_token_ids": _allowed_token_ids,
    "bad_words": _bad_words,
    "logits_processors": lambda value, *_: json.dumps(value) if value else "",
}


def most_tokens_with_logprobs(logprobs: int | None, num_choices: int, is_stream: bool) -> int:
    """Return how many tokens each choice of an answer may have at most because of their log probabilities."""
    if logprobs is None or is_stream:
        return sys.maxsize
    return max(1, MAX_LOGPROBS_OF_ANSWER // (num_choices * (1 + max(0, logprobs))))  # numbers below 0 are refused later


def _check_num_logprobs(prompts: list[list[int]], n: int, sampling: SamplingParams, *, is_whole: bool) -> None:
    """Raise BadRequest if the answer, with all choices of all prompts, could have too many log probabilities at once."""
    if sampling.prompt_logprobs is not None:
        count = n * sum(map(len, prompts)) * (1 + sampling.prompt_logprobs)
        if count > MAX_LOGPROBS_OF_ANSWER:
            message = (
                f"{count} log probabilities of prompts, counted for each choice, are more than {MAX_LOGPROBS_OF_ANSWER}; "
                "ask for fewer top tokens or choices, or send fewer tokens"
            )
            raise InvalidParameter("prompt_logprobs", message)
    most = most_tokens_with_logprobs(sampling.logprobs, n * len(prompts), not is_whole)
    if sampling.max_tokens > most:
        message = (
            f"an answer that is not streamed may have {MAX_LOGPROBS_OF_ANSWER} log probabilities, which allows {most} tokens "
            f"for each choice here, not {sampling.max_tokens}; lower max_tokens, the top tokens or the choices, or stream"
        )
        raise InvalidParameter("logprobs", message)


def truncate(prompt: list[int], length: int | None, max_tokens: int, info: ModelInfo) -> list[int]:
    """Return the last `length` tokens of a prompt; -1 keeps what fits into the context beside the answer, None all."""
    if length is None:
        return prompt
    if length == 0 or length < -1:
        message = f"truncate_prompt_tokens must be at least 1, or -1 for all that fit, not {length}"
        raise InvalidParameter("truncate_prompt_tokens", message)
    return prompt[-(length if length > 0 else max(1, info.max_model_len - max_tokens)) :]


def build_requests(
    draft: RoutedRequest,
    prompts: list[list[int]],
    n: int,
    sampling: SamplingParams,
    info: ModelInfo,
    cache_salt: str = "",
) -> list[RoutedRequest]:
    """Return the requests of all choices. Choice i of each prompt has seed + i, so batching does not change its answers.

    Raises BadRequest if a prompt does not invoke the adapter.

    Args:
        draft: the request but for what it asks for; its salt is that of the API key or group whose KV alone it may reuse.
        cache_salt: that of the body. With both, the KV's salt is a digest.
    """
    salt = cache_salt
    if draft.salt:
        salt = hashlib.blake2b((draft.salt + cache_salt).encode(), digest_size=KEY_BYTES).hexdigest()
    requests: list[RoutedRequest] = []
    for prompt in prompts:
        if draft.alone:
            salt = secrets.token_hex(KEY_BYTES)
        start = info.adapters[draft.adapter_name].start(prompt) if draft.adapter else 0
        keys, packed_keys = prompt_keys(prompt, info.model_digest, salt, info.block_sizes, draft.adapter, start)
        for i in range(n):
            is_single = n * len(prompts) == 1
            request = structs.replace(
                draft,
                request_id=draft.request_id if is_single else f"{draft.request_id}-{len(requests)}",
                prompt=prompt,
                sampling=structs.replace(sampling, seed=(sampling.seed + i) % 2**63) if i else sampling,
                salt=salt,
                keys=keys,
                packed_keys=packed_keys,
                adapter_start=start,
            )
            requests.append(request)
    return requests


def prompt_forms(prompt: object, param: str = "prompt", *, may_be_empty: bool = False) -> list[str | list[int]]:
    """Return OpenAI's four forms of a prompt as a list of texts or token ids. Raises `BadRequest`."""
    if isinstance(prompt, str):
        prompts: list[str | list[int]] = [prompt]
    elif isinstance(prompt, list) and prompt and all(_is_int(item) for item in prompt):
        prompts = [prompt]
    elif isinstance(prompt, list) and all(_is_prompt(item) for item in prompt):
        prompts = prompt
    else:
        message = f"{param} must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
        raise BadRequest(message, kind="invalid_prompt", param=param)
    if not prompts or not (all(prompts) or may_be_empty):
        raise BadRequest(f"the {param} is empty", kind="invalid_prompt", param=param)
    return prompts


def _is_int(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _is_prompt(item: object) -> bool:
    return isinstance(item, str) or (isinstance(item, list) and all(_is_int(element) for element in item))


def _check_suffix(body: CompletionBody) -> None:
    """Raise BadRequest for fields that need a prompt which is one text."""
    for name in ("echo", "truncate_prompt_tokens"):
        if getattr(body, name):
            message = f"{name} and suffix cannot be combined: the prompt is not one text; leave out one of the two"
            raise BadRequest(message, kind="unsupported_parameter", param=name)


def num_choices(n: int | None, num_prompts: int, max_n: int) -> int:
    """Return the choices per prompt; raise BadRequest if all prompts together have more than `max_n`."""
    n = or_default(n, 1)
    if n < 1:
        raise InvalidParameter("n", f"n must be at least 1, not {n}")
    if n * num_prompts > max_n:
        requested = f"{n} choices" if num_prompts == 1 else f"{num_prompts} prompts with {n} choices each"
        message = f"{requested} exceed the limit of {max_n} choices per request"
        raise BadRequest(message, kind="too_many_choices", param="n")
    return n


def _stop_strings(stop: str | list[str]) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS:
        raise InvalidParameter("stop", f"stop may hold at most {MAX_STOPS} strings, not {len(stops)}")
    if not all(0 < len(text) <= MAX_STOP_CHARS for text in stops):
        raise InvalidParameter("stop", f"a stop string must have 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _check_priority(priority: int, info: ModelInfo) -> None:
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidParameter("priority", f"priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}, not {priority}")
    if not info.supports_priorities:
        message = "priority requires that all instances were started with --scheduling-policy priority"
        raise InvalidParameter("priority", message)

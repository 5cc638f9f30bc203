"""Validates a parsed body against the served model and builds one `RoutedRequest` for each choice that it asks for."""

import hashlib
import json
import random
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from msgspec import structs

from pdserve.errors import BadRequest, InvalidParameter, NotFound
from pdserve.grammars.limits import check_grammar
from pdserve.keys import KEY_BYTES
from pdserve.request import MAX_BAD_WORDS, MAX_LOGPROBS, SamplingParams, check_length
from pdserve.router.api.beams import beam_settings, check_no_beam_settings
from pdserve.router.api.chat import template_messages, template_options
from pdserve.router.api.grammars import check_grammar_support, parse_grammar
from pdserve.router.api.parsing import or_default, quote
from pdserve.router.api.reasoning import ReasoningState, reasoning_span, reasoning_state
from pdserve.router.api.schemas import (
    BODY_PARAMS,
    ChatBody,
    CompletionBody,
    SamplingBody,
    StreamOptions,
    TokenizeBody,
)
from pdserve.router.api.tools import AllowedTools, parse_tools
from pdserve.router.backend import ModelInfo
from pdserve.router.routed_request import RoutedRequest, prompt_keys
from pdserve.router.text.parsers.output_parser import OutputParser
from pdserve.router.text.tokenizer import Tokenizer

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGPROBS_OF_ANSWER = 1 << 18  # the top tokens included: of all prompts with all choices, and so of whole outputs
MAX_PRIORITY = 2**31 - 1
DEFAULT_COMPLETION_TOKENS = 16
NO_STREAM_OPTIONS = StreamOptions()


@dataclass(frozen=True)
class RequestContext:
    """Properties of an HTTP request that are not in its body.

    Attributes:
        received: when the body was complete, by `time.monotonic()`.
        session: the session that a header names, or empty.
        traceparent: the W3C trace context of the headers, or empty.
        kv_salt: of the API key or group whose KV alone it may reuse; empty: it may reuse all.
        client: the name of the API key or, without keys, the client's address.
    """

    request_id: str
    received: float
    session: str = ""
    traceparent: str = ""
    kv_salt: str = ""
    client: str = ""

    def salt(self, cache_salt: str = "") -> str:
        """Return the salt of the KV of a request that brings this one: with a `kv_salt` it is a digest of both."""
        if not self.kv_salt:
            return cache_salt
        return hashlib.blake2b((self.kv_salt + cache_salt).encode(), digest_size=KEY_BYTES).hexdigest()


@dataclass(frozen=True, kw_only=True)
class ParsedRequest:
    """A validated HTTP request.

    Attributes:
        id: the response's id, the X-Request-Id header and the id of /debug/requests/{id}.
        prompts: token ids of each prompt.
        requests: the `n` choices of the first prompt, then those of the next.
        echo: the text of each prompt, if it is to precede the answer.
        echo_only: the answer is the echo alone; the one token that is generated nevertheless is no part of it.
        open_parser: returns the parser of a choice's text; None if there is nothing to find in it but text.
        finds_reasoning: the parser tells reasoning from the answer.
        created: when the request was parsed, in seconds since 1970.
    """

    id: str
    chat: bool
    model: str
    prompts: list[list[int]] = field(repr=False)
    requests: list[RoutedRequest]
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    logprobs: bool = False
    prompt_logprobs: int | None = None
    echo: tuple[str, ...] = ()
    echo_only: bool = False
    open_parser: Callable[[], OutputParser | None] | None = None
    finds_reasoning: bool = False
    created: int = field(default_factory=lambda: int(time.time()))


def parse_completion(
    body: CompletionBody, context: RequestContext, tokenizer: Tokenizer, info: ModelInfo, max_n: int
) -> ParsedRequest:
    """Parse a body of /v1/completions; it may ask for at most `max_n` choices.

    Raises:
        BadRequest: the served model cannot do what the body asks for.
        NotFound: the body names another model.
    """
    check_model(body.model, info.name)
    texts = prompt_forms(body.prompt, may_be_empty=bool(body.suffix))
    n = _num_choices(body.n, len(texts), max_n)
    prompts = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in texts]
    for prompt in prompts:
        check_token_ids(prompt, info.vocab_size)
    if body.suffix:
        _check_suffix(body)
        prompts = [tokenizer.fill_in_middle(prompt, body.suffix) for prompt in prompts]
    prompts = [_truncate(prompt, body, body.max_tokens or 1, info) for prompt in prompts]
    remaining = info.max_model_len - max(map(len, prompts))
    max_tokens, echo_only = body.max_tokens, bool(body.echo) and body.max_tokens == 0
    if max_tokens is None:
        max_tokens = max(1, min(DEFAULT_COMPLETION_TOKENS, remaining))
    max_tokens += echo_only
    sampling = _sampling_params(body, max_tokens, body.logprobs, parse_grammar(body, info), info, tokenizer)
    if body.echo and body.logprobs is not None:
        sampling = structs.replace(sampling, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    parsed = _build(body, context, prompts, n, sampling, info, chat=False)
    if not body.echo:
        return parsed
    is_whole = body.truncate_prompt_tokens is None
    pairs = zip(texts, parsed.prompts, strict=True)
    echo = tuple(text if isinstance(text, str) and is_whole else tokenizer.decode(ids) for text, ids in pairs)
    return replace(parsed, echo=echo, echo_only=echo_only)


def parse_chat(
    body: ChatBody, context: RequestContext, tokenizer: Tokenizer, info: ModelInfo, max_n: int
) -> ParsedRequest:
    """Parse a body of /v1/chat/completions; it may ask for at most `max_n` choices.

    Raises:
        BadRequest: the served model cannot do what the body asks for.
        NotFound: the body names another model.
    """
    check_model(body.model, info.name)
    n = _num_choices(body.n, 1, max_n)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        message = "max_tokens (deprecated) and max_completion_tokens contradict each other; send the latter only"
        raise InvalidParameter("max_tokens", message)
    prompt, tools = render(body, tokenizer)
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    prompt = _truncate(prompt, body, max_tokens or 1, info)
    if max_tokens is None:
        # What the context leaves on every instance, so that any may be selected, unless the prompt fits on some only.
        length = info.common_model_len if len(prompt) < info.common_model_len else info.max_model_len
        max_tokens = min(
            max(1, length - len(prompt)), most_tokens_with_logprobs(_chat_logprobs(body), n, bool(body.stream))
        )
    structured = parse_grammar(body, info)
    grammar = _chat_grammar(body, tools, structured, info)
    sampling = _sampling_params(body, max_tokens, _chat_logprobs(body), grammar, info, tokenizer)
    state = reasoning_state(body, prompt, tokenizer)
    may_reason = tools is not None and tools.may_reason(structured)
    span = reasoning_span(body, state, tokenizer, has_grammar=bool(grammar), may_reason=may_reason)
    sampling = sampling if span is None else structs.replace(sampling, reasoning=span)
    parsed = _build(body, context, [prompt], n, sampling, info, chat=True)
    if tools is None and state is ReasoningState.ABSENT:
        return parsed
    if state in (ReasoningState.OPEN, ReasoningState.UNDECIDED) and tools is None and tokenizer.strips_reasoning:
        # The next turn's prompt goes on otherwise after this prompt, so that the KV of the output is of no use to it.
        parsed = replace(parsed, requests=[structs.replace(request, multi_turn=False) for request in parsed.requests])
    open_parser = partial(
        tokenizer.parsers.open,
        tools.parser if tools else None,
        tools.tools if tools else None,
        begins_in_reasoning=state is ReasoningState.OPEN,
        shows_reasoning=or_default(body.include_reasoning, True),
    )
    return replace(parsed, open_parser=open_parser, finds_reasoning=tokenizer.parsers.reasoning is not None)


def render(body: ChatBody, tokenizer: Tokenizer) -> tuple[list[int], AllowedTools | None]:
    """Return the token ids of a conversation, and the tools that the model may call. Raises `BadRequest`."""
    tools = parse_tools(body, tokenizer)
    shown = [
        tool.model_dump(exclude_none=True, exclude={"cache_control": True, "function": {"strict"}})
        for tool in body.tools or ()
        if tools
    ]
    options = template_options(body, tokenizer)
    return tokenizer.render_chat(template_messages(body.messages), tools=[*shown], options=options), tools


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


def tokenize(body: TokenizeBody, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of the body's text or, through the chat template, of its messages.

    Raises:
        BadRequest: the body has both or neither, or invalid messages.
    """
    if (body.prompt is None) == (body.messages is None):
        raise InvalidParameter("prompt", "send either prompt or messages")
    if body.messages is not None:
        names = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt")
        return render(ChatBody(**{name: getattr(body, name) for name in names}), tokenizer)[0]
    for name in ("tools", "chat_template_kwargs"):
        if getattr(body, name) is not None:
            raise InvalidParameter(name, f"{name} needs messages: a prompt has no chat template")
    assert body.prompt is not None
    return tokenizer.encode(body.prompt, add_special_tokens=or_default(body.add_special_tokens, True))


def _build(
    body: SamplingBody,
    context: RequestContext,
    prompts: list[list[int]],
    n: int,
    sampling: SamplingParams,
    info: ModelInfo,
    chat: bool,
) -> ParsedRequest:
    if info.classifies:
        message = f"{info.name} generates nothing, it classifies texts: use /classify, /score or /rerank"
        raise BadRequest(message, kind="not_generative", param="model")
    for prompt in prompts:
        check_length(len(prompt), sampling.max_tokens, info.max_model_len)
    _check_num_logprobs(prompts, n, sampling, is_whole=not body.stream)
    options = _stream_options(body)
    return ParsedRequest(
        id=context.request_id,
        chat=chat,
        model=info.name,
        prompts=prompts,
        requests=_build_requests(context, prompts, n, sampling, body, info, chat),
        stops=_stop_strings(body.stop),
        include_stop=bool(body.include_stop_str_in_output),
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
        skip_special_tokens=or_default(body.skip_special_tokens, True),
        logprobs=sampling.logprobs is not None,
        prompt_logprobs=body.prompt_logprobs,
    )


def _sampling_params(
    body: SamplingBody,
    max_tokens: int,
    logprobs: int | None,
    grammar: str,
    info: ModelInfo,
    tokenizer: Tokenizer,
) -> SamplingParams:
    stop_ids = tuple(body.stop_token_ids or ())
    sampling = SamplingParams(
        max_tokens=max_tokens,
        top_k=0 if body.top_k == -1 else or_default(body.top_k, 0),
        seed=random.getrandbits(63) if body.seed is None else body.seed,
        stop_token_ids=stop_ids,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        logit_bias=_logit_bias(body.logit_bias, info) if body.logit_bias else {},
        grammar=grammar,
        allowed_token_ids=_allowed_token_ids(body, grammar, info),
        bad_words=_bad_words(body.bad_words, tokenizer) if body.bad_words else (),
        logits_processors=json.dumps(body.logits_processors) if body.logits_processors else "",
        **{name: value for name in BODY_PARAMS if (value := getattr(body, name)) is not None},
    )
    if body.prompt_logprobs is not None and body.stream:
        message = (
            "prompt_logprobs are not part of a stream; leave out stream, or send echo and logprobs to /v1/completions"
        )
        raise InvalidParameter("prompt_logprobs", message)
    if body.use_beam_search:
        sampling = structs.replace(sampling, **beam_settings(body, sampling, info))
    else:
        check_no_beam_settings(body)
    sampling.validate()
    check_token_ids(stop_ids, info.vocab_size, "stop_token_ids")
    return sampling


def _chat_grammar(body: ChatBody, tools: AllowedTools | None, structured: str, info: ModelInfo) -> str:
    """Return the grammar of forced or strict tool calls and of structured output; empty if none is requested."""
    if tools is None:
        return structured
    # A response_format holds answers without a call, of which there are none, and some clients send both.
    in_format = body.response_format is not None and body.response_format.type != "text"
    if structured and tools.forced and not in_format:
        message = "tool_choice forces a tool call, and another field asks for structured output; send one of the two"
        raise InvalidParameter("tool_choice", message)
    if spec := tools.grammar(structured):
        check_grammar_support(body, info, "tool_choice" if tools.forced else "tools")
        check_grammar(spec, "tools")
    return spec


def _chat_logprobs(body: ChatBody) -> int | None:
    """Return the number of top tokens to report per position, or None for no logprobs."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidParameter("top_logprobs", "top_logprobs requires logprobs: true")
    if not 0 <= or_default(body.top_logprobs, 0) <= MAX_LOGPROBS:
        message = f"top_logprobs must be from 0 to {MAX_LOGPROBS}, not {body.top_logprobs}"
        raise InvalidParameter("top_logprobs", message)
    return or_default(body.top_logprobs, 0) if body.logprobs else None


def _logit_bias(biases: dict[str, float], info: ModelInfo) -> dict[int, float]:
    for name in biases:
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            message = f'logit_bias maps token ids, such as "276", to numbers; {quote(name)} is not a token id'
            raise InvalidParameter("logit_bias", message)
    by_id = {int(name): value for name, value in biases.items()}
    check_token_ids(by_id, info.vocab_size, "logit_bias")
    return by_id


def _allowed_token_ids(body: SamplingBody, grammar: str, info: ModelInfo) -> tuple[int, ...]:
    ids, name = body.allowed_token_ids, "allowed_token_ids"
    if ids is None:
        return ()
    if not ids:
        raise InvalidParameter(name, f"{name} is empty; leave it out to allow all")
    if grammar:
        raise InvalidParameter(name, f"{name} and structured output exclude each other; send one of the two")
    check_token_ids(ids, info.vocab_size, name)
    return tuple(sorted(set(ids)))


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, also those that it has after a space."""
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
        if spaced[-len(plain) :] != plain:
            found[spaced] = None
    return tuple(found)


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


def _truncate(prompt: list[int], body: SamplingBody, max_tokens: int, info: ModelInfo) -> list[int]:
    """Return the last tokens of a prompt; -1 keeps what fits into the context beside the answer."""
    length = body.truncate_prompt_tokens
    if length is None:
        return prompt
    if length == 0 or length < -1:
        message = f"truncate_prompt_tokens must be at least 1, or -1 for all that fit, not {length}"
        raise InvalidParameter("truncate_prompt_tokens", message)
    return prompt[-(length if length > 0 else max(1, info.max_model_len - max_tokens)) :]


def _build_requests(
    context: RequestContext,
    prompts: list[list[int]],
    n: int,
    sampling: SamplingParams,
    body: SamplingBody,
    info: ModelInfo,
    chat: bool,
) -> list[RoutedRequest]:
    """Return the requests of all choices. Choice i of each prompt has seed + i, so batching does not change its answers."""
    salt, session, priority = context.salt(_cache_salt(body)), _session(body, context), _priority(body, info)
    keyed = [(prompt, *prompt_keys(prompt, info.model_digest, salt, info.block_sizes)) for prompt in prompts]
    choices = [choice for choice in keyed for _ in range(n)]
    return [
        RoutedRequest(
            request_id=context.request_id if len(choices) == 1 else f"{context.request_id}-{index}",
            prompt=prompt,
            sampling=structs.replace(sampling, seed=(sampling.seed + i) % 2**63) if (i := index % n) else sampling,
            salt=salt,
            priority=priority,
            keys=keys,
            packed_keys=packed_keys,
            session=session,
            traceparent=context.traceparent,
            client=context.client,
            multi_turn=chat,
            whole=not body.stream and not body.stop,
            received=context.received,
        )
        for index, (prompt, keys, packed_keys) in enumerate(choices)
    ]


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


def _num_choices(n: int | None, num_prompts: int, max_n: int) -> int:
    """Return the choices per prompt; raise BadRequest if all prompts together have more than `max_n`."""
    n = or_default(n, 1)
    if n < 1:
        raise InvalidParameter("n", f"n must be at least 1, not {n}")
    if n * num_prompts > max_n:
        requested = f"{n} choices" if num_prompts == 1 else f"{num_prompts} prompts with {n} choices each"
        message = f"{requested} exceed the limit of {max_n} choices per request"
        raise BadRequest(message, kind="too_many_choices", param="n")
    return n


def _stream_options(body: SamplingBody) -> StreamOptions:
    if body.stream_options is not None and not body.stream:
        raise InvalidParameter("stream_options", "stream_options requires stream: true")
    return body.stream_options or NO_STREAM_OPTIONS


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise InvalidParameter("stop", f"stop may hold at most {MAX_STOPS} strings, not {len(stops)}")
    if not all(0 < len(text) <= MAX_STOP_CHARS for text in stops):
        raise InvalidParameter("stop", f"a stop string must have 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _cache_salt(body: SamplingBody) -> str:
    if body.cache_salt == "":
        message = "cache_salt must not be empty; leave it out to share the cache with all requests that have none"
        raise InvalidParameter("cache_salt", message)
    return body.cache_salt or ""


def _session(body: SamplingBody, context: RequestContext) -> str:
    """Return the name that the client gives to related requests: the header, else the most explicit field of the body."""
    return context.session or body.prompt_cache_key or body.user or ""


def _priority(body: SamplingBody, info: ModelInfo) -> int:
    priority = or_default(body.priority, 0)
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidParameter("priority", f"priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}, not {priority}")
    if priority and not info.supports_priorities:
        message = "priority requires that all instances were started with --scheduling-policy priority"
        raise InvalidParameter("priority", message)
    return priority

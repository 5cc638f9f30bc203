"""Log probabilities in OpenAI's two formats: one for completions, another for chat."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from msgspec import structs

from pdserve.output import Output
from pdserve.request import TokenLogprobs
from pdserve.router.text.detokenizer import TextStream
from pdserve.router.text.tokenizer import Tokenizer

MANY = 2000  # log probabilities that are too many for the event loop at a time: some 5 ms
MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot express


def are_many(*logprobs: Sequence[TokenLogprobs]) -> bool:
    """Return True if these are too many, top tokens included, to be converted on the event loop."""
    return sum(len(entries) * (1 + len(entries[0].top)) for entries in logprobs if entries) > MANY


def completion_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], text_offsets: Sequence[int]
) -> dict[str, Any]:
    """Return the `logprobs` object of a completion.

    Args:
        ids: the sampled tokens.
        logprobs: one entry per token. The sampled token is always added to its top tokens.
        text_offsets: the character offset in the choice's text at which each token begins.
    """
    name_of = cache(lambda token_id: _token_name(tokenizer.token_bytes(token_id)))
    sampled = [(name_of(token_id), entry) for token_id, entry in zip(ids, logprobs, strict=True)]
    return {
        "tokens": [name for name, _ in sampled],
        "token_logprobs": [_finite(entry.logprob) for _, entry in sampled],
        "top_logprobs": [
            {name_of(top_id): _finite(value) for top_id, value in entry.top} | {name: _finite(entry.logprob)}
            for name, entry in sampled
        ],
        "text_offset": list(text_offsets),
    }


def echoed_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int
) -> dict[str, Any]:
    """Return the `logprobs` object of an echoed prompt. Its first token has none; `logprobs` has an entry per other token."""
    text = TextStream(tokenizer, track_offsets=True)
    text.push(Output(list(ids)))
    cut = [structs.replace(entry, top=entry.top[:num_top]) for entry in logprobs]
    prompt = completion_logprobs(tokenizer, ids, [TokenLogprobs(0.0), *cut], text.text_offsets)
    prompt["token_logprobs"][0] = prompt["top_logprobs"][0] = None
    return prompt


def prompt_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int
) -> list[dict[str, object] | None]:
    """Return vLLM's `prompt_logprobs`: for each token of a prompt a map from token ids; None for the first."""
    return [None, *logprobs_by_id(tokenizer, ids[1:], logprobs, num_top)]


def logprobs_by_id(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int
) -> list[dict[str, object]]:
    """Return a map from token ids for each token, as in vLLM: the most likely tokens, and the token itself."""
    entries: list[dict[str, object]] = []
    decode = cache(lambda one: tokenizer.decode([one]))
    for token_id, entry in zip(ids, logprobs, strict=True):
        ranks = {top_id: rank for rank, (top_id, _) in enumerate(entry.top[:num_top], 1)}
        values = dict(entry.top[:num_top]) | {token_id: entry.logprob}
        entries.append(
            {
                str(one): {
                    "logprob": _finite(value),
                    "rank": ranks.get(one) or entry.rank or None,
                    "decoded_token": decode(one),
                }
                for one, value in values.items()
            }
        )
    return entries


def chat_logprobs(tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, object]:
    """Return the `logprobs` object of a chat completion; `logprobs` has one entry per token of `ids`."""
    named = cache(lambda token_id: _named(tokenizer, token_id))
    content = [
        {
            **named(token_id),
            "logprob": _finite(entry.logprob),
            "top_logprobs": [{**named(top_id), "logprob": _finite(value)} for top_id, value in entry.top],
        }
        for token_id, entry in zip(ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _named(tokenizer: Tokenizer, token_id: int) -> dict[str, object]:
    token_bytes = tokenizer.token_bytes(token_id)
    return {"token": _token_name(token_bytes), "bytes": list(token_bytes)}


def _token_name(token_bytes: bytes) -> str:
    """Return the token as text, or as `bytes:\\xe2\\x80` like OpenAI if it holds part of a character."""
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)

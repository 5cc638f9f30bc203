"""Generation requests as plain data: prompt tokens and sampling parameters."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pdserve.errors import BadRequest, InvalidParameter
from pdserve.reasoning import ReasoningSpan

MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_BEAM_WIDTH = 64
MAX_BAD_WORDS = 256  # each is looked for with and without a space before it
ARRIVALS_PER_PRIORITY = 1000  # in every queue, one priority level outranks this many earlier arrivals


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probability of a token under the unmodified model: before temperature, bias, penalties and grammar.

    Attributes:
        logprob: natural logarithm, from log_softmax in float32.
        top: the most likely tokens as (id, logprob), in descending order.
        rank: of the token, 1 for the most likely; 0 if it was not asked for.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


# Fields of `SamplingParams` with which a token depends on its logits and its position alone.
_LOGITS_AND_POSITION = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop_token_ids", "ignore_eos")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping parameters of a request.

    Attributes:
        max_tokens: maximum number of tokens to generate, 1 or more.
        min_tokens: tokens to generate before a stop token is allowed.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        min_p: drop tokens less likely than this times the most likely one, in [0, 1].
        seed: token i of the output is a pure function of (logits, seed, i).
        stop_token_ids: stop after one of these; it stays in the output's ids, as EOS does.
        ignore_eos: continue after EOS.
        logprobs: report each token's log probability and those of this many most likely tokens; None reports nothing.
        frequency_penalty: subtracted from a token's logit for each occurrence in the output.
        presence_penalty: subtracted once from the logit of each token that occurs in the output.
        repetition_penalty: divides the positive logits of tokens in prompt and output, and multiplies the negative ones.
        grammar: constraint on the output, in the form of `grammars/specification.py`; empty for none.
        logit_bias: token id → value added to its logit, from -100 to 100.
        allowed_token_ids: only these tokens are generated; empty allows all.
        prompt_logprobs: report the same of each token of the prompt but the first, with this many most likely tokens; None
            reports nothing.
        bad_words: sequences of token ids that must not occur in the output, unless no other token is allowed.
        beam_width: beams of a beam search (`beam_search.py`), which replaces sampling; 0 for none.
        num_answers: how many answers the beam search returns, best first.
        length_penalty, early_stopping: of the beam search.
        logits_processors: JSON object from names of plug-ins (`logits_processors.py`) to their arguments; empty for none.
        embed: return the embedding of the prompt instead of an output.
        reasoning: how reasoning is delimited in the output, if it is limited, or a grammar begins after it.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    grammar: str = ""
    allowed_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    beam_width: int = 0
    num_answers: int = 0
    length_penalty: float = 1.0
    early_stopping: str = "false"
    embed: bool = False
    reasoning: ReasoningSpan | None = None
    logits_processors: str = ""

    @property
    def needs_only_logits(self) -> bool:
        """True if a token depends on its logits and its position alone, not on the tokens before it."""
        return self == SamplingParams(**{name: getattr(self, name) for name in _LOGITS_AND_POSITION})

    def validate(self) -> None:
        """Raise BadRequest, with the field's name and its valid range, if a value is invalid."""
        if not 0 <= self.min_tokens <= self.max_tokens and self.max_tokens >= 1:
            raise _invalid("min_tokens", "from 0 to max_tokens", self.min_tokens)
        for name, value in vars(self).items():
            if value == _DEFAULTS[name]:
                continue
            for rule in _RULES.get(name, ()):
                if not rule.allows(shown := rule.looks_at(value)):
                    raise _invalid(name, rule.expected, shown)


class _Rule(NamedTuple):
    """A condition on a field, and its text for errors; `looks_at` returns the part of the value that is checked and shown."""

    expected: str
    allows: Callable[[Any], bool]
    looks_at: Callable[[Any], Any] = lambda value: value


def _finite(low: float, high: float) -> Callable[[float], bool]:
    return lambda value: math.isfinite(value) and low <= value <= high


def _at_most(limit: int, what: str) -> _Rule:
    return _Rule(f"at most {limit} {what}", lambda count: count <= limit, len)


_NUM_LOGPROBS = _Rule(f"from 0 to {MAX_LOGPROBS}", lambda value: value is None or 0 <= value <= MAX_LOGPROBS)
_PENALTY = _Rule("a number from -2 to 2", _finite(-2, 2))
_RULES = {
    "max_tokens": [_Rule("at least 1", lambda value: value >= 1)],
    "temperature": [_Rule("a number from 0 to 100", _finite(0, 100))],
    "top_k": [_Rule("0 (off) or a positive whole number", lambda value: 0 <= value < 2**31)],
    "top_p": [_Rule("above 0 and at most 1", lambda value: 0 < value <= 1)],
    "min_p": [_Rule("from 0 to 1", _finite(0, 1))],
    "seed": [_Rule("from 0 to 2^63 - 1", lambda value: 0 <= value < 2**63)],
    "stop_token_ids": [_at_most(MAX_STOP_TOKEN_IDS, "ids")],
    "frequency_penalty": [_PENALTY],
    "presence_penalty": [_PENALTY],
    "repetition_penalty": [_Rule("above 0, at most 10", lambda value: 0 < value <= 10)],
    "logprobs": [_NUM_LOGPROBS],
    "prompt_logprobs": [_NUM_LOGPROBS],
    "logit_bias": [
        _Rule(f"of at most {MAX_LOGIT_BIAS} tokens", lambda count: count <= MAX_LOGIT_BIAS, len),
        _Rule("of numbers from -100 to 100", _finite(-100, 100), lambda biases: max(biases.values(), key=_magnitude)),
    ],
    "bad_words": [_at_most(MAX_BAD_WORDS, "sequences of tokens")],
    "beam_width": [_Rule(f"from 1 to {MAX_BEAM_WIDTH}", lambda value: 0 <= value <= MAX_BEAM_WIDTH)],
    "length_penalty": [_Rule("a number from -10 to 10", _finite(-10, 10))],
}
_DEFAULTS = vars(SamplingParams())


class Tenant(NamedTuple):
    """On whose behalf a request runs, as instances know it.

    Attributes:
        id: 64 bits of a digest of the API key's name, on which routers agree.
        weight: its share of an instance, relative to those of the others.
    """

    id: int = 0
    weight: float = 1.0


NO_TENANT = Tenant()


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to be continued once. Built by the router; instances only receive the tokens and the sampling parameters.

    Attributes:
        salt: requests with different salts never share KV.
        keys: block size → keys of the prompt's full blocks.
        multi_turn: a chat, so another turn may follow whose prompt begins with this prompt and its output.
        priority: lower is served first, where instances schedule by priority.
        tenant: whose request it is; instances are shared by weight.
        traceparent: the client's span, in W3C Trace Context format.
        client: its sender: the name of its API key or, without keys, its address; empty if unknown.
        session: the client's session id; a routing policy may keep a session on one instance.
        whole: the client reads the output at its end only, so tokens may be sent in batches.
        received: when the router received the body, in seconds on its monotonic clock.
    """

    request_id: str
    prompt: Sequence[int] = field(repr=False)
    sampling: SamplingParams
    salt: str = ""
    keys: dict[int, list[bytes]] = field(default_factory=dict, repr=False)
    multi_turn: bool = False
    priority: int = 0
    tenant: Tenant = NO_TENANT
    traceparent: str = ""
    client: str = ""
    session: str = ""
    whole: bool = False
    received: float | None = None


def _magnitude(value: float) -> float:
    return math.inf if math.isnan(value) else abs(value)


def _invalid(name: str, expected: str, value: object) -> BadRequest:
    return InvalidParameter(name, f"{name} must be {expected}, not {value}")


def check_length(prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
    """Raise BadRequest if the prompt is empty, or prompt and answer do not fit into the model's context."""
    if prompt_tokens == 0:
        raise BadRequest("the prompt is empty: it has no tokens", kind="invalid_prompt", param="prompt")
    if prompt_tokens + max_tokens <= max_model_len:
        return
    problem, param = f"the prompt has {prompt_tokens}, which leaves no room for an answer", "prompt"
    if prompt_tokens < max_model_len:
        total = prompt_tokens + max_tokens
        problem = f"you asked for {total} ({prompt_tokens} in the prompt, {max_tokens} for the answer)"
        param = "max_tokens"
    message = f"this model's context is {max_model_len} tokens; {problem}"
    raise BadRequest(message, kind="context_length_exceeded", param=param)

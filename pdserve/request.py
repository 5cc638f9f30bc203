"""What a client asks for, as plain data: the sampling parameters and the prompt's tokens."""

import math
from dataclasses import dataclass, field

from pdserve.errors import BadRequest

MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
LEVEL = 1000  # arrivals that one level of priority is worth, wherever requests wait


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely a token was in the eyes of the model alone: before temperature, bias and everything else that was asked.

    Attributes:
        logprob: its natural logarithm, of log_softmax in float32.
        top: the likeliest tokens, as (id, logprob), the likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when to stop.

    Attributes:
        max_tokens: tokens to generate at most, 1 or more.
        min_tokens: no stop token before this many.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        min_p: drop tokens less likely than this times the likeliest, in [0, 1].
        seed: token i of the output is a pure function of (logits, seed, i).
        stop_token_ids: end with one of these; it is kept in the output's ids, as EOS is.
        ignore_eos: go on past EOS.
        logprobs: report each token's log probability and those of so many likeliest tokens; None reports nothing.
        frequency_penalty, presence_penalty: taken from a token's logit for each time, or once, that the output has it.
        repetition_penalty: divides the logits of tokens of prompt and output if they are positive, else multiplies them.
        grammar: what the output has to follow, as in `engine/grammar.py`; empty for nothing.
        logit_bias: token id → what is added to its logit, from -100 to 100.
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

    def validate(self) -> None:
        """Raises BadRequest with the field's name and what would be right."""
        _require(self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        _require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "from 0 to max_tokens", self.min_tokens)
        _require(_between(self.temperature, 0, 100), "temperature", "a number from 0 to 100", self.temperature)
        _require(0 <= self.top_k < 2**31, "top_k", "0 (off) or a positive whole number", self.top_k)
        _require(_between(self.top_p, 0, 1) and self.top_p > 0, "top_p", "above 0 and at most 1", self.top_p)
        _require(_between(self.min_p, 0, 1), "min_p", "from 0 to 1", self.min_p)
        _require(0 <= self.seed < 2**63, "seed", "from 0 to 2^63 - 1", self.seed)
        count = len(self.stop_token_ids)
        _require(count <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids", count)
        for name in ("frequency_penalty", "presence_penalty"):
            _require(_between(getattr(self, name), -2, 2), name, "a number from -2 to 2", getattr(self, name))
        repetition = self.repetition_penalty
        _require(
            _between(repetition, 0, 10) and repetition > 0, "repetition_penalty", "above 0, at most 10", repetition
        )
        _require(0 <= (self.logprobs or 0) <= MAX_LOGPROBS, "logprobs", f"from 0 to {MAX_LOGPROBS}", self.logprobs)
        count = len(self.logit_bias)
        _require(count <= MAX_LOGIT_BIAS, "logit_bias", f"of at most {MAX_LOGIT_BIAS} tokens", count)
        for bias in self.logit_bias.values():
            _require(_between(bias, -100, 100), "logit_bias", "of numbers from -100 to 100", bias)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to be continued once. The router makes it; instances see its tokens and sampling only."""

    request_id: str
    prompt: list[int] = field(repr=False)
    sampling: SamplingParams
    salt: str = ""
    keys: dict[int, list[bytes]] = field(default_factory=dict, repr=False)  # block size → of the prompt's full blocks
    multi_turn: bool = False  # a chat: another turn may follow, whose prompt begins with this one's and its output
    priority: int = 0  # lower goes first, where instances schedule by it
    traceparent: str = ""  # the client's span, as OpenTelemetry writes it
    session: str = ""  # what the client says belongs together: a policy may keep it in one place
    whole: bool = False  # its tokens are wanted together, at the end
    received: float | None = None  # on the monotonic clock, when the router got the body


def _between(value: float, low: float, high: float) -> bool:
    return math.isfinite(value) and low <= value <= high


def _require(holds: bool, name: str, right: str, value: object) -> None:
    if not holds:
        raise BadRequest(f"{name} must be {right}, not {value}", kind="invalid_parameter", param=name)

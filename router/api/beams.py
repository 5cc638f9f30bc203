"""Beam searches at the HTTP side: the fields that ask for one, and its answers as token streams, one for each choice."""

from collections.abc import Callable
from typing import Any

from pdserve.beam_search import Hypothesis
from pdserve.errors import InvalidParameter, RequestError
from pdserve.output import Output
from pdserve.request import SamplingParams
from pdserve.router.api.parsing import or_default
from pdserve.router.api.schemas import SamplingBody
from pdserve.router.backend import ModelInfo, TokenStream

MAX_LOGPROBS_AT_ONCE = 1 << 15  # of all answers, the top tokens included: they come in one output
# Fields that a beam search cannot honour, and what a client can do.
EXCLUDED = {
    "stream": "every answer may change until the search ends",
    "prompt_logprobs": "leave it out",
    "stop": "send stop_token_ids",
    "thinking_token_budget": "it would close the reasoning of some beams and not of others: leave it out",
    "prediction": "it computes nothing ahead: leave it out",
    "presence_penalty": "send repetition_penalty",
    "frequency_penalty": "send repetition_penalty",
    "temperature": "a beam search does not sample: leave it out or send 0",
    "top_p": "a beam search does not sample: leave it out or send 1",
    "top_k": "a beam search does not sample: leave it out",
    "min_p": "a beam search does not sample: leave it out",
}
WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "prompt_logprobs": (None,),
    "thinking_token_budget": (None,),
    "temperature": (None, 0),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
}
# Fields that need a beam search, and their values that do not.
HARMLESS: dict[str, tuple[object, ...]] = {
    "beam_width": (),
    "best_of": (1,),
    "length_penalty": (1,),
    "early_stopping": (False,),
}


def beam_settings(body: SamplingBody, sampling: SamplingParams, info: ModelInfo) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that make it a beam search.

    Its width is `beam_width`, else `best_of`, else `n`, as in vLLM's versions; `n` answers are returned.

    Raises:
        BadRequest: a field contradicts another one or cannot be combined with a beam search.
    """
    for name, advice in EXCLUDED.items():
        value = getattr(body, name, None)
        if value not in WITHOUT_EFFECT.get(name, (None, False, 0, "", [])):
            raise InvalidParameter(name, f"{name} cannot be combined with use_beam_search; {advice}")
    if sampling.grammar:
        message = "structured output cannot be combined with use_beam_search; leave out one of them"
        raise InvalidParameter("use_beam_search", message)
    if sampling.logprobs is not None and getattr(body, "echo", None):
        message = "echo and logprobs cannot be combined with use_beam_search; leave out one of them"
        raise InvalidParameter("echo", message)
    count = or_default(body.n, 1) * sampling.max_tokens * (1 + (sampling.logprobs or 0))
    if sampling.logprobs is not None and count > MAX_LOGPROBS_AT_ONCE:
        message = (
            f"{count} log probabilities of a beam search are more than {MAX_LOGPROBS_AT_ONCE}; lower max_tokens or n"
        )
        raise InvalidParameter("logprobs", message)
    widths = {value for value in (body.beam_width, body.best_of) if value is not None}
    if len(widths) > 1:
        raise InvalidParameter("best_of", "beam_width and best_of contradict each other; send one of them")
    n = or_default(body.n, 1)
    width = widths.pop() if widths else n
    if width < max(1, n):
        raise InvalidParameter("beam_width", f"the beam width must be at least n, which is {n}, not {width}")
    stops = len(sampling.stop_token_ids) + (0 if sampling.ignore_eos else len(info.eos_token_ids))
    needed = max(2, 1 + stops) * width
    if (num_allowed := _num_allowed(sampling, info)) < needed:
        message = (
            f"a beam search of this width needs a choice of at least {needed} tokens, and {num_allowed} are allowed"
        )
        raise InvalidParameter("allowed_token_ids" if sampling.allowed_token_ids else "beam_width", message)
    return {
        "beam_width": width,
        "num_answers": n,
        "length_penalty": or_default(body.length_penalty, 1.0),
        "early_stopping": or_default(body.early_stopping, False),
        "temperature": 0.0,
    }


def _num_allowed(sampling: SamplingParams, info: ModelInfo) -> int:
    """Return how many tokens a beam search may choose from at its first step."""
    banned = {word[0] for word in sampling.bad_words if len(word) == 1}
    if sampling.allowed_token_ids:
        return len({*sampling.allowed_token_ids} - banned)
    return info.vocab_size - len(banned)


def check_no_beam_settings(body: SamplingBody) -> None:
    """Raise BadRequest if the body asks for details of a beam search without asking for one."""
    for name, harmless in HARMLESS.items():
        value = getattr(body, name)
        if value is not None and value not in harmless:
            advice = "; to sample, ask for n choices and pick one yourself" if name == "best_of" else ""
            raise InvalidParameter(name, f"{name} needs use_beam_search: true{advice}")


class _Search:
    """The stream of a beam search, which several readers share."""

    def __init__(self, stream: TokenStream, count: int) -> None:
        self.stream = stream
        self.answers = [AnswerStream(self, index) for index in range(count)]
        self._hypotheses: list[Hypothesis] = []
        stream.on_readable = self._wake

    def take(self, index: int) -> list[Output]:
        if not self._hypotheses:
            chunks = self.stream.take()
            self._hypotheses = [one for chunk in chunks for one in chunk.hypotheses]
            if not chunks or chunks[-1].finish_reason is None:
                return []
            if len(self._hypotheses) < len(self.answers):
                message = f"the beam search ended with {len(self._hypotheses)} of {len(self.answers)} answers"
                raise RequestError(message, kind="internal_error")
        found = self._hypotheses[index]
        return [Output(list(found.token_ids), found.finish_reason, list(found.logprobs))]

    def _wake(self) -> None:
        for answer in self.answers:
            answer.on_readable()


class AnswerStream:
    """One answer of a beam search, as a `TokenStream` of a single chunk."""

    def __init__(self, search: _Search, index: int) -> None:
        self.on_readable: Callable[[], object] = lambda: None
        self.timeline = search.stream.timeline
        self._search = search
        self._index = index

    def take(self) -> list[Output]:
        return self._search.take(self._index)

    def cancel(self, finish_reason: str = "cancelled") -> None:
        self._search.stream.cancel(finish_reason)


def answer_streams(stream: TokenStream, count: int) -> list[AnswerStream]:
    """Return a stream for each answer of a beam search, best first."""
    return _Search(stream, count).answers

"""Sampling parameters of a request, read from its message. `Submit` is otherwise read by `Instance`."""

from pdserve.keys import unpack_tokens
from pdserve.proto import pdserve_pb2 as pb
from pdserve.reasoning import ReasoningSpan
from pdserve.request import SamplingParams


def read_sampling(message: pb.Sampling) -> SamplingParams:
    """Return the parameters of a message.

    Raises:
        ValueError: the length of a list of tokens is impossible.
    """
    return SamplingParams(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        logit_bias=dict(message.logit_bias),
        grammar=message.grammar,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        repetition_penalty=message.repetition_penalty or 1.0,
        allowed_token_ids=tuple(message.allowed_token_ids),
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        bad_words=tuple(tuple(unpack_tokens(word)) for word in message.bad_words),
        beam_width=message.beam_width,
        num_answers=message.num_answers,
        length_penalty=message.length_penalty,
        early_stopping=message.early_stopping,
        embed=message.embed,
        reasoning=_reasoning(message.reasoning) if message.HasField("reasoning") else None,
        logits_processors=message.logits_processors,
    )


def _reasoning(message: pb.Reasoning) -> ReasoningSpan:
    return ReasoningSpan(
        tuple(unpack_tokens(message.start)),
        tuple(tuple(unpack_tokens(end)) for end in message.ends),
        tuple(unpack_tokens(message.closing)),
        message.budget if message.HasField("budget") else None,
        message.is_required,
    )

"""Builds vLLM's `GenerateResponse` messages from the deltas of a generation."""

from collections.abc import Iterable, Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as vllm

from pdserve.request import TokenLogprobs
from pdserve.router.api.generation import Delta, Generation


def chunk(generation: Generation, delta: Delta) -> "vllm.GenerateResponse":
    """Return the message of one delta of a stream. Its number of tokens is that of the delta, as in vLLM."""
    message = vllm.GenerateStreamChunk(token_ids=delta.token_ids, **_common(generation, delta))
    return vllm.GenerateResponse(chunk=message)


def complete(generation: Generation, delta: Delta) -> "vllm.GenerateResponse":
    """Return the last message of a choice, from its last delta or, without a stream, from all of it merged."""
    reason = delta.finish_reason or "abort"
    message = vllm.GenerateComplete(output_ids=delta.token_ids, finish_reason=reason, **_common(generation, delta))
    matched = generation.choices[delta.index].text.matched_stop
    stop_ids = generation.requests[delta.index].sampling.stop_token_ids
    if matched is not None:
        message.matched_stop_str = matched
    elif delta.finish_reason == "stop" and delta.token_ids and delta.token_ids[-1] in stop_ids:
        message.matched_token_id = delta.token_ids[-1]
    return vllm.GenerateResponse(complete=message)


def _common(generation: Generation, delta: Delta) -> dict[str, Any]:
    """Return the fields that both messages have."""
    return {
        "prompt_tokens": len(generation.prompt_of(delta.index)),
        "completion_tokens": len(delta.token_ids),
        "cached_tokens": generation.choices[delta.index].stream.timeline.cached_tokens,
        "output_logprobs": _output_logprobs(generation, delta),
        "input_logprobs": _input_logprobs(generation, delta),
        "index": delta.index,
    }


def _output_logprobs(generation: Generation, delta: Delta) -> "vllm.OutputLogProbs | None":
    num_top = generation.requests[delta.index].sampling.logprobs
    if num_top is None:
        return None
    return vllm.OutputLogProbs(
        token_ids=delta.token_ids,
        token_logprobs=[entry.logprob for entry in delta.logprobs],
        top_logprobs=_top(delta.logprobs, num_top),
    )


def _input_logprobs(generation: Generation, delta: Delta) -> "vllm.InputLogProbs | None":
    """Return the scores of the prompt, whose first token has none; None if they are not in this delta."""
    num_top = generation.prompt_logprobs
    if num_top is None or delta.prompt_logprobs is None:
        return None
    scores = [vllm.InputTokenLogProb(value=entry.logprob) for entry in delta.prompt_logprobs]
    return vllm.InputLogProbs(
        token_ids=generation.prompt_of(delta.index),
        token_logprobs=[vllm.InputTokenLogProb(), *scores],
        top_logprobs=[vllm.TopLogProbs(), *_top(delta.prompt_logprobs, num_top)] if num_top else [],
    )


def _top(logprobs: Iterable[TokenLogprobs], num_top: int) -> "Sequence[vllm.TopLogProbs]":
    if not num_top:
        return []
    return [
        vllm.TopLogProbs(
            token_ids=[token_id for token_id, _ in entry.top[:num_top]],
            values=[value for _, value in entry.top[:num_top]],
        )
        for entry in logprobs
    ]

"""Checks of the outputs that instances send, each of one request: pure functions that return a reason, or an empty string.

`output_fault` and `tokens_fault` find what no client's input leads an honest instance to: the instance is dropped. What the
model computes, and may be NaN for some input on every instance, is up to `content_fault`: only the request fails.
"""

import math
import re
from collections.abc import Sequence, Set

import numpy as np

from pdserve.lifetime import RELEASED, Stage
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import MAX_LOGPROBS, SamplingParams
from pdserve.router.instances.frame_checks import MAX_COUNT, MAX_NAME_CHARS, MAX_SECONDS

MIN_SECONDS = 1e-9  # of a duration other than 0
FINISH_REASONS = ("", "stop", "length")
ERROR_KIND = re.compile(r"[a-z_]{1,64}")
_STAGES = {*(stage.value for stage in Stage), RELEASED}


def tokens_fault(ids: Sequence[int], vocab_size: int, max_tokens: int) -> str:
    """Return why the tokens of an output are invalid, if its request may have `max_tokens` more; empty if they are not."""
    if len(ids) > max_tokens:
        return f"{len(ids)} tokens of a request that may have {max_tokens} more"
    if max(ids) >= vocab_size:
        return f"the token id {max(ids)} of a vocabulary of {vocab_size}"
    return ""


def output_fault(output: pb.Output, present: Set[str], hello: pb.Hello, max_tokens: int, context: int) -> str:
    """Return why an output is impossible for its request, whatever that asks for; empty if it is not.

    Args:
        present: names of the fields that are not empty. To ask the message for each takes several times as long.
        hello: the instance's registration.
        max_tokens: tokens that the instance may still generate.
        context: tokens of the prompt and of the output so far.
    """
    ids = output.token_ids if "token_ids" in present else ()
    if ids and (reason := tokens_fault(ids, hello.vocab_size, max_tokens)):
        return reason
    if "finish_reason" in present and (
        output.finish_reason not in FINISH_REASONS or not present & {"token_ids", "hypotheses", "embedding"}
    ):
        return f"the finish reason {output.finish_reason[:MAX_NAME_CHARS]!r} after {len(ids)} tokens"
    if "error" in present and not ERROR_KIND.fullmatch(output.error.kind):
        return f"an error of the kind {output.error.kind[:MAX_NAME_CHARS]!r}"
    if "stored" in present:
        num_blocks = -(-context // hello.block_size)
        if max(output.stored.num_blocks, output.stored.coming) > num_blocks:
            return f"{output.stored.num_blocks} stored blocks and {output.stored.coming} coming ones of {num_blocks}"
    if "tokens" in present and sum(value for _, value in output.tokens.ListFields()) > context:
        return f"more prompt tokens than the {context} of the request"
    return times_fault(output) if present & {"moved", "stamps"} else ""


def times_fault(output: pb.Output) -> str:
    """Return why the stamps or transfer totals of an output are invalid; empty if they are not."""
    if output.HasField("moved"):
        moved = output.moved
        if not (moved.seconds == 0 or MIN_SECONDS <= moved.seconds <= MAX_SECONDS) or moved.bytes > MAX_COUNT:
            return f"transfers of {moved.bytes} bytes in {moved.seconds} seconds"
    for stamp in output.stamps:
        if stamp.stage not in _STAGES or not 0 <= stamp.seconds <= MAX_SECONDS:
            return f"the stage {stamp.stage[:MAX_NAME_CHARS]!r} {stamp.seconds} seconds ago"
    return ""


def content_fault(
    output: pb.Output,
    present: Set[str],
    hello: pb.Hello,
    max_tokens: int,
    sampling: SamplingParams,
    num_scored: int = 0,
) -> str:
    """Return why what the model has computed for a request is not what the request asks for; empty if it is.

    Args:
        present, hello, max_tokens: as of `output_fault`.
        num_scored: tokens of the prompt whose log probabilities are due.
    """
    if sampling.beam_width:
        if reason := _hypotheses_fault(output, hello, max_tokens, sampling):
            return reason
    elif present & {"hypotheses", "searching"}:
        return "answers of a beam search that was not requested"
    if "embedding" in present and (reason := _embedding_fault(output.embedding, hello.embedding_size * sampling.embed)):
        return reason
    num_due = 0 if sampling.logprobs is None else len(output.token_ids)
    reason = ""
    if num_due or "logprobs" in present:
        reason = _logprobs_fault(output.logprobs, num_due, "tokens", hello.vocab_size)
    if reason:
        return reason
    if num_scored or "prompt_logprobs" in present:
        return _logprobs_fault(output.prompt_logprobs, num_scored, "tokens of the prompt", hello.vocab_size)
    return ""


def _hypotheses_fault(output: pb.Output, hello: pb.Hello, max_tokens: int, sampling: SamplingParams) -> str:
    num_answers = sampling.num_answers
    if output.token_ids:
        return "tokens of a beam search, which has none before its end"
    if bool(output.hypotheses) != bool(output.finish_reason) or len(output.hypotheses) not in (0, num_answers):
        return f"{len(output.hypotheses)} answers of a beam search for {num_answers}"
    for answer in output.hypotheses:
        if not 1 <= len(answer.token_ids) <= max_tokens or max(answer.token_ids) >= hello.vocab_size:
            return f"an answer of {len(answer.token_ids)} tokens, where up to {max_tokens} of the vocabulary are due"
        if answer.finish_reason not in ("stop", "length") or not math.isfinite(answer.score):
            return "an answer without a score or a finish reason"
        num_due = 0 if sampling.logprobs is None else len(answer.token_ids)
        if reason := _logprobs_fault(answer.logprobs, num_due, "tokens", hello.vocab_size):
            return reason
    return ""


def _embedding_fault(embedding: bytes, size: int) -> str:
    if len(embedding) != 4 * size:
        return f"an embedding of {len(embedding)} bytes that was not requested like this"
    return "" if np.isfinite(np.frombuffer(embedding, "<f4")).all() else "an embedding with NaN or infinite numbers"


def _logprobs_fault(logprobs: Sequence[pb.Logprobs], num_due: int, tokens: str, vocab_size: int) -> str:
    if len(logprobs) != num_due:
        return f"{len(logprobs)} log probabilities, where those of {num_due} {tokens} are due"
    for one in logprobs:
        top = [*one.top_logprobs]
        if len(one.top_ids) != len(top) or len(top) > MAX_LOGPROBS:
            return f"{len(one.top_ids)} top tokens with {len(top)} log probabilities"
        if top and max(one.top_ids) >= vocab_size:
            return "a log probability of a token that does not exist"
        if not max(top, default=0.0) < 1.0 or not one.logprob < 1.0 or math.isnan(sum(top)):
            return "a log probability that is NaN or above 0"
    return ""

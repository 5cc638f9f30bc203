"""Checks of the frames that instances send: pure functions from a frame to the reason why it is invalid, or an empty string.

An instance is trusted with the tokens that it computes, but not with the router: no frame may stall it, fill its memory, or
bring numbers into it with which it cannot calculate. The bounds are far beyond what instances report.

Types and signs in outputs are checked as they are decoded (`pdserve.output`). `output_fault` finds what no client's input
leads an honest instance to: the instance is dropped. What the model computes may be NaN for some input on every instance, and
is up to `content_fault`: only the request fails.
"""

import math
import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from pdserve.control.frame_connection import NONCE_BYTES
from pdserve.counters import HELP, LABELS, parse_series
from pdserve.keys import KEY_BYTES, TOKEN_BYTES, Layout
from pdserve.lifetime import RELEASED, Stage
from pdserve.output import Output
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import MAX_LOGPROBS, SamplingParams, TokenLogprobs

ROLES = ("prefill", "decode", "both")
MAX_INSTANCE_ID_CHARS = 200
MAX_NAME_CHARS = 200
MAX_BLOCKS = 1 << 22  # 67 million tokens at 16 per block; the prefix index takes 0.2 KB for each
MAX_BLOCK_BYTES = 1 << 40
MAX_BLOCK_SIZE = 1 << 16  # tokens
MAX_TOKEN_ID = (1 << 31) - 1
MAX_DIMENSION = 1 << 20  # of a layout
MAX_EOS_IDS = 1024
MAX_ADAPTERS = 10_000
MAX_KEYS_PER_FRAME = 8192  # instances send up to 1024
MAX_COUNTERS = 1024
MAX_SECONDS = 1e6  # of a cost coefficient or an age: eleven days
MAX_COUNT = 1 << 60  # of tokens, bytes or pairs
MIN_SECONDS = 1e-9  # of a duration other than 0
FINISH_REASONS = ("stop", "length")
ERROR_KIND = re.compile(r"[a-z_]{1,64}")
_STAGES = {*(stage.value for stage in Stage), RELEASED}


class InvalidFrame(ValueError):
    """A frame of an instance breaks a rule; the text says which. The instance is dropped."""


def hello_fault(hello: pb.Hello) -> str:
    """Return why a registration is invalid by itself, whatever its role and model are; empty if it is not."""
    if not hello.instance_id or not _is_name(hello.instance_id, MAX_INSTANCE_ID_CHARS):
        return f"an instance id has 1 to {MAX_INSTANCE_ID_CHARS} characters, all of them printable"
    if len(hello.nonce) != NONCE_BYTES:
        return f"its nonce has {len(hello.nonce)} bytes instead of {NONCE_BYTES}"
    for name in ("connector", "device", "dtype", "kernel", "scheduling_policy", "version", "speculate"):
        if not _is_name(getattr(hello, name)):
            return f"its {name} has at most {MAX_NAME_CHARS} characters, all of them printable"
    limits = {
        "block_size": (1, MAX_BLOCK_SIZE),
        "num_blocks": (1, MAX_BLOCKS),
        "block_bytes": (1, MAX_BLOCK_BYTES),
        "max_model_len": (2, MAX_TOKEN_ID),
        "vocab_size": (1, MAX_TOKEN_ID),
    }
    for name, (low, high) in limits.items():
        if not low <= getattr(hello, name) <= high:
            return f"its {name} is {getattr(hello, name)}; it must be from {low} to {high}"
    if not 0 <= hello.itl_target <= MAX_SECONDS:
        return f"its itl_target is {hello.itl_target} seconds; it must be from 0 to {MAX_SECONDS:g}"
    if len(hello.eos_token_ids) > MAX_EOS_IDS or any(id >= hello.vocab_size for id in hello.eos_token_ids):
        return f"it must have at most {MAX_EOS_IDS} eos_token_ids, all of them below its vocab_size"
    return adapters_fault(hello) or _layout_fault(hello)


def adapters_fault(hello: pb.Hello) -> str:
    """Return why the adapters of a registration are invalid; empty if they are not."""
    is_valid = all(
        len(one.digest) == KEY_BYTES
        and _is_name(one.name)
        and _is_name(one.lost_name)
        and not len(one.invocation) % TOKEN_BYTES
        for one in hello.adapters
    )
    if is_valid and len(hello.adapters) <= MAX_ADAPTERS:
        return ""
    return f"it may have up to {MAX_ADAPTERS} adapters, with printable names, digests of {KEY_BYTES} bytes and whole tokens"


def _layout_fault(hello: pb.Hello) -> str:
    layout = Layout.from_message(hello.layout)
    if not _is_name(layout.model_fingerprint) or not _is_name(layout.dtype):
        return "its layout names no model or dtype of printable characters"
    if layout.numerics and not _is_name(layout.numerics):
        return "its layout's numerics class is no name of printable characters"
    sizes = [layout.itemsize]
    for part in layout.sections:
        sizes += part.num_layers, part.num_kv_heads, part.head_dim
    if not all(1 <= size <= MAX_DIMENSION for size in sizes):
        return f"a dimension of its KV layout is not from 1 to {MAX_DIMENSION}"
    if not layout.is_divisible or layout.ranks > MAX_DIMENSION:
        heads = " and ".join(str(part.num_kv_heads) for part in layout.sections)
        return f"its KV layout has {heads} heads on {layout.ranks} ranks: one number must divide the other"
    if (layout.block_size, layout.block_bytes) != (hello.block_size, hello.block_bytes):
        return "its block_size and block_bytes are not those of its KV layout"
    return "" if layout.namespace == hello.namespace else "its namespace is not that of its KV layout"


def frame_fault(frame: pb.InstanceFrame, kind: str | None, num_blocks: int) -> str:
    """Return why a later frame of an instance with `num_blocks` blocks, which is of this kind, is invalid by itself, or "".

    Registrations are checked by `hello_fault`, outputs one by one by `output_fault`.
    """
    match kind:
        case "outputs" | "hello" | "draining" | "failed" | "adapter_changed":
            is_valid = 0 <= frame.waited <= MAX_SECONDS
            return "" if is_valid else f"it waited for {frame.waited} seconds; that must be from 0 to {MAX_SECONDS:g}"
        case "heartbeat":
            beat = frame.heartbeat
            if len(beat.counters) > MAX_COUNTERS:
                return f"a heartbeat has {len(beat.counters)} counters; the limit is {MAX_COUNTERS}"
            for key, value in beat.counters.items():
                if reason := _series_fault(key):
                    return reason
                if not 0 <= value < math.inf:
                    return f"the counter {key!r} is {value}; it must be finite and not negative"
            if beat.free_blocks > num_blocks:
                return f"a heartbeat reports {beat.free_blocks} free blocks of {num_blocks}"
            costs = beat.costs
            lengths = len(costs.prefill), len(costs.decode), len(costs.transfer)
            if lengths not in ((3, 3, 2), (0, 0, 0)):
                return f"its cost models have {lengths} coefficients instead of (3, 3, 2)"
            for value in (*costs.prefill, *costs.decode, *costs.transfer):
                if not 0 <= value <= MAX_SECONDS:
                    return f"a coefficient of its cost models is not from 0 to {MAX_SECONDS:g} seconds"
            return ""
        case "blocks":
            for keys in (frame.blocks.added, frame.blocks.removed):
                if len(keys) % KEY_BYTES or len(keys) > KEY_BYTES * MAX_KEYS_PER_FRAME:
                    most = f"up to {MAX_KEYS_PER_FRAME} keys of {KEY_BYTES} bytes"
                    return f"KV events of {len(keys)} bytes; they must be {most}"
            return ""
        case "others":
            load = frame.others
            amounts = (load.prefill_tokens, load.output_tokens, load.context_tokens, load.attended_tokens)
            return f"a load of more than {MAX_COUNT} tokens" if max(amounts) > MAX_COUNT else ""
        case other:
            return f"a frame of an unknown kind ({other})"


@lru_cache(4096)
def _series_fault(key: str) -> str:
    """Return why a series of a counter is invalid. One with an unknown name, from another version, only needs to be short."""
    parsed = parse_series(key)
    if len(key) > 2 * MAX_NAME_CHARS or not key.isprintable() or parsed is None:
        return f"{key[:MAX_NAME_CHARS]!r} is not the series of a counter"
    name, labels = parsed
    if name in HELP and tuple(sorted(labels)) != LABELS.get(name, ()):
        return f"the counter {name} has the labels {sorted(labels)}"
    return ""


def _is_name(text: str, max_chars: int = MAX_NAME_CHARS) -> bool:
    return len(text) <= max_chars and text.isprintable()


def output_fault(output: Output, hello: pb.Hello, max_tokens: int, context: int) -> str:
    """Return why an output is impossible for its request, whatever that asks for; empty if it is not.

    Args:
        hello: the instance's registration.
        max_tokens: tokens that the instance may still generate.
        context: tokens of the prompt and of the output so far.
    """
    ids, finish_reason = output.token_ids, output.finish_reason
    if len(ids) > max_tokens:
        return f"{len(ids)} tokens of a request that may have {max_tokens} more"
    if ids and max(ids) >= hello.vocab_size:
        return f"the token id {max(ids)} of a vocabulary of {hello.vocab_size}"
    if finish_reason is not None and (
        finish_reason not in FINISH_REASONS or not (ids or output.hypotheses or output.embedding)
    ):
        return f"the finish reason {finish_reason[:MAX_NAME_CHARS]!r} after {len(ids)} tokens"
    if output.error is not None and not ERROR_KIND.fullmatch(output.error.kind):
        return f"an error of the kind {output.error.kind[:MAX_NAME_CHARS]!r}"
    if (stored := output.stored) is not None:
        num_blocks = -(-context // hello.block_size)
        if max(stored.num_blocks, stored.coming) > num_blocks:
            return f"{stored.num_blocks} stored blocks and {stored.coming} coming ones of {num_blocks}"
    if (sources := output.sources) is not None and sources.computed + sources.local_hit + sources.loaded > context:
        return f"more prompt tokens than the {context} of the request"
    for drafts in (output.drafted, output.predicted):
        if drafts is not None and (drafts.accepted > len(ids) or drafts.rejected > MAX_COUNT):
            return f"{drafts.accepted} drafts among {len(ids)} tokens, and {drafts.rejected} others"
    return times_fault(output) if output.stamps or output.moved is not None else ""


def times_fault(output: Output) -> str:
    """Return why the stamps or transfer totals of an output are invalid; empty if they are not."""
    if (moved := output.moved) is not None:
        is_possible = moved.seconds == 0 or MIN_SECONDS <= moved.seconds <= MAX_SECONDS
        if not is_possible or max(moved.blocks, moved.bytes) > MAX_COUNT:
            return f"transfers of {moved.bytes} bytes in {moved.seconds} seconds"
    for stage, age in output.stamps.items():
        if stage not in _STAGES or not 0 <= age <= MAX_SECONDS:
            return f"the stage {stage[:MAX_NAME_CHARS]!r} {age} seconds ago"
    return ""


def content_fault(
    output: Output, hello: pb.Hello, max_tokens: int, sampling: SamplingParams, num_scored: int = 0
) -> str:
    """Return why what the model has computed for a request is not what the request asks for; empty if it is.

    Args:
        hello, max_tokens: as of `output_fault`.
        num_scored: tokens of the prompt whose log probabilities are due.
    """
    if sampling.beam_width:
        if reason := _hypotheses_fault(output, hello, max_tokens, sampling):
            return reason
    elif output.hypotheses or output.searching:
        return "answers of a beam search that was not requested"
    if output.embedding and (reason := _embedding_fault(output.embedding, hello.embedding_size * sampling.embed)):
        return reason
    num_due = 0 if sampling.logprobs is None else len(output.token_ids)
    return _logprobs_fault(output.logprobs, num_due, "tokens", hello.vocab_size) or _logprobs_fault(
        output.prompt_logprobs, num_scored, "tokens of the prompt", hello.vocab_size
    )


def _hypotheses_fault(output: Output, hello: pb.Hello, max_tokens: int, sampling: SamplingParams) -> str:
    num_answers = sampling.num_answers
    if output.token_ids:
        return "tokens of a beam search, which has none before its end"
    if bool(output.hypotheses) is (output.finish_reason is None) or len(output.hypotheses) not in (0, num_answers):
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


def _logprobs_fault(logprobs: Sequence[TokenLogprobs], num_due: int, tokens: str, vocab_size: int) -> str:
    if len(logprobs) != num_due:
        return f"{len(logprobs)} log probabilities, where those of {num_due} {tokens} are due"
    for one in logprobs:
        if len(one.top) > MAX_LOGPROBS:
            return f"{len(one.top)} top tokens of a position"
        values = [value for _, value in one.top]
        if one.top and max([token for token, _ in one.top]) >= vocab_size:
            return "a log probability of a token that does not exist"
        if not max(values, default=0.0) < 1.0 or not one.logprob < 1.0 or math.isnan(sum(values)):
            return "a log probability that is NaN or above 0"
    return ""

"""Checks of the frames that instances send: pure functions from a frame to the reason why it is invalid, or an empty string.

An instance is trusted with the tokens that it computes, but not with the router: no frame may stall it, fill its memory, or
bring numbers into it with which it cannot calculate. The bounds are far beyond what instances report.
"""

import math
from functools import lru_cache

from pdserve.control.frame_connection import NONCE_BYTES
from pdserve.counters import HELP, LABELS, parse_series
from pdserve.keys import KEY_BYTES, Layout
from pdserve.proto import pdserve_pb2 as pb

ROLES = ("prefill", "decode", "both")
MAX_INSTANCE_ID_CHARS = 200
MAX_NAME_CHARS = 200
MAX_BLOCKS = 1 << 22  # 67 million tokens at 16 per block; the prefix index takes 0.2 KB for each
MAX_BLOCK_BYTES = 1 << 40
MAX_BLOCK_SIZE = 1 << 16  # tokens
MAX_TOKEN_ID = (1 << 31) - 1
MAX_DIMENSION = 1 << 20  # of a layout
MAX_EOS_IDS = 1024
MAX_KEYS_PER_FRAME = 8192  # instances send up to 1024
MAX_COUNTERS = 1024
MAX_SECONDS = 1e6  # of a cost coefficient or an age: eleven days
MAX_COUNT = 1 << 60  # of tokens, bytes or pairs


class InvalidFrame(ValueError):
    """A frame of an instance breaks a rule; the text says which. The instance is dropped."""


def hello_fault(hello: pb.Hello) -> str:
    """Return why a registration is invalid by itself, whatever its role and model are; empty if it is not."""
    if not hello.instance_id or not _is_name(hello.instance_id, MAX_INSTANCE_ID_CHARS):
        return f"an instance id has 1 to {MAX_INSTANCE_ID_CHARS} characters, all of them printable"
    if len(hello.nonce) != NONCE_BYTES:
        return f"its nonce has {len(hello.nonce)} bytes instead of {NONCE_BYTES}"
    for name in ("connector", "device", "dtype", "kernel", "scheduling_policy"):
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
    return _layout_fault(hello)


def _layout_fault(hello: pb.Hello) -> str:
    layout = Layout.from_message(hello.layout)
    if not _is_name(layout.model_fingerprint) or not _is_name(layout.dtype):
        return "its layout names no model or dtype of printable characters"
    if layout.numerics and not _is_name(layout.numerics):
        return "its layout's numerics class is no name of printable characters"
    sizes = (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.itemsize)
    if not all(1 <= size <= MAX_DIMENSION for size in sizes):
        return f"a dimension of its KV layout is not from 1 to {MAX_DIMENSION}"
    if not layout.is_divisible or layout.ranks > MAX_DIMENSION:
        return (
            f"its KV layout has {layout.num_kv_heads} heads on {layout.ranks} ranks: one number must divide the other"
        )
    if (layout.block_size, layout.block_bytes) != (hello.block_size, hello.block_bytes):
        return "its block_size and block_bytes are not those of its KV layout"
    return "" if layout.namespace == hello.namespace else "its namespace is not that of its KV layout"


def frame_fault(frame: pb.InstanceFrame, kind: str | None, num_blocks: int) -> str:
    """Return why a later frame of an instance with `num_blocks` blocks, which is of this kind, is invalid by itself, or "".

    Registrations are checked by `hello_fault`, outputs one by one in `output_checks.py`.
    """
    match kind:
        case "step" | "hello" | "draining" | "failed":
            return ""
        case "heartbeat":
            return _heartbeat_fault(frame.heartbeat, num_blocks)
        case "blocks":
            return _blocks_fault(frame.blocks)
        case "others":
            return _load_fault(frame.others)
        case other:
            return f"a frame of an unknown kind ({other})"


def _heartbeat_fault(heartbeat: pb.Heartbeat, num_blocks: int) -> str:
    if len(heartbeat.counters) > MAX_COUNTERS:
        return f"a heartbeat has {len(heartbeat.counters)} counters; the limit is {MAX_COUNTERS}"
    for key, value in heartbeat.counters.items():
        if reason := _series_fault(key):
            return reason
        if not 0 <= value < math.inf:
            return f"the counter {key!r} is {value}; it must be finite and not negative"
    if heartbeat.free_blocks > num_blocks:
        return f"a heartbeat reports {heartbeat.free_blocks} free blocks of {num_blocks}"
    costs = heartbeat.costs
    lengths = len(costs.prefill), len(costs.decode), len(costs.transfer)
    if lengths not in ((3, 3, 2), (0, 0, 0)):
        return f"its cost models have {lengths} coefficients instead of (3, 3, 2)"
    if not all(0 <= value <= MAX_SECONDS for model in (costs.prefill, costs.decode, costs.transfer) for value in model):
        return f"a coefficient of its cost models is not from 0 to {MAX_SECONDS:g} seconds"
    return ""


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


def _blocks_fault(blocks: pb.Blocks) -> str:
    for keys in (blocks.added, blocks.removed):
        if len(keys) % KEY_BYTES or len(keys) > KEY_BYTES * MAX_KEYS_PER_FRAME:
            return f"KV events of {len(keys)} bytes; they must be up to {MAX_KEYS_PER_FRAME} keys of {KEY_BYTES} bytes"
    return ""


def _load_fault(load: pb.Load) -> str:
    amounts = (load.prefill_tokens, load.output_tokens, load.context_tokens, load.attended_tokens)
    return f"a load of more than {MAX_COUNT} tokens" if max(amounts) > MAX_COUNT else ""


def _is_name(text: str, max_chars: int = MAX_NAME_CHARS) -> bool:
    return len(text) <= max_chars and text.isprintable()

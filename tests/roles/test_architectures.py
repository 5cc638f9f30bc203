"""Prefill and decode of all architectures with windows or states: transformers' tokens, and bytes as forecast."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.keys import STATE_WINDOW
from pdserve.proto import pdserve_pb2 as pb
from tests.roles.pair import answer, compute, hand_over, run, take_over

B, TOKENS = 16, 12
LENGTHS = (96, 96, 17)
# Of two prompts of one length, the last 16 tokens are the same.
PROMPTS = [[*((k * i * i + k) % 251 for i in range(n - 16)), *(i * 31 % 251 for i in range(16))]
           for k, n in zip((3, 4, 5), LENGTHS, strict=True)]  # fmt: skip
Generate = Callable[[Path, list[list[int]], int], list[list[int]]]

WINDOWS = ["gemma4", "granite_swa", "llama4"]
STATES = ["qwen3_5", "bamba", "falcon_h1", "nemotron_h", "jamba", "kimi_linear"]
ALIKE = [
    "qwen3_5_moe",
    "granite_hybrid",
    "granite_moe_swa",
    "gemma3_mixed",
    "gpt_oss",
    "qwen3_next",
]  # others show it


@pytest.mark.parametrize(
    "architecture",
    [*WINDOWS, *STATES, *(pytest.param(name, marks=pytest.mark.slow) for name in ALIKE)],
    indirect=True,
)
def test_a_prompt_crosses(
    architecture: str,
    checkpoint: Callable[..., Path],
    instance: Callable[..., Any],
    rows: dict[bytes, Any],
    generate: Generate,
) -> None:
    expected = generate(checkpoint(architecture, dtype="float32"), PROMPTS, TOKENS)
    assert expected[0] != expected[1], "the tokens before the last 16 decide, or the test is none"
    prefill, decode = instance(), instance()
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        job = hand_over(prefill, decode, prompt, max_tokens=TOKENS)
        assert answer(job) == tokens
        assert job.prompt_sources() == {"computed": 0, "local_hit": 0, "loaded": len(prompt), "unneeded": 0}
        assert (job.transferred_blocks, job.tail_bytes) == (-(-len(prompt) // B), forecast(decode, len(prompt)))
    prefill.check_nothing_is_held()
    decode.check_nothing_is_held()
    again = cached_tokens(instance(), PROMPTS[0])
    assert again == (LENGTHS[0] - 1) // B * B, "all but the last block, on an instance that has seen nothing"
    check_that_bytes_matter(instance, rows, PROMPTS[0], expected[0])


def forecast(one: Any, num_tokens: int) -> int:
    """Return the bytes that cross of a prompt besides those of the first group's blocks."""
    blocks, total = -(-num_tokens // B), 0
    for group in one.engine.layout.groups[1:]:
        is_state = group.window == STATE_WINDOW
        total += group.block_bytes * (1 if is_state else blocks - max(0, num_tokens - group.window) // B)
    return total


def cached_tokens(prefill: Any, prompt: list[int]) -> int:
    """Return what a prefill instance tells the router that it need not compute of a prompt."""
    job = prefill.submit(pb.PREFILL, prompt, TOKENS)
    run(prefill, lambda: job in prefill.context.closed)
    sources = job.output.sources
    return int(sources.local_hit + sources.loaded)


def check_that_bytes_matter(
    instance: Callable[..., Any], rows: dict[bytes, Any], prompt: list[int], expected: list[int]
) -> None:
    """One byte of one number in the store, of each group, is another one: answers are other ones."""
    rows.clear()
    prefill = instance()
    message = compute(prefill, prompt, max_tokens=TOKENS, multi_turn=False)
    clean = {name: row.copy() for name, row in rows.items()}
    job = take_over(instance(), prompt, message, max_tokens=TOKENS, multi_turn=False)
    assert answer(job) == expected
    groups = prefill.engine.layout.groups
    for at, group in enumerate(groups):
        name, wrong = job.keys[-1] + (group.window.to_bytes(2, "big") if group.window else b""), []
        for turn in range(8):
            rows.clear()
            rows.update({key: row.copy() for key, row in clean.items()})
            place = place_of(rows[name].view(np.float32).reshape(-1), group, len(prompt), turn)
            rows[name][4 * place + 3] ^= (0x40, 0xC0)[turn % 2]  # exponent and sign: a number becomes huge
            job = take_over(instance(), prompt, message, max_tokens=TOKENS, multi_turn=False)
            wrong.append(answer(job) != expected)
            if any(wrong):
                break
        assert any(wrong), f"group {at}"


def place_of(numbers: Any, group: Any, num_tokens: int, turn: int) -> int:
    """Return which number of a block to change: of a value of the last token, or a small one of a state."""
    if group.window == STATE_WINDOW:
        sizes = np.where(numbers == 0, np.inf, abs(numbers))
        return int(np.argsort(sizes)[turn // 2])
    shape, last = group.shapes[0], (num_tokens - 1) % B
    return int(np.ravel_multi_index((0, shape[1] - 1, 0, last, turn // 2), shape))

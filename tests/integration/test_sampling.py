"""A request is a pure function: the same seed gives the same tokens on any topology, whatever else is in the batch."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0.9, "min_p": 0.05, "top_p": 0.95, "top_k": 50},
]
TOPOLOGIES = [{"prefill": 1, "decode": 1}, {"prefill": 2, "decode": 2}, {"prefill": 0, "decode": 0, "both": 1}]


def test_seeded_output_is_the_same_everywhere(
    checkpoint: Callable[..., Path],
    prompts: list[list[int]],
    deploy: Callable[..., Any],
    complete: Callable[..., dict[str, Any]],
) -> None:
    bodies = [
        {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "seed": i, **SETTINGS[i % len(SETTINGS)]}
        for i, prompt in enumerate(prompts)
    ]
    seen: list[list[list[int]]] = []
    for number, topology in enumerate(TOPOLOGIES):
        noise = [{"prompt": [number, i] * (i + 1), "max_tokens": 24, "seed": i, "temperature": 1} for i in range(8)]
        with (
            deploy(
                model=str(checkpoint("qwen3")), num_blocks=1024, max_num_batched_tokens=200, **topology
            ) as deployment,
            ThreadPoolExecutor(32) as threads,
        ):
            send = lambda body, d=deployment: complete(d, **body)["choices"][0]["token_ids"]  # noqa: E731
            others = [threads.submit(send, body) for body in noise[: 4 * number]]
            seen.append(list(threads.map(send, bodies)))
            for other in others:
                other.result()
    assert seen[1] == seen[0]
    assert seen[2] == seen[0]
    assert len({tuple(tokens) for tokens in seen[0]}) == len(prompts), "different seeds differ"

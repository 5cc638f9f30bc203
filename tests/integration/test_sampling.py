"""Deterministic sampling: a seed gives the same tokens on every topology, independent of the rest of the batch."""

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0.9, "min_p": 0.05, "top_p": 0.95, "top_k": 50},
]
TOPOLOGIES = [{"prefill": 1, "decode": 1}, {"prefill": 2, "decode": 2}, {"prefill": 0, "decode": 0, "both": 1}]
CONSTRAINED: list[dict[str, Any]] = [
    {
        "prompt": [5] * 20,
        "max_tokens": 60,
        "guided_json": {"type": "object", "properties": {"open": {"type": "boolean"}}, "required": ["open"]},
    },
    {"prompt": [6] * 20, "max_tokens": 60, "temperature": 1.0, "seed": 4, "guided_regex": "[ab]{20}"},
    {"prompt": [7] * 20, "max_tokens": 20, "ignore_eos": True, "frequency_penalty": 2, "repetition_penalty": 10},
]
WITH_LOGPROBS: dict[str, Any] = {
    "prompt": list(range(40)),
    "max_tokens": 8,
    "ignore_eos": True,
    "seed": 3,
    "temperature": 1.0,
    "logprobs": 4,
    "logit_bias": {"5": 3.0},  # changes the drawn tokens, not the reported logprobs
}


@pytest.mark.long
@pytest.mark.parametrize(
    "dtype",
    ["float32", pytest.param("bfloat16", marks=pytest.mark.slow), pytest.param("float16", marks=pytest.mark.slow)],
)
def test_seeded_output_is_the_same_on_every_topology(
    dtype: str,
    checkpoint: Callable[..., Path],
    prompts: list[list[int]],
    deploy: Callable[..., Any],
    complete: Callable[..., dict[str, Any]],
) -> None:
    path, prompts = checkpoint("qwen3", dtype=dtype), prompts[:12]  # one of each length, at least
    letters = transformers.AutoTokenizer.from_pretrained(path).encode("abc", add_special_tokens=False)
    masked = {"allowed_token_ids": letters, "bad_words": ["a", "bb"], "temperature": 1.0, "seed": 5, "max_tokens": 20}
    bodies = [
        {
            "prompt": prompt,
            "logprobs": 2,
            "max_tokens": 24,
            "ignore_eos": True,
            "seed": i,
            **SETTINGS[i % len(SETTINGS)],
        }
        for i, prompt in enumerate(prompts)
    ]
    outputs: list[list[dict[str, Any]]] = []
    choices: list[dict[str, Any]] = []
    constrained: list[list[str]] = []
    for number, topology in enumerate(TOPOLOGIES):
        noise = [{"prompt": [number, i] * (i + 1), "max_tokens": 24, "seed": i, "temperature": 1} for i in range(8)]
        with (
            deploy(model=str(path), num_blocks=1024, max_num_batched_tokens=200, **topology) as deployment,
            ThreadPoolExecutor(32) as threads,
        ):
            send = lambda body, d=deployment: complete(d, **body)["choices"][0]  # noqa: E731
            choices.append(complete(deployment, **WITH_LOGPROBS)["choices"][0])
            constrained.append(
                [
                    complete(deployment, **{"prompt": [8] * 20} | body)["choices"][0]["text"]
                    for body in [*CONSTRAINED, masked]
                ]
            )
            bad = {"model": deployment.config.name, "prompt": "a", "guided_json": {"type": "nothing"}}
            refused = httpx.post(f"{deployment.url}/v1/completions", json=bad)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_grammar"), refused.text
            others = [threads.submit(send, body) for body in noise[: 4 * number]]
            outputs.append(list(threads.map(send, bodies)))
            for other in others:
                other.result()
    tokens = [[choice["token_ids"] for choice in output] for output in outputs]
    assert tokens[1] == tokens[0]
    assert tokens[2] == tokens[0]
    assert len({tuple(each) for each in tokens[0]}) == len(prompts), "different seeds differ"
    assert constrained[0] == constrained[1] == constrained[2]
    assert isinstance(json.loads(constrained[0][0])["open"], bool) and re.fullmatch("[ab]{20}", constrained[0][1])
    assert set(constrained[0][-1]) == {"b", "c"} and "bb" not in constrained[0][-1]
    for choice, output in zip(choices, outputs, strict=True):
        assert choice["token_ids"] == choices[0]["token_ids"]
        if dtype == "float32":
            _check_logprobs(path, choice)
        else:  # transformers rounds otherwise in 16 bits; our own log probabilities are the same, bit for bit
            assert choice["logprobs"] == choices[0]["logprobs"]
            assert [each["logprobs"] for each in output] == [each["logprobs"] for each in outputs[0]]


def _check_logprobs(path: Path, choice: dict[str, Any]) -> None:
    """Compare the logprobs with log_softmax of transformers' logits."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    ids = torch.tensor([[*WITH_LOGPROBS["prompt"], *choice["token_ids"]]])
    with torch.no_grad():
        reference = model(ids).logits[0, len(WITH_LOGPROBS["prompt"]) - 1 : -1].log_softmax(-1)
    chosen = reference.gather(1, ids[0, len(WITH_LOGPROBS["prompt"]) :, None])[:, 0]
    torch.testing.assert_close(torch.tensor(choice["logprobs"]["token_logprobs"]), chosen, atol=1e-4, rtol=0)
    for top, row in zip(choice["logprobs"]["top_logprobs"], reference, strict=True):
        best = sorted(top.values(), reverse=True)[:4]
        torch.testing.assert_close(torch.tensor(best), row.topk(4).values, atol=1e-4, rtol=0)

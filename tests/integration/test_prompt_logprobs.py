"""Log probabilities of prompts: equal to those of transformers in float32, on every topology, whatever is cached."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from pdserve.router.api.answers import ChatCompletion, Completion

LENGTHS = (1, 2, 16, 33, 300)
TOPOLOGIES = [
    {"prefill": 1, "decode": 1},
    pytest.param({"prefill": 0, "decode": 0, "both": 1}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_log_probabilities_of_prompts(
    topology: dict[str, int],
    checkpoint: Callable[..., Path],
    deploy: Callable[..., Any],
    complete: Callable[..., dict[str, Any]],
) -> None:
    path = checkpoint("qwen3")
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    prompts = [[(7 * i * i + length) % 250 for i in range(length)] for length in LENGTHS]
    # Steps are shorter than the longest prompt, and than the limit of prompts whose log probabilities are due.
    with deploy(model=str(path), num_blocks=256, max_num_batched_tokens=100, **topology) as deployment:
        for prompt in prompts:
            complete(deployment, prompt=prompt, max_tokens=2)  # fills pools and store
        for max_tokens in (1, 3):
            answer = complete(
                deployment, prompt=prompts, max_tokens=max_tokens, prompt_logprobs=3, temperature=0, ignore_eos=True
            )
            choices = Completion.model_validate(answer).model_dump()["choices"]
            for prompt, choice in zip(prompts, choices, strict=True):
                _check(model, prompt, choice["prompt_logprobs"])
                assert len(choice["token_ids"]) == max_tokens
        for stream in (False, True):
            _check_echo(deployment, model, prompts[-1], stream=stream)
        chat = {"messages": [{"role": "user", "content": "hello"}], "prompt_logprobs": 0, "max_tokens": 2}
        answer = httpx.post(f"{deployment.url}/v1/chat/completions", json=chat).raise_for_status().json()
        assert len(ChatCompletion.model_validate(answer).prompt_logprobs) == answer["usage"]["prompt_tokens"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def _logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """Return the log probabilities [T - 1, V] of what follows each token but the last."""
    with torch.no_grad():
        logprobs: torch.Tensor = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logprobs


def _check(model: Any, prompt: list[int], entries: list[dict[str, dict[str, Any]] | None]) -> None:
    assert entries[0] is None and len(entries) == len(prompt)
    for token, entry, row in zip(prompt[1:], entries[1:], _logprobs(model, prompt), strict=True):
        assert entry is not None
        assert math.isclose(entry[str(token)]["logprob"], row[token], abs_tol=1e-4)
        best = row.topk(3)
        ranked = sorted(entry.values(), key=lambda one: int(one["rank"]))[:3]
        assert [one["rank"] for one in ranked] == [1, 2, 3]
        torch.testing.assert_close(torch.tensor([one["logprob"] for one in ranked]), best.values, atol=1e-4, rtol=0)
        assert abs(entry[str(token)]["rank"] - (row > row[token]).sum() - 1) <= 1, "equal values may change places"


def _check_echo(deployment: Any, model: Any, prompt: list[int], *, stream: bool) -> None:
    """Send what lm-eval sends, and compare with transformers' log probabilities of prompt and answer."""
    body = {"prompt": prompt, "max_tokens": 3, "logprobs": 1, "echo": True, "temperature": 0, "ignore_eos": True}
    url = f"{deployment.url}/v1/completions"
    if stream:
        events = httpx.post(url, json={**body, "return_token_ids": True, "stream": True}).text.split("\n\n")
        chunks = [httpx.Response(200, text=event[6:]).json() for event in events if event.startswith("data: {")]
    else:
        chunks = [httpx.post(url, json={**body, "return_token_ids": True}).json()]
    parts = [chunk["choices"][0] for chunk in chunks]
    logprobs = {name: [one for part in parts for one in part["logprobs"][name]] for name in parts[0]["logprobs"]}
    answer = [token for part in parts for token in part["token_ids"]]
    text = "".join(part["text"] for part in parts)
    rows = _logprobs(model, [*prompt, *answer])
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    expected = rows.gather(1, torch.tensor([*prompt, *answer])[1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs["token_logprobs"][1:]), expected, atol=1e-4, rtol=0)
    best = torch.tensor([max(one.values()) for one in logprobs["top_logprobs"][1:]])
    torch.testing.assert_close(best, rows.amax(-1), atol=1e-4, rtol=0)
    offsets = logprobs["text_offset"]
    assert len(offsets) == len(prompt) + 3 and offsets == sorted(offsets) and offsets[0] == 0
    assert offsets[-1] <= len(text)

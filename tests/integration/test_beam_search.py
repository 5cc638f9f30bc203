"""Beam search over real processes: the answers of transformers on every topology, and in spite of lost instances."""

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers

PROMPT = [i % 90 for i in range(70)]
BODY: dict[str, Any] = {"use_beam_search": True, "beam_width": 4, "ignore_eos": True}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"stream": True}, "stream cannot be combined with use_beam_search"),
    ({"temperature": 0.5}, "does not sample"),
    ({"prompt_logprobs": 0}, "prompt_logprobs cannot be combined"),
    ({"logprobs": 20, "max_tokens": 8000, "n": 4}, "672000 log probabilities"),
    ({"logprobs": 0, "echo": True}, "echo and logprobs cannot be combined"),
    ({"stop": "x"}, "send stop_token_ids"),
    ({"guided_regex": "a", "ignore_eos": False}, "structured output cannot be combined"),
    ({"n": 5}, "at least n, which is 5"),
    ({"best_of": 3}, "contradict"),
    ({"allowed_token_ids": [1, 2]}, "at least 8 tokens"),
    (
        {"allowed_token_ids": [*range(1, 9)], "bad_words": ["#"]},  # which is token 2 of the tests' tokenizer
        "at least 8 tokens, and 7 are allowed",
    ),
    ({"length_penalty": 11}, "length_penalty must be"),
    ({"early_stopping": "sometimes"}, "early_stopping"),
    ({"beam_width": 20, "n": 20}, "16 sequences at once"),
    ({"beam_width": 16, "max_tokens": 400}, "do not fit into 300 blocks"),
    ({"use_beam_search": False}, "beam_width needs use_beam_search"),
]


def reference(path: Path, max_tokens: int) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    ids = torch.tensor([PROMPT])
    how = {"num_beams": 4, "num_return_sequences": 2, "do_sample": False, "eos_token_id": None}
    mask = torch.ones_like(ids)
    answer: Any = model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, pad_token_id=0, **how)
    tokens: list[list[int]] = answer[:, len(PROMPT) :].tolist()
    return tokens


def reference_logprobs(path: Path, outputs: list[list[int]]) -> list[list[float]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    found = []
    for ids in outputs:
        with torch.inference_mode():
            logprobs = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].log_softmax(dim=-1)
        found.append(logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist())
    return found


@pytest.mark.parametrize(
    "topology",
    [{"prefill": 1, "decode": 1}, pytest.param({"prefill": 0, "decode": 0, "both": 1}, marks=pytest.mark.slow)],
    ids=str,
)
def test_equals_transformers(
    topology: dict[str, int], checkpoint: Callable[..., Path], deploy: Callable[..., Any], complete: Callable[..., Any]
) -> None:
    path = checkpoint("llama")
    with deploy(model=str(path), num_blocks=300, max_num_seqs=16, **topology) as deployment:
        answer = complete(deployment, prompt=PROMPT, n=2, max_tokens=40, **BODY)
        assert [choice["token_ids"] for choice in answer["choices"]] == reference(path, 40)
        assert answer["usage"]["completion_tokens"] == 80
        scored = complete(deployment, prompt=PROMPT, n=2, max_tokens=40, logprobs=3, **BODY)
        for choice, expected in zip(scored["choices"], reference_logprobs(path, reference(path, 40)), strict=True):
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)
            tops = zip(choice["logprobs"]["top_logprobs"], choice["logprobs"]["token_logprobs"], strict=True)
            assert all(len(top) in (3, 4) and logprob in top.values() for top, logprob in tops)
        one = complete(deployment, prompt=PROMPT, n=2, max_tokens=1, **BODY)
        assert [choice["token_ids"] for choice in one["choices"]] == reference(path, 1)
        url = f"{deployment.url}/v1/completions"
        with ThreadPoolExecutor(4) as threads:
            good = threads.submit(complete, deployment, prompt=PROMPT, n=2, max_tokens=40, **BODY)
            for bad, message in BAD:
                reply = httpx.post(url, json={"prompt": PROMPT, "max_tokens": 4, **BODY, **bad})
                assert reply.status_code == 400 and message in reply.json()["error"]["message"], (bad, reply.text)
            assert good.result()["choices"] == answer["choices"], "the batch goes on"
        client = openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0)
        completion = client.completions.create(
            model=deployment.config.name,
            prompt=[PROMPT, PROMPT[:5]],
            n=2,
            best_of=4,
            max_tokens=40,
            extra_body={"use_beam_search": True, "ignore_eos": True},
        )
        assert [choice.text for choice in completion.choices][:2] == [choice["text"] for choice in answer["choices"]]


@pytest.mark.parametrize("victim", ["decode", pytest.param("prefill", marks=pytest.mark.slow)])
def test_survives_the_loss_of_an_instance(
    victim: str,
    checkpoint: Callable[..., Path],
    deploy: Callable[..., Any],
    complete: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:
    path = checkpoint("llama")
    expected = reference(path, 150)
    with (
        deploy(model=str(path), num_blocks=400, prefill=2, decode=2) as deployment,
        ThreadPoolExecutor(4) as threads,
    ):
        answers = [threads.submit(complete, deployment, prompt=PROMPT, n=2, max_tokens=150, **BODY) for _ in range(4)]

        def busy() -> list[str]:
            found = httpx.get(f"{deployment.url}/debug/instances").json()["instances"]
            return [one["instance_id"] for one in found if one["requests"] and one["instance_id"].startswith(victim)]

        wait_until(lambda: busy() or all(answer.done() for answer in answers))
        for name in busy()[:1]:
            os.kill(deployment.child(name).pid, signal.SIGKILL)
        for answer in answers:
            assert [choice["token_ids"] for choice in answer.result()["choices"]] == expected

"""Several choices of one prompt over real processes: it moves once, and each choice has the tokens of its own seed."""

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

PROMPT = [i % 90 for i in range(100)]  # 7 blocks, the last one partial
BODY: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "temperature": 1.2, "seed": 11, "logprobs": 1}


def metric(deployment: Any, name: str, **labels: str) -> float:
    """Return the sum of a metric over its series with these labels."""
    lines = httpx.get(f"{deployment.url}/metrics").text.splitlines()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    named = [line for line in lines if line.startswith((f"pdserve_{name}{{", f"pdserve_{name} "))]
    return sum(float(line.split()[-1]) for line in named if all(part in line for part in wanted))


@pytest.mark.parametrize(
    "topology",
    [{"prefill": 1, "decode": 1}, pytest.param({"prefill": 0, "decode": 0, "both": 1}, marks=pytest.mark.slow)],
    ids=str,
)
def test_the_prompt_is_computed_and_moved_once(
    topology: dict[str, int],
    checkpoint: Callable[..., Path],
    deploy: Callable[..., Any],
    complete: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:
    with deploy(model=str(checkpoint("qwen3", dtype="bfloat16")), num_blocks=256, **topology) as deployment:
        answer = complete(deployment, prompt=PROMPT, n=4, **BODY)
        wait_until(lambda: metric(deployment, "generation_tokens_total") == 4 * 24, "the heartbeats after the answer")
        assert metric(deployment, "prompt_tokens_by_source_total", source="computed") == len(PROMPT)
        if "both" not in topology:
            blocks = partial(metric, deployment, "kv_transfer_blocks_total")
            wait_until(lambda: blocks(direction="store") >= 7, "the heartbeat of prefill after its store")
            assert blocks(direction="store") == blocks(direction="load") == 7
        alone = [complete(deployment, prompt=PROMPT, **{**BODY, "seed": 11 + i})["choices"][0] for i in range(4)]
        for many, one in zip(answer["choices"], alone, strict=True):
            assert (many["token_ids"], many["logprobs"]) == (one["token_ids"], one["logprobs"])
        assert answer["usage"]["completion_tokens"] == 4 * 24 and answer["usage"]["prompt_tokens"] == len(PROMPT)
        client = openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0)
        texts = [""] * 64
        body: dict[str, Any] = {"model": deployment.config.name, "prompt": PROMPT, "n": 64, "max_tokens": 4, "seed": 11}
        for event in client.completions.create(**body, stream=True, extra_body={"ignore_eos": True}):
            for choice in event.choices:
                texts[choice.index] += choice.text
        whole = client.completions.create(**body, extra_body={"ignore_eos": True})
        assert texts == [choice.text for choice in whole.choices]
        guided = complete(deployment, prompt=PROMPT, n=3, max_tokens=40, temperature=1.0, guided_regex="[ab]{9}")
        assert all(len(choice["text"]) == 9 for choice in guided["choices"])
        bad = httpx.post(f"{deployment.url}/v1/completions", json={"prompt": PROMPT, "n": 65})
        assert (bad.status_code, bad.json()["error"]["code"]) == (400, "too_many_choices")
        assert complete(deployment, prompt=PROMPT, n=4, max_tokens=1)["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("victim", ["decode-0", pytest.param("prefill-0", marks=pytest.mark.slow)])
def test_choices_survive_the_loss_of_an_instance(
    victim: str,
    checkpoint: Callable[..., Path],
    deploy: Callable[..., Any],
    complete: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:
    body = {**BODY, "max_tokens": 200, "logprobs": None}
    with (
        deploy(model=str(checkpoint("qwen3")), num_blocks=512, prefill=2, decode=2) as deployment,
        ThreadPoolExecutor(4) as threads,
    ):
        alone = [complete(deployment, prompt=PROMPT, **{**body, "seed": 11 + i})["choices"][0] for i in range(4)]
        answers = [threads.submit(complete, deployment, prompt=PROMPT, n=4, **body) for _ in range(4)]
        wait_until(lambda: metric(deployment, "generation_tokens_total") > 4 * 200 + 100, "they are decoded")
        os.kill(deployment.child(victim).pid, signal.SIGKILL)
        for answer in answers:
            choices = answer.result()["choices"]
            assert [choice["token_ids"] for choice in choices] == [choice["token_ids"] for choice in alone]

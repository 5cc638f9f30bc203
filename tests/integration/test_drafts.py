"""Drafts on the decode instance of a router, a prefill and a decode instance: the same answers in fewer steps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

ORACLE = Path(__file__).parent.parent / "oracle.py"


@pytest.mark.parametrize("num_blocks", [1024, 60])
def test_answers_of_a_decode_instance_with_a_drafter(
    num_blocks: int,
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    prompts: list[list[int]],
    deploy: Callable[..., Any],
    complete: Callable[..., dict[str, Any]],
    complete_all: Callable[..., list[list[int]]],
    metric: Callable[..., float],
    wait_until: Callable[..., None],
    tmp_path: Path,
) -> None:
    path = checkpoint("llama", dtype="float32")
    expected = generate(path, prompts, 32)
    answers = tmp_path / "answers.json"
    answers.write_text(json.dumps([*zip(prompts, expected, strict=True)]))
    flags = {"decode": ["--num-blocks", str(num_blocks)], "prefill": ["--num-blocks", "1024"]}
    settings = {"model": str(path), "speculate": "off", "kv_cache_memory": None}
    with deploy(**settings, flags=flags, programs={"decode": [str(ORACLE), str(answers)]}) as deployment:
        assert complete_all(deployment, prompts) == expected
        tokens = len(prompts) * 31
        wait_until(lambda: metric(deployment, "generation_tokens_total", role="decode") == tokens, "the last heartbeat")
        assert metric(deployment, "kv_transfer_blocks_total", role="decode", direction="load") > 0
        assert metric(deployment, "kv_transfer_failures_total") == 0
        prompt = prompts[-1]
        steps = metric(deployment, "engine_steps_total", role="decode")
        whole = complete(deployment, prompt=prompt, max_tokens=32, ignore_eos=True)["choices"][0]
        wait_until(lambda: metric(deployment, "generation_tokens_total", role="decode") == tokens + 31, "the heartbeat")
        assert metric(deployment, "engine_steps_total", role="decode") - steps < 31 / 1.8, "several tokens in a step"
        client = openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0)
        body: dict[str, Any] = {"model": deployment.config.name, "prompt": prompt, "max_tokens": 32, "temperature": 0}
        for at in range(4, 12):  # a stop string may end with any of a step's tokens
            stop = whole["text"][at : at + 2]
            events = [*client.completions.create(**body, stop=stop, stream=True, extra_body={"ignore_eos": True})]
            assert "".join(event.choices[0].text for event in events) == whole["text"][: whole["text"].index(stop)]
            assert events[-1].choices[0].finish_reason == "stop"
        wait_until(lambda: metric(deployment, "kv_cache_blocks_held", role="decode") == 0, "no block is held")

"""Many log probabilities cost other streams nothing: they come once, in pieces, and are answered from a thread."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

TOP = 20
PROMPT = [7 * i % 250 for i in range(390)]


@pytest.fixture(scope="module")
def deployment(deploy: Callable[..., Any], checkpoint: Callable[[str], Path]) -> Any:
    with deploy(model=str(checkpoint("llama")), num_blocks=512) as running:
        yield running


def test_all_choices_have_the_scores_of_their_prompt_and_no_instance_is_lost(
    deployment: Any, complete: Callable[..., dict[str, Any]]
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2, "prompt_logprobs": TOP, "temperature": 1, "seed": 1, "ignore_eos": True}
    ids, stop = list[int](), threading.Event()

    def stream() -> None:
        while not stop.is_set():
            answer = complete(deployment, prompt=[1, 2, 3], max_tokens=20, ignore_eos=True)
            ids.append(len(answer["choices"][0]["token_ids"]))

    other = threading.Thread(target=stream)
    other.start()
    try:
        alone = complete(deployment, **body)["choices"][0]
        many = complete(deployment, **body, n=16)["choices"]
        chat = {"messages": [{"role": "user", "content": "hello " * 40}], "n": 4, "prompt_logprobs": 3, "max_tokens": 2}
        reply = httpx.post(f"{deployment.url}/v1/chat/completions", json=chat, timeout=600).json()
    finally:
        stop.set()
        other.join()
    assert len(many) == 16 and {len(choice["token_ids"]) for choice in many} == {2}
    assert all(choice["prompt_logprobs"] == alone["prompt_logprobs"] for choice in many)
    assert len(alone["prompt_logprobs"]) == len(PROMPT) and all(map(len, alone["prompt_logprobs"][1:]))
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]
    assert ids and set(ids) == {20}
    metrics = httpx.get(f"{deployment.url}/metrics").text
    assert "pdserve_instances_lost_total 0.0" in metrics and "pdserve_invalid_frames_total 0.0" in metrics


def test_the_limit_is_that_of_all_choices_and_prompts(deployment: Any) -> None:
    url = f"{deployment.url}/v1/completions"
    for body in (
        {"prompt": PROMPT, "n": 64, "prompt_logprobs": TOP, "max_tokens": 1},
        {"prompt": [PROMPT] * 40, "echo": True, "logprobs": TOP, "max_tokens": 1, "stream": True},
        {"prompt": [1], "n": 64, "logprobs": TOP, "max_tokens": 200},
    ):
        reply = httpx.post(url, json=body, timeout=600)
        assert reply.status_code == 400 and "262144" in reply.json()["error"]["message"], reply.text

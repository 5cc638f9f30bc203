"""Grammar bombs over HTTP: they are a 400, most of them before any instance has received them, and delay nobody else."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

NESTED: dict[str, Any] = {"type": "string"}
for _ in range(850):
    NESTED = {"type": "array", "items": NESTED}
BOMBS: list[dict[str, Any]] = [
    *[{"guided_json": json.dumps(NESTED)}] * 3,
    {"guided_regex": "a?" * 20_000},
    {"guided_json": {"type": "nothing"}},
]
LENGTH = 400


def test_bombs_and_invalid_grammars_reach_no_instance(
    checkpoint: Callable[..., Path], deploy: Callable[..., Any], complete: Callable[..., dict[str, Any]]
) -> None:
    with deploy(model=str(checkpoint("qwen3")), num_blocks=256) as deployment:
        for bomb in BOMBS:
            body = {"model": deployment.config.name, "prompt": [5] * 20, **bomb}
            reply = httpx.post(f"{deployment.url}/v1/completions", json=body, timeout=600)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_grammar"), reply.text
        assert httpx.get(f"{deployment.url}/debug/requests").json()["requests"] == []
        good = complete(deployment, prompt=[5] * 20, max_tokens=60, guided_regex="[ab]{20}")["choices"][0]
        assert set(good["text"]) <= set("ab") and len(good["text"]) == 20


def test_a_stream_whose_mask_is_late_delays_no_other(
    checkpoint: Callable[..., Path],
    deploy: Callable[..., Any],
    metric: Callable[..., float],
    wait_until: Callable[..., None],
) -> None:
    """It has the only slot, and its mask worker is stopped. Afterwards, the answer is what it is without."""
    with deploy(model=str(checkpoint("qwen3")), num_blocks=256, max_num_seqs=1) as deployment:
        url = f"{deployment.url}/v1/completions"
        plain = {"model": deployment.config.name, "prompt": [5] * 20, "max_tokens": 20, "seed": 1}
        slow = plain | {"max_tokens": 1000, "stream": True, "guided_regex": f"[ab]{{{LENGTH}}}"}
        expected = httpx.post(url, json=plain, timeout=600).json()["choices"]
        whole = httpx.post(url, json=slow | {"stream": False}, timeout=600).json()["choices"][0]["text"]
        decode = next(child.process.pid for child in deployment.children if child.arguments[0] == "decode")
        workers = [worker for server in children(decode) for worker in children(server)]
        num_late = metric(deployment, "grammar_masks_late_total")

        def is_late() -> bool:
            return metric(deployment, "grammar_masks_late_total") > num_late + 20

        def has_ended() -> bool:
            return not httpx.get(f"{deployment.url}/debug/requests").json()["requests"]

        while not is_late():  # again if a busy machine stopped the worker behind the last mask
            num_late = metric(deployment, "grammar_masks_late_total")
            with httpx.stream("POST", url, json=slow, timeout=600) as answer:
                events = (line for line in answer.iter_lines() if line.startswith("data: {"))
                text = text_of(next(events))
                for pid in workers:
                    os.kill(pid, signal.SIGSTOP)
                try:
                    for _ in range(3):
                        assert httpx.post(url, json=plain, timeout=600).json()["choices"] == expected
                    wait_until(lambda: is_late() or has_ended(), "the heartbeat")
                finally:
                    for pid in workers:
                        os.kill(pid, signal.SIGCONT)
                assert text + "".join(map(text_of, events)) == whole
        assert re.fullmatch(slow["guided_regex"], whole)


def children(pid: int) -> list[int]:
    """Return the ids of a process's children, of whichever thread."""
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def text_of(event: str) -> str:
    text: str = json.loads(event.removeprefix("data: "))["choices"][0]["text"]
    return text

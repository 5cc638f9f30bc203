"""Grammar bombs over HTTP: they are a 400 before any instance has received them, and grammars after them work."""

import json
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

"""A prefill instance with a different store: the router detects it, counts it, and pairs decode with the others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from pdserve.config import CONNECTOR_VARIABLE

STRANGER = "prefill-9"


def test_router_stops_pairing_an_instance_with_another_store(
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    deploy: Callable[..., Any],
    complete: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    path = checkpoint("llama")
    prompts = [[(i * k) % 251 for i in range(40)] for k in range(1, 13)]
    expected = generate(path, prompts, 4)
    with deploy(model=str(path), num_blocks=128, policy="round_robin") as deployment:
        first = deployment.child("prefill-0")
        arguments = [STRANGER if argument == "prefill-0" else argument for argument in first.arguments]
        environment = first.environment | {CONNECTOR_VARIABLE: f"file://{tmp_path}/kv"}
        deployment.children.append(type(first)(STRANGER, arguments, environment))
        deployment._start(deployment.children[-1])
        deployment.wait_ready()

        replies = [complete(deployment, prompt=prompt, max_tokens=4, ignore_eos=True) for prompt in prompts]
        assert [reply["choices"][0]["token_ids"] for reply in replies] == expected, "decode recomputes missing KV"
        timelines = [httpx.get(f"{deployment.url}/debug/requests/{reply['id']}").json() for reply in replies]
        used = [timeline["prefill_instance"] for timeline in timelines]
        assert used.count(STRANGER) == 3 and used[6:] == ["prefill-0"] * 6
        name = f'pdserve_handovers_in_vain_total{{decode="decode-0",prefill="{STRANGER}"}} 3.0'
        assert name in httpx.get(f"{deployment.url}/metrics").text

"""A deployment over several stores goes on with those that are left."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx


def moved(deployment: Any, name: str, connector: str) -> float:
    """The sum of a metric's series of this connector, over all instances."""
    lines = httpx.get(f"{deployment.url}/metrics").text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(f"pdserve_{name}_total{{") and f'connector="{connector}"' in line
    )


def wait_until(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.1)


def test_a_second_tier_that_dies_is_counted_and_changes_no_token(
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    deploy: Callable[..., Any],
    complete: Callable[..., dict[str, Any]],
    prompts: list[list[int]],
    start_redis: Callable[..., Any],
    tmp_path: Path,
) -> None:
    path, server = checkpoint("llama"), start_redis()
    expected = generate(path, prompts, 8)
    url = f"tiered://file://{tmp_path}/kv,{server.url}?timeout=2"
    with deploy(model=str(path), connector=url, num_blocks=256) as deployment:

        def run(which: slice) -> list[list[int]]:
            replies = (complete(deployment, prompt=prompt, max_tokens=8, ignore_eos=True) for prompt in prompts[which])
            return [reply["choices"][0]["token_ids"] for reply in replies]

        assert run(slice(0, 12)) == expected[:12]
        wait_until(lambda: moved(deployment, "kv_transfer_blocks", "tiered/2/redis") > 0)
        server.kill()
        assert run(slice(12, None)) == expected[12:]
        wait_until(lambda: moved(deployment, "kv_transfer_failures", "tiered/2/redis") > 0)
        assert moved(deployment, "kv_transfer_blocks", "tiered") > 0
        assert moved(deployment, "kv_transfer_failures", "tiered") == 0

"""A deployment on tiered stores continues with the remaining tiers when one fails."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_failed_second_tier_is_counted_and_changes_no_token(
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    deploy: Callable[..., Any],
    complete: Callable[..., dict[str, Any]],
    metric: Callable[..., float],
    wait_until: Callable[..., None],
    prompts: list[list[int]],
    start_redis: Callable[..., Any],
    tmp_path: Path,
) -> None:
    path, server = checkpoint("llama"), start_redis()
    expected = generate(path, prompts, 8)
    url = f"tiered://file://{tmp_path}/kv?timeout=600,{server.url}?timeout=60"
    with deploy(model=str(path), connector=url, num_blocks=256) as deployment:

        def run(which: slice) -> list[list[int]]:
            replies = (complete(deployment, prompt=prompt, max_tokens=8, ignore_eos=True) for prompt in prompts[which])
            return [reply["choices"][0]["token_ids"] for reply in replies]

        assert run(slice(0, 12)) == expected[:12]
        wait_until(lambda: metric(deployment, "kv_transfer_blocks_total", connector="tiered/2/redis") > 0)
        server.kill()
        assert run(slice(12, None)) == expected[12:]
        wait_until(lambda: metric(deployment, "kv_transfer_failures_total", connector="tiered/2/redis") > 0)
        assert metric(deployment, "kv_transfer_blocks_total", connector="tiered") > 0
        assert metric(deployment, "kv_transfer_failures_total", connector="tiered") == 0

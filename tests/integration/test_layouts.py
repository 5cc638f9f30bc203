"""Prefill and decode with different block sizes and dtypes: the same tokens, sane ones, or a sentence; never wrong ones."""

import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.proto import pdserve_pb2 as pb

Complete = Callable[..., dict[str, Any]]


def sizes(prefill: int, decode: int) -> dict[str, list[str]]:
    return {
        "prefill": ["--block-size", str(prefill)],
        "decode": ["--block-size", str(decode), "--convert-kv"],
    }


@pytest.mark.parametrize(
    ("connector_url", "prefill", "decode"),
    [("shm", 16, 64), ("shm", 32, 16), ("file", 24, 16), ("nixl", 32, 16)],
    indirect=["connector_url"],
)
def test_other_block_sizes_change_no_token(
    connector_url: str,
    prefill: int,
    decode: int,
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    prompts: list[list[int]],
    deploy: Callable[..., Any],
    complete_all: Callable[..., list[list[int]]],
    metric: Callable[..., float],
    until: Callable[..., None],
    blocks_held: Callable[[Any], dict[str, float]],
) -> None:
    path = checkpoint("llama")
    expected = generate(path, prompts, 32)
    settings = {"model": str(path), "connector": connector_url, "num_blocks": 1024, "max_num_batched_tokens": 256}
    with deploy(flags=sizes(prefill, decode), **settings) as deployment:
        assert complete_all(deployment, prompts) == expected
        tokens = partial(metric, deployment, "prompt_tokens_by_source_total", role="decode")
        until(lambda: tokens(source="loaded") + tokens(source="local_hit") == sum(map(len, prompts)))
        assert tokens(source="computed") == 0, "everything was converted, nothing computed once more"
        assert complete_all(deployment, prompts) == expected, "with warm caches"
        until(lambda: tokens() == 2 * sum(map(len, prompts)))
        assert tokens(source="local_hit") >= 16 * (700 // 16), "exact KV is found again"
        assert tokens(source="computed") == 0
        until(lambda: not any(blocks_held(deployment).values()))


@pytest.mark.parametrize("connector_url", ["shm"], indirect=True)
@pytest.mark.parametrize(("prefill", "decode"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_another_dtype_gives_sane_tokens_that_nobody_else_finds(
    connector_url: str,
    prefill: str,
    decode: str,
    deploy: Callable[..., Any],
    complete: Complete,
    metric: Callable[..., float],
    until: Callable[..., None],
) -> None:
    """The demo model knows its capitals in either dtype."""
    flags = {
        "prefill": ["--dtype", prefill],
        "decode": ["--dtype", decode, "--block-size", "32", "--convert-kv"],
    }
    with deploy(flags=flags, connector=connector_url, num_blocks=256) as deployment:
        lengths = 0
        for _ in range(2):
            reply = complete(deployment, prompt="The capital of France is", max_tokens=8)
            assert "Paris" in reply["choices"][0]["text"]
            story = complete(deployment, prompt="Once upon a time there was a dog. " * 12, max_tokens=8)
            lengths += reply["usage"]["prompt_tokens"] + story["usage"]["prompt_tokens"]
        tokens = partial(metric, deployment, "prompt_tokens_by_source_total", role="decode")
        until(lambda: tokens() == lengths)
        assert tokens(source="loaded") == lengths, "both times"


@pytest.mark.parametrize("connector_url", ["shm"], indirect=True)
def test_without_the_flag_the_router_says_why(
    connector_url: str, checkpoint: Callable[..., Path], deploy: Callable[..., Any], until: Callable[..., None]
) -> None:
    said: list[str] = []
    settings = {"model": str(checkpoint("llama")), "connector": connector_url, "num_blocks": 64}
    flags = {"prefill": ["--block-size", "16"], "decode": ["--block-size", "32"]}
    with deploy(flags=flags, said=said, wait=False, **settings) as deployment:
        sentence = "prefill-0 has KV blocks of 16 tokens in float32, decode-0 of 32 in float32; make them the same, or"
        until(lambda: any(sentence in line for line in said), said)
        assert "start decode-0 with --convert-kv" in next(line for line in said if sentence in line)
        assert httpx.get(f"{deployment.url}/ready").status_code == 503


def test_a_foreign_manifest_is_refused(context: Callable[..., Any], checkpoint: Callable[..., Path]) -> None:
    settings = {"model": str(checkpoint("llama")), "connector": "memory://foreign?timeout=600", "num_blocks": 64}
    one = context(convert_kv=True, **settings)
    own = one.instance.engine.layout
    changes: list[dict[str, Any]] = [{"model_fingerprint": "other"}, {"num_layers": 9}, {"head_dim": 8}]
    for number, change in enumerate(changes):
        foreign = replace(own, block_size=32, **change)
        one.submit(f"r{number}", [1, 2, 3], 4, pb.DECODE, writer=pb.Layout(**asdict(foreign)))
        one.until(lambda outputs: len(outputs) > number)  # noqa: B023 - called before the loop goes on
        assert one.outputs[-1].error.kind == "rejected" and "of another model" in one.outputs[-1].error.message
    strict = context(**settings)
    strict.submit("r", [1, 2, 3], 4, pb.DECODE, writer=pb.Layout(**asdict(replace(own, block_size=32))))
    strict.until(lambda outputs: bool(outputs))
    assert "--convert-kv" in strict.outputs[-1].error.message
    assert one.instance.num_jobs == strict.instance.num_jobs == 0


def test_what_the_pool_has_is_not_loaded(
    context: Callable[..., Any], checkpoint: Callable[..., Path], generate: Callable[..., list[list[int]]]
) -> None:
    """The second prompt shares 32 tokens with the first, half a block of the writer's: only the other half is loaded."""
    path = checkpoint("llama")
    prompts = {"first": [*range(32), *range(100, 130)], "second": [*range(32), *range(60, 91)]}
    settings = {"model": str(path), "connector": f"memory://{uuid.uuid4().hex}?timeout=600", "num_blocks": 64}
    prefill, decode = context(block_size=64, **settings), context(block_size=16, convert_kv=True, **settings)
    writer = pb.Layout(**asdict(prefill.instance.engine.layout))
    moved = []
    for name, prompt in prompts.items():
        prefill.submit(name, prompt, 8, pb.PREFILL)
        prefill.until(lambda outputs: bool(outputs) and outputs[-1].stored.final)
        decode.submit(name, prompt, 8, pb.DECODE, writer=writer)
        decode.instance.hand_over("router", pb.HandOver(request_id=name, num_blocks=1))
        last = pb.HandOver(request_id=name, final=True, first_token=prefill.tokens(name)[0])
        decode.instance.hand_over("router", last)
        decode.until(lambda outputs: bool(outputs) and bool(outputs[-1].finish_reason))
        moved.append(max(output.moved.blocks for output in decode.outputs if output.request_id == name))
        prefill.outputs.append(pb.Output())
        decode.outputs.append(pb.Output())
    assert moved == [4, 2]
    expected = generate(path, list(prompts.values()), 8)
    assert [prefill.tokens(name)[:1] + decode.tokens(name) for name in prompts] == expected

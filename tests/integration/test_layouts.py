"""Prefill and decode with different KV layouts.

Other block sizes give the same tokens, other dtypes plausible ones, and without --convert-kv the router reports the mismatch.
"""

import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.output import Output
from pdserve.proto import pdserve_pb2 as pb
from tests.outputs import is_stored

Complete = Callable[..., dict[str, Any]]


def block_size_flags(prefill: int, decode: int) -> dict[str, list[str]]:
    return {
        "prefill": ["--block-size", str(prefill)],
        "decode": ["--block-size", str(decode), "--convert-kv"],
    }


@pytest.mark.parametrize(
    ("connector_url", "prefill", "decode"),
    [("shm", 16, 64), pytest.param("shm", 32, 16, marks=pytest.mark.slow), ("file", 24, 16), ("nixl", 32, 16)],
    indirect=["connector_url"],
)
def test_different_block_sizes_change_no_token(
    connector_url: str,
    prefill: int,
    decode: int,
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    prompts: list[list[int]],
    deploy: Callable[..., Any],
    loads_all_kv: Callable[..., None],
) -> None:
    path = checkpoint("llama")
    settings = {"model": str(path), "connector": connector_url, "num_blocks": 1024, "max_num_batched_tokens": 256}
    with deploy(flags=block_size_flags(prefill, decode), **settings) as deployment:
        loads_all_kv(deployment, prompts, generate(path, prompts, 32))


@pytest.mark.parametrize("connector_url", ["shm"], indirect=True)
@pytest.mark.parametrize(("prefill", "decode"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_different_dtype_gives_plausible_tokens_and_inexact_kv_is_not_cached(
    connector_url: str,
    prefill: str,
    decode: str,
    deploy: Callable[..., Any],
    complete: Complete,
    metric: Callable[..., float],
    wait_until: Callable[..., None],
) -> None:
    """The demo model answers with the right capital in either dtype; converted KV is loaded again each time."""
    flags = {
        "prefill": ["--dtype", prefill],
        "decode": ["--dtype", decode, "--block-size", "32", "--convert-kv"],
    }
    with deploy(model="demo", flags=flags, connector=connector_url, num_blocks=256) as deployment:
        lengths = 0
        for _ in range(2):
            reply = complete(deployment, prompt="The capital of France is", max_tokens=8)
            assert "Paris" in reply["choices"][0]["text"]
            story = complete(deployment, prompt="Once upon a time there was a dog. " * 12, max_tokens=8)
            lengths += reply["usage"]["prompt_tokens"] + story["usage"]["prompt_tokens"]
        tokens = partial(metric, deployment, "prompt_tokens_by_source_total", role="decode")
        wait_until(lambda: tokens() == lengths)
        assert tokens(source="loaded") == lengths, "both times"


@pytest.mark.parametrize("connector_url", ["shm"], indirect=True)
def test_router_reports_a_layout_mismatch_without_convert_kv(
    connector_url: str, checkpoint: Callable[..., Path], deploy: Callable[..., Any], wait_until: Callable[..., None]
) -> None:
    log_lines: list[str] = []
    settings = {"model": str(checkpoint("llama", dtype="float32")), "connector": connector_url, "num_blocks": 64}
    flags = {"prefill": ["--block-size", "16"], "decode": ["--block-size", "32"]}
    with deploy(flags=flags, log_lines=log_lines, wait=False, **settings) as deployment:
        sentence = (
            "prefill-0 has KV blocks of 16 tokens in float32, decode-0 of 32 tokens in float32; make them the same, or"
        )
        wait_until(lambda: any(sentence in line for line in log_lines), log_lines)
        assert "start decode-0 with --convert-kv" in next(line for line in log_lines if sentence in line)
        assert httpx.get(f"{deployment.url}/ready").status_code == 503


@pytest.mark.parametrize(
    "prefill_flags", [["--kernel", "reference"], pytest.param(["--batch-invariant", "off"], marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("connector_url", ["shm"], indirect=True)
def test_instances_of_two_numerics_classes_serve_together_only_if_allowed(
    connector_url: str,
    prefill_flags: list[str],
    deploy: Callable[..., Any],
    complete: Complete,
    metric: Callable[..., float],
    wait_until: Callable[..., None],
) -> None:
    """The demo model in bfloat16, with a prefill instance that rounds otherwise than decode."""
    log_lines: list[str] = []
    flags = {"prefill": prefill_flags, "decode": ["--kernel", "cpu"]}
    settings = {"model": "demo", "connector": connector_url, "num_blocks": 64}
    with deploy(flags=flags, log_lines=log_lines, wait=False, **settings) as deployment:
        wait_until(lambda: any("start decode-0 with --allow-inexact" in line for line in log_lines), log_lines)
        assert httpx.get(f"{deployment.url}/ready").status_code == 503
    flags["decode"].append("--allow-inexact")
    with deploy(flags=flags, **settings) as deployment:
        for _ in range(2):
            assert (
                "Paris" in complete(deployment, prompt="The capital of France is", max_tokens=8)["choices"][0]["text"]
            )
        wait_until(lambda: metric(deployment, "inexact_prompts_total", role="decode") == 2)
        shown = httpx.get(f"{deployment.url}/debug/instances").json()["instances"]
        assert len({instance["numerics"] for instance in shown}) == 2


def test_layout_of_another_model_is_rejected(
    make_instance: Callable[..., Any], checkpoint: Callable[..., Path]
) -> None:
    settings = {"model": str(checkpoint("llama")), "connector": "memory://foreign?timeout=600", "num_blocks": 64}
    converting = make_instance(convert_kv=True, **settings)
    own_layout = converting.instance.engine.layout
    changes: list[dict[str, Any]] = [{"model_fingerprint": "other"}, {"num_layers": 9}, {"head_dim": 8}]
    for number, change in enumerate(changes):
        foreign = replace(own_layout, block_size=32, **change)
        converting.submit(f"r{number}", [1, 2, 3], 4, pb.DECODE, writer=pb.Layout(**asdict(foreign)))
        converting.run_until(lambda outputs: len(outputs) > number)  # noqa: B023 - called within the iteration
        error = converting.outputs[-1].error
        assert error.kind == "rejected" and "of another model" in error.message
    strict = make_instance(**settings)
    strict.submit("r", [1, 2, 3], 4, pb.DECODE, writer=pb.Layout(**asdict(replace(own_layout, block_size=32))))
    strict.run_until(lambda outputs: bool(outputs))
    assert "--convert-kv" in strict.outputs[-1].error.message
    assert converting.instance.num_jobs == strict.instance.num_jobs == 0


def test_converted_blocks_already_in_the_pool_are_not_loaded(
    make_instance: Callable[..., Any], checkpoint: Callable[..., Path], generate: Callable[..., list[list[int]]]
) -> None:
    """The second prompt shares 32 tokens with the first, half of a writer's block: only the other half is loaded."""
    path = checkpoint("llama")
    prompts = {"first": [*range(32), *range(100, 130)], "second": [*range(32), *range(60, 91)]}
    settings = {"model": str(path), "connector": f"memory://{uuid.uuid4().hex}?timeout=600", "num_blocks": 64}
    prefill, decode = (
        make_instance(block_size=64, **settings),
        make_instance(block_size=16, convert_kv=True, **settings),
    )
    writer = pb.Layout(**asdict(prefill.instance.engine.layout))
    moved = []
    for name, prompt in prompts.items():
        prefill.submit(name, prompt, 8, pb.PREFILL)
        prefill.run_until(lambda outputs: bool(outputs) and is_stored(outputs[-1]))
        decode.submit(name, prompt, 8, pb.DECODE, writer=writer)
        decode.instance.hand_over("router", pb.HandOver(request_id=name, num_blocks=1))
        last = pb.HandOver(request_id=name, final=True, first_token=prefill.tokens(name)[0])
        decode.instance.hand_over("router", last)
        decode.run_until(lambda outputs: bool(outputs) and bool(outputs[-1].finish_reason))
        moved.append(
            max(output.moved.blocks for output in decode.outputs if output.request_id == name and output.moved)
        )
        prefill.outputs.append(Output())
        decode.outputs.append(Output())
    assert moved == [4, 2]
    expected = generate(path, list(prompts.values()), 8)
    assert [prefill.tokens(name)[:1] + decode.tokens(name) for name in prompts] == expected

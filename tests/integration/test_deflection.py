"""Deflection through real processes: roles give way within an ITL target, and the tokens are those of one instance."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx

from pdserve.cli.deployment import Deployment
from pdserve.engine.paced_runner import next_token
from pdserve.profile.profile import EngineFacts, Profile, StepModel, TransferModel

Deploy = Callable[..., AbstractContextManager[Deployment]]
PROFILE = Profile(
    model="demo",
    engine=EngineFacts(
        block_size=16,
        block_bytes=16384,
        num_blocks=1000,
        max_num_batched_tokens=2048,
        max_num_seqs=32,
        max_model_len=4096,
    ),
    step=StepModel(decode=((1, 0.05), (16, 0.15)), prefill=((1, 0.05), (500, 0.5))),
    transfers={"shm": TransferModel(2e-3, 5e8, 2e-3, 5e8, 1e9)},
)


def reasons(deployment: Deployment) -> set[tuple[str, str]]:
    """Return the (way, reason) of all placements."""
    requests = httpx.get(f"{deployment.url}/debug/requests").json()["requests"]
    return {(one["placement"]["way"], one["placement"]["reason"]) for one in requests}


def busy(deployment: Deployment) -> dict[str, int]:
    """Return the number of requests on the instance of each role."""
    return {one["role"]: one["requests"] for one in httpx.get(f"{deployment.url}/debug/instances").json()["instances"]}


def test_a_burst_is_shared_and_tokens_are_the_same(
    deploy: Deploy, complete: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    fast = StepModel(decode=((1, 0.005), (16, 0.015)), prefill=((1, 0.005), (500, 0.05)))
    dataclasses.replace(PROFILE, step=fast).save(tmp_path / "profile.json")
    with deploy(
        model="demo",
        paced=str(tmp_path / "profile.json"),
        itl_target_ms=200,
        ttft_target_ms=1,
        local_prefill_tokens=None,
    ) as deployment:
        prompts = [[i + 3] * (680 + i) for i in range(24)]
        reply = complete(deployment, prompt=prompts, max_tokens=3, ignore_eos=True)  # prefill is what they wait for
        ways = reasons(deployment)
    expected = [[next_token(len(prompt) + j) for j in range(3)] for prompt in prompts]
    assert [choice["token_ids"] for choice in reply["choices"]] == expected
    assert {("split", "forecast"), ("decode", "backlog")} <= ways


def test_an_idle_prefill_instance_decodes_and_says_so(
    deploy: Deploy,
    complete: Callable[..., dict[str, Any]],
    wait_until: Callable[..., None],
    tmp_path: Path,
) -> None:
    PROFILE.save(tmp_path / "profile.json")
    body = {"max_tokens": 100, "ignore_eos": True}
    with (
        deploy(
            model="demo",
            paced=str(tmp_path / "profile.json"),
            itl_target_ms=100,  # a step of twelve sequences takes 123
            ttft_target_ms=60_000,
            local_prefill_tokens=None,
        ) as deployment,
        ThreadPoolExecutor(12) as threads,
    ):
        streams = [threads.submit(complete, deployment, prompt=[i + 3] * 300, **body) for i in range(12)]
        wait_until(lambda: busy(deployment) == {"prefill": 0, "decode": 12}, "all prompts are computed")
        answer = complete(deployment, prompt=[90] * 200, **body | {"max_tokens": 3})
        assert answer["choices"][0]["token_ids"] == [next_token(200 + i) for i in range(3)]
        assert ("prefill", "idle") in reasons(deployment)
        for stream in streams:
            assert stream.result()["choices"][0]["token_ids"] == [next_token(300 + i) for i in range(100)]

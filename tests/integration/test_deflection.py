"""Deflection through real processes: roles give way within an ITL target, and the tokens are those of one instance."""

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
    deploy: Deploy,
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    complete: Callable[..., dict[str, Any]],
) -> None:
    path = checkpoint("llama")
    settings: dict[str, Any] = {
        "num_blocks": 2400,
        "itl_target_ms": 20,
        "ttft_target_ms": 1,
        "local_prefill_tokens": None,
    }
    with deploy(model=str(path), **settings) as deployment:
        for burst in range(
            10
        ):  # while other work stretches the steps that are measured at start, answers look too long
            prompts = [[1 + (7 * i + j + burst) % 40 for j in range(680 + i)] for i in range(24)]
            expected = generate(path, prompts, 3)  # short answers: prefill is what they wait for
            reply = complete(deployment, prompt=prompts, max_tokens=3, ignore_eos=True)
            assert [choice["token_ids"] for choice in reply["choices"]] == expected
            if ("decode", "backlog") in reasons(deployment):
                return
    raise AssertionError(f"no prompt gave way: {reasons(deployment)}")


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

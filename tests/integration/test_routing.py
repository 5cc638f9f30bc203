"""Where requests go: what instances tell their routers, and the same tokens whatever the policy."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.config import InstanceConfig
from pdserve.instance import Instance
from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.policy import POLICIES


def test_a_router_is_told_what_others_have_sent(checkpoint: Callable[..., Path]) -> None:
    config = InstanceConfig(
        model=str(checkpoint("llama")), connector="memory://", num_blocks=64, max_num_batched_tokens=32
    )
    outputs: list[pb.Output] = []
    instance = Instance(config, lambda link, frame: outputs.extend(frame.step.outputs))

    def turns(done: Callable[[], bool]) -> None:
        while not done():
            instance.turn(wait=not instance.engine.has_work)
        instance._publish_load()

    sampling = pb.Sampling(max_tokens=9, top_p=1, ignore_eos=True)

    def submit(link: str, phase: "pb.Phase", length: int) -> None:
        message = pb.Submit(request_id=str(phase), phase=phase, prompt=[1] * length, sampling=sampling)
        instance.submit(link, message)

    submit("a", pb.PREFILL, 100)
    turns(lambda: "engine_steps" in instance._counts)
    assert instance.heartbeat("b").others == pb.Load(requests=1, prefill_tokens=68), "32 tokens are computed"
    assert instance.heartbeat("a").others == pb.Load(), "what it has sent itself it knows"
    submit("b", pb.BOTH, 20)
    submit("b", pb.DECODE, 10)
    turns(lambda: any(output.token_ids and output.request_id == str(pb.BOTH) for output in outputs))
    assert instance.heartbeat("a").others == pb.Load(
        requests=2, prefill_tokens=1, output_tokens=8 + 9, context_tokens=21 + 10
    ), "one has its first token, the other waits for KV"
    assert instance.heartbeat("c").others.requests == 3
    turns(lambda: any(output.stored.final for output in outputs))
    instance.cancel("b", str(pb.DECODE))
    turns(lambda: instance.num_jobs == 0)
    assert instance.heartbeat("c").others == pb.Load(), "all is over"
    instance.connector.close()


PAIRS = [("round_robin", "session"), ("power_of_two", "prefix_aware"), ("least_loaded", "least_loaded")]
assert {policy for pair in PAIRS for policy in pair} == set(POLICIES)


@pytest.mark.parametrize(("prefill_policy", "decode_policy"), PAIRS)
def test_the_tokens_are_the_same_under_every_policy(
    prefill_policy: str,
    decode_policy: str,
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    prompts: list[list[int]],
    deploy: Callable[..., Any],
    complete: Callable[..., dict[str, Any]],
) -> None:
    path = checkpoint("llama")
    expected = generate(path, prompts, 16)
    with (
        deploy(
            model=str(path),
            num_blocks=256,
            prefill=2,
            decode=2,
            prefill_policy=prefill_policy,
            decode_policy=decode_policy,
        ) as deployment,
        ThreadPoolExecutor(8) as threads,
    ):

        def send(prompt: list[int]) -> list[int]:
            body = {"prompt": prompt, "max_tokens": 16, "ignore_eos": True, "user": f"user {len(prompt)}"}
            ids: list[int] = complete(deployment, **body)["choices"][0]["token_ids"]
            return ids

        assert list(threads.map(send, prompts)) == expected
        assert list(threads.map(send, prompts)) == expected, "with warm caches"
        told = httpx.get(f"{deployment.url}/debug/requests").json()["requests"]
    decisions = [one for request in told for one in request["decisions"]]
    asked = {("prefill", prefill_policy), ("decode", decode_policy)}
    assert {(one["role"], one["policy"]) for one in decisions} == asked
    assert {one["chosen"] for one in decisions} == {"prefill-0", "prefill-1", "decode-0", "decode-1"}

"""Submissions that an instance accepts or refuses: it trusts no bytes of a router."""

import time
import uuid
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.config import InstanceConfig
from pdserve.engine import engine as engine_module
from pdserve.instance.instance import Instance
from pdserve.keys import KeyChain, pack_tokens, root_key
from pdserve.kv_transfer.connectors.shm.connector import count_leases, unlink
from pdserve.output import Output
from pdserve.proto import pdserve_pb2 as pb
from tests.instance.hash_model import HashRunner, spec_of
from tests.outputs import outputs_of

PROMPT = [7 * i % 250 for i in range(70)]
GREEDY = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}


def packed(**fields: Any) -> bytes:
    """The bytes of a request, with fields as a wrong router could send them."""
    request = {"prompt": pack_tokens(PROMPT), "sampling": {"max_tokens": 3, "temperature": 0, "ignore_eos": True}}
    return msgspec.msgpack.encode(request | fields)


class Driver:
    """One instance whose steps the test runs."""

    def __init__(self, path: Path, connector: str = "memory://", **settings: Any) -> None:
        self.frames: list[pb.InstanceFrame] = []
        config = InstanceConfig(model=str(path), num_blocks=64, block_size=32, connector=connector, **settings)
        self.instance = Instance(config, lambda _, frame: self.frames.append(frame))

    def run(self, **fields: Any) -> list[Output]:
        submit: dict[str, Any] = {"request_id": "r", "phase": pb.BOTH, "request": packed()}
        self.frames.clear()
        self.instance.submit("router", pb.Submit(**submit | fields))
        idle = False
        while self.instance.num_jobs or not self.frames:
            idle = self.instance.run_once(wait=idle)
        assert self.instance.engine.pool.num_held == 0
        return [one for frame in self.frames for one in outputs_of(frame)]


@pytest.fixture
def driver(checkpoint: Callable[..., Path]) -> Driver:
    return Driver(checkpoint("llama"))


def test_keys_of_a_submission_are_those_that_the_instance_would_compute(driver: Driver) -> None:
    root = root_key(model_digest=driver.instance.engine.layout.model_digest)
    alone = driver.run()
    again = driver.run(request=packed(packed_keys=KeyChain(root).pack(PROMPT)))
    assert sum(len(one.token_ids) for one in again) == 3
    assert [one.sources.local_hit for one in alone if one.sources is not None] == [0]
    assert [one.sources.local_hit for one in again if one.sources is not None] == [64]
    foreign = driver.run(request=packed(packed_keys=bytes(64)))  # they name the blocks: with others nothing is found
    assert [one.sources.local_hit for one in foreign if one.sources is not None] == [0]


def test_a_reset_pins_nothing_of_a_warm_prompt_that_is_under_way(driver: Driver) -> None:
    instance = driver.instance

    def pinned(name: str, epoch: int) -> int:
        """Return how many blocks are pinned once a warm prompt has ended, during which the cache was reset."""
        instance.submit("router", pb.Submit(request_id=name, phase=pb.BOTH, request=packed(pin=True)))
        instance.reset_cache(epoch)
        instance.run_once(wait=False)
        while instance.num_jobs:
            instance.run_once(wait=False)
        return len(instance.engine.pool.pinned)

    assert pinned("before", 1) == 0
    assert pinned("after", 1) == len(PROMPT) // 32, "an epoch begins once"


@pytest.fixture
def shm_url() -> Iterator[str]:
    """URL of a store for this test only."""
    url = f"shm://test-{uuid.uuid4().hex}?size=16MiB&timeout=600"
    yield url
    unlink(url)


@pytest.mark.parametrize("crossed_by", ["the router's cancellation", "the final report"])
def test_the_leases_of_a_hand_over_whose_decode_ends_first_end(
    checkpoint: Callable[..., Path], shm_url: str, crossed_by: str
) -> None:
    """Prefill gets the cancellation after its final report, or decode that report after its end."""
    driver = Driver(checkpoint("llama"), shm_url, lease_seconds=3600)
    (first_token,) = [token for one in driver.run(phase=pb.PREFILL) for token in one.token_ids]
    assert count_leases(shm_url) == 3
    if crossed_by == "the router's cancellation":
        driver.instance.cancel("router", "r")
    else:
        report = pb.HandOver(request_id="r", num_blocks=3, coming=3, first_token=first_token)
        driver.instance.hand_over("router", report)  # ahead of its request: no effect
        driver.instance.submit("router", pb.Submit(request_id="r", phase=pb.DECODE, request=packed()))
        driver.instance.hand_over("router", report)
        driver.instance.run_once(wait=False)
        while driver.instance.num_jobs:
            driver.instance.run_once(wait=False)
        assert count_leases(shm_url) == 3
        driver.instance.hand_over("router", pb.HandOver(request_id="r", num_blocks=3, coming=3, final=True))
    driver.instance.run_once(wait=False)
    while count_leases(shm_url):
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("request_bytes", "message"),
    [
        (b"", "truncated"),
        (packed()[:-1], "truncated"),
        (msgspec.msgpack.encode({"prompt": b""}), "sampling"),
        (packed(later=1), "later"),
        (packed(packed_keys=bytes(15)), "15 bytes are not keys"),
        (packed(packed_keys=bytes(16 * 5)), "80 bytes of keys are more than those of 70 tokens"),
        (packed(sampling={"later": 1}), "later"),
        (packed(sampling={"temperature": -1.0}), "temperature"),
        (packed(tenant=["a"]), "tenant"),
        (packed(prompt=b""), "the prompt is empty"),
        (packed(prompt=b"abc"), "3 bytes are not token ids"),
        (packed(prompt=[1, 2]), "token ids are sent as bytes"),
        (packed(prompt=pack_tokens([2**32 - 1])), "token ids go from 0"),
        (packed(sampling=GREEDY | {"logit_bias": {10**6: 1.0}}), "sampling token ids go from 0"),
        (packed(sampling=GREEDY | {"allowed_token_ids": [1, 10**6]}), "sampling token ids go from 0"),
        (packed(sampling=GREEDY | {"stop_token_ids": [10**6], "min_tokens": 2}), "sampling token ids go from 0"),
        (packed(sampling=GREEDY | {"bad_words": [[1], [1, 10**6]]}), "sampling token ids go from 0"),
        (packed(sampling=GREEDY | {"bad_words": [[]]}), "a bad word has no tokens"),
    ],
)
def test_what_no_router_may_send_ends_the_request_with_an_error(
    driver: Driver, request_bytes: bytes, message: str
) -> None:
    (output,) = driver.run(request=request_bytes, members=[pb.Member(request_id="s", seed=1)])[:1]
    assert output.error is not None and output.error.kind == "rejected" and message in output.error.message
    assert driver.run()[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"output": [1, 2**32 - 1]}, "token ids go from 0"),
        ({"output": [1, 2, 3]}, "the output has 3 tokens already, and may have 3"),
        ({"phase": 7}, "there is no phase 7"),
    ],
)
def test_submissions_that_no_router_may_send(driver: Driver, fields: dict[str, Any], message: str) -> None:
    (output,) = driver.run(**fields)
    assert output.error is not None and output.error.kind == "rejected" and message in output.error.message
    assert driver.run()[-1].finish_reason == "length"


def test_a_first_token_outside_of_the_vocabulary_ends_the_request_with_an_error(driver: Driver) -> None:
    driver.instance.hand_over(
        "router", pb.HandOver(request_id="r", final=True, first_token=10**6)
    )  # it comes too early
    driver.instance.submit("router", pb.Submit(request_id="r", phase=pb.DECODE, request=packed()))
    driver.instance.hand_over("router", pb.HandOver(request_id="r", final=True, first_token=10**6))
    while driver.instance.num_jobs or not driver.frames:
        driver.instance.run_once(wait=False)
    (error,) = [one.error for frame in driver.frames for one in outputs_of(frame) if one.error is not None]
    assert error.kind == "rejected" and "token ids go from 0" in error.message
    assert driver.run()[-1].finish_reason == "length"


def test_a_heartbeat_tells_how_many_blocks_each_key_holds(driver: Driver) -> None:
    instance, sampling = driver.instance, {"max_tokens": 500, "temperature": 0, "ignore_eos": True}
    for request_id, tenant in (("a", [171, 1.0]), ("b", [205, 1.0]), ("c", [0, 1.0])):
        request = packed(tenant=tenant, sampling=sampling)
        instance.submit("router", pb.Submit(request_id=request_id, phase=pb.BOTH, request=request))

    def told() -> dict[str, float]:
        return {name: value for name, value in instance.reporter.heartbeat.counters.items() if "_of_key" in name}

    while len(told()) < 2 or min(told().values()) < 3:  # blocks of 32 tokens
        instance.run_once(wait=False)
    assert told().keys() == {'kv_cache_blocks_of_key{key="ab"}', 'kv_cache_blocks_of_key{key="cd"}'}
    instance.drop_link("router")
    while told():
        instance.run_once(wait=False)


def test_a_beam_search_that_waits_is_one_request_in_heartbeats() -> None:
    runner: Any = HashRunner(spec_of((None,)), 1, 60, 0, frozenset(), 1.0)
    clock, frames = count(), list[pb.InstanceFrame]()
    config = InstanceConfig(model="hashes", num_blocks=60, block_size=1, connector="memory://")
    instance = Instance(config, lambda _, frame: frames.append(frame), runner=runner, now=lambda: float(next(clock)))
    runner.is_warm = True
    search = {"max_tokens": 16, "temperature": 0, "beam_width": 3, "num_answers": 1, "ignore_eos": True}
    request = packed(prompt=pack_tokens([1, 2]), sampling=search)
    for request_id in "abcdef":
        instance.submit("router", pb.Submit(request_id=request_id, phase=pb.BOTH, request=request))
    instance.run_once(wait=False)
    while instance.num_jobs:
        jobs = instance.num_jobs
        instance.run_once(wait=False)
        beat = instance.reporter.heartbeat
        assert beat.waiting + beat.running <= jobs
    assert instance.engine.scheduler.num_preemptions
    assert [one.error for frame in frames for one in outputs_of(frame) if one.error] == []


def test_a_request_that_fails_at_its_last_token_behind_drafts_does_not_end_well(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_late(specification: str) -> list[Any]:
        def process(prompt: Any, output: Any, logits_V: Any) -> None:
            assert len(output) < 4, "broken"

        return [process]

    monkeypatch.setattr(engine_module, "make_processors", fail_late)
    driver = Driver(checkpoint("llama"), speculate="suffix")
    whole = [token for one in driver.run(request=packed(sampling=GREEDY)) for token in one.token_ids]
    request = packed(sampling=GREEDY | {"logits_processors": "{}"})
    outputs = driver.run(request=request, prediction=pack_tokens(whole))
    assert [token for one in outputs for token in one.token_ids] == whole[:4]
    assert [one.finish_reason for one in outputs if one.finish_reason] == []
    assert [one.error.kind for one in outputs if one.error is not None] == ["invalid_logits_processor"]


def test_steps_of_embeddings_are_measured(checkpoint: Callable[..., Path]) -> None:
    """Those that have not been measured are kept until then."""
    driver, measured = Driver(checkpoint("llama"), pooling="last"), list[int]()
    driver.instance.reporter.meter.on_steps = lambda steps, seconds: measured.append(len(steps))
    for _ in range(3):
        assert driver.run(request=packed(sampling={"max_tokens": 1, "embed": True}))[-1].embedding
    assert measured == [1, 1, 1]

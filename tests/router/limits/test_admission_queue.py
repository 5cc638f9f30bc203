"""The admission queue by itself: its decisions, and who is told. Limits and order over HTTP are in web/test_admission.py."""

import pytest

from pdserve.config import RouterConfig
from pdserve.errors import Overloaded
from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.instances.fleet import Fleet, InstanceHandle
from pdserve.router.limits.admission_queue import AdmissionQueue, AdmissionSlot
from pdserve.router.limits.key_file import ApiKey
from pdserve.router.limits.quota import Limits, Rate
from pdserve.router.telemetry.metrics import Metrics


class NoConnection:
    """To an instance that is told nothing."""

    def send(self, frame: pb.RouterFrame) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


class Scene:
    """A queue for three running and two queued requests, of the keys `greedy` and `other`, which has one running.

    The time stands still.
    """

    def __init__(self) -> None:
        limits = Limits(tokens=Rate(1000, 3600.0))
        self.metrics = Metrics(Fleet("router", "model", 1.0, lambda: 0.0))
        config = RouterConfig(max_requests=3, max_queue=2)
        keys = [ApiKey("greedy", b"g", limits=Limits(concurrency=9)), ApiKey("other", b"o", limits=limits)]
        self.queue = AdmissionQueue(keys, config, self.metrics, lambda: 0.0)
        self.told: list[AdmissionSlot] = []
        self.first = self.enter("other")

    def enter(self, key: str) -> AdmissionSlot:
        slot = self.queue.enter(key, prompt_tokens=10, max_tokens=100)
        slot.on_decision = lambda: self.told.append(slot)
        return slot

    def waiting(self, key: str) -> float | None:
        return self.metrics.registry.get_sample_value("pdserve_key_requests_waiting", {"key": key})


def test_a_queued_request_is_told_when_it_may_start() -> None:
    scene = Scene()
    running = [scene.enter("greedy") for _ in range(2)]
    queued = scene.enter("greedy")
    assert all(slot.is_admitted for slot in running) and not queued.is_admitted and scene.waiting("greedy") == 1
    running[0].release(50)
    assert queued.is_admitted and scene.told == [queued] and scene.waiting("greedy") == 0


def test_a_full_queue_drops_the_last_request_of_the_longest_line() -> None:
    scene = Scene()
    for _ in range(3):
        scene.enter("greedy")
    last = scene.enter("greedy")
    with pytest.raises(Overloaded, match="3 requests are running and 2 are queued"):
        scene.enter("greedy")
    assert not scene.told
    other = scene.enter("other")
    assert isinstance(last.refusal, Overloaded) and not last.is_admitted and scene.told == [last]
    assert not other.is_admitted and scene.waiting("greedy") == scene.waiting("other") == 1
    last.release(0)
    assert scene.queue.quotas["greedy"].choices == 3


def test_what_runs_for_a_key_does_not_exclude_requests_that_need_no_place() -> None:
    queue = AdmissionQueue(
        [ApiKey("one", b"o", limits=Limits(requests=Rate(3, 3600.0), concurrency=1))],
        RouterConfig(),
        Metrics(Fleet("router", "model", 1.0, lambda: 0.0)),
        lambda: 0.0,
    )
    queue.enter("one", prompt_tokens=10, max_tokens=100)
    for refused_as, choices in (("rate_limit_concurrency", 1), ("rate_limit_requests", 0)):
        with pytest.raises(Overloaded) as refused:
            queue.check("one", choices)
            for _ in range(3):
                queue.charge("one")
            queue.check("one", choices)
        assert refused.value.kind == refused_as
    assert queue.headers("one")["x-ratelimit-remaining-requests"] == "0"


def test_a_request_that_leaves_the_queue_returns_its_tokens_and_is_not_told() -> None:
    scene = Scene()
    running = [scene.enter("greedy") for _ in range(2)]
    leaving = scene.enter("other")
    assert scene.queue.headers("other")["x-ratelimit-remaining-tokens"] == "800"
    leaving.release(0)
    leaving.release(0)
    running[0].release(50)
    assert not leaving.is_admitted and not scene.told and scene.waiting("other") == 0
    assert scene.queue.headers("other")["x-ratelimit-remaining-tokens"] == "900"


def test_a_key_need_not_wait_for_its_share_while_others_run_more() -> None:
    """Of 3 places, 1.5 are that of each of two keys; a key without any may always have one request running."""
    scene = Scene()
    assert [scene.enter("greedy").is_admitted for _ in range(3)] == [True, True, False]
    assert not scene.enter("other").is_admitted, "two are more than its share"
    scene.first.release(50)
    assert {slot.key for slot in scene.told} == {"greedy", "other"}, "one gets the free place, the other needs none"


def test_a_key_that_runs_nothing_may_start_a_request_of_any_size() -> None:
    scene = Scene()
    running = [scene.enter("greedy") for _ in range(2)]
    scene.first.release(50)
    large = scene.queue.enter("other", prompt_tokens=10, max_tokens=100, choices=3)
    assert large.is_admitted and all(slot.is_admitted for slot in running)
    assert not scene.enter("greedy").is_admitted and not scene.enter("other").is_admitted
    large.release(50)
    assert [slot.key for slot in scene.told] == ["greedy", "other"]


def test_at_most_as_many_choices_again_run_above_the_limit() -> None:
    keys = [ApiKey(f"key-{i}", bytes([i])) for i in range(20)]
    metrics = Metrics(Fleet("router", "model", 1.0, lambda: 0.0))
    queue = AdmissionQueue(keys, RouterConfig(max_requests=4, max_queue=100), metrics, lambda: 0.0)
    slots = [queue.enter(key.name, 1, 1) for key in keys for _ in range(2)]
    assert sum(slot.is_admitted for slot in slots) == 8
    while running := [slot for slot in slots if slot.is_admitted and not slot.released]:
        running[0].release(1)
        assert sum(slot.is_admitted and not slot.released for slot in slots) <= 8
    assert all(slot.is_admitted for slot in slots)


def test_instances_tell_the_blocks_of_keys_by_number_and_the_router_by_name() -> None:
    key, fleet = ApiKey("alice", b"a"), Fleet("router", "model", 1.0, lambda: 0.0)
    metrics = Metrics(fleet)
    AdmissionQueue([key], RouterConfig(), metrics, lambda: 0.0)
    instance = InstanceHandle(
        pb.Hello(instance_id="d", role="decode", num_blocks=8, block_size=16), NoConnection(), 0.0
    )
    number = f"{key.tenant.id:x}"
    instance.heartbeat = pb.Heartbeat(counters={f'kv_cache_blocks_of_key{{key="{one}"}}': 7 for one in (number, "abc")})
    fleet.instances["d"] = instance
    labels = {"instance": "d", "role": "decode"}
    for name in ("alice", "abc"):
        assert metrics.registry.get_sample_value("pdserve_kv_cache_blocks_of_key", {**labels, "key": name}) == 7
    assert b"_of_key" not in b"".join(metrics.parts(with_keys=False))

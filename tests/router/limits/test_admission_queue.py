"""The admission queue by itself: its decisions, and who is told. Limits and order over HTTP are in web/test_admission.py."""

import pytest

from pdserve.config import RouterConfig
from pdserve.errors import Overloaded
from pdserve.router.instances.fleet import Fleet
from pdserve.router.limits.admission_queue import AdmissionQueue, AdmissionSlot
from pdserve.router.limits.key_file import ApiKey
from pdserve.router.limits.quota import Limits, Rate
from pdserve.router.telemetry.metrics import Metrics


class Scene:
    """A queue for two running and two queued requests, of the keys `greedy` and `other`, at a time that stands still."""

    def __init__(self) -> None:
        limits = Limits(tokens=Rate(1000, 3600.0))
        self.metrics = Metrics(Fleet("router", "model", 1.0, lambda: 0.0))
        config = RouterConfig(max_requests=2, max_queue=2)
        keys = [ApiKey("greedy", b"g"), ApiKey("other", b"o", limits=limits)]
        self.queue = AdmissionQueue(keys, config, self.metrics, lambda: 0.0)
        self.told: list[AdmissionSlot] = []

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
    with pytest.raises(Overloaded, match="2 requests are running and 2 are queued"):
        scene.enter("greedy")
    assert not scene.told
    other = scene.enter("other")
    assert isinstance(last.refusal, Overloaded) and not last.is_admitted and scene.told == [last]
    assert not other.is_admitted and scene.waiting("greedy") == scene.waiting("other") == 1
    last.release(0)
    assert scene.queue.quotas["greedy"].choices == 3


def test_a_request_that_leaves_the_queue_returns_its_tokens_and_is_not_told() -> None:
    scene = Scene()
    running = [scene.enter("greedy") for _ in range(2)]
    leaving = scene.enter("other")
    assert scene.queue.headers("other")["x-ratelimit-remaining-tokens"] == "900"
    leaving.release(0)
    leaving.release(0)
    running[0].release(50)
    assert not leaving.is_admitted and not scene.told and scene.waiting("other") == 0
    assert scene.queue.headers("other")["x-ratelimit-remaining-tokens"] == "1000"

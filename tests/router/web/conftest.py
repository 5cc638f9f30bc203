"""Fixtures of the web tests: a router with a real dispatcher and played instances."""

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdserve.config import RouterConfig
from pdserve.output import Output, Sources, Stored
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import SamplingParams
from pdserve.router.dispatch.dispatcher import Dispatcher
from pdserve.router.instances.fleet import Fleet, InstanceHandle
from pdserve.router.limits.key_file import load_api_keys
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.telemetry.events import EventLog
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.admission import AdmissionController
from pdserve.router.web.app import create_app
from pdserve.router.web.overview import Overview


class SentFrames(list[pb.RouterFrame]):
    """A connection to an instance that only records the frames sent."""

    send = list.append

    def close(self) -> None: ...

    def abort(self) -> None: ...


class Scene:
    """A router with a real dispatcher, instances that the test plays, and its application."""

    def __init__(self, tokenizer: Tokenizer, event_log: EventLog, **settings: Any) -> None:
        self.fleet = Fleet("router", "demo", 1.0, time.monotonic)
        metrics = Metrics(self.fleet)
        config = RouterConfig(model="demo", local_prefill_tokens=0, slo="ttft=1s", **settings)
        self.dispatcher = Dispatcher(config, self.fleet, metrics, seed=0)
        self.overview = Overview(self.dispatcher, metrics, event_log)
        latest = self.dispatcher.timelines.latest
        admission = AdmissionController(load_api_keys(config.api_key), config, metrics, time.monotonic)
        self.app = create_app(
            config, tokenizer, self.dispatcher, admission, metrics.parts, latest, self.overview.snapshot
        )

    def join(self, role: str, name: str, ranks: int = 1) -> InstanceHandle:
        hello = pb.Hello(instance_id=name, role=role, model="demo", max_model_len=100, vocab_size=50, num_blocks=99)
        hello.block_size = 2
        hello.layout.ranks = ranks
        hello.connector = "shm"
        return self.fleet.register(hello, SentFrames())

    def serve(self, request_id: str, prefill: InstanceHandle, decode: InstanceHandle) -> None:
        """Run one request of three tokens from start to end."""
        sampling = SamplingParams(max_tokens=3)
        self.dispatcher.open(RoutedRequest(request_id=request_id, prompt=[1, 2, 3], sampling=sampling))
        self.output(prefill, request_id, stamps={"prefill_started": 0.0}, sources=Sources(computed=3))
        self.output(prefill, request_id, token_ids=[7])
        self.output(prefill, request_id, stored=Stored(num_blocks=1, final=True))
        self.output(decode, request_id, token_ids=[8], stamps={"decode_started": 0.0})
        self.output(decode, request_id, token_ids=[9], finish_reason="length")

    def move(self, request_id: str, prefill: InstanceHandle, decode: InstanceHandle) -> None:
        """Run one request of three tokens, whose decode instance is lost after the first one; another one ends it."""
        other = self.join(decode.role, "other")
        sampling = SamplingParams(max_tokens=3)
        state = self.dispatcher.open(RoutedRequest(request_id=request_id, prompt=[1, 2, 3], sampling=sampling))
        assert state.decode is not None
        self.output(prefill, request_id, token_ids=[7], stored=Stored(num_blocks=1, final=True))
        self.fleet.deregister(state.decode, "test")
        self.output(prefill, f"{request_id}#1", token_ids=[8], stored=Stored(num_blocks=1, final=True))
        self.output(state.decode or other, f"{request_id}#1", token_ids=[9], finish_reason="length")

    def output(self, instance: InstanceHandle, request_id: str, **output: Any) -> None:
        self.dispatcher.on_output(instance, Output(request_id=request_id, **output))


@pytest.fixture
def event_log() -> Iterator[EventLog]:
    """An event log attached to the router's logger, as in a router process."""
    logger, handler = logging.getLogger("pdserve"), EventLog()
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


@pytest.fixture
def make_scene(tokenizer: Tokenizer, event_log: EventLog) -> Callable[..., Scene]:
    """Factory: make_scene(**settings)."""
    return lambda **settings: Scene(tokenizer, event_log, **settings)

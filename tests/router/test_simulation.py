"""The router's decisions on a virtual clock: the real objects, over fake instances that answer after computed durations.

Admission queue, dispatcher, selector, hand-over machines, breakers and fleet are those of a router process. They reach the
world by three seams: the clock of the fleet, the connection of each instance, and the wake-up calls of readers.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random

import pytest

from pdserve.config import RouterConfig
from pdserve.control.frame_connection import NONCE_BYTES, PROTOCOL_VERSION
from pdserve.costs import Costs, attention_pairs
from pdserve.keys import Layout
from pdserve.lifetime import Stage
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request, SamplingParams
from pdserve.router.dispatch.dispatcher import Dispatcher
from pdserve.router.dispatch.request_state import RequestState
from pdserve.router.instances.fleet import Fleet
from pdserve.router.limits.admission_queue import AdmissionQueue, AdmissionSlot
from pdserve.router.limits.key_file import ApiKey
from pdserve.router.telemetry.metrics import Metrics

COSTS = Costs(prefill=(0.01, 1e-3, 1e-7), decode=(0.02, 2e-3, 1e-6), transfer=(0.002, 1e-9))
BLOCK_SIZE, VOCAB_SIZE = 16, 1000
LATENCY_S = 0.0005  # of a frame, in either direction
HEARTBEAT_S = 0.4
REQUESTS, ARRIVALS_PER_S = 300, 2.0


class VirtualClock:
    """Time that passes from event to event."""

    def __init__(self) -> None:
        self.time = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()

    def now(self) -> float:
        return self.time

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Call the action once, this much later. Actions of the same time are called in the order of these calls."""
        heapq.heappush(self._events, (self.time + seconds, next(self._order), action))

    def every(self, seconds: float, action: Callable[[], object]) -> None:
        def repeat() -> None:
            action()
            self.after(seconds, repeat)

        self.after(seconds, repeat)

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            self.time, _, action = heapq.heappop(self._events)
            action()


def token_at(prompt: int, position: int) -> int:
    """Return the token that every instance computes at a position of the output, given the prompt's first token."""
    return (31 * prompt + 7 * position) % VOCAB_SIZE


@dataclass
class Job:
    """One request on a fake instance.

    Attributes:
        output: the tokens generated so far, on other instances too.
        stored_tokens: leading tokens whose KV prefill has stored.
        is_waiting: the hand-over is not complete.
        is_computed: the KV of all its tokens but the last is there.
    """

    submit: pb.Submit
    output: list[int]
    is_waiting: bool
    stored_tokens: int = 0
    is_computed: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.submit.prompt) + len(self.output)


class FakeInstance:
    """An instance that computes nothing: it answers frames after the durations of a cost model. Also its own connection.

    Each engine step computes at most one prompt, and one token of every other running sequence.
    """

    def __init__(self, clock: VirtualClock, fleet: Fleet, name: str, role: str) -> None:
        self._clock = clock
        self._fleet = fleet
        self.is_alive = True
        self._jobs: dict[str, Job] = {}
        self._is_stepping = False
        self._num_steps = 0
        hello = _hello(name, role)
        assert not fleet.rejection_reason(pb.InstanceFrame(hello=hello))
        self.handle = fleet.register(hello, self)
        self._heartbeat()
        clock.every(HEARTBEAT_S, self._heartbeat)

    def send(self, frame: pb.RouterFrame) -> None:
        self._clock.after(LATENCY_S, partial(self._receive, frame))

    def close(self) -> None: ...

    def abort(self) -> None: ...

    def freeze(self) -> None:
        """Stop without a word; the router learns of it when the lease expires."""
        self.is_alive = False

    def kill(self) -> None:
        """End the process, and with it the connection."""
        self.is_alive = False
        self._clock.after(LATENCY_S, lambda: self._fleet.deregister(self.handle, "the connection was lost"))

    def _answer(self, frame: pb.InstanceFrame) -> None:
        if self.is_alive:
            self._clock.after(LATENCY_S, partial(self._fleet.handle_frame, self.handle, frame))

    def _heartbeat(self) -> None:
        costs = pb.Costs(prefill=COSTS.prefill, decode=COSTS.decode, transfer=COSTS.transfer)
        heartbeat = pb.Heartbeat(costs=costs, counters={"engine_steps": self._num_steps})
        self._answer(pb.InstanceFrame(heartbeat=heartbeat))

    def _receive(self, frame: pb.RouterFrame) -> None:
        match frame.WhichOneof("frame"):
            case "submit":
                submit = frame.submit
                self._jobs[submit.request_id] = Job(submit, list(submit.output), submit.phase == pb.DECODE)
            case "hand_over":
                self._hand_over(frame.hand_over)
            case "cancel":
                self._jobs.pop(frame.cancel.request_id, None)
        self._start_step()

    def _hand_over(self, message: pb.HandOver) -> None:
        job = self._jobs.get(message.request_id)
        if job is None:
            return
        job.stored_tokens = max(job.stored_tokens, message.num_blocks * BLOCK_SIZE)
        job.is_computed = job.stored_tokens >= len(job.submit.prompt) + len(job.submit.output)
        if message.HasField("first_token"):
            job.output.append(message.first_token)
        job.is_waiting = job.is_waiting and not message.final

    def _start_step(self) -> None:
        running = [job for job in self._jobs.values() if not job.is_waiting]
        if self._is_stepping or not running or not self.is_alive:
            return
        self._is_stepping = True
        prompts, decoding = (
            [job for job in running if not job.is_computed][:1],
            [job for job in running if job.is_computed],
        )
        tokens = sum(job.num_tokens for job in prompts)
        seconds = COSTS.step_seconds(len(decoding), sum(job.num_tokens for job in decoding))
        seconds += COSTS.total_prefill_seconds(len(prompts), tokens, attention_pairs(tokens, 0)) if prompts else 0.0
        self._clock.after(seconds, partial(self._end_step, prompts + decoding))

    def _end_step(self, batch: list[Job]) -> None:
        self._is_stepping = False
        self._num_steps += 1
        outputs = [self._advance(job) for job in batch if self._jobs.get(job.submit.request_id) is job]
        self._answer(pb.InstanceFrame(step=pb.Step(outputs=outputs)))
        self._start_step()

    def _advance(self, job: Job) -> pb.Output:
        """Sample a job's next token, and end the job if it was the last one here."""
        submit, num_stored = job.submit, -(-job.num_tokens // BLOCK_SIZE)
        job.is_computed = True
        job.output.append(token_at(submit.prompt[0], len(job.output)))
        output = pb.Output(request_id=submit.request_id, token_ids=job.output[-1:])
        if len(job.output) == submit.sampling.max_tokens:
            output.finish_reason = "length"
        if output.finish_reason or submit.phase == pb.PREFILL:
            del self._jobs[submit.request_id]
        if submit.phase == pb.PREFILL and not output.finish_reason:
            stored = pb.Output(request_id=submit.request_id, stored=pb.Stored(num_blocks=num_stored, final=True))
            frame = pb.InstanceFrame(step=pb.Step(outputs=[stored]))
            seconds = COSTS.transfer_seconds(num_stored * self.handle.hello.block_bytes)
            self._clock.after(seconds, partial(self._answer, frame))
        return output


def _hello(name: str, role: str) -> pb.Hello:
    sizes = dict(num_layers=2, num_kv_heads=2, head_dim=8, block_size=BLOCK_SIZE, itemsize=2, version=1)
    message = pb.Layout(model_fingerprint="m", dtype="bfloat16", numerics="", **sizes)
    layout = Layout.from_message(message)
    return pb.Hello(
        instance_id=name,
        role=role,
        model="model",
        protocol_version=PROTOCOL_VERSION,
        layout=message,
        namespace=layout.namespace,
        block_size=BLOCK_SIZE,
        block_bytes=layout.block_bytes,
        num_blocks=10_000,
        max_model_len=4096,
        vocab_size=VOCAB_SIZE,
        nonce=bytes(NONCE_BYTES),
    )


@dataclass
class Client:
    """Sends one request and reads its tokens.

    Attributes:
        tokens: (time, token).
    """

    router: SimulatedRouter
    request: Request
    key: str
    tokens: list[tuple[float, int]] = field(default_factory=list)
    was_queued: bool = False
    slot: AdmissionSlot = field(init=False)
    state: RequestState = field(init=False)

    def send(self) -> None:
        num_prompt, clock = len(self.request.prompt), self.router.clock
        self.slot = self.router.admission.enter(self.key, num_prompt, num_prompt + self.request.sampling.max_tokens)
        self.was_queued = not self.slot.is_admitted
        if self.was_queued:
            self.slot.on_decision = lambda: clock.after(0, self._open)
        else:
            self._open()

    def _open(self) -> None:
        self.state = self.router.dispatcher.open(self.request)
        self.state.on_readable = lambda: self.router.clock.after(0, self._read)

    def _read(self) -> None:
        chunks = self.state.take()  # raises if the request has failed
        self.tokens += [(self.router.clock.time, token) for chunk in chunks for token in chunk.token_ids]
        if chunks and chunks[-1].finish_reason is not None:
            self.slot.release(len(self.request.prompt) + len(self.tokens))
            self.router.num_ended += 1

    def record(self) -> tuple[object, ...]:
        """Return the request's routing and all of its times."""
        timeline = self.state.timeline
        return timeline.prefill_instance, timeline.decode_instance, timeline.stamps, timeline.migrations, self.tokens


class SimulatedRouter:
    """The parts of a router process that decide, over two fake prefill and two fake decode instances."""

    def __init__(self, seed: int) -> None:
        self.clock = VirtualClock()
        self.fleet = Fleet("router", "model", 1.5, self.clock.now)
        metrics, config = Metrics(self.fleet), RouterConfig(model="model", max_requests=4, max_queue=REQUESTS)
        self.dispatcher = Dispatcher(config, self.fleet, metrics, seed)
        keys = [ApiKey("heavy", b"heavy"), ApiKey("light", b"light", weight=3.0)]
        self.admission = AdmissionQueue(keys, config, metrics, self.clock.now)
        self.clock.every(self.fleet.lease_check_interval_s, self.fleet.expire_leases)
        self.clock.every(self.dispatcher.check_interval_s, self.dispatcher.check_progress)
        names = [f"{role}-{i}" for role in ("prefill", "decode") for i in range(2)]
        self.instances = {name: FakeInstance(self.clock, self.fleet, name, name[:-2]) for name in names}
        self.num_ended = 0
        self._random = Random(seed)

    def serve(self) -> list[Client]:
        """Send `REQUESTS` requests at random times, and return them once all have ended."""
        random, at, clients = self._random, 0.0, []
        for number in range(REQUESTS):
            at += random.expovariate(ARRIVALS_PER_S)
            prompt = [random.randrange(VOCAB_SIZE)] * random.randrange(10, 800)
            sampling = SamplingParams(max_tokens=random.randrange(1, 60))
            request = Request(request_id=f"r{number}", prompt=prompt, sampling=sampling, received=at)
            clients.append(Client(self, request, random.choice(("heavy", "light"))))
            self.clock.after(at, clients[-1].send)
        self.clock.run(until=lambda: self.num_ended == REQUESTS)
        return clients


def assert_complete(router: SimulatedRouter, clients: list[Client]) -> None:
    """Check that each request got all of its tokens in order, and that nothing of it remains."""
    for client in clients:
        first, max_tokens = client.request.prompt[0], client.request.sampling.max_tokens
        assert [token for _, token in client.tokens] == [token_at(first, i) for i in range(max_tokens)]
        assert not client.state.timeline.error
    assert not router.dispatcher.states
    for instance in router.fleet.instances.values():
        assert not instance.requests and instance.candidate.work_tokens == 0
    assert {quota.choices for quota in router.admission.quotas.values()} == {0}


def test_every_request_ends_with_all_its_tokens_and_no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> float:
        raise AssertionError("the simulation reads a real clock")

    router = SimulatedRouter(seed=1)
    with monkeypatch.context() as patch:
        for name in ("monotonic", "perf_counter", "sleep"):
            patch.setattr(time, name, fail)
        clients = router.serve()
    assert_complete(router, clients)
    assert router.clock.time > 100, "minutes of traffic"
    assert any(client.was_queued for client in clients) and not all(client.was_queued for client in clients)
    timelines = [client.state.timeline for client in clients]
    used = {(timeline.prefill_instance, timeline.decode_instance) for timeline in timelines}
    assert {name for pair in used for name in pair} == router.instances.keys()
    assert len({timeline.placement.way for timeline in timelines if timeline.placement}) > 1


def test_the_seed_determines_the_routing_and_the_times() -> None:
    first, again, other = ([client.record() for client in SimulatedRouter(seed).serve()] for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("end", [FakeInstance.kill, FakeInstance.freeze])
def test_a_decode_instance_that_dies_costs_no_request(end: Callable[[FakeInstance], None]) -> None:
    router = SimulatedRouter(seed=3)
    router.clock.after(60.0, lambda: end(router.instances["decode-0"]))
    clients = router.serve()
    assert_complete(router, clients)
    moved = [client.state.timeline.migrations for client in clients if client.state.timeline.migrations]
    assert moved and {one.instance for migrations in moved for one in migrations} == {"decode-0"}
    assert all(60.0 < one.at < 62.5 for migrations in moved for one in migrations)
    later = [client.state.timeline for client in clients if client.state.timeline.stamps[Stage.RECEIVED] > 62.5]
    assert later and all(timeline.decode_instance != "decode-0" for timeline in later)

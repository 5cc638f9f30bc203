"""Simulated router: what decides in a router process, on the virtual clock; and clients that measure as real ones do."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from pdserve.bench.requests import Request as Load
from pdserve.bench.requests import Sample
from pdserve.config import RouterConfig
from pdserve.errors import RequestError
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request, SamplingParams
from pdserve.router.dispatch.dispatcher import Dispatcher
from pdserve.router.dispatch.request_state import RequestState
from pdserve.router.instances.fleet import Fleet, InstanceHandle
from pdserve.router.limits.admission_queue import AdmissionQueue, AdmissionSlot
from pdserve.router.limits.key_file import ANONYMOUS
from pdserve.router.telemetry.metrics import Metrics
from pdserve.simulator.instance import SimulatedInstance
from pdserve.simulator.model import InstanceModel
from pdserve.simulator.virtual_clock import VirtualClock


@dataclass(eq=False)
class _Connection:
    """Connection to an instance. Frames arrive after the latency, in order."""

    clock: VirtualClock
    instance: SimulatedInstance
    link: str
    latency_s: float
    is_open: bool = True

    def send(self, frame: pb.RouterFrame) -> None:
        if frame.WhichOneof("frame") != "heard":
            self.clock.after(self.latency_s, partial(self.instance.receive, self.link, frame))

    def close(self) -> None:
        self.is_open = False

    def abort(self) -> None:
        self.is_open = False


class SimulatedRouter:
    """Fleet, dispatcher and admission queue of one router process. Its thread serves one thing at a time.

    Attributes:
        fleet, dispatcher, admission: those of a real router.
        model: durations.
        instances: those attached.
        token_times: when the latest tokens of a request arrived, if not now.
    """

    def __init__(self, clock: VirtualClock, name: str, config: RouterConfig, model: InstanceModel, seed: int) -> None:
        self.name = name
        self.clock = clock
        self.fleet = Fleet(name, config.name, config.lease_seconds, clock.now)
        metrics = Metrics(self.fleet)
        self.dispatcher = Dispatcher(config, self.fleet, metrics, seed)
        self.admission = AdmissionQueue([], config, metrics, clock.now)
        self.model = model
        self.instances: list[SimulatedInstance] = []
        self.token_times: dict[str, list[float]] = {}
        self._free_at = 0.0
        clock.every(self.fleet.lease_check_interval_s, self.fleet.expire_leases)
        clock.every(self.dispatcher.check_interval_s, self.dispatcher.check_progress)

    def attach(self, instance: SimulatedInstance) -> InstanceHandle:
        """Register an instance."""
        reason = self.fleet.rejection_reason(pb.InstanceFrame(hello=instance.hello))
        assert not reason, reason
        connection = _Connection(self.clock, instance, self.name, self.model.frame_latency_s)
        handle = self.fleet.register(instance.hello, connection)
        self.instances.append(instance)
        instance.attach(self.name, partial(self._receive, handle))
        return handle

    def lose(self, name: str) -> None:
        """Notice soon that the connection to an instance has ended."""
        handle = self.fleet.instances[name]
        self.clock.after(self.model.frame_latency_s, lambda: self.fleet.deregister(handle, "the connection was lost"))

    def spend(self, seconds: float) -> float:
        """Occupy the router's thread, and return when it is done with this."""
        self._free_at = max(self._free_at, self.clock.time) + seconds
        return self._free_at

    def _receive(self, handle: InstanceHandle, frame: pb.InstanceFrame, times: list[float]) -> None:
        """Handle a frame. If it has the tokens of several steps, `times` tells when each of them arrived."""
        done_at = self.clock.time
        if frame.WhichOneof("frame") == "step":
            done_at = self.spend(sum(len(one.token_ids) for one in frame.step.outputs) * self.model.router_token_s)
        if times:
            self.token_times.update({output.request_id: times for output in frame.step.outputs})
        if done_at > self.clock.time and not times:
            self.clock.at(done_at, partial(self.fleet.handle_frame, handle, frame))
        else:
            self.fleet.handle_frame(handle, frame)


@dataclass
class SimulatedClient:
    """Sends one request to a router and reads its tokens.

    Attributes:
        prompt: its tokens.
        on_end: called when the answer is complete, or the request has failed.
        is_chat: another turn may follow.
    """

    router: SimulatedRouter
    request_id: str
    load: Load
    prompt: list[int]
    keys: dict[int, list[bytes]]
    sample: Sample
    on_end: Callable[["SimulatedClient"], None]
    is_chat: bool
    slot: AdmissionSlot = field(init=False)
    state: RequestState | None = None

    def send(self) -> None:
        """Send the request now."""
        router = self.router
        self.sample.sent = router.clock.time
        router.clock.at(router.spend(router.model.router_request_s), self._enter)

    def _enter(self) -> None:
        num_prompt, router = len(self.prompt), self.router
        try:
            self.slot = router.admission.enter(ANONYMOUS, num_prompt, num_prompt + self.load.output_tokens)
        except RequestError as error:
            self._end(error)
            return
        if self.slot.is_admitted:
            self._open()
        else:
            self.slot.on_decision = lambda: router.clock.after(0, self._open)

    def _open(self) -> None:
        if self.slot.refusal is not None:
            self._end(self.slot.refusal)
            return
        sampling = SamplingParams(max_tokens=self.load.output_tokens, temperature=0.0, ignore_eos=True)
        request = Request(
            request_id=self.request_id,
            prompt=self.prompt,
            sampling=sampling,
            keys=self.keys,
            multi_turn=self.is_chat,
            received=self.sample.sent,
        )
        for instance in self.router.instances:
            instance.catch_up()  # what the selection knows
        try:
            self.state = self.router.dispatcher.open(request)
        except RequestError as error:
            self._end(error)
            return
        self.state.on_readable = lambda: self.router.clock.after(0, self._read)

    def _read(self) -> None:
        assert self.state is not None
        try:
            chunks = self.state.take()
        except RequestError as error:
            self._end(error)
            return
        times = self.router.token_times.pop(self.state.id, [])
        for chunk in chunks:
            count = len(chunk.token_ids)
            self.sample.token_times += times if len(times) == count else [self.router.clock.time] * count
        if chunks and chunks[-1].finish_reason is not None:
            self._end(None)

    def _end(self, error: RequestError | None) -> None:
        sample = self.sample
        sample.ended = self.router.clock.time
        sample.input_tokens, sample.output_tokens = len(self.prompt), len(sample.token_times)
        sample.status = 200
        if error is not None:
            sample.error = str(error)
            if not sample.token_times:
                sample.status = error.status
        if hasattr(self, "slot"):
            self.slot.release(len(self.prompt) + sample.output_tokens)
        self.on_end(self)

"""Simulated router: what decides in a router process, on the virtual clock; and clients that measure as real ones do."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pdserve.config import RouterConfig
from pdserve.errors import RequestError
from pdserve.keys import Tokens
from pdserve.output import unpack
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import SamplingParams, check_length
from pdserve.router.dispatch.dispatcher import Dispatcher
from pdserve.router.dispatch.request_state import RequestState
from pdserve.router.instances.fleet import Fleet, InstanceHandle
from pdserve.router.limits.admission_queue import AdmissionQueue, AdmissionSlot
from pdserve.router.limits.key_file import ANONYMOUS
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.telemetry.metrics import Metrics
from pdserve.tools.bench.requests import Request as Load
from pdserve.tools.bench.requests import Sample
from pdserve.tools.simulator.adapters import digest_of
from pdserve.tools.simulator.cores import SharedCores
from pdserve.tools.simulator.instance import SimulatedInstance
from pdserve.tools.simulator.model import InstanceModel
from pdserve.tools.simulator.virtual_clock import VirtualClock


@dataclass(eq=False)
class _Connection:
    """Connection to an instance. Frames arrive after the latency, in order, and those from the instance are handled in order.

    Attributes:
        handled_until: when the newest frame from the instance is, or was, handled.
    """

    clock: VirtualClock
    instance: SimulatedInstance
    link: str
    latency_s: float
    handled_until: float = 0.0

    def send(self, frame: pb.RouterFrame) -> None:
        kind = frame.WhichOneof("frame")
        assert kind != "refused", f"{self.instance.hello.instance_id} was dropped: {frame.refused.message}"
        if kind != "heard":
            self.clock.after(self.latency_s, partial(self.instance.receive, self.link, frame))

    def close(self) -> None: ...

    def abort(self) -> None: ...


class SimulatedRouter:
    """Fleet, dispatcher and admission queue of one router process. Its thread serves one thing at a time.

    Attributes:
        fleet, dispatcher, admission: those of a real router.
        model: durations.
        thread: its work.
        token_times: when the thread was done with the tokens of the frame that it handles, one for each step.
    """

    def __init__(
        self,
        clock: VirtualClock,
        name: str,
        config: RouterConfig,
        model: InstanceModel,
        seed: int,
        cores: SharedCores | None = None,
    ) -> None:
        self.name = name
        self.clock = clock
        self.fleet = Fleet(name, config.name, config.instance_timeout_seconds, clock.now)
        metrics = Metrics(self.fleet)
        metrics.inter_token_latency.observe = _ignore  # type: ignore[method-assign]  # its buckets cost as much as decisions
        self.dispatcher = Dispatcher(config, self.fleet, metrics, seed)
        self.admission = AdmissionQueue([], config, metrics, clock.now)
        self.model = model
        self.token_times: list[float] = []
        self._instances: list[SimulatedInstance] = []
        self.thread = RouterThread(cores)
        clock.every(self.fleet.lease_check_interval_s, self._when_free(self.fleet.expire_leases))
        clock.every(self.dispatcher.check_interval_s, self._when_free(self.dispatcher.check_progress))

    def attach(self, instance: SimulatedInstance) -> InstanceHandle:
        """Register an instance."""
        reason = self.fleet.rejection_reason(pb.InstanceFrame(hello=instance.hello))
        assert not reason, reason
        connection = _Connection(self.clock, instance, self.name, self.model.frame_latency_s)
        handle = self.fleet.register(instance.hello, connection)
        self._instances.append(instance)
        instance.attach(self.name, partial(self._receive, handle, connection))
        self.fleet.on_joined(handle)
        return handle

    def lose(self, name: str) -> None:
        """Notice soon that the connection to an instance has ended."""
        if (handle := self.fleet.instances.get(name)) is not None:
            deregister = self._up_to_date(lambda: self.fleet.deregister(handle, "the connection was lost"))
            self.clock.after(self.model.frame_latency_s, deregister)

    def spend(self, seconds: float) -> float:
        """Occupy the router's thread, and return when it is done with this."""
        return self.thread.add(self.clock.time, seconds)

    def catch_up(self) -> None:
        """Take over the tokens of skipped steps that have arrived, before something is decided."""
        for instance in self._instances:
            instance.catch_up()

    def _up_to_date(self, action: Callable[[], object]) -> Callable[[], object]:
        def act() -> None:
            self.catch_up()
            action()

        return act

    def _when_free(self, action: Callable[[], object]) -> Callable[[], None]:
        """Return a function that does an action when the thread has done its work: a busy router is late with its checks."""
        up_to_date = self._up_to_date(action)

        def act() -> None:
            if (free_at := self.spend(0.0)) > self.clock.time:
                self.clock.at(free_at, up_to_date)
            else:
                up_to_date()

        return act

    def _receive(
        self, handle: InstanceHandle, connection: _Connection, frame: pb.InstanceFrame, times: list[float]
    ) -> None:
        """Handle a frame when the thread is done with it. If it has the tokens of several steps, `times` tells when each of
        them arrived."""
        times, now = times or [self.clock.time], self.clock.time
        if frame.WhichOneof("frame") == "outputs":
            seconds = sum(len(one.token_ids) for one in unpack(frame.outputs)) * self.model.router_token_s
            times = [self.thread.add(at, seconds / len(times)) for at in times] if seconds else times
        handled_at = connection.handled_until = max(now, times[-1], connection.handled_until)
        if handled_at > now:
            self.clock.at(handled_at, partial(self._handle, handle, frame, times))
        else:
            self._handle(handle, frame, times)

    def _handle(self, handle: InstanceHandle, frame: pb.InstanceFrame, times: list[float]) -> None:
        self.token_times = times
        self.fleet.handle_frame(handle, frame)
        self.token_times = []


@dataclass
class SimulatedClient:
    """Sends one request to a router and reads its tokens.

    Attributes:
        num_prompt: tokens of the prompt.
        prompt: its tokens; empty if they are more than an instance takes.
        on_end: called when the answer is complete, or the request has failed.
        is_chat: another turn may follow.
    """

    router: SimulatedRouter
    request_id: str
    load: Load
    num_prompt: int
    prompt: Tokens
    keys: dict[int, list[bytes]]
    packed_keys: bytes
    sample: Sample
    on_end: Callable[["SimulatedClient"], None]
    is_chat: bool
    slot: AdmissionSlot | None = None
    state: RequestState | None = None

    def send(self) -> None:
        """Send the request now."""
        self.sample.sent = self.router.clock.time
        self.router.clock.after(self.router.model.client_s, self._arrive)

    def _arrive(self) -> None:
        router, model = self.router, self.router.model
        seconds = model.router_request_s + model.router_prompt_token_s * self.num_prompt
        router.clock.at(router.spend(seconds), self._enter)

    def _enter(self) -> None:
        num_prompt, num_output, router = self.num_prompt, self.load.output_tokens, self.router
        try:
            if (info := router.dispatcher.model) is not None or not self.prompt:
                most = router.model.max_model_len if info is None else info.max_model_len
                check_length(num_prompt, num_output, most)
            slot = self.slot = router.admission.enter(ANONYMOUS, num_prompt, num_prompt + num_output)
        except RequestError as error:
            self._end(error)
            return
        if slot.is_admitted:
            self._open(slot)
        else:
            slot.on_decision = lambda: router.clock.after(0, partial(self._open, slot))

    def _open(self, slot: AdmissionSlot) -> None:
        if slot.refusal is not None:
            self._end(slot.refusal)
            return
        sampling = SamplingParams(max_tokens=self.load.output_tokens, temperature=0.0, ignore_eos=True)
        request = RoutedRequest(
            request_id=self.request_id,
            prompt=self.prompt,
            sampling=sampling,
            keys=self.keys,
            packed_keys=self.packed_keys,
            multi_turn=self.is_chat,
            adapter=digest_of(self.load.adapter),
            adapter_name=self.load.adapter,
            received=self.sample.sent,
        )
        self.router.catch_up()
        try:
            self.state = self.router.dispatcher.open(request)
        except RequestError as error:
            self._end(error)
            return
        self.state.on_readable = self._read

    def _read(self) -> None:
        """Take the tokens that have just arrived. The end of the answer is handled after the router has finished with it."""
        assert self.state is not None
        clock, times = self.router.clock, self.router.token_times
        try:
            chunks = self.state.take()
        except RequestError as error:
            clock.after(0, partial(self._end, error))
            return
        for chunk in chunks:
            count = len(chunk.token_ids)
            self.sample.output_tokens += count
            self.sample.token_times += times if len(times) == count else [clock.time]  # one event of a step with drafts
        if chunks and chunks[-1].finish_reason is not None:
            clock.after(0, partial(self._end, None))

    def _end(self, error: RequestError | None) -> None:
        sample = self.sample
        sample.ended = self.router.clock.time
        sample.input_tokens = self.num_prompt
        sample.status = 200
        if error is not None:
            sample.error = str(error)
            if not sample.token_times:
                sample.status = error.status
        if self.slot is not None:
            self.slot.release(self.num_prompt + sample.output_tokens)
        self.on_end(self)
        self.slot = self.state = None  # they refer to this: such a cycle would keep the prompt until a collection


def _ignore(amount: float, exemplar: dict[str, str] | None = None) -> None:
    """Take the place of `observe` of a histogram that no simulation reads."""


SLOT_S = 0.005
MAX_SLOTS = 200  # how late work may become known: longer than skipped steps are left to be caught up with


class RouterThread:
    """Says when work is done. Tokens of skipped steps become known late: their work then counts from when it arrived, so that
    it fills the time in which the thread was idle, and does not delay what arrives now.

    Work is therefore summed by slots of time, and what is ahead of an arrival is known up to the length of a slot. So
    skipping may change the order of what arrives within a slot, and with it these times and what is decided then.

    Attributes:
        busy_seconds: all work, including that which waits.
    """

    def __init__(self, cores: SharedCores | None = None) -> None:
        self._cores = cores
        self.busy_seconds = 0.0
        self._first = 0  # number of the first slot
        self._work = deque([0.0])  # seconds, by slot
        self._backlog = deque([0.0])  # seconds that are left of earlier work when the slot begins

    def add(self, at: float, seconds: float) -> float:
        """Add work that arrives, or has arrived, at a time. Returns when it is done."""
        if self._cores is not None:
            seconds = self._cores.light(at, seconds)
        slot = int(at / SLOT_S) - self._first
        if slot < 0:
            slot = 0
        while slot >= len(self._work):
            slot -= self._append_slot()
        begins = (self._first + slot) * SLOT_S
        ahead = self._backlog[slot] + self._work[slot] - (at - begins if at > begins else 0.0)
        if ahead < 0:
            ahead = 0.0
        self._work[slot] += seconds
        self.busy_seconds += seconds
        if slot + 1 < len(self._work):
            self._update_backlogs(slot + 1)
        return at + ahead + seconds

    def _append_slot(self) -> int:
        """Append a slot. Returns by how many slots the first one has moved."""
        self._backlog.append(self._left(len(self._work) - 1))
        self._work.append(0.0)
        if len(self._work) <= MAX_SLOTS:
            return 0
        self._work.popleft()
        self._backlog.popleft()
        self._first += 1
        return 1

    def _update_backlogs(self, slot: int) -> None:
        while slot < len(self._work) and self._backlog[slot] != (left := self._left(slot - 1)):
            self._backlog[slot] = left
            slot += 1

    def _left(self, slot: int) -> float:
        """Return the seconds of work that are left at the end of a slot."""
        return max(0.0, self._backlog[slot] + self._work[slot] - SLOT_S)

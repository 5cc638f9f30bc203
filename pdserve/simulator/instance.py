"""Simulated instance: the real `Instance` with a paced runner, whose steps take virtual time."""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue

from pdserve.config import InstanceConfig
from pdserve.control.frame_connection import NONCE_BYTES
from pdserve.engine.paced_runner import PacedRunner
from pdserve.instance.hello import make_hello
from pdserve.instance.kv_events import PendingKVEvents
from pdserve.instance.router_link import HEARTBEAT_INTERVAL_S, MAX_KEYS_PER_FRAME, UPDATE_INTERVAL_S
from pdserve.keys import KeyChain
from pdserve.proto import pdserve_pb2 as pb
from pdserve.simulator.engine_thread import EngineThread
from pdserve.simulator.model import InstanceModel
from pdserve.simulator.store import SimulatedConnector, SimulatedStore
from pdserve.simulator.virtual_clock import VirtualClock

MIN_SKIPPED, MAX_SKIPPED = 2, 64  # plain decode steps that are taken at once
Receive = Callable[[pb.InstanceFrame, list[float]], None]


class Inbox(SimpleQueue[Callable[[], None]]):
    """The queue of work for an engine thread, without a thread: it wakes the simulated instance."""

    def __init__(self) -> None:
        self.items: deque[Callable[[], None]] = deque()
        self.on_put: Callable[[], None] = lambda: None

    def put(self, item: Callable[[], None], block: bool = True, timeout: float | None = None) -> None:
        self.items.append(item)
        self.on_put()

    def get_nowait(self) -> Callable[[], None]:
        if not self.items:
            raise Empty
        return self.items.popleft()


@dataclass
class _Link:
    """Connection to one router, as `RouterLink`.

    Attributes:
        receive: passes a frame to the router, with the times at which the tokens of skipped steps arrived, if it has such.
    """

    receive: Receive
    pending: PendingKVEvents
    last_load: pb.Load = field(default_factory=pb.Load)
    last_heartbeat: pb.Heartbeat | None = None


class SimulatedInstance:
    """One instance process. Its own time runs ahead of the clock's during a step, since nothing interrupts a step.

    What it sends leaves at its own time, and what it is sent waits in its inbox, as in the engine thread of a process.

    Plain decode steps are skipped and caught up with when something needs their result. To the router their tokens arrive
    late then, but each at its own time by the clients' measure.

    Args:
        chains: request id → key chain, which the instances share to compute keys once.
        can_skip: skip plain decode steps.

    Attributes:
        hello: its registration.
        busy_s: time spent in steps.
    """

    def __init__(
        self,
        clock: VirtualClock,
        model: InstanceModel,
        store: SimulatedStore,
        config: InstanceConfig,
        role: str,
        chains: Mapping[str, KeyChain],
        *,
        can_skip: bool = True,
    ) -> None:
        self._clock = clock
        self._model = model
        self._time = clock.time
        self._inbox = Inbox()
        self._is_scheduled = False
        self._is_alive = True
        self._can_skip = can_skip
        self._skipped_ends: list[float] = []  # of the steps that have not been taken yet
        self._times: list[float] = []  # when the tokens that are being sent arrive, if those of several steps
        self._delivers_now = False
        self.busy_s = 0.0
        runner = PacedRunner(
            config,
            model.layout,
            model.max_model_len,
            model.step_seconds,
            model.swap_seconds,
            self._pass,
            block_bytes=1,
        )
        connector = SimulatedConnector(clock, self.now, store, model.layout.block_bytes)
        self.thread = EngineThread(config, self._send, connector, runner=runner, inbox=self._inbox, now=self.now)
        self._time, self.busy_s = clock.time, 0.0  # the warm-up is part of the start-up time
        self.hello = make_hello(role, config, self.thread)
        self.hello.epoch, self.hello.nonce = 0, bytes(NONCE_BYTES)
        self.thread.engine.chains = chains
        self._links: dict[str, _Link] = {}
        self._inbox.on_put = self._wake

    def now(self) -> float:
        """Return the instance's own time."""
        return max(self._time, self._clock.time)

    def attach(self, link: str, receive: Receive) -> None:
        """Connect to a router that has accepted the Hello. Frames to it are passed to `receive`."""
        one = self._links[link] = _Link(receive, self.thread.kv_events.subscribe())
        self._send_heartbeat(one)
        self._clock.every(HEARTBEAT_INTERVAL_S, partial(self._send_heartbeat, one))
        self._clock.every(UPDATE_INTERVAL_S, partial(self._send_updates, link, one))

    def receive(self, link: str, frame: pb.RouterFrame) -> None:
        """Handle a frame of a router, as `RouterLink.receive`."""
        if not self._is_alive:
            return
        match frame.WhichOneof("frame"):
            case "submit":
                self.thread.submit(link, frame.submit)
            case "hand_over":
                self.thread.hand_over(link, frame.hand_over)
            case "cancel":
                self.thread.cancel(link, frame.cancel.request_id)

    def stop(self) -> None:
        """Stop without a word."""
        self._is_alive = False

    def _pass(self, seconds: float) -> None:
        self._time = self.now() + seconds
        self.busy_s += seconds

    def catch_up(self) -> None:
        """Deliver the tokens of skipped steps that have reached the routers by now."""
        arrived = bisect_right(self._skipped_ends, self._clock.time - self._model.frame_latency_s)
        self._skip(arrived, delivers_now=True)

    def _wake(self) -> None:
        if self._skipped_ends:  # the step under way ends first
            self.catch_up()
            if self._clock.time > self._time:
                self._skip(bisect_left(self._skipped_ends, self._clock.time) + 1)
            self._skipped_ends = []
            self._is_scheduled = False
        if not self._is_scheduled:
            self._is_scheduled = True
            self._clock.at(self._time, self._run_once)

    def _run_once(self) -> None:
        """Do one turn of the engine thread."""
        if not self._is_alive:
            return
        self._time = self._clock.time
        idle = self.thread.run_once(wait=False)
        self._is_scheduled = not idle or bool(self._inbox.items)
        if self._is_scheduled and not (self._can_skip and self._plan_skip()):
            self._clock.at(self._time, self._run_once)

    def _plan_skip(self) -> bool:
        """Skip the next steps if they are plain. Returns whether they are."""
        steps = 0 if self._inbox.items else self.thread.num_plain_steps(MAX_SKIPPED)
        if steps < MIN_SKIPPED:
            return False
        time, work = self._time, [(1, seq.num_computed) for seq in self.thread.engine.scheduler.running]
        sequences, context = len(work), sum(before + 1 for _, before in work)
        for step in range(steps):
            time += self._model.decode_seconds(sequences, context + step * sequences)
            self._skipped_ends.append(time)
        ends = self._skipped_ends
        self._clock.at(time, lambda: self._end_skip(ends))
        return True

    def _end_skip(self, ends: list[float]) -> None:
        """End the skipped steps, unless something has interrupted them."""
        if self._skipped_ends is ends:
            self._skip(len(ends))
            self._skipped_ends = []
            self._clock.at(self._time, self._run_once)

    def _skip(self, steps: int, *, delivers_now: bool = False) -> None:
        """Take the next skipped steps and send their tokens."""
        if self._skipped_ends[:steps] and self._is_alive:
            ends, self._skipped_ends[:steps] = self._skipped_ends[:steps], []
            self.busy_s += ends[-1] - self._time
            self._time = ends[-1]
            self._times, self._delivers_now = [end + self._model.frame_latency_s for end in ends], delivers_now
            self.thread.skip(len(ends))
            self._times, self._delivers_now = [], False

    def _send(self, link: str, frame: pb.InstanceFrame) -> None:
        if link in self._links and self._is_alive:
            receive = partial(self._links[link].receive, frame, self._times)
            if self._delivers_now:
                receive()
            else:
                self._clock.at(self.now() + self._model.frame_latency_s, receive)

    def _send_heartbeat(self, link: _Link) -> None:
        if self._skipped_ends:
            self.catch_up()
            self.thread.update_heartbeat()
        if (heartbeat := self.thread.heartbeat) is link.last_heartbeat:
            self._send_later(link, pb.InstanceFrame(others=link.last_load))  # renews the lease for less
        else:
            link.last_heartbeat = heartbeat
            self._send_later(link, pb.InstanceFrame(heartbeat=heartbeat))

    def _send_updates(self, name: str, link: _Link) -> None:
        if self._skipped_ends and len(self._links) > 1:  # one router needs no news of its own load
            self.catch_up()
            self.thread.update_heartbeat()
        if len(self._links) > 1 and (load := self.thread.other_load(name)) != link.last_load:
            link.last_load = load
            self._send_later(link, pb.InstanceFrame(others=load))
        while link.pending:
            removed, added = link.pending.pop_batch(MAX_KEYS_PER_FRAME)
            blocks = pb.Blocks(removed=b"".join(removed), added=b"".join(added), untold=len(link.pending))
            self._send_later(link, pb.InstanceFrame(blocks=blocks))

    def _send_later(self, link: _Link, frame: pb.InstanceFrame) -> None:
        """Send a frame of the other thread, which does not wait for the engine."""
        if self._is_alive:
            self._clock.after(self._model.frame_latency_s, partial(link.receive, frame, []))

"""Simulated instance: the real `Instance` with a paced runner, whose steps take virtual time."""

import math
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue

from pdserve.config import InstanceConfig
from pdserve.control.frame_connection import NONCE_BYTES
from pdserve.engine.paced_runner import PacedRunner
from pdserve.instance.hello import make_hello
from pdserve.instance.kv_events import KVEventPublisher, PendingKVEvents
from pdserve.instance.router_link import (
    DRAIN_POLL_S,
    HEARTBEAT_INTERVAL_S,
    MAX_KEYS_PER_FRAME,
    UPDATE_INTERVAL_S,
)
from pdserve.kv_transfer.connector import Connector
from pdserve.kv_transfer.grouped import GroupedConnector
from pdserve.proto import pdserve_pb2 as pb
from pdserve.tools.simulator.adapters import SimulatedAdapters
from pdserve.tools.simulator.cores import SharedCores
from pdserve.tools.simulator.drafts import Draws, SimulatedDrafter, SimulatedDraftModel
from pdserve.tools.simulator.engine_thread import EngineThread
from pdserve.tools.simulator.model import InstanceModel
from pdserve.tools.simulator.store import SimulatedConnector, SimulatedStore
from pdserve.tools.simulator.virtual_clock import VirtualClock

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
        pending: changes of the pool's keys, by steps that have ended, that the router has not been told.
        load: work of other routers' requests, as of the newest heartbeat that the instance shows.
        last_load, last_heartbeat: what was sent last, the load as a frame.
    """

    receive: Receive
    pending: PendingKVEvents
    load: pb.Load = field(default_factory=pb.Load)
    last_load: pb.InstanceFrame = field(default_factory=lambda: pb.InstanceFrame(others=pb.Load()))
    last_heartbeat: pb.Heartbeat | None = None


class SimulatedInstance:
    """One instance process. Its own time runs ahead of the clock's during a step, since nothing interrupts a step.

    What it sends leaves at its own time, and what it is sent waits in its inbox, as in the engine thread of a process.

    Plain decode steps are skipped and caught up with when something needs their result. To the router their tokens arrive
    late then, but each at its own time by the clients' measure. This changes no time as long as routers' threads take none
    (see `RouterThread`).

    What routers see of it is what it was after the last step that has ended: its heartbeat, load and keys do not show a step
    that is under way. Once it has stopped, nothing that it would have sent or stored later happens.

    Args:
        can_skip: skip plain decode steps; not with `cores`.
        cores: those that it shares with others; None: it has its own.
        draws: the tokens of its drafts, where it has some.

    Attributes:
        hello: its registration.
        connectors: to the KV store, one for each group of blocks.
        on_drained: called when it has drained in order to end.
    """

    def __init__(
        self,
        clock: VirtualClock,
        model: InstanceModel,
        store: SimulatedStore,
        config: InstanceConfig,
        role: str,
        *,
        can_skip: bool = True,
        cores: SharedCores | None = None,
        draws: Draws | None = None,
    ) -> None:
        self._clock = clock
        self._model = model
        self._time = clock.time
        self._inbox = Inbox()
        self._is_scheduled = False
        self._can_skip = can_skip and cores is None
        self._cores: SharedCores | None = None  # nobody waits for the warm-up
        self._stopped_at = math.inf
        self._skipped_ends: list[float] = []  # of the steps that have not been taken yet
        self._times: list[float] = []  # when the tokens that are being sent arrive, if those of skipped steps
        self._busy_s = 0.0
        runner = PacedRunner(
            config,
            model.layout,
            model.max_model_len,
            model.step_seconds,
            model.swap_seconds,
            self._pass,
            block_bytes=1,
            num_pages=model.num_pages or None,
            window=model.window,
        )
        self.connectors = [
            SimulatedConnector(clock, self.now, store, group.block_bytes, at)
            for at, group in enumerate(model.layout.groups)
        ]
        connector: Connector = self.connectors[0]
        if len(self.connectors) > 1:
            sizes = [runner.kv.num_pages * group.per_page for group in runner.kv.groups]
            connector = GroupedConnector(self.connectors, model.layout, sizes)
        self.thread = EngineThread(config, self._send, connector, runner=runner, inbox=self._inbox, now=self.now)
        if model.adapters:
            adapters = SimulatedAdapters(model.adapters, config.max_loras, model.adapter_model, self._pass)
            self.thread.engine.adapters = adapters
        if model.acceptance and draws is not None:
            self._speculate(config, draws)
        self._heartbeat = self._shown = self.thread.reporter.heartbeat
        self._key_changes = self.thread.kv_events.subscribe()  # not shown yet
        self._shown_keys = KVEventPublisher()
        self._time, self._busy_s = clock.time, 0.0  # the warm-up is part of the start-up time
        self._cores = cores
        self.hello = make_hello(role, config, self.thread)
        self.hello.epoch, self.hello.nonce = 0, bytes(NONCE_BYTES)
        self._links: dict[str, _Link] = {}
        self._inbox.on_put = self._wake
        self._drain_seconds = config.drain_seconds
        self.on_drained: Callable[[], object] = self.stop

    def _speculate(self, config: InstanceConfig, draws: Draws) -> None:
        """Let steps have drafts."""
        engine, draft = self.thread.engine, self._model.draft
        if draft is None:
            engine.drafter = SimulatedDrafter(engine.scheduler, draws, config.draft_length)
        else:
            engine.drafter = SimulatedDraftModel(config, engine.scheduler, draws, draft, self.now, self._pass)

    def now(self) -> float:
        """Return the instance's own time."""
        return max(self._time, self._clock.time)

    def attach(self, link: str, receive: Receive) -> None:
        """Connect to a router that has accepted the Hello. Frames to it are passed to `receive`."""
        one = self._links[link] = _Link(receive, self._shown_keys.subscribe())
        self._send_heartbeat(one)
        self._clock.every(HEARTBEAT_INTERVAL_S, partial(self._send_heartbeat, one))
        self._clock.every(UPDATE_INTERVAL_S, partial(self._send_updates, one))

    def receive(self, link: str, frame: pb.RouterFrame) -> None:
        """Handle a frame of a router, as `RouterLink.receive`."""
        if not self.is_alive:
            return
        match frame.WhichOneof("frame"):
            case "submit":
                self.thread.submit(link, frame.submit)
            case "hand_over":
                self.thread.hand_over(link, frame.hand_over)
            case "cancel":
                self.thread.cancel(link, frame.cancel.request_id)
            case "drain":
                self._drain(frame.drain.role)

    @property
    def is_alive(self) -> bool:
        return self._stopped_at == math.inf

    @property
    def busy_seconds(self) -> float:
        """Time spent in steps until now."""
        since_step = self._clock.time - self._time  # negative in the middle of a step that is counted already
        return self._busy_s + (since_step if self._skipped_ends else min(0.0, since_step))

    def _drain(self, role: str) -> None:
        """Tell routers to send no more requests, and serve in the role when none is left; if it is empty, end."""
        for link in self._links.values():
            self._send_later(link, pb.InstanceFrame(draining=pb.Draining()))
        deadline = self._clock.time + self._drain_seconds
        self._clock.after(DRAIN_POLL_S, partial(self._end_drain, role, deadline))

    def _end_drain(self, role: str, deadline: float) -> None:
        self.catch_up()
        if (self.thread.num_jobs or self._inbox.items) and self._clock.time < deadline:
            self._clock.after(DRAIN_POLL_S, partial(self._end_drain, role, deadline))
        elif role:
            hello = pb.Hello()
            hello.CopyFrom(self.hello)
            hello.role = role
            self.hello = hello
            for link in self._links.values():
                self._send_later(link, pb.InstanceFrame(hello=hello))
        else:
            self.on_drained()

    def stop(self) -> None:
        """Stop without a word, in the middle of a step if one is under way. What it has sent still arrives."""
        if self.is_alive:
            self.catch_up()
            self._busy_s = self.busy_seconds
            self._time, self._skipped_ends = self._clock.time, []
            self._stopped_at = self._clock.time
            for connector in self.connectors:
                connector.stop()

    def catch_up(self) -> None:
        """Take the skipped steps that have ended by now. Their tokens that have arrived by now are delivered at once."""
        if self._skipped_ends and self._skipped_ends[0] <= (now := self._clock.time):
            ended = bisect_right(self._skipped_ends, now)
            arrived = bisect_right(self._skipped_ends, now, key=self._arrival)
            self._skip(arrived)
            for _ in range(ended - arrived):
                self._skip(1)

    def _pass(self, seconds: float) -> None:
        if self._cores is not None:
            seconds = self._cores.step(self, self.now(), seconds)
        self._time = self.now() + seconds
        self._busy_s += seconds

    def _arrival(self, sent_at: float) -> float:
        return sent_at + self._model.frame_latency_s

    def _wake(self) -> None:
        if self._skipped_ends:
            self.catch_up()
            if self._clock.time > self._time:
                self._show_keys()
                self._skip(1)  # the step under way ends first
            self._skipped_ends = []
            self._is_scheduled = False
        if not self._is_scheduled:
            self._is_scheduled = True
            self._clock.at(self._time, self._run_once)

    def _run_once(self) -> None:
        """Do one turn of the engine thread."""
        if not self.is_alive:
            return
        self._show_keys()
        self._time = self._clock.time
        idle = self.thread.run_once(wait=False)
        self._show_heartbeat()
        self._is_scheduled = not idle or bool(self._inbox.items)
        if self._is_scheduled and not (self._can_skip and self._plan_skip()):
            self._clock.at(self._time, self._run_once)

    def _plan_skip(self) -> bool:
        """Skip the next steps if they are plain. Returns whether they are."""
        steps = 0 if self._inbox.items else self.thread.num_plain_steps(MAX_SKIPPED)
        if steps < MIN_SKIPPED:
            return False
        time, running = self._time, self.thread.engine.scheduler.running
        sequences, context, adapters = len(running), sum(map(len, running)), self.thread.engine.adapters
        extra = adapters.seconds((seq, 1) for seq in running) if isinstance(adapters, SimulatedAdapters) else 0.0
        for step in range(steps):
            if extra:
                time += extra
            time += self._model.decode_seconds(sequences, context + step * sequences)
            self._skipped_ends.append(time)
        ends = self._skipped_ends
        self._clock.at(time, lambda: self._end_skip(ends))
        return True

    def _end_skip(self, ends: list[float]) -> None:
        """End the skipped steps, unless something has interrupted them."""
        if self._skipped_ends is ends:
            self.catch_up()
            self._skipped_ends = []
            self._clock.at(self._time, self._run_once)

    def _skip(self, steps: int) -> None:
        """Take the next skipped steps and send their tokens."""
        ends, self._skipped_ends[:steps] = self._skipped_ends[:steps], []
        if ends:
            began_at, self._time = self._time, ends[-1]
            self._busy_s += self._time - began_at
            self._times = [self._arrival(end) for end in ends]
            self.thread.skip(began_at, ends)
            self._times = []
            self._show_heartbeat()

    def _send(self, link: str, frame: pb.InstanceFrame) -> None:
        """Send a frame of the engine thread when the step that it follows has ended."""
        if link in self._links:
            sent_at = self._time if self._times else self.now()
            receive = partial(self._deliver, sent_at, self._links[link], frame, self._times)
            if self._times and self._times[-1] <= self._clock.time:
                receive()
            else:
                self._clock.at(self._arrival(sent_at), receive)

    def _deliver(self, sent_at: float, link: _Link, frame: pb.InstanceFrame, times: list[float]) -> None:
        if sent_at <= self._stopped_at:
            link.receive(frame, times)

    def _show_heartbeat(self) -> None:
        """Show routers the newest heartbeat and load once the step that they follow has ended."""
        if (heartbeat := self.thread.reporter.heartbeat) is self._heartbeat:
            return
        self._heartbeat = heartbeat
        several = len(self._links) > 1  # one router needs no news of its own load
        loads = [(link, self.thread.reporter.other_load(name)) for name, link in self._links.items()] if several else []

        def show() -> None:
            self._shown = heartbeat
            for link, load in loads:
                link.load = load

        if self._time > self._clock.time:
            self._clock.at(self._time, show)
        else:
            show()

    def _send_heartbeat(self, link: _Link) -> None:
        self.catch_up()
        if self._shown is link.last_heartbeat:
            self._send_later(link, link.last_load)  # renews the lease for less
        else:
            link.last_heartbeat = self._shown
            self._send_later(link, pb.InstanceFrame(heartbeat=self._shown))

    def _show_keys(self) -> None:
        """Show routers the changes of the pool's keys until now, when no step that has made some is still under way."""
        if not self._key_changes:
            return
        removed, added = self._key_changes.pop_batch(sys.maxsize)
        for key in removed:
            self._shown_keys.remove(key)
        for key in added:
            self._shown_keys.store(key)

    def _send_updates(self, link: _Link) -> None:
        several = len(self._links) > 1
        if self._skipped_ends:
            ended = bisect_right(self._skipped_ends, self._clock.time)
            if ended and (several or ended >= self.thread.steps_until_keys_change()):
                self.catch_up()
        if self._time <= self._clock.time:
            self._show_keys()
        if several and link.load != link.last_load.others:
            link.last_load = pb.InstanceFrame(others=link.load)
            self._send_later(link, link.last_load)
        while link.pending:
            removed, added = link.pending.pop_batch(MAX_KEYS_PER_FRAME)
            blocks = pb.Blocks(removed=b"".join(removed), added=b"".join(added), untold=len(link.pending))
            self._send_later(link, pb.InstanceFrame(blocks=blocks))

    def _send_later(self, link: _Link, frame: pb.InstanceFrame) -> None:
        """Send a frame of the other thread, which does not wait for the engine."""
        if self.is_alive:
            self._clock.after(self._model.frame_latency_s, partial(link.receive, frame, []))

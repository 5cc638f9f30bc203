"""The fleet: all instances attached to this router, from their Hello until their lease expires or they leave.

Frames from an instance are passed to a `FleetListener`; frames to an instance go through its `Connection`. The fleet also has
the router's clock.
"""

import hmac
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

from pdserve.control.frame_connection import OLDEST_VERSION, PROTOCOL_VERSION, AwakeClock
from pdserve.costs import Costs
from pdserve.keys import STATE_WINDOW, Layout
from pdserve.output import Output, unpack
from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.instances.compatibility import conflict_between, kind_of
from pdserve.router.instances.frame_checks import (
    MAX_NAME_CHARS,
    ROLES,
    InvalidFrame,
    adapters_fault,
    frame_fault,
    hello_fault,
)
from pdserve.router.scheduling.breaker import CircuitBreakers
from pdserve.router.scheduling.output_faults import OutputFaults
from pdserve.router.scheduling.policy import DEFAULT_COSTS, NO_LOAD, Candidate, Load
from pdserve.router.scheduling.prefix_index import PrefixIndex

log = logging.getLogger(__name__)

TICKS_PER_LEASE = 6  # number of times that leases are checked within one lease
HEARTBEAT_ACK = pb.RouterFrame(heard=pb.Heard())
SPARE_BLOCKS = 2048  # of each group, that a pool may have beyond what it says: states of some hundred sequences
MAX_EPOCH = 1 << 62  # that is believed, so that an instance cannot use up the numbers
IDLE_S = 10.0  # without a step, behind another instance: half of what `OnlineFit` knew from steps is forgotten
ACK_INTERVAL_S = 2.0  # a tenth of the silence after which instances take a router for lost; each frame wakes a process


_PREFILL_TOKENS = attrgetter("prefill_tokens")


class Connection(Protocol):
    """Connection to an instance: everything that a router sends to it passes here. Implemented by `FrameConnection`.

    What the instance answers is passed to `Fleet.handle_frame`, never from within `send`.
    """

    def send(self, frame: pb.RouterFrame) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


@dataclass(eq=False)
class InstanceHandle:
    """One attached instance: what it reported, and the requests that this router has running on it.

    Attributes:
        hello: its registration; replaced when it changes its role.
        last_frame_at: arrival of its last frame, on the router's monotonic clock.
        lease_renewed_at: arrival of its last frame, on the fleet's `AwakeClock`.
        last_step_at: when it last reported an engine step, on the fleet's `AwakeClock`; -inf: it has reported none.
        last_token_at: when it last sent a token of any request of this router, on the same clock.
        unpublished_blocks: number of block keys that it has not yet reported to the prefix index.
        unpublished_since: when `unpublished_blocks` became positive.
        heartbeat: its last heartbeat.
        requests: ids of this router's requests on it → their remaining work.
        other_load: sum of the remaining work of other routers' requests, as last reported.
        is_draining: it accepts no new requests.
        may_be_poisoned: it was lost by a fault that an unknown request may have caused: its engine has failed, or a frame
            could not be read.
        acknowledged_at: when this router last acknowledged a heartbeat, on its monotonic clock.
        own_costs: the cost model that it reported last; that of `candidate` may be another instance's.
        candidate: the view of the policies: this router's requests as of now, plus `other_load`.
        groups: the layouts of its blocks, see `Layout.groups`.
        max_keys: the most keys that it may have in its pool.
        kind: all that decides which instances it can serve with. Most instances of a fleet are of a few kinds.
        adapters: digests of those that it has.
    """

    hello: pb.Hello
    connection: Connection
    last_frame_at: float
    lease_renewed_at: float = 0.0
    last_step_at: float = -math.inf
    last_token_at: float = 0.0
    unpublished_blocks: int = 0
    unpublished_since: float = 0.0
    heartbeat: pb.Heartbeat = field(default_factory=pb.Heartbeat)
    requests: dict[str, Load] = field(default_factory=dict)
    other_load: Load = NO_LOAD
    own_costs: Costs = DEFAULT_COSTS
    is_draining: bool = False
    may_be_poisoned: bool = False
    acknowledged_at: float = -math.inf
    id: str = field(init=False)
    role: str = field(init=False)
    kind: tuple[object, ...] = field(init=False)
    adapters: frozenset[bytes] = field(init=False)
    max_model_len: int = field(init=False)
    groups: tuple[Layout, ...] = field(init=False)
    max_keys: int = field(init=False)
    vocab_size: int = field(init=False)

    def __post_init__(self) -> None:
        # Read for each request or output; a field of a message takes longer.
        self.max_model_len, self.vocab_size = self.hello.max_model_len, self.hello.vocab_size
        self.id, self.role, self.kind = self.hello.instance_id, self.hello.role, kind_of(self.hello)
        self.adapters = _digests(self.hello)
        size, block_bytes = max(1, self.hello.block_size), self.hello.block_bytes
        self.groups = groups = Layout.from_message(self.hello.layout).groups
        first_bytes = groups[0].block_bytes if len(groups) > 1 else max(1, block_bytes)
        block_bytes -= sum(group.block_bytes for group in groups if group.window == STATE_WINDOW)
        self.max_keys = self.hello.num_blocks
        if len(groups) > 1:  # if all pages have the smallest blocks
            sizes = [group.block_bytes for group in groups]
            self.max_keys = (self.max_keys + SPARE_BLOCKS) * sum(sizes) // max(1, min(sizes))
        self.candidate = Candidate(
            self.id,
            is_both=self.role == "both",
            token_bytes=first_bytes // size,
            windows=tuple((max(group.window, size), group.block_bytes // size) for group in groups[1:]),
            capacity_tokens=self.hello.num_blocks * size * max(1, block_bytes) // first_bytes,
            itl_target=self.hello.itl_target or math.inf,
            block_size=self.hello.block_size,
        )

    def assign(self, request_id: str, remaining: Load) -> None:
        """Add a request, or update its remaining work."""
        old, self.requests[request_id] = self.requests.get(request_id, NO_LOAD), remaining
        self._replace_load(old, remaining)

    def unassign(self, request_id: str) -> None:
        """Remove a request, if it is assigned."""
        self._replace_load(self.requests.pop(request_id, NO_LOAD), NO_LOAD)

    def _replace_load(self, old: Load, new: Load) -> None:
        longest = self.candidate.longest
        if new.prefill_tokens >= longest.prefill_tokens:
            self.candidate.longest = new
        elif old == longest:
            self.candidate.longest = max(self.requests.values(), key=_PREFILL_TOKENS, default=NO_LOAD)
        self.candidate.replace_load(old, new)

    def index_age(self, now: float) -> float:
        """Return how many seconds the prefix index lags behind this instance's pool."""
        since = self.unpublished_since if self.unpublished_blocks else self.last_frame_at
        return max(0.0, now - since)  # frames arrive while another thread reads this

    def change_role(self, hello: pb.Hello) -> None:
        """Take over the new role of an instance that has finished draining."""
        self.hello, self.role, self.kind, self.is_draining = hello, hello.role, kind_of(hello), False
        self.adapters = _digests(hello)
        self.candidate.is_both = hello.role == "both"

    def update_heartbeat(self, heartbeat: pb.Heartbeat, judges: "dict[Any, InstanceHandle] | None" = None) -> None:
        """Store a heartbeat, and its cost model if it carries one.

        Args:
            judges: by kind and by connector, the instance that measured a step or a transfer last. One that has moved
                nothing, or made no step for long, is judged by these: by what it assumes, or calibrated while others were
                starting, it might get no request that would correct it. If it is slower, it gets one from time to time.
        """
        costs: Any = heartbeat.costs
        if costs.prefill:
            judges = {} if judges is None else judges
            own = self.own_costs = Costs(tuple(costs.prefill), tuple(costs.decode), tuple(costs.transfer))
            link = self.hello.connector, self.role
            if own.transfer != Costs.transfer:
                judges[link] = self
            peers = self.kind, self.hello.device.partition(":")[0], self.hello.kernel
            if self.last_step_at >= judges.setdefault(peers, self).last_step_at:
                judges[peers] = self
            is_idle = judges[peers].last_step_at - self.last_step_at > IDLE_S
            steps, moves = judges[peers].own_costs if is_idle else own, judges.get(link, self).own_costs
            self.candidate.update_costs(Costs(steps.prefill, steps.decode, moves.transfer))
        self.heartbeat = heartbeat
        self.candidate.free_tokens = heartbeat.free_blocks * self.candidate.block_size

    def update_other_load(self, load: pb.Load) -> None:
        """Replace the load of other routers' requests."""
        new = Load(
            load.requests,
            load.prefill_tokens,
            load.output_tokens,
            load.context_tokens,
            load.prefills,
            load.attended_tokens,
        )
        if new != self.other_load:
            self.candidate.replace_load(self.other_load, new)
            self.other_load = new

    def as_dict(self, now: float) -> dict[str, object]:
        """Return the instance's entry of /debug/instances."""
        return {
            "instance_id": self.id,
            "version": self.hello.version,
            "epoch": self.hello.epoch,
            "role": self.role,
            "model": self.hello.model,
            "device": self.hello.device,
            "dtype": self.hello.dtype,
            "kernel": self.hello.kernel,
            "numerics": self.hello.layout.numerics,
            "ranks": max(1, self.hello.layout.ranks),
            "kv_groups": [
                {
                    "window": group.window or None,
                    "block_bytes": group.block_bytes,
                    "states": group.window == STATE_WINDOW,
                }
                for group in self.groups
            ],
            "connector": self.hello.connector,
            "block_size": self.hello.block_size,
            "num_blocks": self.hello.num_blocks,
            "free_blocks": self.heartbeat.free_blocks,
            "running": self.heartbeat.running,
            "waiting": self.heartbeat.waiting,
            "requests": len(self.requests),
            "prefill_tokens": self.candidate.prefill_tokens,
            "output_tokens": self.candidate.output_tokens,
            "costs": vars(self.own_costs),
            "speculate": self.hello.speculate,
            "drafts": {
                name: self.heartbeat.counters.get(f"spec_decode_{series}", 0.0)
                for name, series in (
                    ("tokens", "num_draft_tokens"),
                    ("accepted", "num_accepted_tokens"),
                    ("seconds", "draft_seconds"),
                )
            },
            "draining": self.is_draining,
            "last_heard_seconds": round(now - self.last_frame_at, 3),
        }


class FleetListener(Protocol):
    """Receives the fleet's events. Implemented by the dispatcher."""

    def on_output(self, instance: InstanceHandle, output: Output) -> None:
        """Handle the output of one request from one engine step.

        Raises:
            InvalidFrame: the output is impossible.
        """

    def on_lost(self, instance: InstanceHandle) -> None:
        """Handle the end of an instance, for whatever reason; it is no longer in the fleet."""

    def on_draining(self, instance: InstanceHandle) -> None:
        """Handle an instance that has begun to drain."""

    def on_adapter_changed(self, instance: InstanceHandle, answer: pb.AdapterChanged) -> None:
        """Handle an instance's answer to an order to change an adapter."""


class Fleet:
    """The attached instances, with their prefix index and circuit breakers. Everything runs in one thread.

    Attributes:
        index: blocks in the instances' pools.
        stored: blocks in the KV store, as far as publishers of KV events tell (`router/kv_events/`).
        now: the router's clock: returns the current time in seconds, and never goes back. Every time in the fleet and in the
            dispatcher is read from it.
        awake_now: returns the time by which peers are judged, which leaves out that in which this router was stalled itself.
        serving: role → the instances for it that accept new requests: lists that are replaced and never modified.
        on_joined: called with an instance that has attached, once it has been told so.
        on_heard: called when an instance has renewed its lease; None while nothing waits for that.
        on_change: called when an instance has come, gone or changed.
        lease_check_interval_s: intended interval of the calls of `expire_leases`.
        is_closing: the router ends, so instances that leave are no news.
        cache_epoch: of the last reset of the prefix cache, on whichever router; 0: there was none.
        on_reset: called when it has changed.
    """

    def __init__(self, router_id: str, model: str, lease_seconds: float, now: Callable[[], float]) -> None:
        self.instances: dict[str, InstanceHandle] = {}
        self.index = PrefixIndex()
        self.stored = PrefixIndex()
        self.breakers = CircuitBreakers()
        self._output_faults = OutputFaults()
        self._judges: dict[Any, InstanceHandle] = {}  # see `InstanceHandle.update_heartbeat`
        self.listener: FleetListener | None = None
        self.is_closing = False
        self.on_joined: Callable[[InstanceHandle], None] = lambda instance: None
        self.on_heard: Callable[[], None] | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.cache_epoch = 0
        self.on_reset: Callable[[], None] = lambda: None
        self.num_lost = 0
        self.num_invalid_frames = 0
        self.router_id = router_id
        self.now = now
        self.lease_check_interval_s = lease_seconds / TICKS_PER_LEASE
        self._model = model
        self._lease_seconds = lease_seconds
        self._clock = AwakeClock(self.lease_check_interval_s, now)
        self.awake_now = self._clock.read
        self.serving: dict[str, list[InstanceHandle]] = {"prefill": [], "decode": []}

    def begin_drain(self, instance: InstanceHandle) -> None:
        """Give an instance no new requests."""
        instance.is_draining = True
        self._update()

    def _update(self) -> None:
        open_ones = [one for one in self.instances.values() if not one.is_draining]
        self.serving = {role: [one for one in open_ones if one.role in (role, "both")] for role in self.serving}
        self._judges.clear()  # some may have gone, or have another role; heartbeats find new ones
        self.on_change()

    def record_fault(self, instance: InstanceHandle, now: float) -> None:
        """Count a fault against the instance's circuit breaker."""
        if self.breakers.record_fault(instance.id, now):
            log.warning(
                "circuit breaker of %s opened after repeated faults: no requests for a while, then one as a probe",
                instance.id,
                extra={"event": "breaker", "instance": instance.id},
            )

    def record_success(self, instance: InstanceHandle) -> None:
        """Record that an instance has just produced a token, which closes its circuit breaker."""
        if not self._output_faults.is_suspect(instance.id, self.now()):
            self.breakers.record_success(instance.id)

    def record_invalid_output(self, instance: InstanceHandle, request_id: str, client: str) -> None:
        """Count an output with invalid content, which is a fault of the instance if several clients get such."""
        log.warning("%s sent an invalid output for %s", instance.id, request_id, extra={"request_id": request_id})
        if self._output_faults.record(instance.id, request_id, client, self.now()):
            self.record_fault(instance, self.now())

    def welcome(self) -> pb.Welcome:
        return pb.Welcome(router_id=self.router_id, lease_seconds=self._lease_seconds)

    def reset_cache(self, epoch: int) -> None:
        """Let all instances forget their cached blocks. Through them, the other routers learn of the epoch."""
        self.cache_epoch = epoch
        for instance in self.instances.values():
            self.tell_epoch(instance)
        self.on_reset()

    def tell_epoch(self, instance: InstanceHandle) -> None:
        """Tell an instance the epoch, in case it has missed a reset."""
        if self.cache_epoch:
            instance.connection.send(pb.RouterFrame(reset_cache=pb.ResetCache(epoch=self.cache_epoch)))

    def expire_leases(self) -> None:
        """Deregister instances that sent no frame within their lease (frozen, or cut off by the network).

        The time in which this router was stalled itself does not count.
        """
        self._clock.tick()
        now = self.awake_now()
        for instance in list(self.instances.values()):
            if now - instance.lease_renewed_at > self._lease_seconds:
                instance.connection.abort()  # a frozen instance must not read the unsent frames when it wakes up
                self.deregister(instance, f"no frame within its lease of {self._lease_seconds} s")

    def rejection_reason(self, frame: pb.InstanceFrame) -> str:
        """Return why an instance with this first frame cannot be registered; empty if it can."""
        hello = frame.hello
        if frame.WhichOneof("frame") != "hello" or not OLDEST_VERSION <= hello.protocol_version <= PROTOCOL_VERSION:
            advice = "; update routers before instances" if hello.protocol_version > PROTOCOL_VERSION else ""
            spoken = " and ".join(map(str, range(OLDEST_VERSION, PROTOCOL_VERSION + 1)))
            return f"this router speaks control protocol {spoken}, the instance {hello.protocol_version}{advice}"
        if reason := hello_fault(hello):
            return reason
        if hello.model != self._model:
            other_model = hello.model[:MAX_NAME_CHARS]
            return f"this router serves {self._model!r}, the instance {other_model!r}: set the same --served-model-name"
        namesake = self.instances.get(hello.instance_id)
        if namesake is not None and not _is_same_process(namesake.hello, hello):
            return f"another instance {hello.instance_id!r} is attached; choose another --instance-id, or stop that one"
        return self.conflict(hello)

    def conflict(self, hello: pb.Hello) -> str:
        """Return why an instance in this role cannot serve with the other attached ones; empty if it can."""
        if hello.role not in ROLES:
            return f"unknown role {hello.role[:MAX_NAME_CHARS]!r}; the roles are {', '.join(ROLES)}"
        kinds = {other.kind: other.hello for other in self.instances.values() if other.id != hello.instance_id}
        return next(filter(None, (conflict_between(hello, other) for other in kinds.values())), "")

    def register(self, hello: pb.Hello, connection: Connection) -> InstanceHandle:
        """Add an instance that passed `rejection_reason`. It replaces an earlier connection of the same instance."""
        if hello.instance_id in self.instances:
            self.deregister(self.instances[hello.instance_id], "it has reconnected")
        instance = InstanceHandle(hello, connection, self.now(), self._clock.time)
        self.instances[hello.instance_id] = instance
        self._update()
        extra = {"event": "joined", "instance": instance.id}
        log.info("%s joined as %s with %d blocks", instance.id, hello.role, hello.num_blocks, extra=extra)
        return instance

    def deregister(self, instance: InstanceHandle, reason: str) -> None:
        """Remove an instance and close its connection. Does nothing if it is no longer registered."""
        if self.instances.get(instance.id) is not instance:
            return
        del self.instances[instance.id]
        self._update()
        self.index.forget(instance.id)
        is_drained = instance.is_draining and not instance.requests  # else it has crashed, or cut them off
        is_planned = self.is_closing or is_drained
        self.num_lost += not is_planned
        extra = {"event": "drained" if is_drained else "left", "instance": instance.id}
        level = logging.INFO if is_planned else logging.WARNING
        log.log(level, "%s left: %s; it had %d requests", instance.id, reason, len(instance.requests), extra=extra)
        instance.connection.close()
        assert self.listener is not None
        self.listener.on_lost(instance)

    def handle_frame(self, instance: InstanceHandle, frame: pb.InstanceFrame) -> None:
        """Process a frame of a registered instance; frames of others are ignored. An invalid one deregisters the instance."""
        if self.instances.get(instance.id) is not instance:
            return
        kind = frame.WhichOneof("frame")
        try:
            if reason := frame_fault(frame, kind, instance.hello.num_blocks):
                raise InvalidFrame(reason)
            instance.last_frame_at, instance.lease_renewed_at = self.now(), self._clock.time
            assert self.listener is not None
            match kind:
                case "outputs":
                    try:
                        outputs = unpack(frame.outputs)
                    except ValueError as error:
                        instance.may_be_poisoned = True  # any of its requests may be the cause
                        raise InvalidFrame(f"outputs that cannot be read: {error}") from error
                    for output in outputs:
                        for stage in output.stamps:
                            output.stamps[stage] += frame.waited
                        self.listener.on_output(instance, output)
                case "draining":
                    extra = {"event": "draining", "instance": instance.id}
                    log.info("%s is draining; it has %d requests", instance.id, len(instance.requests), extra=extra)
                    self.begin_drain(instance)
                    self.listener.on_draining(instance)
                case "failed":
                    instance.may_be_poisoned = True
                    self.deregister(instance, "its engine has failed")
                case "hello":
                    self._handle_second_hello(instance, frame)
                case "adapter_changed":
                    self.listener.on_adapter_changed(instance, frame.adapter_changed)
                case "blocks":
                    blocks, room = frame.blocks, instance.max_keys
                    if self.index.update(instance.id, blocks.removed, blocks.added) > room:
                        raise InvalidFrame(f"KV events of more keys than its pool of {room} blocks can hold")
                    if blocks.untold and not instance.unpublished_blocks:
                        instance.unpublished_since = instance.last_frame_at
                    instance.unpublished_blocks = blocks.untold
                case "others":
                    instance.update_other_load(frame.others)
                    if self.on_heard is not None:
                        self.on_heard()
                case "heartbeat":
                    if frame.heartbeat.counters["engine_steps"] != instance.heartbeat.counters["engine_steps"]:
                        instance.last_step_at = self.awake_now()
                    instance.update_heartbeat(frame.heartbeat, self._judges)
                    if self.cache_epoch < frame.heartbeat.cache_epoch <= MAX_EPOCH:
                        self.reset_cache(frame.heartbeat.cache_epoch)
                    if instance.last_frame_at - instance.acknowledged_at >= ACK_INTERVAL_S:
                        instance.acknowledged_at = instance.last_frame_at
                        instance.connection.send(HEARTBEAT_ACK)
                    if self.on_heard is not None:
                        self.on_heard()
        except InvalidFrame as fault:
            reason = f"it sent an invalid frame: {fault}"
            self.num_invalid_frames += 1
            self.record_fault(instance, self.now())
            instance.connection.send(pb.RouterFrame(refused=pb.Refused(message=reason)))
            self.deregister(instance, reason)

    def _handle_second_hello(self, instance: InstanceHandle, frame: pb.InstanceFrame) -> None:
        expected = pb.Hello()
        expected.CopyFrom(frame.hello)
        expected.role = instance.hello.role
        del expected.adapters[:]
        expected.adapters.extend(instance.hello.adapters)
        if expected != instance.hello:
            raise InvalidFrame("a second Hello differs from the first in more than the role and the adapters")
        if reason := adapters_fault(frame.hello):
            raise InvalidFrame(reason)
        if frame.hello.role == instance.role and frame.hello.adapters != instance.hello.adapters:
            instance.hello, instance.adapters = frame.hello, _digests(frame.hello)
            self._update()
        elif reason := self.conflict(frame.hello):
            self.deregister(instance, reason)
        else:
            extra = {"event": "role", "instance": instance.id}
            log.info("%s now serves as %s", instance.id, frame.hello.role, extra=extra)
            instance.change_role(frame.hello)
            self._update()


def _digests(hello: pb.Hello) -> frozenset[bytes]:
    return frozenset(adapter.digest for adapter in hello.adapters)


def _is_same_process(attached: pb.Hello, joining: pb.Hello) -> bool:
    """Return whether both are from one process. The epoch is public, the nonce is not."""
    return attached.epoch == joining.epoch and hmac.compare_digest(attached.nonce, joining.nonce)

"""The instances that serve this router: they dial in, say Hello, and stay as long as they are heard.

What an instance says is handed to a `Listener`; what it is told goes through `InstanceHandle.send`.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.control.wire import PROTOCOL_VERSION
from pdserve.costs import Costs
from pdserve.keys import KEY_BYTES, Layout
from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.scheduling.breaker import Breakers
from pdserve.router.scheduling.policy import NOTHING, Candidate, Load
from pdserve.router.scheduling.prefix_index import PrefixIndex

log = logging.getLogger(__name__)

ROLES = ("prefill", "decode", "both")
MAX_NAME = 200  # characters of an instance's id
HEARD = pb.RouterFrame(heard=pb.Heard())


class Connection(Protocol):
    """The way to an instance: its `Wire`."""

    def put(self, frame: pb.RouterFrame) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


@dataclass(eq=False)
class InstanceHandle:
    """One attached instance.

    Attributes:
        beat: its last heartbeat.
        load: what policies see of it: this router's requests as they are now, and other routers' as last heard.
        heard: when its last frame came, on the router's monotonic clock.
        stepped: when its engine was last seen to have moved on.
        untold: how many blocks the prefix index has yet to be told of, and since when there are some.
        requests: ids of the router's requests that it works on → what is left to do of them.
    """

    hello: pb.Hello
    wire: Connection
    heard: float
    stepped: float = 0.0
    untold: int = 0
    untold_since: float = 0.0
    beat: pb.Heartbeat = field(default_factory=pb.Heartbeat)
    requests: dict[str, Load] = field(default_factory=dict)
    others: Load = NOTHING
    draining: bool = False  # takes nothing new
    id: str = field(init=False)
    role: str = field(init=False)

    def __post_init__(self) -> None:
        self.id, self.role = self.hello.instance_id, self.hello.role
        self.load = Candidate(
            self.id,
            both=self.role == "both",
            token_bytes=self.hello.block_bytes // max(1, self.hello.block_size),
            capacity_tokens=self.hello.num_blocks * self.hello.block_size,
        )

    def give(self, request_id: str, left: Load) -> None:
        """Notes what is left to do of a request, which may be a new one."""
        self.load.replace(self.requests.get(request_id, NOTHING), left)
        self.requests[request_id] = left

    def release(self, request_id: str) -> None:
        """Forgets a request, if it is known."""
        self.load.replace(self.requests.pop(request_id, NOTHING), NOTHING)

    def index_age(self, now: float) -> float:
        """Seconds since the prefix index knew all that there was to know of the instance's pool."""
        return now - (self.untold_since if self.untold else self.heard)

    def serves_as(self, hello: pb.Hello) -> None:
        """It has drained and has another role now."""
        self.hello, self.role, self.draining = hello, hello.role, False
        self.load.both = hello.role == "both"

    def update_heartbeat(self, beat: pb.Heartbeat) -> None:
        """Takes a heartbeat's news."""
        if beat.HasField("costs"):
            prefill, decode, transfer = (tuple(getattr(beat.costs, name)) for name in ("prefill", "decode", "transfer"))
            self.load.learn(Costs(prefill, decode, transfer))
        self.beat = beat

    def update_other_load(self, others: pb.Load) -> None:
        """Takes what other routers' requests come to."""
        before, self.others = self.others, Load(*(getattr(others, name) for name in Load._fields))
        self.load.replace(before, self.others)

    def as_dict(self, now: float) -> dict[str, object]:
        """What it said of itself, and what it has to do."""
        return {
            "instance_id": self.id,
            "epoch": self.hello.epoch,
            "role": self.role,
            "model": self.hello.model,
            "device": self.hello.device,
            "dtype": self.hello.dtype,
            "kernel": self.hello.kernel,
            "connector": self.hello.connector,
            "block_size": self.hello.block_size,
            "num_blocks": self.hello.num_blocks,
            "free_blocks": self.beat.free_blocks,
            "running": self.beat.running,
            "waiting": self.beat.waiting,
            "requests": len(self.requests),
            "prefill_tokens": self.load.prefill_tokens,
            "output_tokens": self.load.output_tokens,
            "costs": vars(self.load.costs),
            "draining": self.draining,
            "last_heard_seconds": round(now - self.heard, 3),
        }

    def send(self, frame: pb.RouterFrame) -> None:
        self.wire.put(frame)


class Listener(Protocol):
    def on_output(self, instance: InstanceHandle, output: pb.Output) -> None: ...

    def on_lost(self, instance: InstanceHandle) -> None: ...

    def on_draining(self, instance: InstanceHandle) -> None: ...


class Fleet:
    """Everything runs on one event loop."""

    def __init__(self, router_id: str, model: str, lease_seconds: float) -> None:
        self.instances: dict[str, InstanceHandle] = {}
        self.index = PrefixIndex()
        self.breakers = Breakers()
        self.listener: Listener | None = None
        self.num_lost = 0
        self.router_id = router_id
        self._model = model
        self._lease_seconds = lease_seconds

    def serving(self, *roles: str) -> list[InstanceHandle]:
        return [m for m in self.instances.values() if m.role in roles and not m.draining]

    def fault(self, instance: InstanceHandle, now: float) -> None:
        """It has failed a request."""
        if self.breakers.failed(instance.id, now):
            log.warning(
                "%s has failed again and again; it gets nothing for a while, then one request, to see",
                instance.id,
                extra={"event": "breaker", "instance": instance.id},
            )

    def welcome(self) -> pb.Welcome:
        return pb.Welcome(router_id=self.router_id, lease_seconds=self._lease_seconds)

    async def watch(self) -> None:
        """Drops instances whose lease has run out: frozen, or behind a network that swallows frames."""
        while True:
            await asyncio.sleep(self._lease_seconds / 6)
            now = time.monotonic()
            for instance in list(self.instances.values()):
                if now - instance.heard > self._lease_seconds:
                    instance.wire.abort()  # what it has not read, it is not to read later
                    self.deregister(instance, f"not heard for {self._lease_seconds} s")

    def refusal(self, frame: pb.InstanceFrame) -> str:
        """Why an instance may not serve here, or nothing."""
        hello = frame.hello
        if frame.WhichOneof("frame") != "hello" or hello.protocol_version != PROTOCOL_VERSION:
            return f"this router speaks control protocol {PROTOCOL_VERSION}, the instance {hello.protocol_version}"
        if not hello.instance_id.isprintable() or len(hello.instance_id) > MAX_NAME:
            return f"an instance's id has at most {MAX_NAME} characters, all of which can be printed"
        if hello.role not in ROLES:
            return f"role {hello.role!r} is unknown; there are {', '.join(ROLES)}"
        if hello.model != self._model:
            return f"this router serves {self._model!r}, the instance {hello.model!r}: set --served-model-name alike"
        namesake = self.instances.get(hello.instance_id)
        if namesake is not None and namesake.hello.epoch != hello.epoch:
            return (
                f"an instance {hello.instance_id!r} is attached already; give another --instance-id, or stop that one"
            )
        for other in self.instances.values():
            if other.id != hello.instance_id and other.hello.namespace != hello.namespace:
                refusal = _cannot_hand_over(hello, other.hello)
                if refusal:
                    return refusal
        return ""

    def register(self, hello: pb.Hello, wire: Connection) -> InstanceHandle:
        """Takes in an instance that nothing speaks against (`refusal`)."""
        if hello.instance_id in self.instances:
            self.deregister(self.instances[hello.instance_id], "it has dialled again")
        instance = self.instances[hello.instance_id] = InstanceHandle(hello, wire, heard=time.monotonic())
        extra = {"event": "joined", "instance": instance.id}
        log.info("%s joined as %s with %d blocks", instance.id, hello.role, hello.num_blocks, extra=extra)
        return instance

    def deregister(self, instance: InstanceHandle, reason: str) -> None:
        """It serves here no more, if it did."""
        if self.instances.get(instance.id) is not instance:
            return
        del self.instances[instance.id]
        self.index.forget(instance.id)
        self.num_lost += 1
        extra = {"event": "drained" if instance.draining else "left", "instance": instance.id}
        log.warning("%s left: %s; %d requests were with it", instance.id, reason, len(instance.requests), extra=extra)
        instance.wire.close()
        assert self.listener is not None
        self.listener.on_lost(instance)

    def handle_frame(self, instance: InstanceHandle, frame: pb.InstanceFrame) -> None:
        """Something that the instance says."""
        if self.instances.get(instance.id) is not instance:
            return
        instance.heard = time.monotonic()
        assert self.listener is not None
        match frame.WhichOneof("frame"):
            case "draining":
                extra = {"event": "draining", "instance": instance.id}
                log.info("%s is draining; %d requests are with it", instance.id, len(instance.requests), extra=extra)
                instance.draining = True
                self.listener.on_draining(instance)
            case "hello":
                self._handle_role(instance, frame)
            case "blocks":
                self._handle_blocks(instance, frame.blocks)
            case "others":
                instance.update_other_load(frame.others)
            case "heartbeat":
                if frame.heartbeat.counters["engine_steps"] != instance.beat.counters["engine_steps"]:
                    instance.stepped = instance.heard
                instance.update_heartbeat(frame.heartbeat)
                instance.send(HEARD)
            case "step":
                for output in frame.step.outputs:
                    self.listener.on_output(instance, output)

    def _handle_role(self, instance: InstanceHandle, frame: pb.InstanceFrame) -> None:
        if refusal := self.refusal(frame):
            self.deregister(instance, refusal)
        else:
            log.info(
                "%s serves as %s now", instance.id, frame.hello.role, extra={"event": "role", "instance": instance.id}
            )
            instance.serves_as(frame.hello)

    def _handle_blocks(self, instance: InstanceHandle, blocks: pb.Blocks) -> None:
        self.index.remove(instance.id, _keys(blocks.removed))
        self.index.add(instance.id, _keys(blocks.added))
        assert self.index.blocks(instance.id) <= instance.hello.num_blocks, "it has more keys than blocks"
        if blocks.untold and not instance.untold:
            instance.untold_since = instance.heard
        instance.untold = blocks.untold


def _keys(joined: bytes) -> list[bytes]:
    return [joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES)]


def _cannot_hand_over(one: pb.Hello, other: pb.Hello) -> str:
    """Why two instances of different layouts may not serve together, or nothing. Any prefill may be paired with any decode,
    so each of the two has to be able to decode what the other has prefilled, as far as their roles ask for it."""
    if not Layout.like(one.layout).converts_to(Layout.like(other.layout)):
        return f"its weights or its KV layout differ from those of {other.instance_id}"
    for prefill, decode in ((one, other), (other, one)):
        if prefill.role != "decode" and decode.role != "prefill" and not decode.convert_kv:
            return (
                f"{prefill.instance_id} has KV blocks of {prefill.layout.block_size} tokens in {prefill.layout.dtype}, "
                f"{decode.instance_id} of {decode.layout.block_size} in {decode.layout.dtype}; make them the same, or start "
                f"{decode.instance_id} with --convert-kv"
            )
    return ""

"""The instances that serve this router: they dial in, say Hello, and stay as long as they are heard.

What an instance says is handed to a `Listener`; what it is told goes through `Member.send`.
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


class Outgoing(Protocol):
    """The way to an instance: its `Wire`."""

    def put(self, frame: pb.RouterFrame) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


@dataclass(eq=False)
class Member:
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
    wire: Outgoing
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

    def heard_of(self, beat: pb.Heartbeat) -> None:
        """Takes a heartbeat's news."""
        if beat.HasField("costs"):
            prefill, decode, transfer = (tuple(getattr(beat.costs, name)) for name in ("prefill", "decode", "transfer"))
            self.load.learn(Costs(prefill, decode, transfer))
        self.beat = beat

    def heard_of_others(self, others: pb.Load) -> None:
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
    def on_output(self, member: Member, output: pb.Output) -> None: ...

    def on_lost(self, member: Member) -> None: ...

    def on_draining(self, member: Member) -> None: ...


class Fleet:
    """Everything runs on one event loop."""

    def __init__(self, router_id: str, model: str, lease_seconds: float) -> None:
        self.members: dict[str, Member] = {}
        self.index = PrefixIndex()
        self.breakers = Breakers()
        self.listener: Listener | None = None
        self.num_lost = 0
        self.router_id = router_id
        self._model = model
        self._lease_seconds = lease_seconds

    def serving(self, *roles: str) -> list[Member]:
        return [m for m in self.members.values() if m.role in roles and not m.draining]

    def fault(self, member: Member, now: float) -> None:
        """It has failed a request."""
        if self.breakers.failed(member.id, now):
            log.warning(
                "%s has failed again and again; it gets nothing for a while, then one request, to see",
                member.id,
                extra={"event": "breaker", "instance": member.id},
            )

    def welcome(self) -> pb.Welcome:
        return pb.Welcome(router_id=self.router_id, lease_seconds=self._lease_seconds)

    async def watch(self) -> None:
        """Drops instances whose lease has run out: frozen, or behind a network that swallows frames."""
        while True:
            await asyncio.sleep(self._lease_seconds / 6)
            now = time.monotonic()
            for member in list(self.members.values()):
                if now - member.heard > self._lease_seconds:
                    member.wire.abort()  # what it has not read, it is not to read later
                    self.leave(member, f"not heard for {self._lease_seconds} s")

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
        namesake = self.members.get(hello.instance_id)
        if namesake is not None and namesake.hello.epoch != hello.epoch:
            return (
                f"an instance {hello.instance_id!r} is attached already; give another --instance-id, or stop that one"
            )
        for other in self.members.values():
            if other.id != hello.instance_id and other.hello.namespace != hello.namespace:
                refusal = _cannot_hand_over(hello, other.hello)
                if refusal:
                    return refusal
        return ""

    def join(self, hello: pb.Hello, wire: Outgoing) -> Member:
        """Takes in an instance that nothing speaks against (`refusal`)."""
        if hello.instance_id in self.members:
            self.leave(self.members[hello.instance_id], "it has dialled again")
        member = self.members[hello.instance_id] = Member(hello, wire, heard=time.monotonic())
        extra = {"event": "joined", "instance": member.id}
        log.info("%s joined as %s with %d blocks", member.id, hello.role, hello.num_blocks, extra=extra)
        return member

    def leave(self, member: Member, reason: str) -> None:
        """It serves here no more, if it did."""
        if self.members.get(member.id) is not member:
            return
        del self.members[member.id]
        self.index.forget(member.id)
        self.num_lost += 1
        extra = {"event": "drained" if member.draining else "left", "instance": member.id}
        log.warning("%s left: %s; %d requests were with it", member.id, reason, len(member.requests), extra=extra)
        member.wire.close()
        assert self.listener is not None
        self.listener.on_lost(member)

    def take(self, member: Member, frame: pb.InstanceFrame) -> None:
        """Something that the instance says."""
        if self.members.get(member.id) is not member:
            return
        member.heard = time.monotonic()
        assert self.listener is not None
        match frame.WhichOneof("frame"):
            case "draining":
                extra = {"event": "draining", "instance": member.id}
                log.info("%s is draining; %d requests are with it", member.id, len(member.requests), extra=extra)
                member.draining = True
                self.listener.on_draining(member)
            case "hello":
                self._take_role(member, frame)
            case "blocks":
                self._take_news(member, frame.blocks)
            case "others":
                member.heard_of_others(frame.others)
            case "heartbeat":
                if frame.heartbeat.counters["engine_steps"] != member.beat.counters["engine_steps"]:
                    member.stepped = member.heard
                member.heard_of(frame.heartbeat)
                member.send(HEARD)
            case "step":
                for output in frame.step.outputs:
                    self.listener.on_output(member, output)

    def _take_role(self, member: Member, frame: pb.InstanceFrame) -> None:
        if refusal := self.refusal(frame):
            self.leave(member, refusal)
        else:
            log.info("%s serves as %s now", member.id, frame.hello.role, extra={"event": "role", "instance": member.id})
            member.serves_as(frame.hello)

    def _take_news(self, member: Member, blocks: pb.Blocks) -> None:
        self.index.remove(member.id, _keys(blocks.removed))
        self.index.add(member.id, _keys(blocks.added))
        assert self.index.blocks(member.id) <= member.hello.num_blocks, "it has more keys than blocks"
        if blocks.untold and not member.untold:
            member.untold_since = member.heard
        member.untold = blocks.untold


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

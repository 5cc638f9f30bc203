"""From a request to its stream of tokens: picks P and D, runs the hand-over machine, keeps the timeline."""

import asyncio
import logging
import math
import secrets
import time
from dataclasses import replace

from pdserve.config import RouterConfig
from pdserve.errors import BadRequest, Conflict, NotFound, Overloaded, RequestError, Unavailable
from pdserve.handover import Action, Event, HandOver, State
from pdserve.keys import Layout
from pdserve.lifetime import Stage
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request
from pdserve.router.admission import admit
from pdserve.router.breaker import BreakerState
from pdserve.router.fleet import Fleet, Member
from pdserve.router.flight import Flight
from pdserve.router.metrics import Metrics
from pdserve.router.pairs import IN_VAIN, Pairs
from pdserve.router.placement import Placement, place
from pdserve.router.policy import Ask, Decision, Load, decide
from pdserve.router.retry_budget import RetryBudget
from pdserve.router.stream import ModelInfo
from pdserve.router.timeline import Move, Moved, Timeline, TimelineLog
from pdserve.slo import Slo

log = logging.getLogger(__name__)


class Dispatcher:
    """Implements `stream.Backend` over a fleet. One event loop, no locks."""

    def __init__(self, config: RouterConfig, fleet: Fleet, metrics: Metrics) -> None:
        self.config = config
        self.fleet = fleet
        self.flights: dict[str, Flight] = {}
        self.timelines = TimelineLog(config.timelines)
        self._open: set[str] = set()  # request ids; a flight that moves changes its own id
        self.watchers = [metrics.finished]  # of requests that have ended
        self._metrics = metrics
        self._pairs = Pairs()
        self._budget = RetryBudget()
        metrics.retry_budget.set_function(lambda: self._budget.left)
        self._policies = {
            "prefill": config.prefill_policy or config.policy,
            "decode": config.decode_policy or config.policy,
        }
        self._slo = Slo.parse(config.slo)
        self._turn = secrets.randbits(32)  # routers that start together do not go round together
        fleet.listener = self

    # ---- for the HTTP side (stream.Backend) -------------------------------------------------------------------

    def model(self) -> ModelInfo | None:
        hellos = [member.hello for member in self.fleet.members.values()]
        if not hellos:
            return None
        return ModelInfo(
            name=self.config.name,
            max_model_len=min(hello.max_model_len for hello in hellos),
            vocab_size=hellos[0].vocab_size,
            eos_token_ids=frozenset(hellos[0].eos_token_ids),
            weights=Layout.like(hellos[0].layout).weights,
            block_sizes=frozenset(hello.block_size for hello in hellos),
            grammars=all(hello.grammars for hello in hellos),
            by_priority=all(hello.scheduling_policy == "priority" for hello in hellos),
        )

    def ready(self) -> tuple[bool, str]:
        missing = self._missing()
        return not missing, f"{missing} is registered" if missing else "ready"

    def open(self, request: Request) -> Flight:
        now = time.monotonic()
        if request.request_id in self._open:
            raise BadRequest(f"request id {request.request_id!r} is in use", kind="duplicate_request_id")
        machine = HandOver(now, self.config.handover_timeout_seconds)
        flight = Flight(request, machine, on_cancel=lambda flight: self.handle(flight, Event.CANCELLED))
        flight.timeline.stamp(Stage.RECEIVED, request.received or now)
        ask = self._route(flight)
        self._refuse(
            admit(self._slo, flight.prefill.load, flight.last_member.load, ask, now - (request.received or now))
        )
        flight.timeline.stamp(Stage.ADMITTED, time.monotonic())
        self._start(flight)
        self._open.add(request.request_id)
        self._budget.earn()
        flight.timeline.stamp(Stage.ROUTED, time.monotonic())
        self.timelines.add(flight.timeline)
        return flight

    def instances(self) -> list[dict[str, object]]:
        now = time.monotonic()
        return [
            {
                "instance_id": member.id,
                "epoch": member.hello.epoch,
                "role": member.hello.role,
                "model": member.hello.model,
                "device": member.hello.device,
                "dtype": member.hello.dtype,
                "kernel": member.hello.kernel,
                "connector": member.hello.connector,
                "block_size": member.hello.block_size,
                "num_blocks": member.hello.num_blocks,
                "free_blocks": member.beat.free_blocks,
                "running": member.beat.running,
                "waiting": member.beat.waiting,
                "requests": len(member.requests),
                "prefill_tokens": member.load.prefill_tokens,
                "output_tokens": member.load.output_tokens,
                "cached_blocks": self.fleet.index.blocks(member.id),
                "costs": vars(member.load.costs),
                "draining": member.draining,
                "breaker": self.fleet.breakers.state(member.id, now),
                "last_heard_seconds": round(now - member.heard, 3),
            }
            for member in sorted(self.fleet.members.values(), key=lambda m: m.id)
        ]

    def timeline(self, request_id: str) -> Timeline | None:
        return self.timelines.get(request_id)

    def drain(self, instance_id: str, role: str = "") -> None:
        member = self.fleet.members.get(instance_id)
        if member is None:
            raise NotFound(f"no instance {instance_id!r} is attached to this router", kind="instance_not_found")
        if member.draining:
            raise Conflict(f"{instance_id} is draining already", kind="draining")
        if role == member.hello.role:
            return
        if missing := self._missing(avoid=member):
            message = f"while {instance_id} drains, {missing} would be there, so requests would fail"
            raise Conflict(message, kind="last_instance")
        hello = pb.Hello()
        hello.CopyFrom(member.hello)
        hello.role = role or hello.role
        if refusal := self.fleet.refusal(pb.InstanceFrame(hello=hello)):
            raise Conflict(f"{instance_id} cannot serve as {role}: {refusal}", kind="role_refused")
        member.draining = True  # from here on; it will tell everybody
        member.send(pb.RouterFrame(drain=pb.Drain(role=role)))

    # ---- for the fleet (fleet.Listener) -----------------------------------------------------------------------

    def on_output(self, member: Member, output: pb.Output) -> None:
        flight = self.flights.get(output.request_id)
        if flight is None or flight.id not in member.requests:
            return  # it is over, or this instance has been given up
        if member is flight.hedge:
            self._on_hedge(flight, member, output)
            return
        flight.note(member, output, time.monotonic())
        if member is flight.decode and any(stamp.stage == Stage.KV_READY for stamp in output.stamps):
            self._note_pair(flight, flight.prefill.hello, member.hello)
        if output.token_ids:
            self.fleet.breakers.succeeded(member.id)
        if output.HasField("error"):
            kind = BadRequest if output.error.kind == "invalid_grammar" else RequestError
            self.handle(flight, Event.UNPLACED, kind(output.error.message, kind=output.error.kind))
        elif member is flight.decode or flight.decode is None:
            self._on_decode(flight, member, output)
        else:
            self._on_prefill(flight, member, output)

    def on_lost(self, member: Member) -> None:
        self._pairs.forget(member.id)
        if member.requests and not member.draining:
            self._fault(member, time.monotonic())
        for request_id in list(member.requests):
            flight = self.flights.get(request_id)
            if flight is not None:
                error = Unavailable(f"instance {member.id} was lost while it served the request", kind="instance_lost")
                self._member_failed(flight, member, error)

    def on_draining(self, member: Member) -> None:
        """Moves the streams that it decodes to others, if there are any; else they end where they are."""
        for request_id in list(member.requests):
            flight = self.flights.get(request_id)
            if flight is not None and member is flight.last_member and not self._missing(avoid=member):
                self._let_go(flight, member)
                reason = Unavailable(f"instance {member.id} was drained", kind="drained")
                self.handle(flight, Event.DRAINED, reason)

    async def watch(self) -> None:
        """Ends requests that make no progress."""
        while True:
            hedge_after = self.config.hedge_prefill_after
            await asyncio.sleep(min(1.0, self.config.handover_timeout_seconds / 4, (hedge_after or math.inf) / 4))
            now = time.monotonic()
            for flight in list(self.flights.values()):
                if hedge_after is not None and now - flight.started > hedge_after:
                    self._hedge(flight)
                flight.machine.progressed(flight.owner.stepped)
                if flight.machine.late(now):
                    self._fault(flight.owner, now)
                    state = flight.machine.state
                    message = f"no progress for {self.config.handover_timeout_seconds} s while {state}"
                    self.handle(flight, Event.LATE, Unavailable(message, kind="timeout"))

    def _fault(self, member: Member, now: float) -> None:
        if self.fleet.breakers.failed(member.id, now):
            log.warning(
                "%s has failed again and again; it gets nothing for a while, then one request, to see",
                member.id,
                extra={"event": "breaker", "instance": member.id},
            )

    # ---- the hand-over ----------------------------------------------------------------------------------------

    def handle(self, flight: Flight, event: Event, error: RequestError | None = None) -> None:
        """Runs one event through the flight's machine and carries out what it says."""
        for action in flight.machine.handle(event, time.monotonic()):
            match action:
                case Action.RESUME:
                    assert error is not None
                    self._resume(flight, error)
                case Action.FINALIZE:
                    assert flight.decode is not None
                    self._hand_over(flight, pb.HandOver(final=True))
                    kind = error.kind if error else event.value
                    self._metrics.fallbacks.labels(kind=kind).inc()
                    extra = {
                        "event": "fallback",
                        "instance": flight.prefill.id,
                        "request_id": flight.request.request_id,
                    }
                    log.warning(
                        "%s: decode computes what %s did not hand over (%s)",
                        flight.id,
                        flight.prefill.id,
                        kind,
                        extra=extra,
                    )
                case Action.CANCEL_PREFILL:
                    self._let_go(flight, flight.prefill)
                    self._drop_hedge(flight)
                case Action.CANCEL_DECODE if flight.decode is not None:
                    self._let_go(flight, flight.decode)
                case Action.FAIL:
                    assert error is not None
                    flight.timeline.error = str(error)
                    flight.put(error)
                    if error.status >= 500:
                        extra = {"event": "failed", "request_id": flight.request.request_id}
                        log.warning("%s failed: %s", flight.id, error, extra=extra)
        if flight.machine.ended:
            self._end(flight)

    def _on_prefill(self, flight: Flight, member: Member, output: pb.Output) -> None:
        message = pb.HandOver(
            num_blocks=output.stored.num_blocks, final=output.stored.final, tickets=output.stored.tickets
        )
        if output.token_ids:
            message.first_token = output.token_ids[0]
            member.give(flight.id, Load())
        elif output.stored.num_blocks and member.requests[flight.id].prefills:
            done = max(flight.cached.get(member.id, 0), output.stored.num_blocks * member.hello.block_size)
            member.give(flight.id, flight.left(pb.PREFILL, done))
        if not output.finish_reason and (output.token_ids or output.HasField("stored")):
            self._hand_over(flight, message)
        if output.token_ids:
            self._drop_hedge(flight)
            self.handle(flight, Event.FIRST_TOKEN)
            self._emit(flight, output)
        if output.finish_reason:
            member.release(flight.id)
            self.handle(flight, Event.FINISHED)
        elif output.stored.final:
            member.release(flight.id)
            self.handle(flight, Event.STORED)

    def _on_decode(self, flight: Flight, member: Member, output: pb.Output) -> None:
        if output.token_ids:
            self.handle(flight, Event.DECODED)
            self._emit(flight, output)
            member.give(flight.id, flight.left(pb.DECODE))
        if output.finish_reason:
            member.release(flight.id)
            self.handle(flight, Event.FINISHED)

    def _member_failed(self, flight: Flight, member: Member, error: RequestError) -> None:
        split_prefill = flight.decode is not None and member is flight.prefill
        member.release(flight.id)
        if member is flight.hedge:
            flight.hedge = None
        elif split_prefill and flight.hedge is not None:
            self._prefer_hedge(flight)
        else:
            self.handle(flight, Event.PREFILL_FAILED if split_prefill else Event.DECODE_FAILED, error)

    # A prefill that is late is asked of another instance too. Who has the first token first goes on; both compute, and store
    # under the same keys, the same KV.

    def _hedge(self, flight: Flight) -> None:
        if flight.machine.state is not State.PREFILLING or flight.hedge is not None:
            return
        first, decode = flight.prefill, flight.decode
        assert decode is not None
        flight.started = math.inf  # once is enough
        able = [member for member in self._partners(decode, self._able("prefill", avoid=first)) if member is not decode]
        able = [member for member in able if member.hello.namespace == first.hello.namespace]
        if able:
            ask = Ask(flight.tokens, self._turn, flight.request.session, flight.cached, flight.tokens_left)
            flight.hedge, flight.held = self._take(flight, "prefill", self._decide("prefill", ask, able)), []
            self._submit(flight, flight.hedge, pb.PREFILL, flight.submission())
            self._metrics.hedges.labels(outcome="asked").inc()

    def _on_hedge(self, flight: Flight, member: Member, output: pb.Output) -> None:
        flight.held.append(output)
        if output.HasField("error"):
            member.release(flight.id)
            flight.hedge = None
        elif output.token_ids:
            self._let_go(flight, flight.prefill)
            self._prefer_hedge(flight)

    def _prefer_hedge(self, flight: Flight) -> None:
        """It takes the first one's place, and has said what it has said."""
        assert flight.hedge is not None
        flight.prefill, flight.hedge = flight.hedge, None
        flight.timeline.prefill_instance = flight.prefill.id
        self._metrics.hedges.labels(outcome="preferred").inc()
        for output in flight.held:
            self.on_output(flight.prefill, output)

    def _drop_hedge(self, flight: Flight) -> None:
        if flight.hedge is not None:
            self._let_go(flight, flight.hedge)
            flight.hedge = None

    def _emit(self, flight: Flight, output: pb.Output) -> None:
        now = time.monotonic()
        if flight.last_token_at is not None:
            self._metrics.inter_token.observe((now - flight.last_token_at) / max(1, len(output.token_ids)))
        flight.emit(output, now)

    def _note_pair(self, flight: Flight, prefill: pb.Hello, decode: pb.Hello) -> None:
        """Whether the two reach the same store is known once decode has tried to load what prefill stored."""
        loaded = flight.timeline.loaded
        if not loaded.seconds:
            return  # decode had it all, or nothing was stored
        if not loaded.blocks:
            self._metrics.in_vain.labels(prefill=prefill.instance_id, decode=decode.instance_id).inc()
        pair = prefill.instance_id, decode.instance_id
        if self._pairs.handed_over(pair, loaded.blocks, time.monotonic()):
            log.warning(
                "%s (%s://) found nothing of what %s (%s://) had stored, %d times in a row: their --connector seems to lead "
                "to different stores, or to one that is far too small. Prompts are computed twice; the two are kept apart "
                "for a while if there are others.",
                decode.instance_id,
                decode.connector,
                prefill.instance_id,
                prefill.connector,
                IN_VAIN,
                extra={"event": "in_vain", "instance": decode.instance_id},
            )

    def _end(self, flight: Flight) -> None:
        """Forgets the flight. Every way out of a request comes through here, once."""
        timeline = flight.timeline
        if self.flights.pop(flight.id, None) is None:
            return
        for member in (flight.prefill, flight.decode):
            if member is not None:
                member.release(flight.id)
        self._open.discard(flight.request.request_id)
        timeline.stamp(Stage.FINISHED, time.monotonic())
        if flight.machine.state is State.FAILED:
            timeline.finish_reason = "error"
        for finished in self.watchers:
            finished(timeline)

    # ---- to the instances -------------------------------------------------------------------------------------

    def _refuse(self, error: Overloaded | None) -> None:
        """Raises it, if there is one."""
        if error is not None:
            self._metrics.refusals.labels(reason=error.kind).inc()
            raise error

    def _start(self, flight: Flight) -> None:
        """Submits to the instances that were picked what the request is by now."""
        prefill, decode, placement = flight.prefill, flight.decode, flight.timeline.placement
        assert placement is not None
        self._metrics.placements.labels(way=placement.way, reason=placement.reason).inc()
        flight.timeline.prefill_instance = prefill.id
        flight.timeline.decode_instance = (decode or prefill).id
        flight.timeline.stored, flight.timeline.loaded = Moved(), Moved()
        flight.machine.resumed(split=decode is not None)
        flight.started = time.monotonic()
        self.flights[flight.id] = flight
        frame = flight.submission()
        if decode is not None:
            copy = pb.RouterFrame()
            copy.CopyFrom(frame)
            self._submit(flight, decode, pb.DECODE, copy)
        alone = decode is None and prefill.role != "prefill"
        self._submit(flight, prefill, pb.BOTH if alone else pb.PREFILL, frame)

    def _resume(self, flight: Flight, error: RequestError) -> None:
        """Moves the request to other instances; its stream goes on after the tokens that are out."""
        del self.flights[flight.id]
        failed, moves = flight.last_member, flight.timeline.migrations
        flight.timeline.moves.append(Move(time.monotonic(), failed.id, str(error)))
        self.flights[flight.id] = flight
        try:
            self._route(flight, avoid=failed)
            if error.kind != "drained" and not self._budget.spend(moves):
                raise Unavailable("too many requests had to move again lately", kind="no_instance")
        except Unavailable as nobody:
            reason = Unavailable(f"{error}, and {nobody}", kind=error.kind, retry_after_s=1)
            self.handle(flight, Event.UNPLACED, reason)
            return
        self._start(flight)
        self._metrics.migrations.labels(kind=error.kind).inc()
        extra = {"event": "moved", "instance": failed.id, "request_id": flight.request.request_id}
        log.warning("%s goes on with %s: %s", flight.id, flight.timeline.decode_instance, error, extra=extra)

    def _route(self, flight: Flight, avoid: Member | None = None) -> Ask:
        """Picks the prefill and the decode instance; None for decode when the first does it all.

        Raises:
            Unavailable: there is none of a kind.
        """
        able = {role: self._able(role, avoid) for role in ("prefill", "decode")}
        if not all(able.values()):
            raise Unavailable(f"{self._missing(avoid)} is there to take it", kind="no_instance", retry_after_s=1)
        self._turn += 1
        flight.cached = self._cached(flight)
        alone = all(member.role == "both" for member in able["prefill"])
        session, left = flight.request.session, flight.tokens_left
        ask = Ask(flight.tokens, self._turn, session, flight.cached, left, alone=alone)
        flight.prefill, flight.decode, flight.timeline.placement = self._place(ask, flight, able)
        return ask

    def _place(
        self, ask: Ask, flight: Flight, able: dict[str, list[Member]]
    ) -> tuple[Member, Member | None, Placement]:
        if flight.tokens_left == 1:  # the first token is all there is to do
            one = self._take(flight, "prefill", self._decide("prefill", ask, able["prefill"]))
            return one, None, Placement("prefill", "one_token")
        decode = self._take(flight, "decode", self._decide("decode", ask, able["decode"]))
        partners, both = self._partners(decode, able["prefill"]), decode.role == "both"
        if partners == [decode]:
            return decode, None, Placement("both", "no_prefill_instance")
        decision = self._decide("prefill", ask, partners)
        prefill = self.fleet.members[decision.chosen]
        if both:
            placement = Placement("both" if prefill is decode else "split", "policy")
        else:
            placement = place(prefill.load, decode.load, ask, self.config.local_prefill_tokens)
        if placement.way == "decode":
            return decode, None, placement
        self._take(flight, "prefill", decision)
        return prefill, None if prefill is decode else decode, placement

    def _cached(self, flight: Flight) -> dict[str, int]:
        """Leading tokens of the prompt that each instance need not compute, by the index. The last token always is."""
        cached: dict[str, int] = {}
        for block_size, keys in sorted(flight.request.keys.items(), reverse=True):  # an instance's own tells the most
            most = (flight.tokens - 1) // block_size
            for name, blocks in self.fleet.index.match(keys).items():
                cached[name] = (blocks if blocks < most else most) * block_size
        return cached

    def _able(self, role: str, avoid: Member | None = None) -> list[Member]:
        able = [member for member in self.fleet.serving(role, "both") if member is not avoid]
        breakers, now = self.fleet.breakers, time.monotonic()
        if not breakers.any_failed:
            return able
        return [member for member in able if breakers.allows(member.id, len(member.requests), now)]

    def _partners(self, decode: Member, able: list[Member]) -> list[Member]:
        """Who may prefill for it: those that reach its store, if any do. A `both` asks no other `both`, but itself."""
        now = time.monotonic()
        if decode.role == "both":
            able = [member for member in able if member is decode or member.role == "prefill"]
        if not self._pairs.any_apart:
            return able
        return [member for member in able if not self._pairs.apart((member.id, decode.id), now)] or able

    def _missing(self, avoid: Member | None = None) -> str:
        """What keeps a request from being served, such as `no decode instance`, or nothing."""
        roles = [role for role in ("prefill", "decode") if not self._able(role, avoid)]
        if not roles:
            return ""
        now = time.monotonic()
        out = [name for name in self.fleet.members if self.fleet.breakers.state(name, now) is not BreakerState.CLOSED]
        but = f" but {', '.join(out)}, out after repeated faults," if out else ""
        return f"no {' and no '.join(roles)} instance{but}"

    def _decide(self, role: str, ask: Ask, able: list[Member]) -> Decision:
        """What the role's policy says."""
        ask = replace(ask, decode=role == "decode")
        return decide(self._policies[role], [member.load for member in able], ask)

    def _take(self, flight: Flight, role: str, decision: Decision) -> Member:
        """Notes a decision that is carried out in the request's timeline."""
        flight.timeline.decisions.append((role, decision))
        self._metrics.decisions.labels(role=role, policy=decision.policy).inc()
        return self.fleet.members[decision.chosen]

    def _submit(self, flight: Flight, member: Member, phase: "pb.Phase", frame: pb.RouterFrame) -> None:
        member.give(flight.id, flight.left(phase, flight.cached.get(member.id, 0)))
        frame.submit.phase = phase
        if phase == pb.DECODE and flight.prefill.hello.namespace != member.hello.namespace:
            frame.submit.writer.CopyFrom(flight.prefill.hello.layout)
        member.send(frame)

    def _hand_over(self, flight: Flight, message: pb.HandOver) -> None:
        if flight.decode is not None:
            message.request_id = flight.id
            flight.decode.send(pb.RouterFrame(hand_over=message))

    def _let_go(self, flight: Flight, member: Member) -> None:
        """Tells an instance that nobody wants more of this request, unless it has said itself that it is done."""
        if flight.id in member.requests:
            member.send(pb.RouterFrame(cancel=pb.Cancel(request_id=flight.id)))
            member.release(flight.id)

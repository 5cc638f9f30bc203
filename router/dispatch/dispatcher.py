"""From a request to its stream of tokens: asks P and D, runs the hand-over machine, keeps the timeline."""

import asyncio
import logging
import time

from pdserve.config import RouterConfig
from pdserve.errors import BadRequest, Conflict, NotFound, Overloaded, RequestError, Unavailable
from pdserve.keys import Layout
from pdserve.lifetime import RELEASED, Stage
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request
from pdserve.router.backend import ModelInfo
from pdserve.router.dispatch.handover import MAX_RESUMPTIONS, Action, Event, HandOver, State
from pdserve.router.dispatch.hedge import Hedges
from pdserve.router.dispatch.request_state import Flight
from pdserve.router.dispatch.selector import Chooser
from pdserve.router.instances.fleet import Fleet, Member
from pdserve.router.scheduling.policy import Ask, Load
from pdserve.router.scheduling.retry_budget import RetryBudget
from pdserve.router.scheduling.slo_admission import admit
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.telemetry.timeline import Move, Moved, Timeline, TimelineLog
from pdserve.slo import Slo

log = logging.getLogger(__name__)


class Dispatcher:
    """Implements `stream.Backend` over a fleet. One event loop, no locks."""

    def __init__(self, config: RouterConfig, fleet: Fleet, metrics: Metrics) -> None:
        self.config = config
        self.fleet = fleet
        self.flights: dict[str, Flight] = {}
        self.timelines = TimelineLog(config.timelines)
        self._hellos: list[pb.Hello] = []  # of those who are attached, as of the last `model`
        self._model: ModelInfo | None = None
        self._open: set[str] = set()  # request ids; a flight that moves changes its own id
        self.watchers = [metrics.finished]  # of requests that have ended
        self._metrics = metrics
        self._chooser = Chooser(config, fleet, metrics)
        self._hedges = Hedges(config.hedge_prefill_after, self._chooser, metrics, self.on_output)
        self._budget = RetryBudget()
        metrics.retry_budget.set_function(lambda: self._budget.left)
        self.slo = Slo.parse(config.slo)
        fleet.listener = self

    # ---- for the HTTP side (stream.Backend) -------------------------------------------------------------------

    def model(self) -> ModelInfo | None:
        hellos = [member.hello for member in self.fleet.members.values()]
        if hellos != self._hellos:
            self._hellos, self._model = hellos, _agreed(self.config.name, hellos) if hellos else None
        return self._model

    def ready(self) -> tuple[bool, str]:
        missing = self._chooser.missing()
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
            admit(self.slo, flight.prefill.load, flight.last_member.load, ask, now - (request.received or now))
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
                **member.as_dict(now),
                "cached_blocks": self.fleet.index.blocks(member.id),
                "breaker": self.fleet.breakers.state(member.id, now),
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
        if missing := self._chooser.missing(avoid=member):
            message = f"while {instance_id} drains, {missing} would be there"
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
            self._note_late(member, output)
            return  # it is over, or this instance has been given up
        if member is flight.hedge:
            self._hedges.on_output(flight, member, output)
            return
        flight.note(member, output, time.monotonic())
        if output.stamps and member is flight.decode and any(s.stage == Stage.KV_READY for s in output.stamps):
            self._note_pair(flight, flight.prefill, member)
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
        self._chooser.forget(member)
        if member.requests and not member.draining:
            self.fleet.fault(member, time.monotonic())
        for request_id in list(member.requests):
            flight = self.flights.get(request_id)
            if flight is not None:
                error = Unavailable(f"instance {member.id} was lost while it served the request", kind="instance_lost")
                self._member_failed(flight, member, error)

    def on_draining(self, member: Member) -> None:
        """Moves the streams that it decodes to others, if there are any; else they end where they are."""
        for request_id in list(member.requests):
            flight = self.flights.get(request_id)
            if flight is not None and member is flight.last_member and not self._chooser.missing(avoid=member):
                flight.let_go(member)
                reason = Unavailable(f"instance {member.id} was drained", kind="drained")
                self.handle(flight, Event.DRAINED, reason)

    async def watch(self) -> None:
        """Ends requests that make no progress."""
        while True:
            await asyncio.sleep(min(1.0, self.config.handover_timeout_seconds / 4, self._hedges.after / 4))
            now = time.monotonic()
            for flight in list(self.flights.values()):
                self._hedges.watch(flight, now)
                flight.machine.progressed(flight.owner.stepped)
                if flight.machine.late(now):
                    self.fleet.fault(flight.owner, now)
                    state = flight.machine.state
                    message = f"no progress for {self.config.handover_timeout_seconds} s while {state}"
                    self.handle(flight, Event.LATE, Unavailable(message, kind="timeout"))

    # ---- the hand-over ----------------------------------------------------------------------------------------

    def handle(self, flight: Flight, event: Event, error: RequestError | None = None) -> None:
        """Runs one event through the flight's machine and carries out what it says."""
        for action in flight.machine.handle(event, time.monotonic()):
            match action:
                case Action.RESUME:
                    assert error is not None
                    self._resume(flight, error)
                case Action.FINALIZE:
                    self._finalize(flight, error.kind if error else event.value)
                case Action.CANCEL_PREFILL:
                    flight.let_go(flight.prefill)
                    self._hedges.drop(flight)
                case Action.CANCEL_DECODE if flight.decode is not None:
                    flight.let_go(flight.decode)
                case Action.FAIL:
                    assert error is not None
                    self._fail(flight, error)
        if flight.machine.ended:
            self._end(flight)

    def _finalize(self, flight: Flight, kind: str) -> None:
        assert flight.decode is not None
        flight.hand_over(pb.HandOver(final=True))
        self._metrics.fallbacks.labels(kind=kind).inc()
        prefill, extra = flight.prefill.id, {"event": "fallback", "request_id": flight.request.request_id}
        extra["instance"] = prefill
        log.warning("%s: decode computes what %s did not hand over (%s)", flight.id, prefill, kind, extra=extra)

    def _fail(self, flight: Flight, error: RequestError) -> None:
        if flight.machine.resumptions < 0:
            error = Unavailable(f"{error}, and it has moved {MAX_RESUMPTIONS} times already", kind=error.kind)
        flight.timeline.error = str(error)
        flight.put(error)
        if error.status >= 500:
            extra = {"event": "failed", "request_id": flight.request.request_id}
            log.warning("%s failed: %s", flight.id, error, extra=extra)

    def _on_prefill(self, flight: Flight, member: Member, output: pb.Output) -> None:
        stored = output.stored
        message = pb.HandOver(
            num_blocks=stored.num_blocks, coming=stored.coming, final=stored.final, tickets=stored.tickets
        )
        if output.token_ids:
            message.first_token = output.token_ids[0]
            member.give(flight.id, Load())
        elif output.stored.num_blocks and member.requests[flight.id].prefills:
            done = max(flight.cached.get(member.id, 0), output.stored.num_blocks * member.hello.block_size)
            member.give(flight.id, flight.left(pb.PREFILL, done))
        if not output.finish_reason and (output.token_ids or output.HasField("stored")):
            flight.hand_over(message)
        if output.token_ids:
            self._hedges.drop(flight)
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
            self._hedges.prefer(flight)
        else:
            self.handle(flight, Event.PREFILL_FAILED if split_prefill else Event.DECODE_FAILED, error)

    def _emit(self, flight: Flight, output: pb.Output) -> None:
        now = time.monotonic()
        if flight.last_token_at is not None:
            self._metrics.inter_token.observe((now - flight.last_token_at) / max(1, len(output.token_ids)))
        flight.emit(output, now)

    def _note_pair(self, flight: Flight, prefill: Member, decode: Member) -> None:
        loaded = flight.timeline.loaded
        if not loaded.seconds:
            return  # decode had it all, or nothing was stored
        if not loaded.blocks:
            self._metrics.in_vain.labels(prefill=prefill.id, decode=decode.id).inc()
        self._chooser.handed_over(prefill.hello, decode.hello, loaded.blocks)

    def _note_late(self, member: Member, output: pb.Output) -> None:
        """Decode follows prefill's store, and may have ended before prefill knows that all is stored."""
        timeline, now = self.timelines.get(output.request_id), time.monotonic()
        if timeline is None:
            return
        cancelled = timeline.finish_reason == "cancelled"
        for stamp in output.stamps:
            if stamp.stage == RELEASED and cancelled:
                since = now - stamp.seconds - timeline.stamps[Stage.FINISHED]
                timeline.released[member.id] = since
                self._metrics.released.labels(role=member.role).observe(since)
            elif stamp.stage == Stage.KV_STORED and member.id == timeline.prefill_instance:
                timeline.stamp(Stage.KV_STORED, now - stamp.seconds)
                timeline.stored = Moved(output.moved.blocks, output.moved.bytes, output.moved.seconds)

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
        flight.started, flight.hedged = time.monotonic(), False
        self.flights[flight.id] = flight
        frame = flight.submission()
        if decode is not None:
            copy = pb.RouterFrame()
            copy.CopyFrom(frame)
            flight.submit(decode, pb.DECODE, copy)
        alone = decode is None and (prefill.role != "prefill" or flight.tokens_left > 1)
        flight.submit(prefill, pb.BOTH if alone else pb.PREFILL, frame)

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
        """Says which instances the request has from here on; what was asked is the answer. Raises as `choose` does."""
        choice = self._chooser.choose(flight.ask, flight.request.keys, avoid)
        flight.prefill, flight.decode, flight.cached = choice.prefill, choice.decode, choice.ask.cached
        flight.timeline.placement = choice.placement
        flight.timeline.decisions += choice.decisions
        return choice.ask


def _agreed(name: str, hellos: list[pb.Hello]) -> ModelInfo:
    return ModelInfo(
        name=name,
        max_model_len=min(hello.max_model_len for hello in hellos),
        vocab_size=hellos[0].vocab_size,
        eos_token_ids=frozenset(hellos[0].eos_token_ids),
        weights=Layout.like(hellos[0].layout).weights,
        block_sizes=frozenset(hello.block_size for hello in hellos),
        grammars=all(hello.grammars for hello in hellos),
        by_priority=all(hello.scheduling_policy == "priority" for hello in hellos),
    )

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
from pdserve.router.dispatch.request_state import RequestState
from pdserve.router.dispatch.selector import InstanceSelector
from pdserve.router.instances.fleet import Fleet, InstanceHandle
from pdserve.router.scheduling.policy import Load, PlacementRequest
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
        self.states: dict[str, RequestState] = {}
        self.timelines = TimelineLog(config.timelines)
        self._hellos: list[pb.Hello] = []  # of those who are attached, as of the last `model`
        self._model: ModelInfo | None = None
        self._open: set[str] = set()  # request ids; a flight that moves changes its own id
        self.watchers = [metrics.finished]  # of requests that have ended
        self._metrics = metrics
        self._selector = InstanceSelector(config, fleet, metrics)
        self._hedges = Hedges(config.hedge_prefill_after, self._selector, metrics, self.on_output)
        self._budget = RetryBudget()
        metrics.retry_budget.set_function(lambda: self._budget.left)
        self.slo = Slo.parse(config.slo)
        fleet.listener = self

    # ---- for the HTTP side (stream.Backend) -------------------------------------------------------------------

    def model(self) -> ModelInfo | None:
        hellos = [instance.hello for instance in self.fleet.instances.values()]
        if hellos != self._hellos:
            self._hellos, self._model = hellos, _agreed(self.config.name, hellos) if hellos else None
        return self._model

    def ready(self) -> tuple[bool, str]:
        missing = self._selector.missing()
        return not missing, f"{missing} is registered" if missing else "ready"

    def open(self, request: Request) -> RequestState:
        now = time.monotonic()
        if request.request_id in self._open:
            raise BadRequest(f"request id {request.request_id!r} is in use", kind="duplicate_request_id")
        machine = HandOver(now, self.config.handover_timeout_seconds)
        state = RequestState(request, machine, on_cancel=lambda state: self.handle(state, Event.CANCELLED))
        state.timeline.stamp(Stage.RECEIVED, request.received or now)
        placement = self._route(state)
        self._refuse(
            admit(self.slo, state.prefill.load, state.last_instance.load, placement, now - (request.received or now))
        )
        state.timeline.stamp(Stage.ADMITTED, time.monotonic())
        self._start(state)
        self._open.add(request.request_id)
        self._budget.earn()
        state.timeline.stamp(Stage.ROUTED, time.monotonic())
        self.timelines.add(state.timeline)
        return state

    def instances(self) -> list[dict[str, object]]:
        now = time.monotonic()
        return [
            {
                **instance.as_dict(now),
                "cached_blocks": self.fleet.index.blocks(instance.id),
                "breaker": self.fleet.breakers.state(instance.id, now),
            }
            for instance in sorted(self.fleet.instances.values(), key=lambda m: m.id)
        ]

    def timeline(self, request_id: str) -> Timeline | None:
        return self.timelines.get(request_id)

    def drain(self, instance_id: str, role: str = "") -> None:
        instance = self.fleet.instances.get(instance_id)
        if instance is None:
            raise NotFound(f"no instance {instance_id!r} is attached to this router", kind="instance_not_found")
        if instance.draining:
            raise Conflict(f"{instance_id} is draining already", kind="draining")
        if role == instance.hello.role:
            return
        if missing := self._selector.missing(avoid=instance):
            message = f"while {instance_id} drains, {missing} would be there"
            raise Conflict(message, kind="last_instance")
        hello = pb.Hello()
        hello.CopyFrom(instance.hello)
        hello.role = role or hello.role
        if refusal := self.fleet.refusal(pb.InstanceFrame(hello=hello)):
            raise Conflict(f"{instance_id} cannot serve as {role}: {refusal}", kind="role_refused")
        instance.draining = True  # from here on; it will tell everybody
        instance.send(pb.RouterFrame(drain=pb.Drain(role=role)))

    # ---- for the fleet (fleet.Listener) -----------------------------------------------------------------------

    def on_output(self, instance: InstanceHandle, output: pb.Output) -> None:
        state = self.states.get(output.request_id)
        if state is None or state.id not in instance.requests:
            self._note_late(instance, output)
            return  # it is over, or this instance has been given up
        if instance is state.hedge:
            self._hedges.on_output(state, instance, output)
            return
        state.note(instance, output, time.monotonic())
        if output.stamps and instance is state.decode and any(s.stage == Stage.KV_READY for s in output.stamps):
            self._note_pair(state, state.prefill, instance)
        if output.token_ids:
            self.fleet.breakers.succeeded(instance.id)
        if output.HasField("error"):
            kind = BadRequest if output.error.kind == "invalid_grammar" else RequestError
            self.handle(state, Event.UNPLACED, kind(output.error.message, kind=output.error.kind))
        elif instance is state.decode or state.decode is None:
            self._on_decode(state, instance, output)
        else:
            self._on_prefill(state, instance, output)

    def on_lost(self, instance: InstanceHandle) -> None:
        self._selector.forget(instance)
        if instance.requests and not instance.draining:
            self.fleet.fault(instance, time.monotonic())
        for request_id in list(instance.requests):
            state = self.states.get(request_id)
            if state is not None:
                error = Unavailable(
                    f"instance {instance.id} was lost while it served the request", kind="instance_lost"
                )
                self._instance_failed(state, instance, error)

    def on_draining(self, instance: InstanceHandle) -> None:
        """Moves the streams that it decodes to others, if there are any; else they end where they are."""
        for request_id in list(instance.requests):
            state = self.states.get(request_id)
            if state is not None and instance is state.last_instance and not self._selector.missing(avoid=instance):
                state.let_go(instance)
                reason = Unavailable(f"instance {instance.id} was drained", kind="drained")
                self.handle(state, Event.DRAINED, reason)

    async def watch(self) -> None:
        """Ends requests that make no progress."""
        while True:
            await asyncio.sleep(min(1.0, self.config.handover_timeout_seconds / 4, self._hedges.after / 4))
            now = time.monotonic()
            for state in list(self.states.values()):
                self._hedges.watch(state, now)
                state.machine.progressed(state.owner.stepped)
                if state.machine.late(now):
                    self.fleet.fault(state.owner, now)
                    phase = state.machine.state
                    message = f"no progress for {self.config.handover_timeout_seconds} s while {phase}"
                    self.handle(state, Event.LATE, Unavailable(message, kind="timeout"))

    # ---- the hand-over ----------------------------------------------------------------------------------------

    def handle(self, state: RequestState, event: Event, error: RequestError | None = None) -> None:
        """Runs one event through the flight's machine and carries out what it says."""
        for action in state.machine.handle(event, time.monotonic()):
            match action:
                case Action.RESUME:
                    assert error is not None
                    self._resume(state, error)
                case Action.FINALIZE:
                    self._finalize(state, error.kind if error else event.value)
                case Action.CANCEL_PREFILL:
                    state.let_go(state.prefill)
                    self._hedges.drop(state)
                case Action.CANCEL_DECODE if state.decode is not None:
                    state.let_go(state.decode)
                case Action.FAIL:
                    assert error is not None
                    self._fail(state, error)
        if state.machine.ended:
            self._end(state)

    def _finalize(self, state: RequestState, kind: str) -> None:
        assert state.decode is not None
        state.hand_over(pb.HandOver(final=True))
        self._metrics.fallbacks.labels(kind=kind).inc()
        prefill, extra = state.prefill.id, {"event": "fallback", "request_id": state.request.request_id}
        extra["instance"] = prefill
        log.warning("%s: decode computes what %s did not hand over (%s)", state.id, prefill, kind, extra=extra)

    def _fail(self, state: RequestState, error: RequestError) -> None:
        if state.machine.resumptions < 0:
            error = Unavailable(f"{error}, and it has moved {MAX_RESUMPTIONS} times already", kind=error.kind)
        state.timeline.error = str(error)
        state.put(error)
        if error.status >= 500:
            extra = {"event": "failed", "request_id": state.request.request_id}
            log.warning("%s failed: %s", state.id, error, extra=extra)

    def _on_prefill(self, state: RequestState, instance: InstanceHandle, output: pb.Output) -> None:
        stored = output.stored
        message = pb.HandOver(
            num_blocks=stored.num_blocks, coming=stored.coming, final=stored.final, tickets=stored.tickets
        )
        if output.token_ids:
            message.first_token = output.token_ids[0]
            instance.give(state.id, Load())
        elif output.stored.num_blocks and instance.requests[state.id].prefills:
            done = max(state.cached.get(instance.id, 0), output.stored.num_blocks * instance.hello.block_size)
            instance.give(state.id, state.left(pb.PREFILL, done))
        if not output.finish_reason and (output.token_ids or output.HasField("stored")):
            state.hand_over(message)
        if output.token_ids:
            self._hedges.drop(state)
            self.handle(state, Event.FIRST_TOKEN)
            self._emit(state, output)
        if output.finish_reason:
            instance.release(state.id)
            self.handle(state, Event.FINISHED)
        elif output.stored.final:
            instance.release(state.id)
            self.handle(state, Event.STORED)

    def _on_decode(self, state: RequestState, instance: InstanceHandle, output: pb.Output) -> None:
        if output.token_ids:
            self.handle(state, Event.DECODED)
            self._emit(state, output)
            instance.give(state.id, state.left(pb.DECODE))
        if output.finish_reason:
            instance.release(state.id)
            self.handle(state, Event.FINISHED)

    def _instance_failed(self, state: RequestState, instance: InstanceHandle, error: RequestError) -> None:
        split_prefill = state.decode is not None and instance is state.prefill
        instance.release(state.id)
        if instance is state.hedge:
            state.hedge = None
        elif split_prefill and state.hedge is not None:
            self._hedges.prefer(state)
        else:
            self.handle(state, Event.PREFILL_FAILED if split_prefill else Event.DECODE_FAILED, error)

    def _emit(self, state: RequestState, output: pb.Output) -> None:
        now = time.monotonic()
        if state.last_token_at is not None:
            self._metrics.inter_token.observe((now - state.last_token_at) / max(1, len(output.token_ids)))
        state.emit(output, now)

    def _note_pair(self, state: RequestState, prefill: InstanceHandle, decode: InstanceHandle) -> None:
        loaded = state.timeline.loaded
        if not loaded.seconds:
            return  # decode had it all, or nothing was stored
        if not loaded.blocks:
            self._metrics.failed_handovers.labels(prefill=prefill.id, decode=decode.id).inc()
        self._selector.handed_over(prefill.hello, decode.hello, loaded.blocks)

    def _note_late(self, instance: InstanceHandle, output: pb.Output) -> None:
        """Decode follows prefill's store, and may have ended before prefill knows that all is stored."""
        timeline, now = self.timelines.get(output.request_id), time.monotonic()
        if timeline is None:
            return
        cancelled = timeline.finish_reason == "cancelled"
        for stamp in output.stamps:
            if stamp.stage == RELEASED and cancelled:
                since = now - stamp.seconds - timeline.stamps[Stage.FINISHED]
                timeline.released[instance.id] = since
                self._metrics.released.labels(role=instance.role).observe(since)
            elif stamp.stage == Stage.KV_STORED and instance.id == timeline.prefill_instance:
                timeline.stamp(Stage.KV_STORED, now - stamp.seconds)
                timeline.stored = Moved(output.moved.blocks, output.moved.bytes, output.moved.seconds)

    def _end(self, state: RequestState) -> None:
        """Forgets the flight. Every way out of a request comes through here, once."""
        timeline = state.timeline
        if self.states.pop(state.id, None) is None:
            return
        for instance in (state.prefill, state.decode):
            if instance is not None:
                instance.release(state.id)
        self._open.discard(state.request.request_id)
        timeline.stamp(Stage.FINISHED, time.monotonic())
        if state.machine.state is State.FAILED:
            timeline.finish_reason = "error"
        for finished in self.watchers:
            finished(timeline)

    # ---- to the instances -------------------------------------------------------------------------------------

    def _refuse(self, error: Overloaded | None) -> None:
        """Raises it, if there is one."""
        if error is not None:
            self._metrics.refusals.labels(reason=error.kind).inc()
            raise error

    def _start(self, state: RequestState) -> None:
        """Submits to the instances that were picked what the request is by now."""
        prefill, decode, placement = state.prefill, state.decode, state.timeline.placement
        assert placement is not None
        self._metrics.placements.labels(way=placement.way, reason=placement.reason).inc()
        state.timeline.prefill_instance = prefill.id
        state.timeline.decode_instance = (decode or prefill).id
        state.timeline.stored, state.timeline.loaded = Moved(), Moved()
        state.machine.resumed(split=decode is not None)
        state.started, state.hedged = time.monotonic(), False
        self.states[state.id] = state
        frame = state.submission()
        if decode is not None:
            copy = pb.RouterFrame()
            copy.CopyFrom(frame)
            state.submit(decode, pb.DECODE, copy)
        alone = decode is None and (prefill.role != "prefill" or state.tokens_left > 1)
        state.submit(prefill, pb.BOTH if alone else pb.PREFILL, frame)

    def _resume(self, state: RequestState, error: RequestError) -> None:
        """Moves the request to other instances; its stream goes on after the tokens that are out."""
        del self.states[state.id]
        failed, moves = state.last_instance, state.timeline.migrations
        state.timeline.moves.append(Move(time.monotonic(), failed.id, str(error)))
        self.states[state.id] = state
        try:
            self._route(state, avoid=failed)
            if error.kind != "drained" and not self._budget.spend(moves):
                raise Unavailable("too many requests had to move again lately", kind="no_instance")
        except Unavailable as nobody:
            reason = Unavailable(f"{error}, and {nobody}", kind=error.kind, retry_after_s=1)
            self.handle(state, Event.UNPLACED, reason)
            return
        self._start(state)
        self._metrics.migrations.labels(kind=error.kind).inc()
        extra = {"event": "moved", "instance": failed.id, "request_id": state.request.request_id}
        log.warning("%s goes on with %s: %s", state.id, state.timeline.decode_instance, error, extra=extra)

    def _route(self, state: RequestState, avoid: InstanceHandle | None = None) -> PlacementRequest:
        """Says which instances the request has from here on; what was asked is the answer. Raises as `select` does."""
        choice = self._selector.select(state.placement_request, state.request.keys, avoid)
        state.prefill, state.decode, state.cached = choice.prefill, choice.decode, choice.request.cached
        state.timeline.placement = choice.placement
        state.timeline.decisions += choice.decisions
        return choice.request


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

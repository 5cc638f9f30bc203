"""The dispatcher: turns a request into a token stream, by submitting it to instances and running its hand-over machine.

open ── select, check SLO, submit ──► on_output, on_lost, on_draining ──► handle(event) ──► actions of the machine
          │     ▲                                                                             │
          │     └───────────────────────────────── migrate ◄──────────────────────────────────┘
          │                                           │
          └─ no instance is eligible ─► wait ◄────────┘      an instance joins ─► select …
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from msgspec import structs

from pdserve.config import RouterConfig
from pdserve.errors import BadRequest, RequestError, Unavailable
from pdserve.lifetime import RELEASED, Stage
from pdserve.output import Output, Stored
from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.backend import ModelInfo
from pdserve.router.dispatch.adapter_changes import AdapterChanges
from pdserve.router.dispatch.handover import MAX_MIGRATIONS, Action, Event, HandOverMachine, IllegalTransition, State
from pdserve.router.dispatch.operations import Operations
from pdserve.router.dispatch.request_state import RequestState
from pdserve.router.dispatch.selector import InstanceSelector, Selection
from pdserve.router.dispatch.waiting import WaitingRequests
from pdserve.router.instances.fleet import Fleet, InstanceHandle
from pdserve.router.instances.frame_checks import InvalidFrame, content_fault, output_fault, times_fault
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.scheduling.policy import Load
from pdserve.router.scheduling.slo_admission import check_slo
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.telemetry.timeline import Timeline, TimelineLog
from pdserve.slo import Slo

log = logging.getLogger(__name__)

CLIENT_ERRORS = (
    "invalid_grammar",
    "invalid_logits_processor",
    "beams_do_not_fit",
    "too_few_answers",
)  # kinds of errors of instances that the request has caused
MAX_DROPS = 1  # instances that a request may cost until it is not tried on a further one
# Migrations after faults of requests that have migrated before (as in Twitter's Finagle). The first one of a request is free:
# when an instance dies, all of its streams have to move. Without a limit on the others, one that fails everywhere, or an
# outage that spreads, would make the fleet compute everything several times.
RETRIES_PER_REQUEST = 0.1  # that each new request adds to the budget
MAX_RETRIES = 100.0  # in the budget
FREE_MIGRATIONS = 8  # after faults, of a request that decodes a token between any two
MAX_ERROR_CHARS = 4000  # of an instance's error message
NOTHING_STORED = Stored()
ANSWERS = 32  # recent ones whose mean length is known
NO_WORK_LEFT = Load()  # prefill has sampled; the request stays on its instance until the last store has ended


class Dispatcher:
    """Runs all requests of a router over its fleet. One thread, no locks. It reads the fleet's clock.

    It implements `Backend` for the HTTP side and `FleetListener` for the fleet.

    Attributes:
        states: the running requests, by their ids on the instances.
        timelines: the latest timelines, of running and finished requests.
        finish_listeners: called with the timeline of each finished request.
        check_interval_s: intended interval of the calls of `check_progress`.
    """

    def __init__(self, config: RouterConfig, fleet: Fleet, metrics: Metrics, seed: int) -> None:
        """`seed`, 0 or more, is where the policies' rotation and random draws begin."""
        self.config = config
        self.fleet = fleet
        self.states: dict[str, RequestState] = {}
        self.timelines = TimelineLog(config.timelines)
        self.model: ModelInfo | None = None
        self._open_ids: set[str] = set()  # of requests, which do not change with migrations
        self.finish_listeners = [metrics.record_finished]
        self._metrics = metrics
        self._now = fleet.now
        self._selector = InstanceSelector(config, fleet, metrics, seed)
        self._waiting = WaitingRequests(
            config.no_instance_timeout,
            fleet,
            metrics,
            self._place,
            lambda state, error: self.handle(state, Event.REJECTED, error),
        )
        self._adapters = AdapterChanges(fleet)
        self.change_adapter = self._adapters.order
        operations = Operations(fleet, self._selector)
        self.instances, self.drain = operations.instances, operations.drain
        self.reset_prefix_cache = operations.reset_prefix_cache
        self._lost_numerics: set[tuple[str, str, str]] = set()  # of the instances lost since there was none
        self.check_interval_s = min(1.0, config.handover_timeout_seconds / 4)
        self._retry_budget = MAX_RETRIES
        metrics.retry_budget.set_function(lambda: self._retry_budget)
        self.slo = Slo.parse(config.slo)
        fleet.listener = self
        fleet.on_joined, fleet.on_change = self.on_joined, self._update_model

    # ---- Backend: called by the HTTP side ---------------------------------------------------------------------

    def ready(self) -> tuple[bool, str]:
        missing = self._selector.missing_roles()
        return not missing, f"{missing} is registered" if missing else "ready"

    @property
    def num_instances(self) -> int:
        return len(self.fleet.instances)

    def open(self, request: RoutedRequest) -> RequestState:
        return self.open_choices([request])[0]

    def open_choices(self, requests: Sequence[RoutedRequest]) -> list[RequestState]:
        now = self._now()
        states = [self._new_state(request, now) for request in requests]
        try:
            rejection = self._admit(states)
        except Unavailable as unplaced:
            if not self._waiting.timeout_s:
                raise
            self._waiting.add(states, unplaced)
            self.states.update((state.id, state) for state in states)
            rejection = None
        for state in states:
            if rejection is None:
                self._open_ids.add(state.request.request_id)
                self._retry_budget = min(MAX_RETRIES, self._retry_budget + RETRIES_PER_REQUEST)
            else:
                state.timeline.refuse(str(rejection), self._now())
            self.timelines.add(state.timeline)
        if rejection is not None:
            raise rejection
        return states

    def _check_fields(self, state: RequestState) -> None:
        """Raise BadRequest if the request sets a field that no attached instance knows."""
        version, field = state.newest_field
        attached = self.fleet.instances.values()
        if field and attached and all(one.hello.protocol_version < version for one in attached):
            message = f"no attached instance knows {field} yet: leave it out, or update the instances"
            raise BadRequest(message, kind="unsupported_parameter", param=field)

    def _admit(self, states: Sequence[RequestState]) -> RequestError | None:
        """Select the instances of new choices of one prompt and submit them, or return why they would break the SLO.

        Raises:
            BadRequest: they set a field that no attached instance knows.
            Unavailable: no instance is eligible.
        """
        first = states[0]
        if first.newest_field[0]:
            self._check_fields(first)
        selection = self._select(states)
        if self.config.slo:
            waited = self._now() - first.timeline.stamps[Stage.RECEIVED]
            prefill, final = selection.prefill, selection.decode or selection.prefill
            rejection = check_slo(self.slo, prefill.candidate, final.candidate, selection.request, waited)
            if rejection is not None:
                self._metrics.refusals.labels(reason=rejection.kind).inc()
                return rejection
        for state in states:
            state.timeline.stamp(Stage.ADMITTED, self._now())
        self._submit(selection, states)
        for state in states:
            state.timeline.stamp(Stage.ROUTED, self._now())
        return None

    def _new_state(self, request: RoutedRequest, now: float) -> RequestState:
        """Return the state of a request that has no instances yet. While its id is in use, it gets another one."""
        if request.request_id in self._open_ids:
            ids = (f"{request.request_id}.{number}" for number in count(1))
            request = structs.replace(request, request_id=next(one for one in ids if one not in self._open_ids))
        machine = HandOverMachine(
            self.fleet.awake_now(), self.config.handover_timeout_seconds, request.sampling.max_tokens
        )
        timeline = self.timelines.new(request, now)
        return RequestState(request, machine, timeline, lambda state: self.handle(state, Event.CANCELLED))

    def timeline(self, request_id: str) -> Timeline | None:
        return self.timelines.get(request_id)

    # ---- FleetListener: called by the fleet -------------------------------------------------------------------

    def on_output(self, instance: InstanceHandle, output: Output) -> None:
        state = self.states.get(output.request_id)
        if state is None or output.request_id not in instance.requests:
            self._record_late_output(instance, output)  # the request has finished, or was cancelled on this instance
            if state is None and (output.finish_reason is not None or output.error is not None):
                instance.unassign(output.request_id)  # a warm prompt, which has no state
            return
        try:
            self._handle_output(state, instance, output)
        except (InvalidFrame, IllegalTransition) as fault:
            state.num_drops += 1
            raise InvalidFrame(str(fault)) from None

    def _fail_for_content(self, state: RequestState, instance: InstanceHandle, reason: str) -> None:
        """End a request whose output is invalid by what the model computed. It may be due to the client's input."""
        self._metrics.invalid_outputs.inc()
        self.fleet.record_invalid_output(instance, state.request.request_id, state.request.client)
        message = f"{instance.id} has computed {reason}, so the answer is not passed on"
        self.handle(state, Event.REJECTED, RequestError(message, kind="invalid_output"))

    def _handle_output(self, state: RequestState, instance: InstanceHandle, output: Output) -> None:
        """Process an output of an instance that runs the request.

        Raises:
            InvalidFrame: the output is impossible.
            IllegalTransition: it is impossible in the state of the hand-over.
        """
        now, is_final = self._now(), instance is state.final_instance
        max_tokens = state.remaining_tokens if is_final else 1
        if fault := output_fault(output, instance.hello, max_tokens, state.num_tokens):
            raise InvalidFrame(fault)
        state.has_answered = True
        has_scores = bool(output.logprobs or output.prompt_logprobs)
        has_answer = bool(output.hypotheses or output.embedding)
        if (has_scores or has_answer or output.searching or not state.is_plain) and (
            fault := _content_fault(state, instance, output)
        ):
            self._fail_for_content(state, instance, fault)
            return
        if output.token_ids:
            instance.last_token_at = self.fleet.awake_now()
            if self.fleet.breakers.records:
                self.fleet.record_success(instance)
        if output.error is not None:
            state.record_output(instance, output, now)
            kind = BadRequest if output.error.kind in CLIENT_ERRORS else RequestError
            self.handle(state, Event.REJECTED, kind(output.error.message[:MAX_ERROR_CHARS], kind=output.error.kind))
            return
        if not is_final:
            self._hand_over(state, instance, output)
        elif output.searching or (output.token_ids and state.machine.state is not State.DECODING):
            self.handle(state, Event.DECODED)
        has_drafts = (output.drafted or output.predicted) is not None
        has_counts = output.sources is not None or output.moved is not None or has_drafts
        if output.stamps or has_scores or has_counts:
            state.record_output(instance, output, now)
        if output.token_ids or has_answer:
            if state.timeline.migrations and (pause := state.end_pause(now)) is not None:
                self._metrics.migration_pause.observe(pause)
            gap = state.emit(output, now)
            if gap is not None:
                for _ in output.token_ids:
                    self._metrics.inter_token_latency.observe(gap)
        if instance is state.decode and Stage.KV_READY in output.stamps:
            loaded = state.timeline.loaded
            if loaded.seconds and (self._selector.failed_handovers or not loaded.blocks):
                self._selector.record_handover(state.prefill.hello, instance.hello, loaded.blocks)
        if is_final and output.token_ids:
            instance.assign(state.id, state.remaining_load(pb.DECODE))
        if output.finish_reason is not None:
            instance.unassign(state.id)
            self.handle(state, Event.FINISHED)
        elif not is_final and output.stored is not None and output.stored.final:
            instance.unassign(state.id)
            self.handle(state, Event.PREFILLED if state.request.sampling.beam_width else Event.STORED)

    def _hand_over(self, state: RequestState, instance: InstanceHandle, output: Output) -> None:
        """Tell decode how far prefill is."""
        stored = output.stored or NOTHING_STORED
        message = pb.HandOver(
            num_blocks=stored.num_blocks, coming=stored.coming, final=stored.final, tickets=stored.tickets
        )
        if output.token_ids:
            self.handle(state, Event.FIRST_TOKEN)  # first, because decode must not be told of a second one
            message.first_token = output.token_ids[0]
            instance.assign(state.id, NO_WORK_LEFT)
        elif stored.num_blocks and instance.requests[state.id].prefills:
            num_computed = max(state.cached.get(instance.id, 0), stored.num_blocks * instance.hello.block_size)
            instance.assign(state.id, state.remaining_load(pb.PREFILL, num_computed))
        if output.finish_reason is None and (output.token_ids or output.stored is not None):
            state.send_handover(message)

    def on_adapter_changed(self, instance: InstanceHandle, answer: pb.AdapterChanged) -> None:
        self._adapters.answered(instance, answer.number, answer.error)

    def on_lost(self, instance: InstanceHandle) -> None:
        self._adapters.lost(instance)
        self._selector.forget(instance)
        self._lost_numerics.add(_numerics(instance.hello))
        if instance.requests and not instance.is_draining:
            self.fleet.record_fault(instance, self._now())
        for request_id in list(instance.requests):
            state = self.states.get(request_id)
            if state is not None:
                state.num_drops += instance.may_be_poisoned and not state.has_answered
                error = Unavailable(
                    f"instance {instance.id} was lost while it served the request", kind="instance_lost"
                )
                self._instance_failed(state, instance, error)

    def on_joined(self, instance: InstanceHandle) -> None:
        """Give the waiting requests to an instance that has attached. If it is the first one and computes something else,
        such as with other weights, they end: their tokens would not be those of one model.
        """
        self.fleet.tell_epoch(instance)
        if self.model is not None and self.model.adapters:
            self._adapters.share(self.model.adapters, has_joined=True)
        if len(self.fleet.instances) == 1:
            lost, self._lost_numerics = self._lost_numerics, set()
            if lost and _numerics(instance.hello) not in lost:
                self._waiting.end_all(f"and {instance.id}, which has attached, has other weights or another dtype")
        self._waiting.place()

    def on_draining(self, instance: InstanceHandle) -> None:
        """Migrate the streams that the instance decodes. Those that no other instance can take finish where they are."""
        for request_id in list(instance.requests):
            state = self.states.get(request_id)
            if state is None or instance is not state.final_instance:
                continue
            if not self._selector.missing_roles(replace(state.needs, left=instance)):
                state.cancel_on(instance)
                reason = Unavailable(f"instance {instance.id} was drained", kind="drained")
                self.handle(state, Event.DRAINED, reason)

    def check_progress(self) -> None:
        """End the states and requests that are overdue.

        The time in which this router was stalled itself does not count.
        """
        now = self.fleet.awake_now()
        if self._waiting.groups:
            self._waiting.end_overdue(now)
            self._waiting.place()  # a role has changed, or a circuit breaker allows a trial
        for state in list(self.states.values()):
            if state.machine.state is State.WAITING:
                continue
            state.machine.record_progress(state.owner.last_token_at, state.owner.last_step_at)
            phase = state.machine.state
            if state.machine.is_overdue(now):
                seconds = self._now() - state.timeline.stamps[Stage.ADMITTED]
                message = f"the request has taken {seconds:.0f} s, and is still {phase}"
                self.handle(state, Event.REJECTED, Unavailable(message, kind="timeout"))
            elif state.machine.is_timed_out(now):
                self.fleet.record_fault(state.owner, self._now())
                message = f"no progress for {self.config.handover_timeout_seconds} s while {phase}"
                self.handle(state, Event.TIMED_OUT, Unavailable(message, kind="timeout"))

    # ---- the hand-over ----------------------------------------------------------------------------------------

    def handle(self, state: RequestState, event: Event, error: RequestError | None = None) -> None:
        """Pass an event to the request's hand-over machine, and carry out the actions that it returns.

        Args:
            error: the cause of a failure; ends the client's stream if the machine decides so.
        """
        for action in state.machine.handle(event, self.fleet.awake_now()):
            match action:
                case Action.MIGRATE:
                    assert error is not None
                    self._migrate(state, error)
                case Action.FINALIZE:
                    self._finalize(state, error.kind if error else event.value)
                case Action.CANCEL_PREFILL if state.id in state.prefill.requests:  # else it has already finished it
                    state.cancel_on(state.prefill)
                case Action.CANCEL_DECODE if state.decode is not None and state.id in state.decode.requests:
                    state.cancel_on(state.decode)
                case Action.FAIL:
                    assert error is not None
                    self._fail(state, error)
        if state.machine.is_over:
            self._finish(state)

    def _finalize(self, state: RequestState, kind: str) -> None:
        """Let decode compute the KV that prefill did not deliver."""
        assert state.decode is not None
        state.send_handover(pb.HandOver(final=True))
        self._metrics.fallbacks.labels(kind=kind).inc()
        prefill, extra = state.prefill.id, {"event": "fallback", "request_id": state.request.request_id}
        extra["instance"] = prefill
        log.warning("%s: decode computes the KV that %s did not hand over (%s)", state.id, prefill, kind, extra=extra)

    def _fail(self, state: RequestState, error: RequestError) -> None:
        """End the client's stream with an error."""
        if state.machine.migrations_left < 0:
            error = Unavailable(f"{error}, and it has migrated {MAX_MIGRATIONS} times without a token", kind=error.kind)
        state.timeline.error = str(error)
        state.emit_error(error)
        if error.status >= 500:
            extra = {"event": "failed", "request_id": state.request.request_id}
            log.warning("%s failed: %s", state.id, error, extra=extra)

    def _instance_failed(self, state: RequestState, instance: InstanceHandle, error: RequestError) -> None:
        """Handle the loss of one of the request's instances."""
        is_split_prefill = state.decode is not None and instance is state.prefill
        instance.unassign(state.id)
        if state.num_drops > MAX_DROPS:
            message = f"{state.num_drops} instances have failed over this request, so no other one is tried"
            self.handle(state, Event.REJECTED, RequestError(f"{message} ({error})", kind="invalid_output"))
        else:
            self.handle(state, Event.PREFILL_FAILED if is_split_prefill else Event.DECODE_FAILED, error)

    def _record_late_output(self, instance: InstanceHandle, output: Output) -> None:
        """Record stamps that arrive after the end of a request.

        Decode may finish before prefill reports that all blocks are stored. After a cancellation, each instance reports when
        it has released the request's blocks.
        """
        if fault := times_fault(output):
            raise InvalidFrame(fault)
        timeline, now = self.timelines.get(output.request_id.partition("#")[0]), self._now()
        if timeline is None or timeline.submission_id != output.request_id:
            return
        if RELEASED in output.stamps and timeline.finish_reason == "cancelled":
            delay = now - output.stamps[RELEASED] - timeline.stamps[Stage.FINISHED]
            timeline.release_seconds[instance.id] = delay
            self._metrics.release_latency.labels(role=instance.role).observe(delay)
        if Stage.KV_STORED in output.stamps and instance.id == timeline.prefill_instance:
            timeline.stamp(Stage.KV_STORED, now - output.stamps[Stage.KV_STORED])
            timeline.stored = output.moved or timeline.stored

    def _finish(self, state: RequestState) -> None:
        """Remove a request whose machine is in a final state. No effect if it was removed before."""
        timeline = state.timeline
        if self.states.pop(state.id, None) is None:
            return
        for instance in state.holders:
            if state.id in instance.requests:
                instance.unassign(state.id)
        if timeline.waits:
            self._waiting.record_end(state, "cancelled")
        self._open_ids.discard(state.request.request_id)
        timeline.stamp(Stage.FINISHED, self._now())
        timeline.itl_p99_s = p99(state.gaps)
        if tokens := timeline.output_tokens:
            mean = self._selector.mean_answer
            self._selector.mean_answer = tokens if math.isinf(mean) else mean + (tokens - mean) / ANSWERS
        if state.machine.state is State.FAILED:
            timeline.finish_reason = "error"
        for on_finish in self.finish_listeners:
            on_finish(timeline)

    # ---- submission and migration -----------------------------------------------------------------------------

    def _submit(self, selection: Selection, states: Sequence[RequestState]) -> None:
        """Submit choices of one prompt, in their current state, to the selected instances."""
        first, prefill, decode = states[0], selection.prefill, selection.decode
        frame = pb.RouterFrame()  # the submission is built in it: copying a long prompt would take as long again
        frame.submit.request_id, frame.submit.request = first.id, first.request.pack()
        frame.submit.output.extend(first.emitted)
        for state in states:
            state.begin(selection, None if state is first else first, self.fleet.awake_now())
            self.states[state.id] = state
            if state is not first:
                frame.submit.members.add(request_id=state.id, seed=state.request.sampling.seed)
        placement = selection.placement
        self._metrics.placements.labels(way=placement.way, reason=placement.reason).inc(len(states))
        if decode is not None:
            copy = pb.RouterFrame()
            copy.CopyFrom(frame)
            first.submit(decode, pb.DECODE, copy, states)
        one_token = first.remaining_tokens == 1 and not first.request.sampling.beam_width
        does_both = decode is None and (prefill.role != "prefill" or not one_token)
        first.submit(prefill, pb.BOTH if does_both else pb.PREFILL, frame, states)

    def _migrate(self, state: RequestState, error: RequestError) -> None:
        """Move the request to other instances; its stream continues after the last emitted token."""
        del self.states[state.id]
        now = self._now()
        is_fault, machine = error.kind != "drained", state.machine
        must_be_heard = is_fault and machine.is_suspect and self._waiting.timeout_s
        state.move(error, now, heard_since=now if must_be_heard else -math.inf)
        self.states[state.id] = state
        if is_fault and (machine.is_suspect or machine.faults > FREE_MIGRATIONS):
            if self._retry_budget < 1:
                message = f"{error}, and the budget for repeated migrations is exhausted"
                self.handle(state, Event.REJECTED, Unavailable(message, kind=error.kind, retry_after_s=1))
                return
            self._retry_budget -= 1
        try:
            self._resume(state)
        except Unavailable as unplaced:
            reason = Unavailable(f"{error}, and {unplaced}", kind=error.kind, retry_after_s=1)
            if self._waiting.timeout_s:
                self._waiting.add([state], reason)
            else:
                self.handle(state, Event.REJECTED, reason)

    def _resume(self, state: RequestState) -> None:
        """Submit a stream that has lost an instance to others.

        Raises:
            Unavailable: no other instance is eligible.
        """
        self._submit(self._select([state]), [state])
        assert state.needs.left is not None
        reason = state.timeline.migrations[-1].reason
        self._metrics.migrations.labels(kind=state.migrates_for).inc()
        extra = {"event": "moved", "instance": state.needs.left.id, "request_id": state.request.request_id}
        log.warning("%s migrated to %s: %s", state.id, state.timeline.decode_instance, reason, extra=extra)

    def _place(self, states: Sequence[RequestState]) -> RequestError | None:
        """Submit requests that wait, or return why the new ones among them are refused.

        Raises:
            Unavailable: still no instance is eligible.
        """
        if states[0].needs.left is not None:
            self._resume(states[0])
            return None
        try:
            return self._admit(states)
        except BadRequest as refusal:
            return refusal

    def _select(self, states: Sequence[RequestState]) -> Selection:
        """Select instances for choices of one prompt.

        Raises:
            Unavailable: no instance is eligible.
        """
        selection = self._selector.select(states[0])
        for state in states:
            state.timeline.placement = selection.placement
            state.timeline.decisions += selection.decisions
        return selection

    def _update_model(self) -> None:
        """Look again at what is served. While requests wait for an instance, the last model stays that of new ones."""
        hellos = [instance.hello for instance in self.fleet.instances.values()]
        if hellos:
            self.model = ModelInfo.common_to(self.config.name, hellos)
        elif not self._waiting.timeout_s:
            self.model = None


def p99(gaps: Sequence[float]) -> float | None:
    """Return the gap that 99 % of the gaps do not exceed; None if there are none."""
    return sorted(gaps)[-1 - len(gaps) // 100] if gaps else None


def _content_fault(state: RequestState, instance: InstanceHandle, output: Output) -> str:
    """Return why the content of an output is invalid for its request, or ""."""
    num_scored, sampling = 0, state.request.sampling
    if state.scores_prompt:
        if state.leader is not None and state.num_unscored and output.token_ids:
            return "a token before the log probabilities of the prompt"
        due = 0 if state.leader is not None else state.num_unscored
        num_scored = due if output.token_ids else min(due, len(output.prompt_logprobs))
    return content_fault(output, instance.hello, state.remaining_tokens, sampling, num_scored)


def _numerics(hello: pb.Hello) -> tuple[str, str, str]:
    """Return what an instance's tokens depend on, besides the request."""
    return hello.layout.model_fingerprint, hello.layout.dtype, hello.layout.numerics

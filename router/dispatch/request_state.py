"""State of one running request: its instances, its hand-over machine, its timeline, and its output stream."""

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING

from pdserve.costs import attention_pairs
from pdserve.errors import RequestError
from pdserve.lifetime import RELEASED, Stage
from pdserve.output import Output
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import SINCE, TokenLogprobs
from pdserve.router.dispatch.handover import OWNER, HandOverMachine
from pdserve.router.instances.fleet import InstanceHandle
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.scheduling.policy import Load
from pdserve.router.telemetry.timeline import NOTHING_MOVED, Migration, Timeline

if TYPE_CHECKING:
    from pdserve.router.dispatch.selector import Selection


@dataclass(frozen=True, slots=True)
class Needs:
    """What an instance must be to take a request.

    Attributes:
        context: tokens for which it must have room.
        version: of the control protocol, which it must speak at least.
        left: the instance that a stream has lost, and that does not take it again without a new connection.
        heard_since: time on the router's clock since which it must have been heard from.
        adapter: digest of the adapter that it must have; empty: none.
    """

    context: int = 0
    version: int = 0
    left: InstanceHandle | None = None
    heard_since: float = -math.inf
    adapter: bytes = b""


class RequestState:
    """One running request. Implements `TokenStream` for the HTTP side; the dispatcher feeds it.

    Attributes:
        id: request id on the instances; another one for each attempt.
        prefill: the instance that computes the prompt. If `decode` is None, it does everything.
        decode: the decode instance, or None.
        final_instance: the instance that produces the end of the output.
        num_tokens: length of the prompt plus the output so far.
        remaining_tokens: number of tokens that may still be generated.
        emitted: tokens passed to the client so far.
        newest_field: `SamplingParams.newest_field` of its parameters.
        needs: which instances may take it.
        gaps: seconds before each token after the first.
        cached: instance id → number of leading tokens in its pool at the time of selection.
        is_plain: its outputs are tokens, without log probabilities, embeddings or a beam search.
        migrates_for: the kind of the error for which it last left an instance; empty if it has not.
        holders: the instances to which it was submitted since it last moved.
        has_answered: an instance has sent an output of it since the last submission.
        num_drops: instances that failed or were dropped for what they sent for this request, or perhaps for this request.
        leader: the choice of the same prompt along with which it was submitted, and which alone gets the prompt's log
            probabilities; None for that one itself, and for those that have moved since.
        is_follower: it was submitted along with another choice of the same prompt, which accounts for the prompt.
    """

    prefill: InstanceHandle
    decode: InstanceHandle | None
    final_instance: InstanceHandle

    def __init__(
        self,
        request: RoutedRequest,
        machine: HandOverMachine,
        timeline: Timeline,
        on_cancel: "Callable[[RequestState], None]",
    ) -> None:
        """`on_cancel` is called when the HTTP side cancels the stream."""
        self.request = request
        self.machine = machine
        self.timeline = timeline
        self.id = timeline.submission_id if timeline.attempt else request.request_id
        self.gaps = array("f")
        self.last_token_at: float | None = None
        self.is_follower = self.has_answered = False
        self.leader: RequestState | None = None
        self._own_scores: list[TokenLogprobs] = []  # of the prompt, since the last submission
        self.num_drops = 0
        self.migrates_for = ""
        self.holders: list[InstanceHandle] = []
        sampling = request.sampling
        self.newest_field = sampling.newest_field() if SINCE else (0, "")
        self.is_plain = (
            sampling.logprobs is None
            and sampling.prompt_logprobs is None
            and not (sampling.embed or sampling.beam_width)
        )
        self.emitted: list[int] = []
        self.num_tokens, self.remaining_tokens = len(request.prompt), sampling.max_tokens
        self.needs = Needs(self.num_tokens + sampling.max_tokens, self.newest_field[0], adapter=request.adapter)
        self.cached: Mapping[str, int] = {}
        self._on_cancel = on_cancel
        self._outputs: list[Output] = []  # not yet taken by the HTTP side
        self._error: RequestError | None = None  # raised after the outputs
        self.on_readable: Callable[[], object] = lambda: None

    @property
    def owner(self) -> InstanceHandle:
        """The instance that must act next."""
        return self.prefill if OWNER[self.machine.state] == "prefill" else self.final_instance

    @property
    def is_suspect(self) -> bool:
        """True if only an instance that is heard from again may take it."""
        return self.needs.heard_since > -math.inf

    @property
    def scores_prompt(self) -> bool:
        """True if the instance that samples the first token has to report the log probabilities of the prompt."""
        return self.request.sampling.prompt_logprobs is not None and not self.emitted

    @property
    def prompt_scores(self) -> list[TokenLogprobs]:
        """Log probabilities of the prompt that have arrived; all choices of a prompt share them."""
        return self._own_scores if self.leader is None else self.leader.prompt_scores

    @property
    def num_unscored(self) -> int:
        """Tokens of the prompt whose log probabilities are still due."""
        return len(self.request.prompt) - 1 - len(self.prompt_scores) if self.scores_prompt else 0

    def begin(self, selection: "Selection", leader: "RequestState | None", now: float) -> None:
        """Take the instances that were selected for the next submission, and forget what others have sent for the last one.

        Args:
            leader: the choice of the same prompt along with which it is submitted.
            now: time of the machine's clock.
        """
        self.prefill, self.decode, self.cached = selection.prefill, selection.decode, selection.request.cached
        self.final_instance = selection.decode or selection.prefill
        self.leader, self.is_follower = leader, leader is not None
        self.has_answered, self.holders, self._own_scores = False, [], []
        timeline = self.timeline
        timeline.prefill_instance, timeline.decode_instance = self.prefill.id, self.final_instance.id
        timeline.stored = timeline.loaded = NOTHING_MOVED
        self.machine.restart(self.decode is not None, now)

    def move(self, error: RequestError, now: float, heard_since: float) -> None:
        """Leave the instances for an error, and move alone from now on, see `Needs` for where to."""
        self.needs = replace(self.needs, left=self.final_instance, heard_since=heard_since)
        self.is_follower, self.leader = False, None
        self.migrates_for = error.kind
        self.timeline.migrations.append(Migration(now, self.final_instance.id, str(error)))
        self.timeline.attempt += 1
        self.id = self.timeline.submission_id

    def end_pause(self, now: float) -> float | None:
        """Record and return how long the client of a moved stream has waited for a token; None if it has one since."""
        paused = [move for move in self.timeline.migrations if move.pause_s is None]
        if not paused:
            return None
        seconds = now - (paused[0].at if self.last_token_at is None else self.last_token_at)
        for move in paused:
            move.pause_s = seconds
        return seconds

    def remaining_load(self, phase: "pb.Phase", num_computed: int = 0) -> Load:
        """Return the remaining work of a phase.

        Args:
            num_computed: leading tokens that are computed or cached. At least the last token has to be computed.
        """
        beams = max(1, self.request.sampling.beam_width)
        output, context = (0, 0) if phase == pb.PREFILL else (beams * self.remaining_tokens, beams * self.num_tokens)
        if phase == pb.DECODE or self.is_follower:
            return Load(output_tokens=output, context_tokens=context)
        tokens = max(1, self.num_tokens - num_computed)
        pairs = int(attention_pairs(tokens, self.num_tokens - tokens))
        return Load(1, tokens, output, context, prefills=1, attended_tokens=pairs)

    def submit(
        self, instance: InstanceHandle, phase: "pb.Phase", frame: pb.RouterFrame, choices: "Sequence[RequestState]"
    ) -> None:
        """Send an instance a frame with the phase added, and assign it the choices in it, of which this is the first."""
        for one in choices:
            instance.assign(one.id, one.remaining_load(phase, self.cached.get(instance.id, 0)))
            one.holders.append(instance)
        frame.submit.phase = phase
        if phase != pb.PREFILL:
            if self.request.prediction:
                frame.submit.prediction = self.request.prediction
            if self.request.leaves_nothing:
                frame.submit.leaves_nothing = True
        if phase == pb.DECODE and self.prefill.hello.namespace != instance.hello.namespace:
            frame.submit.writer.CopyFrom(self.prefill.hello.layout)
        instance.connection.send(frame)

    def send_handover(self, message: pb.HandOver) -> None:
        """Report prefill's progress to the decode instance, if there is a separate one."""
        if self.decode is not None:
            message.request_id = self.id
            self.decode.connection.send(pb.RouterFrame(hand_over=message))

    def cancel_on(self, instance: InstanceHandle) -> None:
        """Cancel the request on an instance that runs it."""
        instance.connection.send(pb.RouterFrame(cancel=pb.Cancel(request_id=self.id)))
        instance.unassign(self.id)

    def emit(self, output: Output, now: float) -> float | None:
        """Pass a valid output to the client. Return the seconds since the last one, by token; None for the first tokens."""
        count, gap = len(output.token_ids), None
        if self.last_token_at is None:  # the stamp is the router's own, because the client waits for it
            self.timeline.stamp(Stage.FIRST_TOKEN, now)
        elif count:
            gap = (now - self.last_token_at) / count
            self.gaps.extend(repeat(gap, count))
        self.last_token_at = now
        if not self.is_plain and self.scores_prompt:
            output.prompt_logprobs = self.prompt_scores
        self.emitted += output.token_ids
        self.num_tokens += count
        self.remaining_tokens -= count
        self.timeline.output_tokens += count
        for answer in output.hypotheses:
            self.timeline.output_tokens += len(answer.token_ids)
        self.timeline.finish_reason = output.finish_reason or ""
        if self._outputs and self.request.whole:
            self._outputs[0].extend(output)
        else:
            self._outputs.append(output)
        if self._has_items:
            self.on_readable()
        return gap

    def emit_error(self, error: RequestError) -> None:
        """End the client's stream with an error, after the outputs that it has not read yet."""
        self._error = error
        self.on_readable()

    def record_output(self, instance: InstanceHandle, output: Output, now: float) -> None:
        """Record an output's stamps and counts in the timeline, and the prompt's log probabilities.

        An instance sends each stamp as its age when the frame is written, which is subtracted from that of its arrival. So a
        delayed frame makes its stamps late, never early: nothing is stamped before the router sent what it answers.
        """
        self._own_scores += output.prompt_logprobs
        for name, age in output.stamps.items():
            is_own = name != Stage.FINISHED or instance is self.final_instance
            if is_own and name != RELEASED:  # of an earlier request with the same id
                self.timeline.stamp(Stage(name), now - age)
        if output.sources is not None and not self.timeline.migrations:
            self.timeline.computed_tokens = output.sources.computed
            self.timeline.local_hit_tokens = output.sources.local_hit
            self.timeline.loaded_tokens = output.sources.loaded
        if output.drafted is not None:
            self.timeline.drafted += output.drafted
        if output.predicted is not None:
            self.timeline.predicted += output.predicted
        if output.moved is not None and instance is self.decode:
            self.timeline.loaded = output.moved
        elif output.moved is not None:
            self.timeline.stored = output.moved

    @property
    def _has_items(self) -> bool:
        """There is an error or an output to read; for a request with `whole`, an error or the last output."""
        if self._error is not None:
            return True
        return bool(self._outputs) and (not self.request.whole or self._outputs[-1].finish_reason is not None)

    def take(self) -> list[Output]:
        if not self._has_items:
            return []
        outputs, self._outputs = self._outputs, []
        if not outputs:
            assert self._error is not None
            raise self._error
        return outputs

    def cancel(self, finish_reason: str = "cancelled") -> None:
        if not self.machine.is_over:
            self.timeline.finish_reason = finish_reason
            self._on_cancel(self)

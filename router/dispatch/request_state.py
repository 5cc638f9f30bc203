"""State of one running request: its instances, its hand-over machine, its timeline, and its output stream."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import overload

from pdserve.beam_search import Hypothesis
from pdserve.costs import attention_pairs
from pdserve.errors import RequestError
from pdserve.lifetime import RELEASED, Stage
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import SINCE, TokenLogprobs
from pdserve.router.backend import Chunk
from pdserve.router.dispatch.handover import OWNER, HandOverMachine
from pdserve.router.instances.fleet import InstanceHandle
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.scheduling.policy import Load, PlacementRequest
from pdserve.router.telemetry.timeline import Timeline, TransferStats
from pdserve.router.telemetry.traffic import prompt_ids


class RequestState:
    """One running request. Implements `TokenStream` for the HTTP side; the dispatcher feeds it.

    Attributes:
        prefill: the instance that computes the prompt. If `decode` is None, it does everything.
        decode: the decode instance, or None.
        emitted: tokens passed to the client so far.
        newest_field: `SamplingParams.newest_field` of its parameters.
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

    def __init__(
        self, request: RoutedRequest, machine: HandOverMachine, on_cancel: "Callable[[RequestState], None]"
    ) -> None:
        """`on_cancel` is called when the HTTP side cancels the stream."""
        self.request = request
        self.machine = machine
        block, ids = prompt_ids(request.keys)
        self.timeline = Timeline(
            request.request_id,
            request.traceparent,
            "chat" if request.multi_turn else "text_completion",
            request.sampling.max_tokens,
            prompt_tokens=len(request.prompt),
            prompt_block=block,
            prompt_ids=ids,
        )
        self.gaps = array("f")
        self.last_token_at: float | None = None
        self.is_follower = self.has_answered = False
        self.leader: RequestState | None = None
        self._own_scores: list[pb.Logprobs] = []  # of the prompt, since the last submission
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
        self.cached: Mapping[str, int] = {}
        self._on_cancel = on_cancel
        self._chunks: list[Chunk] = []  # not yet taken by the HTTP side
        self._error: RequestError | None = None  # raised after the chunks
        self.on_readable: Callable[[], object] = lambda: None

    @property
    def id(self) -> str:
        """Request id on the instances."""
        return self.timeline.submission_id

    @property
    def final_instance(self) -> InstanceHandle:
        """The instance that produces the end of the output."""
        return self.decode or self.prefill

    @property
    def owner(self) -> InstanceHandle:
        """The instance that must act next."""
        return self.prefill if OWNER[self.machine.state] == "prefill" else self.final_instance

    @property
    def num_tokens(self) -> int:
        """Length of the prompt plus the output so far."""
        return len(self.request.prompt) + len(self.emitted)

    @property
    def remaining_tokens(self) -> int:
        """Number of tokens that may still be generated."""
        return self.request.sampling.max_tokens - len(self.emitted)

    @property
    def placement_request(self) -> PlacementRequest:
        """The request in its current state, for the policies."""
        return PlacementRequest(
            self.num_tokens,
            session=self.request.session,
            cached=self.cached,
            output_tokens=self.remaining_tokens
            + bool(self.request.sampling.beam_width),  # one alone has no decode phase
            scores_prompt=self.scores_prompt,
            newest_field=self.newest_field,
        )

    @property
    def scores_prompt(self) -> bool:
        """True if the instance that samples the first token has to report the log probabilities of the prompt."""
        return self.request.sampling.prompt_logprobs is not None and not self.emitted

    @property
    def prompt_scores(self) -> list[pb.Logprobs]:
        """Log probabilities of the prompt that have arrived; all choices of a prompt share them."""
        return self._own_scores if self.leader is None else self.leader.prompt_scores

    @property
    def num_unscored(self) -> int:
        """Tokens of the prompt whose log probabilities are still due."""
        return len(self.request.prompt) - 1 - len(self.prompt_scores) if self.scores_prompt else 0

    def begin(self) -> None:
        """Forget what instances have sent for the last submission, before the next one."""
        self.has_answered, self.holders, self._own_scores = False, [], []

    def leave_leader(self) -> None:
        """Move alone from now on."""
        self.is_follower, self.leader = False, None

    def follow(self, other: "RequestState") -> None:
        """Use the instances that were selected for another choice of the same prompt."""
        self.is_follower, self.leader = True, other
        self.prefill, self.decode, self.cached = other.prefill, other.decode, other.cached
        self.timeline.placement = other.timeline.placement
        self.timeline.decisions += other.timeline.decisions

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

    def submit_frame(self, others: "Sequence[RequestState]" = ()) -> pb.RouterFrame:
        """Return a frame with the request in its current state, without the phase, and the other choices of its prompt.

        The submission is built inside of the frame: copying a long prompt into it would take as long again.
        """
        frame = pb.RouterFrame()
        submit, request = frame.submit, self.request
        submit.request_id, submit.request = self.id, request.pack()
        submit.output.extend(self.emitted)
        for other in others:
            submit.members.add(request_id=other.id, seed=other.request.sampling.seed)
        return frame

    def submit(
        self,
        instance: InstanceHandle,
        phase: "pb.Phase",
        frame: pb.RouterFrame,
        others: "Sequence[RequestState]" = (),
    ) -> None:
        """Assign the request to an instance and send it `frame` with the phase set.

        Args:
            frame: from `submit_frame`, not shared.
            others: other choices of its prompt in the frame.
        """
        for one in (self, *others):
            instance.assign(one.id, one.remaining_load(phase, self.cached.get(instance.id, 0)))
            one.holders.append(instance)
        frame.submit.phase = phase
        if phase == pb.DECODE and self.prefill.hello.namespace != instance.hello.namespace:
            frame.submit.writer.CopyFrom(self.prefill.hello.layout)
        instance.send(frame)

    def send_handover(self, message: pb.HandOver) -> None:
        """Report prefill's progress to the decode instance, if there is a separate one."""
        if self.decode is not None:
            message.request_id = self.id
            self.decode.send(pb.RouterFrame(hand_over=message))

    def cancel_on(self, instance: InstanceHandle) -> None:
        """Cancel the request on one instance, unless that has already finished it."""
        if self.id in instance.requests:
            instance.send(pb.RouterFrame(cancel=pb.Cancel(request_id=self.id)))
            instance.unassign(self.id)

    def chunk(self, output: pb.Output) -> Chunk:
        """Return what the client reads of a valid output."""
        if self.is_plain:
            return Chunk(list(output.token_ids), output.finish_reason or None)
        return Chunk(
            list(output.token_ids),
            output.finish_reason or None,
            [_logprobs(one) for one in output.logprobs],
            PromptScores(self.prompt_scores) if self.scores_prompt else [],
            [_hypothesis(one) for one in output.hypotheses],
            output.embedding,
        )

    def emit(self, chunk: Chunk, now: float) -> None:
        """Pass a chunk to the client."""
        if self.last_token_at is None:  # the stamp is the router's own, because the client waits for it
            self.timeline.stamp(Stage.FIRST_TOKEN, now)
        self.last_token_at = now
        self.emitted += chunk.token_ids
        self.timeline.output_tokens += len(chunk.token_ids)
        for answer in chunk.hypotheses:
            self.timeline.output_tokens += len(answer.token_ids)
        self.timeline.finish_reason = chunk.finish_reason or ""
        if self._chunks and self.request.whole:
            self._chunks[0].extend(chunk)
        else:
            self._chunks.append(chunk)
        if self._has_items:
            self.on_readable()

    def emit_error(self, error: RequestError) -> None:
        """End the client's stream with an error, after the chunks that it has not read yet."""
        self._error = error
        self.on_readable()

    def record_output(self, instance: InstanceHandle, output: pb.Output, now: float) -> None:
        """Record an output's stamps and counts in the timeline, and the prompt's log probabilities.

        An instance sends each stamp as its age, which is subtracted from the frame's time of arrival. So a delayed frame
        makes its stamps late, never early: what an instance does on a message is not stamped before the router sent that.
        """
        if not self.is_plain and output.prompt_logprobs:
            self._own_scores += output.prompt_logprobs
        for stamp in output.stamps:
            if stamp.stage == RELEASED:
                continue  # of an earlier request with the same id
            stage = Stage(stamp.stage)
            if stage is not Stage.FINISHED or instance is self.final_instance:
                self.timeline.stamp(stage, now - stamp.seconds)
        if output.HasField("tokens") and not self.timeline.migrations:
            self.timeline.computed_tokens = output.tokens.computed
            self.timeline.local_hit_tokens = output.tokens.local_hit
            self.timeline.loaded_tokens = output.tokens.loaded
        if output.HasField("moved"):
            transfer = TransferStats(output.moved.blocks, output.moved.bytes, output.moved.seconds)
            if instance is self.decode:
                self.timeline.loaded = transfer
            else:
                self.timeline.stored = transfer

    @property
    def _has_items(self) -> bool:
        """There is an error or a chunk to read; for a request with `whole`, an error or the last chunk."""
        if self._error is not None:
            return True
        return bool(self._chunks) and (not self.request.whole or self._chunks[-1].finish_reason is not None)

    def take(self) -> list[Chunk]:
        if not self._has_items:
            return []
        chunks, self._chunks = self._chunks, []
        if not chunks:
            assert self._error is not None
            raise self._error
        return chunks

    def cancel(self, finish_reason: str = "cancelled") -> None:
        if not self.machine.is_over:
            self.timeline.finish_reason = finish_reason
            self._on_cancel(self)


class PromptScores(Sequence[TokenLogprobs]):
    """Log probabilities of a prompt, converted when they are read: for a long prompt that is done in a thread."""

    def __init__(self, messages: list[pb.Logprobs]) -> None:
        self._messages = messages

    def __len__(self) -> int:
        return len(self._messages)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, index: slice) -> "PromptScores": ...

    def __getitem__(self, index: int | slice) -> "TokenLogprobs | PromptScores":
        if isinstance(index, slice):
            return PromptScores(self._messages[index])
        return _logprobs(self._messages[index])


def _hypothesis(message: pb.Hypothesis) -> Hypothesis:
    logprobs = tuple(map(_logprobs, message.logprobs))
    return Hypothesis(tuple(message.token_ids), message.score, message.finish_reason, logprobs)


def _logprobs(message: pb.Logprobs) -> TokenLogprobs:
    return TokenLogprobs(message.logprob, tuple(zip(message.top_ids, message.top_logprobs, strict=True)), message.rank)

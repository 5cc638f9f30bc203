"""One request under way on its instances: what is known of it, what is left of it, and its tokens on their way out."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

from pdserve.costs import attended
from pdserve.errors import RequestError
from pdserve.lifetime import Stage
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request, TokenLogprobs
from pdserve.router.backend import Chunk
from pdserve.router.dispatch.handover import OWNER, HandOver
from pdserve.router.instances.fleet import InstanceHandle
from pdserve.router.scheduling.policy import Load, PlacementRequest
from pdserve.router.telemetry.timeline import Moved, Timeline


class RequestState:
    """A TokenStream for the HTTP side, fed by the dispatcher, whom `on_cancel` tells that nobody wants more."""

    prefill: InstanceHandle
    decode: InstanceHandle | None  # None: prefill does everything

    def __init__(self, request: Request, machine: HandOver, on_cancel: "Callable[[RequestState], None]") -> None:
        self.request = request
        self.machine = machine
        self.timeline = Timeline(request.request_id, request.traceparent, prompt_tokens=len(request.prompt))
        self.last_token_at: float | None = None
        self.started = 0.0  # when instances were asked
        self.hedged = False  # since then, a second instance was to be asked to prefill too; once is enough
        self.hedge: InstanceHandle | None = None  # asked to prefill too, because the first one is late
        self.held: list[pb.Output] = []  # what it has said, until it turns out to be the faster one
        self.emitted: list[int] = []
        self.cached: Mapping[str, int] = {}  # instance id → leading tokens in its pool when it was picked
        self._on_cancel = on_cancel
        self._chunks: list[Chunk] = []  # what the client's side has not taken yet
        self._error: RequestError | None = None  # after that
        self._news = asyncio.Event()

    @property
    def id(self) -> str:
        """What instances call it: they may still be busy with what it was before it moved."""
        moves = self.timeline.migrations
        return f"{self.request.request_id}#{moves}" if moves else self.request.request_id

    @property
    def last_instance(self) -> InstanceHandle:
        """The instance that produces the output's end."""
        return self.decode or self.prefill

    @property
    def owner(self) -> InstanceHandle:
        """The instance that must act next."""
        return self.prefill if OWNER[self.machine.state] == "prefill" else self.last_instance

    @property
    def tokens(self) -> int:
        """Of prompt and output so far."""
        return len(self.request.prompt) + len(self.emitted)

    @property
    def tokens_left(self) -> int:
        return self.request.sampling.max_tokens - len(self.emitted)

    @property
    def placement_request(self) -> PlacementRequest:
        """What is to be placed by now."""
        return PlacementRequest(
            self.tokens, session=self.request.session, cached=self.cached, output_tokens=self.tokens_left
        )

    def left(self, phase: "pb.Phase", done: int = 0) -> Load:
        """What is left to do in a phase, with so many tokens computed or cached. The last one always has to be computed."""
        output, context = (0, 0) if phase == pb.PREFILL else (self.tokens_left, self.tokens)
        if phase == pb.DECODE:
            return Load(output_tokens=output, context_tokens=context)
        tokens = max(1, self.tokens - done)
        pairs = int(attended(tokens, self.tokens - tokens))
        return Load(1, tokens, output, context, prefills=1, attended_tokens=pairs)

    def submission(self) -> pb.RouterFrame:
        """What the request is by now, but for the phase. Built in its frame: copying a long prompt takes as long."""
        frame = pb.RouterFrame()
        submit, request = frame.submit, self.request
        submit.request_id, submit.salt = self.id, request.salt
        submit.multi_turn, submit.priority, submit.whole = request.multi_turn, request.priority, request.whole
        submit.prompt.extend(request.prompt)
        submit.output.extend(self.emitted)
        submit.sampling.CopyFrom(pb.Sampling(**vars(request.sampling)))
        return frame

    def submit(self, instance: InstanceHandle, phase: "pb.Phase", frame: pb.RouterFrame) -> None:
        instance.give(self.id, self.left(phase, self.cached.get(instance.id, 0)))
        frame.submit.phase = phase
        if phase == pb.DECODE and self.prefill.hello.namespace != instance.hello.namespace:
            frame.submit.writer.CopyFrom(self.prefill.hello.layout)
        instance.send(frame)

    def hand_over(self, message: pb.HandOver) -> None:
        """Tells decode, if there is one apart, what prefill has done."""
        if self.decode is not None:
            message.request_id = self.id
            self.decode.send(pb.RouterFrame(hand_over=message))

    def let_go(self, instance: InstanceHandle) -> None:
        """Tells an instance that nobody wants more of this request, unless it has said itself that it is done."""
        if self.id in instance.requests:
            instance.send(pb.RouterFrame(cancel=pb.Cancel(request_id=self.id)))
            instance.release(self.id)

    def put(self, item: Chunk | RequestError) -> None:
        if isinstance(item, RequestError):
            self._error = item
        elif self._chunks and self.request.whole:
            self._chunks[0].extend(item)
        else:
            self._chunks.append(item)
        if self._due:
            self._news.set()

    @property
    def _due(self) -> bool:
        """Whether there is something for the client's side; of a whole answer, that is its end."""
        if self._error is not None or not self._chunks:
            return self._error is not None
        return not self.request.whole or self._chunks[-1].finish_reason is not None

    async def __aiter__(self) -> AsyncIterator[list[Chunk]]:
        while True:
            if not self._due:
                self._news.clear()
                await self._news.wait()
            chunks, self._chunks = self._chunks, []
            if not chunks:
                assert self._error is not None
                raise self._error
            yield chunks
            if chunks[-1].finish_reason is not None:
                return

    def cancel(self, finish_reason: str = "cancelled") -> None:
        if not self.machine.ended:
            self.timeline.finish_reason = finish_reason
            self._on_cancel(self)

    def emit(self, output: pb.Output, now: float) -> None:
        """Passes an output's tokens on to the client."""
        if self.last_token_at is None:
            self.timeline.stamp(Stage.FIRST_TOKEN, now)
        self.last_token_at = now
        self.emitted += output.token_ids
        self.timeline.output_tokens += len(output.token_ids)
        self.timeline.finish_reason = output.finish_reason
        logprobs = [_logprobs(one) for one in output.logprobs]
        self.put(Chunk(list(output.token_ids), output.finish_reason or None, logprobs))

    def note(self, instance: InstanceHandle, output: pb.Output, now: float) -> None:
        """Takes stamps and counts into the timeline; instances stamp in seconds before they sent the frame.

        What one instance did because of another's news is then never stamped before it: a frame that is late makes
        its stamps late, not early.
        """
        for stamp in output.stamps:
            stage = Stage(stamp.stage)
            # The client's first token counts, hence the router's own stamp, in `emit`.
            if stage is not Stage.FIRST_TOKEN and (stage is not Stage.FINISHED or instance is self.last_instance):
                self.timeline.stamp(stage, now - stamp.seconds)
        if output.HasField("tokens") and not self.timeline.migrations:
            self.timeline.computed_tokens = output.tokens.computed
            self.timeline.local_hit_tokens = output.tokens.local_hit
            self.timeline.loaded_tokens = output.tokens.loaded
        if output.HasField("moved"):
            moved = Moved(output.moved.blocks, output.moved.bytes, output.moved.seconds)
            if instance is self.decode:
                self.timeline.loaded = moved
            else:
                self.timeline.stored = moved


def _logprobs(message: pb.Logprobs) -> TokenLogprobs:
    return TokenLogprobs(message.logprob, tuple(zip(message.top_ids, message.top_logprobs, strict=True)))

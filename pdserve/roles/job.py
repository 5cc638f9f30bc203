"""One request on one instance: its sequence, who asked, and the news that the next frame will carry."""

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from pdserve.costs import attended
from pdserve.engine.sequence import Sequence
from pdserve.kv_transfer.connector import Outcome, Result
from pdserve.lifetime import Stage
from pdserve.proto import pdserve_pb2 as pb

T = TypeVar("T")

WHOLE_TOKENS = 16  # of an answer that nobody reads before its end: so many are worth a place in a frame


@dataclass(eq=False)
class Job:
    """Lives from Submit until nothing of the request is left on the instance.

    Attributes:
        link: the router that asked.
        multi_turn: another turn may follow, whose prompt begins with this one's and its output.
        whole: its tokens are wanted together.
        keys: content keys of the prompt's blocks, the partial last one included.
        output: news since the last frame, or None.
        urgent: they go with the next one.
        transfers: stores or loads under way; they hold blocks until they are done.
        moved_blocks, moved_seconds, moved_until: those that have ended: their blocks, the time in which at least one of
            them was under way, and when the last one ended.
        over: the router has been told how it ended, or does not want to know.
        cut_short: the latter.
    """

    link: str
    seq: Sequence
    phase: "pb.Phase"
    multi_turn: bool = False
    whole: bool = False
    keys: list[bytes] = field(default_factory=list)
    output: pb.Output | None = None
    urgent: bool = False
    stamped: set[Stage] = field(default_factory=set)
    transfers: int = 0
    moved_blocks: int = 0
    moved_seconds: float = 0.0
    moved_until: float = -math.inf
    over: bool = False
    cut_short: bool = False

    def pending_output(self, *, urgent: bool = True) -> pb.Output:
        self.urgent = self.urgent or urgent
        if self.output is None:
            self.output = pb.Output(request_id=self.seq.request_id)
        return self.output

    def stamp(self, stage: Stage, now: float) -> None:
        if stage not in self.stamped:
            self.stamped.add(stage)
            self.pending_output().stamps.add(stage=stage.value, seconds=now)  # made relative when the frame is sent

    def moved(self, result: Result, now: float) -> None:
        """Adds a transfer that has just ended to the request's totals. Time shared with others counts once."""
        self.moved_blocks += result.outcomes.count(Outcome.OK)
        self.moved_seconds += min(result.seconds, now - self.moved_until)
        self.moved_until = now

    def report_transfer(self, block_bytes: int) -> None:
        """Reports the totals, along with other news: they are not worth a frame of their own in the middle of a hand-over."""
        self.pending_output().moved.CopyFrom(
            pb.Moved(blocks=self.moved_blocks, bytes=self.moved_blocks * block_bytes, seconds=self.moved_seconds)
        )

    def sources(self) -> dict[str, int]:
        """Where the KV of the prompt came from, in tokens."""
        hit, loaded = self.seq.num_local_hit, self.seq.num_loaded
        return {"computed": self.seq.num_given - hit - loaded, "local_hit": hit, "loaded": loaded}

    def report_prompt_sources(self) -> None:
        """Reports the sources to the router: the instance that prefilled does."""
        self.pending_output().tokens.CopyFrom(pb.Tokens(**self.sources()))

    def left(self) -> pb.Load:
        """What is left to do of it here."""
        seq, load = self.seq, pb.Load(requests=1)
        sampled = len(seq) > seq.num_given
        waits = self.phase == pb.DECODE and not seq.admitted  # for KV that is computed elsewhere
        if not sampled and not waits:
            load.prefills = 1
            load.prefill_tokens = seq.num_missing
            load.attended_tokens = int(attended(seq.num_missing, seq.num_computed))
        if self.phase != pb.PREFILL:
            load.output_tokens = seq.sampling.max_tokens - seq.num_output
            load.context_tokens = len(seq)
        return load

    def report_token(self) -> None:
        """The token that has just been sampled, with what was asked about it."""
        pending_output, logprobs = self.pending_output(urgent=not self.whole), self.seq.last_logprobs
        pending_output.token_ids.append(self.seq.tokens[-1])
        if len(self.seq) == self.seq.num_given + 1 or len(pending_output.token_ids) == WHOLE_TOKENS:
            self.urgent = True
        if logprobs is not None:
            top = logprobs.top
            pending_output.logprobs.add(
                logprob=logprobs.logprob, top_ids=[one for one, _ in top], top_logprobs=[value for _, value in top]
            )

    def finish(self, reason: str, now: float) -> None:
        self.stamp(Stage.FINISHED, now)
        self.pending_output().finish_reason = reason
        self.over = True


class InstanceContext(Protocol):
    """What a role needs of the instance that it works in."""

    def now(self) -> float:
        """Seconds, monotonic."""

    def when_done(self, future: Future[T], then: Callable[[T], None]) -> None:
        """Calls `then(result)` on the engine thread once the future is done."""

    def close_job(self, job: Job) -> None:
        """Nothing of the job is left; forgets it once its last news is sent."""

    def count(self, name: str, value: float, **labels: str) -> None: ...

    def moved(self, blocks: int, seconds: float) -> None:
        """A transfer has taken so long, without the time that it waited for others."""

    def count_sources(self, job: Job) -> None:
        """Adds a prompt to pdserve_prompt_tokens_by_source, once per instance that held it."""

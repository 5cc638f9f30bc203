"""State of one request on one instance: its sequence, its router link, and the output for the next frame."""

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.beam_search import Hypothesis
from pdserve.costs import attention_pairs
from pdserve.engine.features import Embedding, PromptScores, find
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Accepted
from pdserve.errors import RequestError
from pdserve.keys import Layout
from pdserve.kv_transfer.connector import Outcome, Result
from pdserve.lifetime import Stage
from pdserve.output import Failure, Moved, Output, Predicted, Sources, Stored
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import TokenLogprobs

LOGPROBS_PER_OUTPUT = 4096  # of a prompt, the top tokens included: some 40 KB and 2 ms
BATCHED_TOKENS = 16  # tokens per frame of an answer that the client reads only at its end


@dataclass(frozen=True)
class GroupedResult(Result):
    """Result of a transfer of blocks of several groups, with one outcome for all those of the same tokens.

    Attributes:
        tail_bytes: bytes that were moved besides the first group's blocks of these outcomes.
    """

    tail_bytes: int = 0


@dataclass(eq=False)
class Job:
    """One request on this instance, from its Submit frame until the instance holds nothing of it.

    Attributes:
        link: name of the router link over which the request came.
        phase: prefill, decode, or both.
        multi_turn: another turn may follow, whose prompt begins with this prompt and its output.
        whole: the client reads the answer only at its end, so tokens are sent in batches.
        pin: the prompt's blocks are to be pinned at its end.
        keys: keys of the prompt's blocks, including a partial last one.
        output: what has happened since the last frame, or None.
        urgent: send `output` with the next frame.
        stamped: stages that have been reported.
        open_transfers: unfinished stores and loads. They hold their blocks until they end.
        transferred_blocks: blocks moved by finished transfers.
        tail_bytes: bytes of further groups that were moved with them.
        transfer_seconds: time in which at least one transfer was active.
        last_transfer_end: when the last transfer ended.
        leader: the first choice of the same prompt, which alone reports the prompt's log probabilities.
        scores: log probabilities of the prompt's tokens that are to be sent before `output`.
        ended: the router needs nothing more, because the end was reported or the request was cancelled.
        cancelled: the request was cancelled, or its link closed.
    """

    link: str
    seq: Sequence
    phase: "pb.Phase"
    multi_turn: bool = False
    whole: bool = False
    pin: bool = False
    keys: list[bytes] = field(default_factory=list)
    output: Output | None = None
    urgent: bool = False
    stamped: set[Stage] = field(default_factory=set)
    open_transfers: int = 0
    transferred_blocks: int = 0
    tail_bytes: int = 0
    transfer_seconds: float = 0.0
    last_transfer_end: float = -math.inf
    leader: "Job | None" = None
    scores: list[TokenLogprobs] = field(default_factory=list)
    ended: bool = False
    cancelled: bool = False

    def pending_output(self, *, urgent: bool = True) -> Output:
        """Return the output for the next frame, creating it if needed."""
        self.urgent = self.urgent or urgent
        if self.output is None:
            self.output = Output(request_id=self.seq.request_id)
        return self.output

    def take_output(self) -> Output | None:
        """Return what the next frame has of this request; None if nothing is due.

        The log probabilities of a long prompt come in pieces, one for each call, and the output with the last: neither this
        thread nor the router's is to be busy with them for long. Other choices of the prompt wait until they are sent.
        """
        if self.output is None or not self.urgent or (self.leader is not None and self.leader.scores):
            return None
        if self.scores:
            size = max(1, LOGPROBS_PER_OUTPUT // (1 + (self.seq.sampling.prompt_logprobs or 0)))
            piece, self.scores = self.scores[:size], self.scores[size:]
            if self.scores:
                return Output(request_id=self.seq.request_id, prompt_logprobs=piece)
            self.output.prompt_logprobs = piece
        output, self.output, self.urgent = self.output, None, False
        return output

    def mark_cancelled(self) -> None:
        """Drop unsent tokens. Unsent stamps, as of a store that ended just before, still complete the timeline."""
        self.cancelled, self.scores = True, []
        if (old := self.output) is not None:
            self.output = Output(request_id=old.request_id, error=old.error, stamps=old.stamps)
            self.output.sources, self.output.moved, self.output.searching = old.sources, old.moved, old.searching

    def stamp(self, stage: Stage, now: float) -> None:
        """Report when a stage was reached. Only the first stamp of a stage counts."""
        if stage not in self.stamped:
            self.stamped.add(stage)
            self.pending_output().stamps[stage.value] = now  # made relative when the frame is sent

    def record_transfer(self, result: Result, now: float) -> None:
        """Add a transfer that has just ended to the totals. Time shared by several transfers counts once."""
        self.transferred_blocks += result.outcomes.count(Outcome.OK)
        if isinstance(result, GroupedResult):
            self.tail_bytes += result.tail_bytes
        self.transfer_seconds += min(result.seconds, now - self.last_transfer_end)
        self.last_transfer_end = now

    def report_transfers(self, layout: Layout) -> None:
        """Report the transfer totals. Called along with other output, because they are not worth a frame of their own."""
        num_bytes = self.transferred_blocks * layout.groups[0].bytes_on_all_ranks + self.tail_bytes * layout.ranks
        seconds = round(self.transfer_seconds, 9)  # routers refuse fractions of a nanosecond
        self.pending_output().moved = Moved(self.transferred_blocks, num_bytes, seconds)

    def pending_stored(self) -> Stored:
        """Return what the next frame tells of the prompt's stores, creating it if needed."""
        output = self.pending_output()
        output.stored = output.stored or Stored()
        return output.stored

    def prompt_sources(self) -> dict[str, int]:
        """Return the number of prompt tokens by the source of their KV."""
        hit, loaded, unneeded = self.seq.kv.num_local_hit, self.seq.kv.num_loaded, self.seq.kv.num_unneeded
        computed = self.seq.kv.num_initial - hit - loaded - unneeded
        return {"computed": computed, "local_hit": hit, "loaded": loaded, "unneeded": unneeded}

    def report_prompt_sources(self) -> None:
        """Report the sources to the router. Only the instance that prefills the prompt does."""
        sources = self.prompt_sources()
        cached = sources["loaded"] + sources["unneeded"]  # to the router, both are cached tokens
        self.pending_output().sources = Sources(sources["computed"], sources["local_hit"], cached)

    def count_prompt_sources(self, context: "InstanceContext") -> None:
        """Add the prompt to `pdserve_prompt_tokens_by_source_total`, once per instance that held it."""
        for source, tokens in self.prompt_sources().items():
            context.count("prompt_tokens_by_source", tokens, source=source)

    def remaining_load(self) -> pb.Load:
        """Return the work that the request still needs on this instance."""
        seq, load = self.seq, pb.Load(requests=1)
        has_sampled = len(seq) > seq.kv.num_initial or seq.leader is not None  # whose load has the prompt
        has_sampled |= seq.group is not None and seq.group.search.num_steps > 0
        awaits_kv = self.phase == pb.DECODE and not seq.kv.admitted  # another instance computes the prompt
        if not has_sampled and not awaits_kv:
            load.prefills = 1
            load.prefill_tokens = len(seq) - seq.kv.num_computed
            load.attended_tokens = int(attention_pairs(load.prefill_tokens, seq.kv.num_computed))
        if self.phase != pb.PREFILL:
            load.output_tokens = seq.sampling.max_tokens - seq.output.num_generated
            load.context_tokens = len(seq)
        return load

    def report_tokens(self, accepted: Accepted, now: float) -> None:
        """Report the tokens that a step has appended, with their log probabilities if requested, and the end if it is."""
        output = self.pending_output(urgent=not self.whole)
        output.token_ids.extend(accepted.tokens)
        is_first = len(self.seq) == self.seq.kv.num_initial + len(accepted.tokens)
        if is_first or len(output.token_ids) >= BATCHED_TOKENS:
            self.urgent = True
        output.logprobs.extend(accepted.logprobs)
        if accepted.num_drafts:
            num_right = len(accepted.tokens) - 1
            drafts = Predicted(num_right, accepted.num_drafts - num_right)
            output.drafted = drafts if output.drafted is None else output.drafted + drafts
            if accepted.num_predicted:
                output.predicted = drafts if output.predicted is None else output.predicted + drafts
        if is_first and self.seq.features and self.leader is None and (found := find(PromptScores, self.seq)):
            self.scores = [of_prompt for _, of_prompt in sorted(found.scores.items())]
        if accepted.finish_reason is not None:
            self.finish(accepted.finish_reason, now)

    def report_answers(self, answers: SequenceABC[Hypothesis]) -> None:
        """Report the answers of a beam search that is over."""
        self.pending_output().hypotheses = [*answers]

    def reject(self, error: RequestError) -> None:
        """Report that the request has failed, which ends it."""
        self.pending_output().error = failure(error)
        self.ended = True

    def report_embedding(self, now: float) -> bool:
        """Report the embedding of the prompt, which ends the request, if that is what it asks for and there is one."""
        found = find(Embedding, self.seq)
        if found is None or not found.vector:
            return False
        self.pending_output().embedding = found.vector
        self.finish("stop", now)
        return True

    def finish(self, reason: str, now: float) -> None:
        """Report the end of the request, with its OpenAI finish reason."""
        self.stamp(Stage.FINISHED, now)
        self.pending_output().finish_reason = reason
        self.ended = True


def failure(error: RequestError) -> Failure:
    """Return an error for a frame. What UTF-8 cannot express, as a plug-in's message about a client's text, is replaced."""
    return Failure(error.kind, str(error).encode(errors="replace").decode())


class InstanceContext(Protocol):
    """Services that an instance provides to its roles."""

    def now(self) -> float:
        """Return the time in seconds, monotonic."""

    def post(self, work: Callable[[], None]) -> None:
        """Run a function on the engine thread. May be called from any thread."""

    def send_outputs(self) -> None:
        """Send what is to be told to routers now, rather than after the current step."""

    def close_job(self, job: Job) -> None:
        """Forget a job of which nothing is held any more, once its last output is sent."""

    def count(self, name: str, value: float, **labels: str) -> None:
        """Add `value` to a counter of `pdserve.counters`."""

    def record_transfer(self, nbytes: int, seconds: float, now: float) -> None:
        """Add a finished transfer to the cost model. `seconds` excludes time in the queue."""

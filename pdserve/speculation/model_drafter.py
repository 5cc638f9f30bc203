"""ModelDrafter: the drafts of a second, smaller model, whatever computes it: for whom, how many, and with which KV.

Its KV is in a pool of its own. It is a function of a sequence's tokens, so nothing of it is handed over or migrates: an
instance computes it from the first token on that a sequence gets there, a few blocks of the prompt in each step, and proposes
nothing until that is done. Who gets no blocks, or no more, goes on without drafts.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import eq

from pdserve.config import EngineConfig
from pdserve.costs import Work
from pdserve.counters import series
from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.memory.groups import BlockTable
from pdserve.engine.memory.sequence_kv import block_table
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Drafter, StepPlan
from pdserve.keys import Tokens
from pdserve.speculation.lengths import PREDICTED, Acceptance, Step, common_length
from pdserve.speculation.matches import continue_predicted

CATCH_UP_TOKENS = 128  # of prompts in a step, together: the streams beside them wait for these
AT_ONCE = 2  # tokens behind the KV of a sequence that has drafted: after right drafts, the last of them and one more
PROBE_STEPS = 64  # where no drafts pay, one is computed that often
TIMED = 16  # steps of which the mean time counts, the latest most
MAX_RATIO = 4.0  # of a time to that mean: what lost the processor, or was recorded, counts no more


@dataclass(eq=False, slots=True)
class DraftKV:
    """The KV that the draft model has of a sequence.

    Attributes:
        num_computed: leading tokens that have KV, those of `drafts` included.
        num_registered: leading blocks that are registered in the pool by key.
        drafts: what was drafted last, behind the first `length` tokens.
        acceptance: of its drafts.
    """

    block_ids: BlockTable = field(default_factory=block_table)
    num_computed: int = 0
    num_registered: int = 0
    drafts: list[int] = field(default_factory=list)
    length: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)

    def follow(self, tokens: Tokens) -> list[bool]:
        """Keep the KV of drafts that have come true, but for the last token, whose logits are needed.

        Returns:
            Of each draft up to the first wrong one, whether it was right.
        """
        agree = [*map(eq, self.drafts, tokens[self.length :])]
        right = agree.index(False) if False in agree else len(agree)
        self.num_computed = min(self.num_computed, self.length + right, len(tokens) - 1)
        self.drafts, self.length = [], len(tokens)
        return agree[: right + 1]

    def find(self, pool: BlockPool, keys: list[bytes]) -> None:
        """Take the blocks of the longest prefix of these keys that the pool has."""
        hits = pool.match(keys)
        pool.hold(hits)
        self.block_ids, self.num_registered = block_table(hits), len(hits)
        self.num_computed = len(hits) * pool.block_size

    def register(self, pool: BlockPool, keys: list[bytes]) -> None:
        """Make its full blocks prefix hits for others."""
        for index in range(self.num_registered, self.num_computed // pool.block_size):
            pool.register(self.block_ids[index], keys[index])
            self.num_registered = index + 1

    def grow(self, pool: BlockPool, count: int) -> None:
        """Take `count` further blocks of the pool."""
        self.block_ids.extend(pool.allocate(count))

    def compute(self, count: int) -> None:
        """Count `count` further tokens as computed."""
        self.num_computed += count

    def release(self, pool: BlockPool) -> None:
        """Give up all blocks. Those with keys stay prefix hits for a while."""
        pool.release(self.block_ids)
        self.block_ids, self.num_computed, self.num_registered = block_table(), 0, 0


class ModelDrafter(Drafter):
    """Proposes tokens by a second model for each sequence that it has the KV of: `--speculative-tokens` if these are given,
    else as many for each as pay, by its own time, the cost model and measured acceptance.

    What a client has predicted of an answer comes first, and is proposed without the model.

    Args:
        scheduler: has the limit of tokens in a step, and the cost model of steps.
        num_blocks: of its pool.
        context_length: tokens of its longest sequence.
        now: clock in seconds, as that of the costs.

    Attributes:
        pool: the blocks of the draft model's KV.
        on_step: called with the work and the seconds of each step of the draft model, unless it is None.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        num_blocks: int,
        context_length: int,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.followed: dict[Sequence, DraftKV] = {}
        self.counters: dict[str, float] = {}
        self.pool = BlockPool(num_blocks, config.block_size)
        self.context_length, self.now = context_length, now
        self.on_step: Callable[[Work, float], None] | None = None
        self._scheduler = scheduler
        self._most, self._is_fixed = config.draft_length, config.speculative_tokens is not None
        self._acceptance = Acceptance()  # of all sequences
        self._step_s = 0.0  # of the draft model
        self._vain = 0  # proposals since a draft has paid

    def propose(self, plan: StepPlan) -> Mapping[Sequence, list[int]]:
        """Return the tokens that may follow some of a plan's sequences."""
        started = self.now()
        proposed = self._propose(plan)
        self.seconds = self.now() - started
        self._count("spec_decode_draft_seconds", self.seconds)
        return proposed

    def _propose(self, plan: StepPlan) -> dict[Sequence, list[int]]:
        takers = [seq for seq in plan.counts if plan.takes_drafts(seq)]
        room = self._scheduler.max_num_batched_tokens - sum(plan.counts.values())
        room = min(self._most, room // len(takers)) if takers else 0
        lengths = {seq: min(room, seq.output.max_tokens - seq.output.num_generated - 1) for seq in takers}
        lengths = {seq: length for seq, length in lengths.items() if length > 0}
        proposed = {seq: tokens for seq, length in lengths.items() if (tokens := _predicted(seq, length))}
        plan.predicted.update(proposed)
        due = [seq for seq in lengths if seq not in proposed]
        for seq in due:
            self._follow(seq)
        most = room if self._is_fixed or not due else self._worthwhile(plan, due, room)
        return proposed | self._draft({seq: min(most, lengths[seq]) for seq in due} if most else {}, plan)

    def end(self, seq: Sequence) -> None:
        """Give up the KV of a sequence that is over here."""
        self.followed.pop(seq).release(self.pool)

    def _count(self, name: str, value: float = 1.0, **labels: str) -> None:
        key = series(name, **labels)
        self.counters[key] = self.counters.get(key, 0.0) + value

    def _follow(self, seq: Sequence) -> None:
        """Compare the last drafts of a sequence with the tokens that have come."""
        if (kept := self.followed.get(seq)) is None:
            kept = self.followed[seq] = DraftKV()
        for is_right in kept.follow(seq.output.tokens):
            kept.acceptance.record(PREDICTED, is_right)
            self._acceptance.record(PREDICTED, is_right)

    def _worthwhile(self, plan: StepPlan, seqs: list[Sequence], most: int) -> int:
        """Return how many drafts of each sequence pay; one if it is time to try whether that does."""
        step = Step.forecast(plan.counts, self._scheduler.costs, None, Step.extra_seconds)
        own = [self.followed[seq].acceptance.own_chance(PREDICTED, self._acceptance) for seq in seqs]
        more = self._step_s + sum(step.more(len(seq)) for seq in seqs)
        if (limit := self._scheduler.itl_target) is not None and more > 0:
            most = max(0, min(most, int((limit - step.seconds) / more)))
            if not most:
                return 0
        length = common_length(step, own, most, more)
        self._vain = 0 if length or self._vain == PROBE_STEPS else self._vain + 1
        return length or int(not self._vain)

    def _draft(self, lengths: Mapping[Sequence, int], plan: StepPlan) -> dict[Sequence, list[int]]:
        """Return up to `lengths` drafts of each sequence whose KV is there, or is computed in this step."""
        new, drafting, budget = dict[Sequence, Tokens](), list[Sequence](), CATCH_UP_TOKENS
        for seq, length in lengths.items():
            if not self._take_room(seq, length, plan):
                self._count("spec_decode_num_without_drafts", reason="room")
                continue
            first = self.followed[seq].num_computed
            missing = len(seq) - first
            count = missing if missing <= AT_ONCE else min(missing, budget)
            budget -= count if missing > AT_ONCE else 0
            if count:
                new[seq] = seq.output.tokens[first : first + count]
            if count == missing:
                drafting.append(seq)
            else:
                self._count("spec_decode_num_without_drafts", reason="behind")
        drafted = {seq: self.followed[seq] for seq in drafting}
        while new:
            started, work = self.now(), self.work(new, drafting)
            for seq, token in zip(drafting, self._compute(new, drafting), strict=True):
                seq.output.append(token)  # until all drafts are there
            self._time(work, len(new), self.now() - started)
            drafting = [seq for seq in drafting if self._goes_on(seq, lengths[seq])]
            new = {seq: seq.output.tokens[-1:] for seq in drafting}
        for seq, kept in drafted.items():
            kept.drafts = seq.output.tokens[kept.length :].tolist()
            seq.output.retract(len(kept.drafts))
        return {seq: kept.drafts[:] for seq, kept in drafted.items()}

    def _take_room(self, seq: Sequence, length: int, plan: StepPlan) -> bool:
        """Give a sequence blocks for its tokens and `length` drafts. Who finds none has none afterwards."""
        kept, keys = self.followed[seq], seq.kv.full_keys()
        if not kept.block_ids:
            kept.find(self.pool, keys[: (len(seq) - 1) // self.pool.block_size])
        kept.register(self.pool, keys)
        needed = self.pool.blocks_for(len(seq) + length - 1) - len(kept.block_ids)
        if needed > self.pool.num_free:
            for other in self.followed.keys() - plan.counts.keys():  # preempted, or paused
                self.followed[other].release(self.pool)
        if len(seq) + length > self.context_length or needed > self.pool.num_free:
            kept.release(self.pool)
            return False
        kept.grow(self.pool, max(0, needed))
        return True

    def work(self, new: Mapping[Sequence, Tokens], drafting: list[Sequence]) -> list[tuple[int, int]]:
        """Return (tokens to compute, tokens before them) of each row of a step.

        A step that only drafts has rows of one token, even where a sequence has two new ones: such steps are recorded.
        """
        first = {seq: self.followed[seq].num_computed for seq in new}
        if len(drafting) < len(new) or max(map(len, new.values())) > AT_ONCE:
            return [(len(tokens), first[seq]) for seq, tokens in new.items()]
        return [(1, first[seq] + ahead) for seq, tokens in new.items() for ahead in range(len(tokens))]

    def _time(self, work: Work, num_seqs: int, seconds: float) -> None:
        """Count the time of a step of the draft model, if each sequence had one token."""
        if self.on_step is not None:
            self.on_step(work, seconds)
        if len(work) > num_seqs or any(count > 1 for count, _ in work):
            return
        seconds = min(seconds, MAX_RATIO * self._step_s) if self._step_s else seconds
        self._step_s += (seconds - self._step_s) / TIMED if self._step_s else seconds

    def _goes_on(self, seq: Sequence, length: int) -> bool:
        """Return whether further drafts may follow those of a sequence."""
        is_end = seq.output.ends_with(seq.output.tokens[-1], seq.output.num_generated)
        return not is_end and len(seq) < self.followed[seq].length + length

    @abstractmethod
    def _compute(self, new: Mapping[Sequence, Tokens], drafting: list[Sequence]) -> list[int]:
        """Compute new tokens of some sequences, and return the tokens that follow those of `drafting`."""


def _predicted(seq: Sequence, length: int) -> list[int]:
    """Return what the client of a sequence has predicted to follow; empty if nothing is found."""
    if seq.prediction is None:
        return []
    found = continue_predicted(seq.prediction, seq.output.tokens, seq.output.num_prompt, length)
    return [] if found is None else found.tokens

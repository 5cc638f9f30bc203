"""Speculator: the drafter of an engine. It looks for what follows, first in the answer that a client has predicted, then in
the sequence's own tokens and in the answers that others of its owner have had, and proposes what pays.

With `auto`, it follows each sequence in a text where its last tokens have stood before, and counts how often that was right.
Only where a draft may pay does it look at all occurrences. What comes to nothing may take a hundredth of the steps' time, so
where steps are short, it looks at some sequences in each, in turns.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from pdserve.config import EngineConfig
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Drafter, StepPlan
from pdserve.keys import Tokens
from pdserve.speculation.answers import FinishedAnswers
from pdserve.speculation.lengths import PREDICTED, Acceptance, Step, bucket, chances, worthwhile
from pdserve.speculation.matches import (
    SEPARATOR,
    Draft,
    Index,
    Match,
    continue_by_votes,
    continue_last,
    continue_predicted,
)

MAX_INDEXED = 4096  # tokens of a sequence in one step, about a millisecond: a long prompt takes several
SHARE = 0.01  # of the steps' time, for looks of which nothing comes
LOOK_SECONDS, LEAST_SECONDS = 1e-5, 1e-6  # of the first look, and of any
MAX_SAVED = 64  # looks that may be made up for
FORECAST_STEPS = 16  # of the same sequences, for which a forecast holds


@dataclass(slots=True)
class _Followed:
    """What is known of a sequence beside its tokens: nothing that another instance could not do without.

    Attributes:
        index: of its tokens, and `predicted` of those that its client has predicted.
        acceptance: of its drafts.
        text, at: where it is expected to go on; 0: nowhere.
        run: tokens before that which have matched.
        seen: how many tokens it had.
    """

    index: Index
    predicted: Index | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    text: "Tokens | None" = None
    at: int = 0
    run: int = 0
    seen: int = 0

    def follow(self, text: Tokens, at: int, run: int) -> None:
        """Expect that it goes on as a text does at a position, behind so many tokens that have matched."""
        self.text, self.at, self.run = text, at, run

    @property
    def bucket(self) -> int:
        """Under what drafts are recorded here."""
        return PREDICTED if self.predicted is not None and self.text is self.predicted.text else bucket(self.run)


class _Looks:
    """The seconds of a look, fitted as those of steps are (`OnlineFit`): what lost the processor hardly counts."""

    def __init__(self) -> None:
        self._rate, self._square = 1 / LOOK_SECONDS, 1 / LOOK_SECONDS**2

    def record(self, seconds: float) -> None:
        """Add what one took."""
        rate = 1 / max(seconds, LEAST_SECONDS)
        self._rate += (rate - self._rate) / MAX_SAVED
        self._square += (rate * rate - self._square) / MAX_SAVED

    @property
    def seconds(self) -> float:
        """The forecast of the next one."""
        return self._rate / self._square


class Speculator(Drafter):
    """Proposes drafts by `--speculate`: `ngram` and `suffix` all that they find, `auto` as many tokens as pay.

    Args:
        scheduler: whose costs and limit of a step's time count.
        extra_seconds: by which steps with so many rows take longer than if they were recorded.
        now: clock in seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        extra_seconds: Callable[[int], float],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.answers = FinishedAnswers() if config.speculate != "ngram" else None
        self._proposes_all = config.speculate != "auto"
        self._most = config.speculative_tokens
        self._continue = continue_last if config.speculate == "ngram" else continue_by_votes
        self._scheduler, self._extra_seconds, self._now = scheduler, extra_seconds, now
        self._acceptance = Acceptance()  # of all sequences
        self._followed: dict[Sequence, _Followed] = {}
        self._drafted: list[Sequence] = []  # in the last step
        self._looks, self._credit = _Looks(), 0.0
        self._step, self._step_age, self._turn = Step(0, 0.0, 0.0, 0.0), FORECAST_STEPS, 0

    def propose(self, plan: StepPlan) -> Mapping[Sequence, list[int]]:
        """Return the tokens that may follow some of a plan's sequences."""
        if not (self._most and plan.counts):
            return {}
        if self._proposes_all:
            found = ((seq, self.find(seq, self._follow(seq))) for seq in plan.counts if seq.takes_drafts)
            drafts = {seq: draft for seq, draft in found if draft is not None}
            lengths: Mapping[Sequence, int] = dict.fromkeys(drafts, self._most)
        else:
            drafts, lengths = self._find_what_pays(plan)
        for seq in lengths:
            if drafts[seq].is_predicted:
                plan.predicted.add(seq)
        return {seq: drafts[seq].tokens[:length] for seq, length in lengths.items()}

    def end(self, seq: Sequence) -> None:
        """Forget a sequence that is over here, but for its answer."""
        if self._followed.pop(seq, None) is not None and self.answers is not None:
            started = self._now()
            self.answers.add(seq)
            self._charge(self._now() - started)

    def _follow(self, seq: Sequence) -> _Followed:
        followed = self._followed.get(seq)
        if followed is None:
            followed = self._followed[seq] = _Followed(Index(seq.output.tokens))
            if seq.prediction is not None:
                followed.predicted = Index(seq.prediction)
                followed.predicted.extend()
        return followed

    def find(self, seq: Sequence, followed: _Followed) -> Draft | None:
        """Return what may follow a sequence; None if nothing is found."""
        followed.index.extend()
        tokens, gram = seq.output.tokens, followed.index.gram
        if followed.predicted is not None:
            draft = continue_predicted(followed.predicted, tokens, gram, seq.output.num_prompt, self._most)
            if draft is not None:
                return draft
        match = self._match(seq, followed)
        if match is None:
            return None
        draft = self._continue(match, self._most)
        return draft if draft.tokens else None

    def _match(self, seq: Sequence, followed: _Followed, *, last: bool = False) -> Match | None:
        """Return where a sequence's last tokens match best, in its own or in its owner's answers."""
        tokens, gram = seq.output.tokens, followed.index.gram
        match = followed.index.find(tokens, gram, last=last)
        if self.answers is not None:
            other = self.answers.find(seq, gram, last=last)
            if other is not None and (match is None or other.length > match.length):
                return other
        return match

    # ---- auto ---------------------------------------------------------------------------------------------------

    def _find_what_pays(self, plan: StepPlan) -> tuple[dict[Sequence, Draft], Mapping[Sequence, int]]:
        """Return what may follow some of a plan's sequences, and how much of it pays."""
        started, step = self._now(), self._forecast(plan.counts)
        self._credit = min(self._credit + SHARE * step.seconds, MAX_SAVED * self._looks.seconds)
        if step.least_chance >= 1:
            return {}, {}
        due = [seq for seq in self._drafted if seq in plan.counts]
        if self._credit > 0:
            due += self._others(plan.counts, due)
        drafts, expected = dict[Sequence, Draft](), dict[Sequence, list[float]]()
        for seq in due:
            if seq.takes_drafts:
                followed = self._follow(seq)
                if self._look(seq, followed, step.least_chance) and (draft := self.find(seq, followed)) is not None:
                    drafts[seq] = draft
                    expected[seq] = chances(draft, followed.acceptance, self._acceptance)
        lengths = worthwhile(step, expected) if expected else {}
        self._drafted = [*lengths]
        if due:
            self._looks.record((self._now() - started) / len(due))
            self._charge(self._looks.seconds * (len(due) - len(lengths)))
        return drafts, lengths

    def _charge(self, seconds: float) -> None:
        """Take time from what there is for looks; not all of a long one, which has lost the processor meanwhile."""
        self._credit = max(self._credit - seconds, -MAX_SAVED * self._looks.seconds)

    def _forecast(self, counts: Mapping[Sequence, int]) -> Step:
        """Return the forecast of a step, or the last one, if it was of as many sequences and not long ago."""
        self._step_age += 1
        is_other = self._step.num_seqs != len(counts) or sum(counts.values()) > len(counts)
        if is_other or self._step_age >= FORECAST_STEPS:
            self._step_age = 0
            limit = self._scheduler.itl_target
            self._step = Step.forecast(counts, self._scheduler.costs, limit, self._extra_seconds)
        return self._step

    def _others(self, counts: Mapping[Sequence, int], due: list[Sequence]) -> list[Sequence]:
        """Return the sequences whose turn it is, as many as there is time for."""
        count = min(len(counts) - len(due), 1 + int(self._credit / self._looks.seconds))
        first = self._turn % len(counts)
        self._turn = first + count
        turns = [*islice(counts, first, first + count)]
        turns += islice(counts, count - len(turns))
        return [seq for seq in turns if seq not in due] if due else turns

    def _look(self, seq: Sequence, followed: _Followed, least: float) -> bool:
        """Compare what has been expected of a sequence with what has come, and return whether a draft of it may pay."""
        tokens = seq.output.tokens
        if followed.at:
            self._compare(followed, tokens)
        is_whole = followed.index.extend(MAX_INDEXED)
        followed.seen = len(tokens)
        if not followed.at and is_whole:
            self.meet(seq, followed)
        if not followed.at:
            return False
        recorded = followed.bucket
        return followed.acceptance.own_chance(recorded, self._acceptance) > least

    def _compare(self, followed: _Followed, tokens: Tokens) -> None:
        """Record whether a sequence has gone on as the text does that it was followed in."""
        text, own, everyone = followed.text, followed.acceptance, self._acceptance
        assert text is not None
        for at in range(followed.seen, len(tokens)):
            if text[followed.at] == SEPARATOR:  # the answer has ended there
                followed.at = 0
                return
            is_right = text[followed.at] == tokens[at]
            recorded = followed.bucket
            own.record(recorded, is_right)
            everyone.record(recorded, is_right)
            if not is_right:
                followed.at = 0
                return
            followed.at, followed.run = followed.at + 1, followed.run + 1

    def meet(self, seq: Sequence, followed: _Followed) -> None:
        """Find a text in which to follow a sequence: the client's prediction, or the last that it shares some tokens with."""
        tokens, index = seq.output.tokens, followed.index
        if (predicted := followed.predicted) is not None:
            draft = continue_predicted(predicted, tokens, index.gram, seq.output.num_prompt, 1)
            if draft is not None:
                followed.follow(predicted.text, draft.position, draft.match)
                return
        if (match := self._match(seq, followed, last=True)) is not None:
            followed.follow(match.text, match.positions[0], match.length)

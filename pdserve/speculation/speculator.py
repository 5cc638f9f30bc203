"""Speculator: the drafter of an engine. It looks for what follows, first in the answer that a client has predicted, then in
the sequence's own tokens and in the answers that others of its owner have had, and proposes what pays.

With `auto`, it follows each sequence in a text where its last tokens have stood before, and counts how often that was right.
Only where a draft may pay does it look at all occurrences. Looks of which nothing comes take a small share of the steps'
time: behind some, it rests for as many steps as pay for them.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from pdserve.config import EngineConfig
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Drafter, StepPlan
from pdserve.keys import Tokens, token_array
from pdserve.speculation.answers import LEAST, FinishedAnswers
from pdserve.speculation.lengths import PREDICTED, Acceptance, Step, bucket, chances, worthwhile
from pdserve.speculation.matches import (
    MAX_VOTES,
    SEPARATOR,
    Draft,
    Match,
    continue_by_votes,
    continue_last,
    continue_predicted,
    find,
)

SHARE = 0.005  # of the steps' time, for looks of which nothing comes
GAIN = 10  # steps that pay for looks as well as an accepted token: as much of the time that it has saved
AT_ONCE = 8  # sequences that are looked at in turn
MAX_OWED = 64  # steps, owed or saved up: a look that has lost the processor counts no more
FORECAST_STEPS = 16  # of the same sequences, for which a forecast holds


@dataclass(slots=True)
class _Followed:
    """What is known of a sequence beside its tokens: nothing that another instance could not do without.

    Attributes:
        acceptance: of its drafts.
        text, at: where it is expected to go on; 0: nowhere.
        run: tokens before that which have matched.
        is_predicted: the text is the answer that its client has predicted.
        seen: how many tokens it had.
    """

    acceptance: Acceptance = field(default_factory=Acceptance)
    text: Tokens = field(default_factory=token_array)
    at: int = 0
    run: int = 0
    is_predicted: bool = False
    seen: int = 0

    def follow(self, text: Tokens, at: int, run: int, *, is_predicted: bool = False) -> None:
        """Expect that it goes on as a text does at a position, behind so many tokens that have matched."""
        self.text, self.at, self.run, self.is_predicted = text, at, run, is_predicted

    @property
    def bucket(self) -> int:
        """Under what drafts are recorded here."""
        return PREDICTED if self.is_predicted else bucket(self.run)


class Speculator(Drafter):
    """Proposes drafts by `--speculate`: `ngram` and `suffix` all that they find, `auto` as many tokens as pay.

    Args:
        scheduler: whose costs and limit of a step's time count.
        extra_seconds: by which steps with so many rows take longer than if they were recorded.
        now: clock in seconds, as that of the costs.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        extra_seconds: Callable[[int], float],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.answers = FinishedAnswers() if config.speculate != "ngram" else None
        self.followed: dict[Sequence, _Followed] = {}
        self.rest = 0
        self._proposes_all = config.speculate != "auto"
        self._most = config.draft_length
        self._continue = continue_last if config.speculate == "ngram" else continue_by_votes
        self._scheduler, self._extra_seconds, self._now = scheduler, extra_seconds, now
        self._acceptance = Acceptance()  # of all sequences
        self._drafted: list[Sequence] = []  # in the last step
        self._owed = 0.0  # steps whose share of time has been spent in advance
        self._step, self._step_age, self._turn = Step(0, 0.0, 0.0, 0.0), FORECAST_STEPS, 0

    def propose(self, plan: StepPlan) -> Mapping[Sequence, list[int]]:
        """Return the tokens that may follow some of a plan's sequences."""
        if not (self._most and plan.counts):
            return {}
        if self._proposes_all:
            found = ((seq, self.find(seq)) for seq in plan.counts if plan.takes_drafts(seq) and self._follow(seq))
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
        del self.followed[seq]
        if self.answers is not None:
            started = self._now()
            self.answers.add(seq)
            self._charge(self._now() - started)

    def _follow(self, seq: Sequence) -> _Followed:
        if (followed := self.followed.get(seq)) is None:
            followed = self.followed[seq] = _Followed()
        return followed

    def find(self, seq: Sequence) -> Draft | None:
        """Return what may follow a sequence; None if nothing is found."""
        tokens = seq.output.tokens
        if seq.prediction is not None:
            draft = continue_predicted(seq.prediction, tokens, seq.output.num_prompt, self._most)
            if draft is not None:
                return draft
        match = self._match(seq, MAX_VOTES)
        draft = None if match is None else self._continue(match, self._most)
        return draft if draft is not None and draft.tokens else None

    def _match(self, seq: Sequence, most: int) -> Match | None:
        """Return where a sequence's last tokens match best, in its own or in its owner's answers."""
        match = find(seq.output.tokens, seq.output.tokens, most)
        other = self.answers.find(seq, most) if self.answers is not None else None
        return other if match is None or (other is not None and other.length > match.length) else match

    # ---- auto ---------------------------------------------------------------------------------------------------

    def _find_what_pays(self, plan: StepPlan) -> tuple[dict[Sequence, Draft], Mapping[Sequence, int]]:
        """Return what may follow some of a plan's sequences, and how much of it pays."""
        started, step = self._now(), self._forecast(plan.counts)
        due = [seq for seq in self._drafted if seq in plan.counts]
        gained = sum(len(seq) - 1 - self.followed[seq].seen for seq in due)
        self._owed = max(self._owed - GAIN * gained, -MAX_OWED) if gained else self._owed
        if self._owed < 1:
            due += self._others(plan.counts)
        drafts, expected = dict[Sequence, Draft](), dict[Sequence, list[float]]()
        for seq in due if step.least_chance < 1 else ():
            if plan.takes_drafts(seq) and (draft := self._look(seq, step.least_chance)) is not None:
                drafts[seq] = draft
                expected[seq] = chances(draft, self.followed[seq].acceptance, self._acceptance)
        lengths = worthwhile(step, expected) if expected else {}
        if vain := len(due) - len(lengths):
            self._charge((self._now() - started) * vain / len(due))
        elif not due:
            self._owed = max(self._owed, LEAST)
        self._owed -= self._owed > 0
        self._drafted = [*lengths]
        self.rest = 0 if lengths else max(0, int(self._owed))
        self._owed -= self.rest
        return drafts, lengths

    def _charge(self, seconds: float) -> None:
        """Let the next steps pay for time that nothing has come of."""
        self._owed = min(self._owed + seconds / (SHARE * (self._step.seconds or 1.0)), MAX_OWED)

    def _forecast(self, counts: Mapping[Sequence, int]) -> Step:
        """Return the forecast of a step, or the last one, if it was of as many sequences and not long ago."""
        self._step_age += 1
        is_other = self._step.num_seqs != len(counts) or sum(counts.values()) > len(counts)
        if is_other or self._step_age >= FORECAST_STEPS:
            self._step_age = 0
            limit = self._scheduler.itl_target
            self._step = Step.forecast(counts, self._scheduler.costs, limit, self._extra_seconds)
        return self._step

    def _others(self, counts: Mapping[Sequence, int]) -> list[Sequence]:
        """Return the sequences whose turn it is, but for short answers, and those that are looked at anyway."""
        first, count = self._turn % len(counts), min(AT_ONCE, len(counts))
        self._turn = first + count
        turns = [*islice(counts, first, first + count)]
        turns += islice(counts, count - len(turns))
        return [
            seq for seq in turns if seq not in self._drafted and (seq.prediction or seq.output.num_generated >= LEAST)
        ]

    def _look(self, seq: Sequence, least: float) -> Draft | None:
        """Compare what has been expected of a sequence with what has come, and return a draft if one may pay."""
        followed = self._follow(seq)
        if followed.at:
            self._compare(followed, seq.output.tokens)
        followed.seen = len(seq)
        if not followed.at:
            self.meet(seq, followed)
        if not followed.at or followed.acceptance.own_chance(followed.bucket, self._acceptance) <= least:
            return None
        return self.find(seq)

    def _compare(self, followed: _Followed, tokens: Tokens) -> None:
        """Record whether a sequence has gone on as the text does that it was followed in."""
        text, own, everyone = followed.text, followed.acceptance, self._acceptance
        for at in range(followed.seen, len(tokens)):
            if followed.at == len(text) or text[followed.at] == SEPARATOR:  # what was followed has ended there
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
        if seq.prediction is not None:
            draft = continue_predicted(seq.prediction, seq.output.tokens, seq.output.num_prompt, 1)
            if draft is not None:
                followed.follow(seq.prediction, draft.position, draft.match, is_predicted=True)
                return
        if (match := self._match(seq, 1)) is not None:
            followed.follow(match.text, match.positions[0], match.length)

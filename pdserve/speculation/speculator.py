"""Speculator: the drafter of an engine. It looks for what follows, first in the answer that a client has predicted, then in
the sequence's own tokens and in the answers that others of its owner have had, and proposes what pays.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pdserve.config import EngineConfig
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Drafter, StepPlan
from pdserve.speculation.answers import FinishedAnswers
from pdserve.speculation.lengths import Acceptance, Step, chances, compare, worthwhile
from pdserve.speculation.matches import Draft, Index, continue_by_votes, continue_last, continue_predicted

MAX_INDEXED = 4096  # tokens of a sequence in one step, about a millisecond: a long prompt takes several


@dataclass
class _Followed:
    """What is known of a sequence beside its tokens: nothing that another instance could not do without.

    Attributes:
        index: of its tokens, and `predicted` of those that its client has predicted.
        acceptance: of its drafts.
        guess: what would have followed, computed or not, when it had `guessed_at` tokens.
    """

    index: Index
    predicted: Index | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    guess: Draft | None = None
    guessed_at: int = 0


class Speculator(Drafter):
    """Proposes drafts by `--speculate`: `ngram` and `suffix` all that they find, `auto` as many tokens as pay.

    Args:
        scheduler: whose costs and limit of a step's time count.
        is_recorded: whether steps with so many rows are recorded.
    """

    def __init__(self, config: EngineConfig, scheduler: Scheduler, is_recorded: Callable[[int], bool]) -> None:
        self.answers = FinishedAnswers() if config.speculate != "ngram" else None
        self._proposes_all = config.speculate != "auto"
        self._most = config.speculative_tokens
        self._continue = continue_last if config.speculate == "ngram" else continue_by_votes
        self._scheduler, self._is_recorded = scheduler, is_recorded
        self._acceptance = Acceptance()  # of all sequences
        self._followed: dict[Sequence, _Followed] = {}

    def propose(self, plan: StepPlan) -> Mapping[Sequence, list[int]]:
        """Return the tokens that may follow some of a plan's sequences."""
        if not self._most:
            return {}
        if self._proposes_all:
            found = ((seq, self.find(seq, self._follow(seq), self._most)) for seq in plan.counts if seq.takes_drafts)
            drafts = {seq: draft for seq, draft in found if draft is not None}
            lengths: Mapping[Sequence, int] = dict.fromkeys(drafts, self._most)
        else:
            drafts, lengths = self._find_what_pays(plan)
        plan.predicted.update(seq for seq in lengths if drafts[seq].is_predicted)
        return {seq: drafts[seq].tokens[:length] for seq, length in lengths.items()}

    def end(self, seq: Sequence) -> None:
        """Forget a sequence that is over here, but for its answer."""
        self._followed.pop(seq, None)
        if self.answers is not None:
            self.answers.add(seq)

    def _follow(self, seq: Sequence) -> _Followed:
        followed = self._followed.get(seq)
        if followed is None:
            followed = self._followed[seq] = _Followed(Index(seq.output.tokens))
            if seq.prediction is not None:
                followed.predicted = Index(seq.prediction)
                followed.predicted.extend()
        return followed

    def find(self, seq: Sequence, followed: _Followed, most: int) -> Draft | None:
        """Return what may follow a sequence; None if nothing is found."""
        followed.index.extend()
        tokens, gram = seq.output.tokens, followed.index.gram
        if followed.predicted is not None:
            draft = continue_predicted(followed.predicted, tokens, gram, seq.output.num_prompt, most)
            if draft is not None:
                return draft
        match = followed.index.find(tokens, gram)
        if self.answers is not None:
            other = self.answers.find(seq, gram)
            if other is not None and (match is None or other.length > match.length):
                match = other
        if match is None:
            return None
        draft = self._continue(match, most)
        return draft if draft.tokens else None

    def _find_what_pays(self, plan: StepPlan) -> tuple[dict[Sequence, Draft], Mapping[Sequence, int]]:
        """Return what may follow some of a plan's sequences, and how much of it pays."""
        step = Step.forecast(plan.counts, self._scheduler.costs, self._scheduler.itl_target, self._is_recorded)
        least, drafts, expected = step.least_chance(), dict[Sequence, Draft](), dict[Sequence, list[float]]()
        if least >= 1:
            return {}, {}
        for seq in plan.counts:
            if not seq.takes_drafts:
                continue
            followed = self._follow(seq)
            self._compare(followed, seq)
            if not followed.index.extend(MAX_INDEXED):
                continue
            guess = self.find(seq, followed, 1)
            if guess is not None and chances(guess, followed.acceptance, self._acceptance)[0] > least:
                guess = drafts[seq] = self.find(seq, followed, self._most) or guess
                expected[seq] = chances(guess, followed.acceptance, self._acceptance)
            followed.guess, followed.guessed_at = guess, len(seq)
        return drafts, worthwhile(step, expected) if expected else {}

    def _compare(self, followed: _Followed, seq: Sequence) -> None:
        """Record whether the last guess was right: what has followed since is known."""
        if (guess := followed.guess) is not None:
            since = seq.output.tokens[followed.guessed_at : followed.guessed_at + len(guess.tokens)].tolist()
            compare(guess, since, followed.acceptance, self._acceptance)
            followed.guess = None

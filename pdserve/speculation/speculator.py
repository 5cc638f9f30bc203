"""Speculator: the drafter of an engine. It looks for what follows, in the sequence's own tokens and before them in the answer
that a client has predicted, and proposes what pays.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from pdserve.config import EngineConfig
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Drafter, StepPlan
from pdserve.keys import Tokens
from pdserve.speculation.lengths import Acceptance, chances, compare, worthwhile
from pdserve.speculation.matches import Draft, continue_by_votes, continue_last, continue_predicted, occurrences

MAX_SKIPPED = 16  # tokens for which no match is looked up, after as many lookups without one


@dataclass
class _Followed:
    """Drafting state of a sequence. It affects speed only, so another instance starts without it.

    Attributes:
        acceptance: of its drafts.
        draft: the last one, and `drafted_at` the number of tokens before it.
        misses: looks in a row of which nothing came.
        due: number of tokens from which on to look again.
    """

    acceptance: Acceptance = field(default_factory=Acceptance)
    draft: Draft | None = None
    drafted_at: int = 0
    misses: int = 0
    due: int = 0

    def look(self, has_come: bool, length: int) -> None:
        """Record a look at a number of tokens, and whether a draft came of it."""
        self.misses = 0 if has_come else min(self.misses + 1, MAX_SKIPPED)
        self.due = length + self.misses


class Speculator(Drafter):
    """Proposes drafts by `--speculate`: `ngram` and `suffix` all that they find, `auto` as many tokens as pay.

    Args:
        scheduler: whose costs and limit of a step's time count.
    """

    def __init__(self, config: EngineConfig, scheduler: Scheduler) -> None:
        self._looks_at_all = config.speculate != "auto"
        self._most = config.speculative_tokens
        self._continue = continue_last if config.speculate == "ngram" else continue_by_votes
        self._scheduler = scheduler
        self._acceptance = Acceptance()  # of all sequences
        self._followed: WeakKeyDictionary[Sequence, _Followed] = WeakKeyDictionary()

    def find(self, tokens: Tokens) -> Draft | None:
        """Return what may follow some tokens; None if nothing is found."""
        match, positions = occurrences(tokens)
        return self._continue(tokens, match, positions, self._most) if positions and self._most else None

    def draft(self, seq: Sequence) -> Draft | None:
        """Return what may follow a sequence, first of the answer that its client has predicted; None if nothing is found."""
        tokens = seq.output.tokens
        if seq.prediction is not None and self._most:
            draft = continue_predicted(seq.prediction, tokens, seq.output.num_prompt, self._most)
            if draft is not None:
                return draft
        return self.find(tokens)

    def propose(self, plan: StepPlan) -> Mapping[Sequence, list[int]]:
        """Return the tokens that may follow some of a plan's sequences."""
        if self._looks_at_all:
            found = ((seq, self.draft(seq)) for seq in plan.counts if seq.takes_drafts)
            drafts = {seq: draft for seq, draft in found if draft is not None}
            lengths: Mapping[Sequence, int] = dict.fromkeys(drafts, self._most)
        else:
            drafts, lengths = self._find_what_pays(plan)
        plan.predicted.update(seq for seq in lengths if drafts[seq].is_predicted)
        return {seq: drafts[seq].tokens[:length] for seq, length in lengths.items()}

    def _find_what_pays(self, plan: StepPlan) -> tuple[dict[Sequence, Draft], Mapping[Sequence, int]]:
        """Return what may follow some of a plan's sequences, and how much of it pays."""
        looked, drafts = list[_Followed](), dict[Sequence, Draft]()
        for seq in plan.counts:
            followed = self._followed.get(seq)
            if followed is None:
                followed = self._followed[seq] = _Followed()
            if len(seq.output.tokens) >= followed.due and seq.takes_drafts:
                self._compare(followed, seq.output.tokens)
                if (draft := self.draft(seq)) is not None:
                    drafts[seq] = draft
                followed.draft, followed.drafted_at = draft, len(seq)
                looked.append(followed)
        lengths: Mapping[Sequence, int] = {}
        if drafts:
            expected = {
                seq: chances(one, self._followed[seq].acceptance, self._acceptance) for seq, one in drafts.items()
            }
            decoding = [seq for seq in plan.counts if seq.kv.is_decoding]
            lengths = worthwhile(expected, decoding, self._scheduler.costs, self._scheduler.itl_target)
        came = {id(self._followed[seq]) for seq in lengths}
        for followed in looked:
            followed.look(id(followed) in came, followed.drafted_at)
        return drafts, lengths

    def _compare(self, followed: _Followed, tokens: Tokens) -> None:
        """Compare the last draft, computed or not, with the tokens generated since, and record the acceptance."""
        if (draft := followed.draft) is not None:
            since = tokens[followed.drafted_at : followed.drafted_at + len(draft.tokens)].tolist()
            compare(draft, since, followed.acceptance, self._acceptance)

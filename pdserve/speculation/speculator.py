"""Speculator: the drafter of an engine. It looks for what follows in the sequence's own tokens, and proposes what pays."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from pdserve.config import EngineConfig
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Drafter, StepPlan
from pdserve.keys import Tokens
from pdserve.speculation.lengths import Acceptance, chances, compare, worthwhile
from pdserve.speculation.matches import Draft, continue_by_votes, continue_last, occurrences


@dataclass
class _Followed:
    """What is known of a sequence beside its tokens: nothing that another instance could not do without.

    Attributes:
        draft: the last one, and `drafted_at` the number of tokens before it.
    """

    acceptance: Acceptance = field(default_factory=Acceptance)
    draft: Draft | None = None
    drafted_at: int = 0


class Speculator(Drafter):
    """Proposes drafts by `--speculate`: `ngram` and `suffix` all that they find, `auto` as many tokens as pay.

    Args:
        scheduler: whose costs and limit of a step's time count.
    """

    def __init__(self, config: EngineConfig, scheduler: Scheduler) -> None:
        self._method, self._most = config.speculate, config.speculative_tokens
        self._scheduler = scheduler
        self._acceptance = Acceptance()  # of all sequences
        self._followed: WeakKeyDictionary[Sequence, _Followed] = WeakKeyDictionary()

    def propose(self, plan: StepPlan) -> Mapping[Sequence, list[int]]:
        """Return the tokens that may follow some sequences of the plan, each of which only decodes."""
        drafts = {}
        for seq in plan.counts:
            if seq.takes_drafts and (draft := self._draft(seq)) is not None:
                drafts[seq] = draft
        if self._method != "auto" or not drafts:
            return {seq: draft.tokens for seq, draft in drafts.items()}
        expected = {
            seq: chances(draft, self._followed[seq].acceptance, self._acceptance) for seq, draft in drafts.items()
        }
        decoding = [seq for seq in plan.counts if seq.kv.is_decoding]
        lengths = worthwhile(expected, decoding, self._scheduler.costs, self._scheduler.itl_target)
        return {seq: drafts[seq].tokens[:length] for seq, length in lengths.items()}

    def _draft(self, seq: Sequence) -> Draft | None:
        """Return what may follow a sequence, if anything is found. Whether it was right is seen when it is asked again."""
        tokens = seq.output.tokens
        if self._method == "auto":
            followed = self._followed.setdefault(seq, _Followed())
            if followed.draft is not None:
                so_far = tokens[followed.drafted_at : followed.drafted_at + len(followed.draft.tokens)]
                compare(followed.draft, so_far.tolist(), followed.acceptance, self._acceptance)
            followed.draft, followed.drafted_at = self._find(tokens), len(tokens)
            return followed.draft
        return self._find(tokens)

    def _find(self, tokens: Tokens) -> Draft | None:
        match, positions = occurrences(tokens)
        if not positions or not self._most:
            return None
        if self._method == "ngram":
            return continue_last(tokens, match, positions[0], self._most)
        return continue_by_votes(tokens, match, positions, self._most)

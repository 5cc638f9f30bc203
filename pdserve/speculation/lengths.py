"""Lengths of drafts: as many rows as let a step give more tokens per second, by the cost model and measured acceptance.

A step of R rows takes a + b × R + c × context tokens of all rows. A draft is worth its row if its chance to be accepted
exceeds the tokens that the step would otherwise give in the time of that row. Chances are measured without computing
anything: what would have been drafted is compared with what has come. So nothing is drafted until it has proved right.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pdserve.costs import Costs, attention_pairs
from pdserve.engine.sequence import Sequence
from pdserve.speculation.matches import LEVELS, Draft

MARGIN = 1.1  # by which a chance must exceed what its row costs: forecasts err
MEMORY = 64.0  # drafts of one length of match that are remembered
OWN_WEIGHT = 2.0  # drafts of other sequences of which a sequence is thought to be like
UNSEEN, PREDICTED_UNSEEN = (0.0, 1.0), (1.0, 2.0)  # accepted, compared: before anything is measured
PREDICTED = 0  # in place of a match: what a client has predicted is right or wrong for other reasons
UNRECORDED = 1.0  # steps that one takes longer whose number of rows is not recorded (`engine/step_graph.py`), at most


@dataclass
class Acceptance:
    """How often drafts were right, by the number of tokens before them that had matched.

    Attributes:
        counts: accepted and compared ones, by `bucket`; both shrink, so that the latest count most.
    """

    counts: dict[int, tuple[float, float]] = field(default_factory=dict)

    def record(self, match: int, is_right: bool) -> None:
        """Record a draft behind a match."""
        right, compared = self.counts.get(match, (0.0, 0.0))
        shrunk = 1 - 1 / MEMORY
        self.counts[match] = right * shrunk + is_right, compared * shrunk + 1

    def chance(self, match: int, prior: tuple[float, float]) -> float:
        """Return how likely a draft behind a match is right; `prior` is added to the counts."""
        right, compared = self.counts.get(match, (0.0, 0.0))
        return (right + prior[0]) / (compared + prior[1])


def compare(draft: Draft, followed: list[int], *tables: Acceptance) -> None:
    """Record in some tables which tokens of a draft have turned out right, up to the first wrong one."""
    for ahead, (drafted, token) in enumerate(zip(draft.tokens, followed, strict=False)):
        for table in tables:
            table.record(bucket(draft, ahead), drafted == token)
        if drafted != token:
            return


def bucket(draft: Draft, ahead: int) -> int:
    """Return the level of match under which a draft's token number `ahead` is recorded."""
    if draft.is_predicted:
        return PREDICTED
    match, reached = draft.match + ahead, LEVELS[0]
    for level in LEVELS:
        if match >= level:
            reached = level
    return reached


def chances(draft: Draft, own: Acceptance, all_of_them: Acceptance) -> list[float]:
    """Return how likely each token of a draft will be accepted, which includes those before it."""
    chance, found = 1.0, []
    for ahead, share in enumerate(draft.shares):
        match = bucket(draft, ahead)
        expected = all_of_them.chance(match, PREDICTED_UNSEEN if draft.is_predicted else UNSEEN)
        chance *= share * own.chance(match, (OWN_WEIGHT * expected, OWN_WEIGHT))
        found.append(chance)
    return found


@dataclass(frozen=True)
class Step:
    """A step without drafts, as forecast.

    Attributes:
        num_seqs: that decode, and get a token each.
        seconds: its duration.
        row, token: seconds of a further row, and of each token of its context.
        most_seconds: that it may take; None: it is not limited.
        is_recorded: whether a step with so many rows is recorded.
    """

    num_seqs: int
    seconds: float
    row: float
    token: float
    most_seconds: float | None = None
    is_recorded: Callable[[int], bool] = lambda rows: True

    @classmethod
    def forecast(
        cls,
        counts: Mapping[Sequence, int],
        costs: Costs,
        most_seconds: float | None,
        is_recorded: Callable[[int], bool],
    ) -> "Step":
        """Return the forecast of a step that computes so many tokens of each sequence; with prompts, it is not recorded."""
        decoding = context = 0
        prompts = 0.0
        for seq, count in counts.items():
            if seq.kv.is_decoding:
                decoding += 1
                context += len(seq)
            else:
                pairs = attention_pairs(count, seq.kv.num_computed)
                prompts += costs.total_prefill_seconds(0, count, pairs)
        seconds = costs.step_seconds(decoding, context) + prompts
        is_recorded = cls.is_recorded if prompts else is_recorded
        return cls(decoding, seconds, costs.decode[1], costs.decode[2], most_seconds, is_recorded)

    def more(self, context: int) -> float:
        """Return the seconds of a further row of a context."""
        return self.row + self.token * context

    def least_chance(self) -> float:
        """Return the chance below which no draft pays, whatever its context."""
        if self.most_seconds is not None and self.seconds + self.row > self.most_seconds:
            return 1.0
        return MARGIN * self.num_seqs * self.row / self.seconds if self.seconds else 1.0


def worthwhile(step: Step, expected: Mapping[Sequence, list[float]]) -> dict[Sequence, int]:
    """Return how many drafts of each sequence pay, a power of two in sum: a step is only recorded once its size recurs.

    Args:
        expected: chances of the drafts of some sequences, which all decode.
    """
    tokens, seconds = float(step.num_seqs), step.seconds
    queue = [(-found[0], index, seq) for index, (seq, found) in enumerate(expected.items()) if found]
    heapq.heapify(queue)
    lengths = dict[Sequence, int]()
    chosen: list[Sequence] = []
    best, best_rate = 0, _rate(step, tokens, seconds, 0)
    while queue:
        chance, index, seq = queue[0]
        length = lengths.get(seq, 0)
        more = step.more(len(seq) + length + 1)
        is_too_long = step.most_seconds is not None and seconds + more > step.most_seconds
        if -chance * seconds < MARGIN * tokens * more or is_too_long:
            heapq.heappop(queue)  # the further ones of this sequence are less likely; another's row may cost less
            continue
        lengths[seq], tokens, seconds = length + 1, tokens - chance, seconds + more
        chosen.append(seq)
        if length + 1 < len(expected[seq]):
            heapq.heapreplace(queue, (-expected[seq][length + 1], index, seq))
        else:
            heapq.heappop(queue)
        count = len(chosen)
        if count & (count - 1) == 0 and (rate := _rate(step, tokens, seconds, count)) > best_rate:
            best, best_rate = count, rate
    return Counter(chosen[:best])


def _rate(step: Step, tokens: float, seconds: float, drafts: int) -> float:
    """Return the tokens per second of a step with so many drafts."""
    is_recorded = step.is_recorded(step.num_seqs + drafts)
    return tokens / (seconds + (0.0 if is_recorded else UNRECORDED * step.seconds) or 1.0)

"""Lengths of drafts: as many rows as let a step give more tokens per second, by the cost model and measured acceptance.

A step of R rows takes a + b × R + c × context tokens of all rows. A draft is worth its row if its chance to be accepted
exceeds the tokens that the step would otherwise give in the time of that row. Chances are measured without computing
anything: what would have been drafted is compared with what has come. So nothing is drafted until it has proved right.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from pdserve.costs import Costs, attention_pairs
from pdserve.engine.sequence import Sequence
from pdserve.speculation.matches import LEVELS, Draft

MARGIN = 1.1  # by which a chance must exceed what its row costs: forecasts err
SHRINK = 1 - 1 / 64  # drafts of one length of match that are remembered: some 64
OWN_WEIGHT = 2.0  # drafts of other sequences of which a sequence is thought to be like
PREDICTED_UNSEEN = (1.0, 2.0)  # accepted, compared: before anything is measured
PREDICTED = 0  # bucket of its own: what a client has predicted is right or wrong for other reasons
_BUCKETS = [1 + sum(match >= level for level in LEVELS[1:]) for match in range(LEVELS[-1])]


class Acceptance:
    """How often drafts were right, by the number of tokens before them that had matched (`bucket`); the latest count most."""

    def __init__(self) -> None:
        self._right, self._compared = [0.0] * (len(LEVELS) + 1), [0.0] * (len(LEVELS) + 1)

    def record(self, bucket: int, is_right: bool) -> None:
        """Record a draft."""
        self._right[bucket] = self._right[bucket] * SHRINK + is_right
        self._compared[bucket] = self._compared[bucket] * SHRINK + 1

    def chance(self, bucket: int) -> float:
        """Return how likely a draft is right. A match not seen yet is thought to be like a shorter one."""
        right, compared = self._right[bucket], self._compared[bucket]
        if bucket == PREDICTED:
            return (right + PREDICTED_UNSEEN[0]) / (compared + PREDICTED_UNSEEN[1])
        return (right + (self.chance(bucket - 1) if bucket > 1 else 0.0)) / (compared + 1)

    def own_chance(self, bucket: int, of_all: "Acceptance") -> float:
        """Return how likely a draft of one sequence is right, which is thought to be like all of them."""
        return (self._right[bucket] + OWN_WEIGHT * of_all.chance(bucket)) / (self._compared[bucket] + OWN_WEIGHT)


def bucket(match: int) -> int:
    """Return under what drafts are recorded behind so many tokens that had matched."""
    return _BUCKETS[match] if match < len(_BUCKETS) else len(LEVELS)


def chances(draft: Draft, own: Acceptance, all_of_them: Acceptance) -> list[float]:
    """Return how likely each token of a draft will be accepted, which includes those before it."""
    chance, found = 1.0, []
    for ahead, share in enumerate(draft.shares):
        recorded = PREDICTED if draft.is_predicted else bucket(draft.match + ahead)
        chance *= share * own.own_chance(recorded, all_of_them)
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
        extra_seconds: by which a step with so many rows takes longer than if it were recorded.
    """

    num_seqs: int
    seconds: float
    row: float
    token: float
    most_seconds: float | None = None
    extra_seconds: Callable[[int], float] = lambda rows: 0.0

    @classmethod
    def forecast(
        cls,
        counts: Mapping[Sequence, int],
        costs: Costs,
        most_seconds: float | None,
        extra_seconds: Callable[[int], float],
    ) -> "Step":
        """Return the forecast of a step that computes so many tokens of each sequence; one with prompts is never recorded."""
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
        extra_seconds = cls.extra_seconds if prompts else extra_seconds
        return cls(decoding, seconds, costs.decode[1], costs.decode[2], most_seconds, extra_seconds)

    def more(self, context: int) -> float:
        """Return the seconds of a further row of a context."""
        return self.row + self.token * context

    @cached_property
    def least_chance(self) -> float:
        """The chance below which no draft pays, whatever its context."""
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


def common_length(step: Step, chances: Collection[float], most: int, more: float) -> int:
    """Return how many drafts of each of some sequences pay, if each further one of all of them is a step of a draft model.

    Args:
        chances: of each sequence, how likely a draft behind right ones is right.
        most: drafts of each.
        more: seconds of one more draft of all of them: the draft model's step, and their rows.
    """
    tokens, seconds, best = float(step.num_seqs), step.seconds, 0
    best_rate = MARGIN * tokens / (seconds or 1.0)
    for length in range(1, most + 1):
        tokens += sum(chance**length for chance in chances)
        seconds += more
        if (rate := tokens / (seconds or 1.0)) > best_rate:
            best, best_rate = length, rate
    return best


def _rate(step: Step, tokens: float, seconds: float, drafts: int) -> float:
    """Return the tokens per second of a step with so many drafts."""
    return tokens / (seconds + step.extra_seconds(step.num_seqs + drafts) or 1.0)

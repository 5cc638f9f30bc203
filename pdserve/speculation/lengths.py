"""Draft lengths that maximize the tokens per second of a step, by the cost model and the measured acceptance.

A step of R rows takes a + b × R + c × context tokens of all rows. A draft is worth its row if its chance to be accepted
exceeds the tokens that the step would otherwise give in the time of that row.
"""

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.costs import Costs
from pdserve.engine.sequence import Sequence
from pdserve.speculation.matches import MAX_MATCH, MIN_MATCH, Draft

MARGIN = 1.1  # by which a chance must exceed what its row costs: forecasts err
MEMORY = 64.0  # drafts, per match length, over which acceptance is averaged
OWN_WEIGHT = 2.0  # drafts: the weight of the average over all sequences in the estimate for one
PRIOR = (1.0, 2.0)  # accepted, compared: pseudo-counts before the first draft
PREDICTED = 0  # in place of a match length: drafts from a client's prediction are counted by themselves


@dataclass
class Acceptance:
    """Acceptance rate of draft tokens by match length: the number of tokens before them that had matched.

    Attributes:
        counts: accepted and compared ones, by `bucket`; both shrink, so that the latest count most.
    """

    counts: dict[int, tuple[float, float]] = field(default_factory=dict)

    def record(self, match: int, is_right: bool) -> None:
        """Record whether a draft token after a match of this length was right."""
        right, compared = self.counts.get(match, (0.0, 0.0))
        shrunk = 1 - 1 / MEMORY
        self.counts[match] = right * shrunk + is_right, compared * shrunk + 1

    def chance(self, match: int, prior: tuple[float, float]) -> float:
        """Return the probability that a draft token after a match of this length is right; `prior` is added to the counts."""
        right, compared = self.counts.get(match, (0.0, 0.0))
        return (right + prior[0]) / (compared + prior[1])


def compare(draft: Draft, followed: list[int], *tables: Acceptance) -> None:
    """Record which tokens of a draft were right, up to the first wrong one, in each of the tables."""
    for ahead, (drafted, token) in enumerate(zip(draft.tokens, followed, strict=False)):
        for table in tables:
            table.record(bucket(draft, ahead), drafted == token)
        if drafted != token:
            return


def bucket(draft: Draft, ahead: int) -> int:
    """Return the length of match under which a draft's token number `ahead` is recorded."""
    return PREDICTED if draft.is_predicted else max(MIN_MATCH, min(draft.match + ahead, MAX_MATCH))


def chances(draft: Draft, own: Acceptance, all_of_them: Acceptance) -> list[float]:
    """Return the probability of each token of a draft to be accepted, which requires all tokens before it to be."""
    chance, found = 1.0, []
    for ahead, share in enumerate(draft.shares):
        match = bucket(draft, ahead)
        expected = all_of_them.chance(match, PRIOR)
        chance *= share * own.chance(match, (OWN_WEIGHT * expected, OWN_WEIGHT))
        found.append(chance)
    return found


def worthwhile(
    expected: Mapping[Sequence, list[float]], seqs: list[Sequence], costs: Costs, most_seconds: float | None
) -> dict[Sequence, int]:
    """Return the draft length of each sequence. The sum is a power of two, since graphs are recorded for sizes that recur.

    Args:
        expected: acceptance probabilities of the drafts of some of `seqs`, which all decode.
        most_seconds: that the step may take; None: it is not limited.
    """
    _, row, token = costs.decode
    tokens, seconds = float(len(seqs)), costs.step_seconds(len(seqs), sum(map(len, seqs)))
    queue = [(-found[0], index, seq) for index, (seq, found) in enumerate(expected.items()) if found]
    heapq.heapify(queue)
    lengths = dict[Sequence, int]()
    chosen: list[Sequence] = []
    while queue:
        chance, index, seq = queue[0]
        length = lengths.get(seq, 0)
        more = row + token * (len(seq) + length + 1)
        if -chance * seconds < MARGIN * tokens * more or (most_seconds is not None and seconds + more > most_seconds):
            heapq.heappop(queue)  # the further ones of this sequence are less likely; another's row may cost less
            continue
        lengths[seq], tokens, seconds = length + 1, tokens - chance, seconds + more
        chosen.append(seq)
        if length + 1 < len(expected[seq]):
            heapq.heapreplace(queue, (-expected[seq][length + 1], index, seq))
        else:
            heapq.heappop(queue)
    return Counter(chosen[: 1 << len(chosen).bit_length() >> 1])

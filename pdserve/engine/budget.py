"""What one step may compute: so many tokens, and no more of prompts than those who decode have time for."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.costs import Costs, attended
from pdserve.engine.sequence import Sequence


@dataclass
class Budget:
    """What is left of it.

    Attributes:
        tokens: of whatever kind.
        seconds: that prompts may add to the step; infinite if nobody waits for its end.
        least: tokens that the next prompt gets even if there is no time, so that prompts are computed in the end.
    """

    costs: Costs
    tokens: int
    seconds: float = math.inf
    least: int = 1

    @classmethod
    def of(cls, costs: Costs, tokens: int, decoding: Iterable[Sequence], itl: float | None, least: int) -> "Budget":
        """For a step with these sequences, which decode, in at most `itl` seconds by forecast; None: in any time."""
        contexts = [len(seq) for seq in decoding]
        if itl is None or not contexts:
            return cls(costs, tokens)
        return cls(costs, tokens, itl - costs.step_seconds(len(contexts), sum(contexts)), least)

    @property
    def has_time(self) -> bool:
        """For another prompt."""
        return self.least > 0 or _fitting(self.costs, self.seconds, 0) > 0

    def take(self, seq: Sequence) -> int:
        """How many tokens of a sequence the step computes. They are taken off the budget."""
        count = min(seq.num_missing, self.tokens)
        if seq.num_missing > 1:
            count = min(count, max(self.least, _fitting(self.costs, self.seconds, seq.num_computed)))
            self.seconds -= _added(self.costs, count, seq.num_computed)
            self.least = 0
        self.tokens -= count
        return count


def _added(costs: Costs, tokens: int, cached: int) -> float:
    """Seconds that a step takes longer for these tokens of a prompt, after `cached` ones."""
    _, b, c = costs.prefill
    return b * tokens + c * attended(tokens, cached)


def _fitting(costs: Costs, seconds: float, cached: int) -> int:
    """How many tokens take no longer than that: the n for which b × n + c × n × (cached + n / 2) are so many seconds."""
    _, b, c = costs.prefill
    if seconds <= 0:
        return 0
    slope = b + c * cached
    divisor = slope + math.sqrt(slope * slope + 2 * c * seconds) if math.isfinite(seconds) else 0.0
    return int(min(2 * seconds / divisor, 2**31)) if divisor else 2**31

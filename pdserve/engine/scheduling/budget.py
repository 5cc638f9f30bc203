"""Compute budget of one engine step: a token limit, and the time that prompts may add beside decoding sequences."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.costs import Costs, attention_pairs
from pdserve.engine.sequence import Sequence


@dataclass
class StepBudget:
    """Remaining budget of one step.

    Attributes:
        tokens: token limit over all sequences.
        prompt_seconds: time that prompts may add to the step; infinite if no sequence decodes in it.
        min_chunk: tokens granted to the next prompt even without time left, so that prompts always make progress.
        scored_tokens: limit over all prompts whose log probabilities are due: each token needs a large row of logits.
    """

    costs: Costs
    tokens: int
    prompt_seconds: float = math.inf
    min_chunk: int = 1
    scored_tokens: int = 128

    @classmethod
    def for_step(
        cls, costs: Costs, tokens: int, decoding: Iterable[Sequence], itl: float | None, min_chunk: int
    ) -> "StepBudget":
        """Return the budget of a step in which `decoding` decode, forecast to take at most `itl` seconds (None: no limit)."""
        contexts = [len(seq) for seq in decoding]
        if itl is None or not contexts:
            return cls(costs, tokens)
        return cls(costs, tokens, itl - costs.step_seconds(len(contexts), sum(contexts)), min_chunk)

    def has_prompt_time(self, cached: int) -> bool:
        """Return whether there is time for a token of another prompt behind `cached` ones."""
        return self.min_chunk > 0 or _tokens_within(self.costs, self.prompt_seconds, cached) > 0

    def refuse_prompts(self) -> None:
        """Leave no time for further prompts."""
        self.prompt_seconds = self.min_chunk = 0

    def allocate(self, seq: Sequence) -> int:
        """Return how many tokens of a sequence the step computes, and take them off the budget."""
        count = min(seq.num_uncomputed, self.tokens)
        if seq.scores_prompt:
            count = min(count, self.scored_tokens)
            self.scored_tokens -= count
        if seq.num_uncomputed > 1:
            affordable = _tokens_within(self.costs, self.prompt_seconds, seq.num_computed)
            count = min(count, max(self.min_chunk, affordable))
            self.prompt_seconds -= _added_seconds(self.costs, count, seq.num_computed)
            self.min_chunk = 0
        self.tokens -= count
        return count


def _added_seconds(costs: Costs, tokens: int, cached: int) -> float:
    """Return by how many seconds `tokens` of a prompt, behind `cached` ones, lengthen a step."""
    _, b, c = costs.prefill
    return b * tokens + c * attention_pairs(tokens, cached)


def _tokens_within(costs: Costs, seconds: float, cached: int) -> int:
    """Return the largest chunk that fits into `seconds`: the n that solves b × n + c × n × (cached + n / 2) = seconds."""
    _, b, c = costs.prefill
    if seconds <= 0:
        return 0
    slope = b + c * cached
    divisor = slope + math.sqrt(slope * slope + 2 * c * seconds) if math.isfinite(seconds) else 0.0
    return int(min(2 * seconds / divisor, 2**31)) if divisor else 2**31

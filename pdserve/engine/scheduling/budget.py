"""Compute budget of one engine step: a token limit, and the time that prompts may add beside decoding sequences."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from pdserve.costs import Costs, attention_pairs
from pdserve.engine.scheduling.shares import step_shares
from pdserve.engine.sequence import Sequence
from pdserve.request import Tenant


@dataclass
class StepBudget:
    """Remaining budget of one step.

    Attributes:
        tokens: token limit over all sequences.
        prompt_seconds: time that prompts may add to the step; infinite if no sequence decodes in it.
        min_chunk: tokens granted to the next prompt even without time left, so that prompts always make progress.
        scored_tokens: limit over all prompts whose log probabilities are due: each token needs a large row of logits.
        base: seconds of the step, whatever it computes.
        shares: time that each tenant may add to the step; one that is missing is not limited.
    """

    costs: Costs
    tokens: int
    prompt_seconds: float = math.inf
    min_chunk: int = 1
    scored_tokens: int = 128
    base: float = 0.0
    shares: dict[Tenant, float] = field(default_factory=dict)

    @classmethod
    def for_step(
        cls, costs: Costs, tokens: int, decoding: Collection[Sequence], itl: float | None, min_chunk: int
    ) -> "StepBudget":
        """Return the budget of a step in which `decoding` decode, forecast to take at most `itl` seconds (None: no limit)."""
        base = costs.decode[0] if decoding else costs.prefill[0]
        if itl is None or not decoding:
            return cls(costs, tokens, base=base)
        seconds = costs.step_seconds(len(decoding), sum(map(len, decoding)))
        return cls(costs, tokens, itl - seconds, min_chunk, base=base)

    def share(self, demands: Collection[Sequence], creditors: Collection[Tenant]) -> None:
        """Limit the time of each tenant to its share of the step, see `step_shares`. `demands` are all that could run."""
        weights = sum(tenant.weight for tenant in {seq.tenant for seq in demands})
        tokens = {seq.tenant: max(1, int(self.tokens * seq.tenant.weight / weights)) for seq in demands}
        seconds = dict.fromkeys(tokens, 0.0)
        for seq in demands:
            if chunk := min(seq.kv.num_uncomputed, tokens[seq.tenant]):
                tokens[seq.tenant] -= chunk
                seconds[seq.tenant] += self.seconds(seq, chunk)
        self.shares = step_shares(self.base, seconds, creditors)

    def has_share(self, tenant: Tenant) -> bool:
        """Return whether a tenant may have further tokens computed in this step."""
        return self.shares.get(tenant, math.inf) > 0

    def take_back(self, tokens: int) -> None:
        """Return tokens of a sequence that was allocated them, and leaves the step."""
        self.tokens += tokens

    def has_prompt_time(self, cached: int) -> bool:
        """Return whether there is time for a token of another prompt behind `cached` ones."""
        return self.min_chunk > 0 or _tokens_within(self.costs, self.prompt_seconds, cached) > 0

    def allocate(self, seq: Sequence) -> int:
        """Return how many tokens of a sequence the step computes, and take them off the budget."""
        share = self.shares.get(seq.tenant, math.inf)
        if share <= 0:
            return 0
        count = min(seq.kv.num_uncomputed, self.tokens)
        if seq.features and seq.reads_logits:
            count = min(count, self.scored_tokens)
            self.scored_tokens -= count
        if not seq.kv.is_decoding:
            affordable = _tokens_within(self.costs, self.prompt_seconds, seq.kv.num_computed)
            count = min(
                count, max(self.min_chunk, affordable), max(1, _tokens_within(self.costs, share, seq.kv.num_computed))
            )
            self.prompt_seconds -= _added_seconds(self.costs, count, seq.kv.num_computed)
            self.min_chunk = 0
        self.tokens -= count
        if share < math.inf:
            self.shares[seq.tenant] = share - self.seconds(seq, count)
        return count

    def seconds(self, seq: Sequence, count: int) -> float:
        """Return by how many seconds `count` tokens of a sequence lengthen a step."""
        if not seq.kv.is_decoding:
            return _added_seconds(self.costs, count, seq.kv.num_computed)
        _, per_sequence, per_token = self.costs.decode
        return per_sequence + per_token * len(seq)


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

"""Compute budget of one engine step: a token limit, the time that prompts may add beside decoding sequences, tenants' shares.

Shares of tenants are weighted max-min fairness: what a tenant does not need goes to the others, by weight. Whoever has used
less than its share lately is hardly slowed down by the others until it has made up for that, so short answers take about as
long as alone.
"""

import math
from collections.abc import Collection, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field

from pdserve.costs import Costs, attention_pairs
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import StepPlan
from pdserve.request import Tenant

CREDIT_S = 0.5  # the most that a tenant can make up for
CREDITOR_SLOWDOWN = 1 / 8  # of its steps by those who have no credit: these advance, but not by much


@dataclass
class StepBudget:
    """Remaining budget of one step, and what it was spent for.

    Attributes:
        tokens: token limit over all sequences.
        prompt_seconds: time that prompts may add to the step; infinite if no sequence decodes in it.
        min_chunk: tokens granted to the next prompt even without time left, so that prompts always make progress.
        scored_tokens: limit over all prompts whose log probabilities are due: each token needs a large row of logits.
        base: seconds of the step, whatever it computes.
        shares: time that each tenant may add to the step; one that is missing is not limited.
        token_shares: tokens of each tenant, if together they ask for more than the limit; else empty.
        kept: tokens and seconds that are set aside for long prompts.
        plan: the tokens that were allocated.
        turn: number of the step, from which sequences know whose turn it is in the next one, if tenants are limited.
    """

    costs: Costs
    tokens: int
    prompt_seconds: float = math.inf
    min_chunk: int = 1
    scored_tokens: int = 128
    base: float = 0.0
    shares: dict[Tenant, float] = field(default_factory=dict)
    token_shares: dict[Tenant, int] = field(default_factory=dict)
    kept: dict[Sequence, tuple[int, float]] = field(default_factory=dict)
    plan: StepPlan = field(default_factory=StepPlan)
    turn: int = 0

    @classmethod
    def for_step(
        cls,
        costs: Costs,
        tokens: int,
        decoding: Collection[Sequence],
        itl: float | None,
        min_chunk: int,
        plan: StepPlan,
    ) -> "StepBudget":
        """Return the budget of a step in which `decoding` decode, forecast to take at most `itl` seconds (None: no limit)."""
        budget = cls(costs, tokens, base=costs.decode[0] if decoding else costs.prefill[0], plan=plan)
        if itl is not None and decoding:
            budget.prompt_seconds = itl - costs.step_seconds(len(decoding), sum(map(len, decoding)))
            budget.min_chunk = min_chunk
        return budget

    def share(
        self,
        demands: Mapping[Tenant, SequenceABC[Sequence]],
        tokens_now: Mapping[Tenant, float],
        creditors: Collection[Tenant],
        turn: int,
    ) -> None:
        """Limit the time and the tokens of each tenant to its share of the step.

        Args:
            demands: of each tenant, all that could run if it were alone; for time, see `step_shares`.
            tokens_now: how many tokens of each tenant could be computed in this step: what no other can use is not kept.
            creditors: tenants that have credit.
            turn: number of the step.
        """
        if sum(tokens_now.values()) > self.tokens:
            granted = split(self.tokens, tokens_now)
            self.token_shares = {tenant: math.ceil(count) for tenant, count in granted.items() if count}
        seconds = self._seconds_of(demands, creditors)
        self.shares, self.turn = step_shares(self.base, seconds, creditors), turn
        self.plan.limited = {tenant for tenant, share in self.shares.items() if share < seconds[tenant]}

    def _seconds_of(
        self, demands: Mapping[Tenant, SequenceABC[Sequence]], creditors: Collection[Tenant]
    ) -> dict[Tenant, float]:
        """Return the seconds that all work of each tenant would add; if it can get less, of some of its work only.

        That changes no share. Looking at all sequences would take longer than computing those few that advance.
        """
        tokens, weights = self.tokens, sum(tenant.weight for tenant in demands)
        # The shares depend on the tenants with credit, if there are some, and then on those with the least work.
        first = {tenant for tenant in demands if tenant in creditors} or demands.keys()
        seconds, enough, weights_first = dict[Tenant, float](), math.inf, sum(tenant.weight for tenant in first)
        for tenant in sorted(demands, key=lambda tenant: (tenant not in first, len(demands[tenant]))):
            if tenant not in first:
                enough = (self.base + sum(seconds[one] for one in first)) * CREDITOR_SLOWDOWN
            left = max(1, int(tokens * tenant.weight / weights))
            seconds[tenant] = 0.0
            for seq in demands[tenant]:
                if chunk := min(seq.kv.num_uncomputed, left):
                    left -= chunk
                    seconds[tenant] += self.seconds(seq, chunk)
                if seconds[tenant] > enough or not left:
                    break
            enough = min(enough, (self.base + seconds[tenant]) / tenant.weight * weights_first - self.base)
        return seconds

    def has_share(self, tenant: Tenant) -> bool:
        """Return whether a tenant may have further tokens computed in this step."""
        return self.shares.get(tenant, math.inf) > 0 and self.token_shares.get(tenant, 1) > 0

    def take_back(self, tokens: int) -> None:
        """Return tokens of a sequence that was allocated them, and leaves the step."""
        self.tokens += tokens

    def affordable(self, cached: int) -> int:
        """Return for how many tokens of a prompt behind `cached` ones there is time."""
        return _tokens_within(self.costs, self.prompt_seconds, cached)

    def room(self, seq: Sequence) -> int:
        """Return for how many tokens of a sequence there is room in the step, and time."""
        share = self.shares.get(seq.tenant, math.inf)
        if share <= 0:
            return 0
        room = min(self.tokens, self.token_shares.get(seq.tenant, self.tokens))
        if seq.features and seq.reads_logits:
            room = min(room, self.scored_tokens)
        if not seq.kv.is_decoding:
            affordable = max(self.min_chunk, self.affordable(seq.kv.num_computed))
            room = min(room, affordable, max(1, _tokens_within(self.costs, share, seq.kv.num_computed)))
        return room

    def allocate(self, seq: Sequence) -> int:
        """Plan as many tokens of a sequence as there is room for, and return their number."""
        kept, seconds = self.kept.pop(seq, (0, 0.0))
        if kept:
            self._take(seq, -kept, -seconds)
            self.min_chunk = max(self.min_chunk, kept)
        # What was kept is there, even if another one's last token took longer than its tenant's share had left.
        count = min(seq.kv.num_uncomputed, max(kept, self.room(seq)))
        if count:
            if seq.features and seq.reads_logits:
                self.scored_tokens -= count
            if not seq.kv.is_decoding:
                self.min_chunk = 0
            self._take(seq, count, self.seconds(seq, count))
            self.plan.counts[seq] = count
            if self.shares:
                seq.take_turn(self.turn)
        return count

    def keep_half(self, seq: Sequence) -> None:
        """Set aside for a long prompt half of what it could have now, until it is allocated."""
        tokens = (self.room(seq) + 1) // 2
        self.min_chunk //= 2
        self.kept[seq] = tokens, self.seconds(seq, tokens)
        self._take(seq, *self.kept[seq])

    def _take(self, seq: Sequence, tokens: int, seconds: float) -> None:
        self.tokens -= tokens
        if not seq.kv.is_decoding:
            self.prompt_seconds -= seconds
        if seq.tenant in self.shares:
            self.shares[seq.tenant] -= seconds
        if seq.tenant in self.token_shares:
            self.token_shares[seq.tenant] -= tokens

    def seconds(self, seq: Sequence, count: int) -> float:
        """Return by how many seconds `count` tokens of a sequence lengthen a step."""
        if not seq.kv.is_decoding:
            _, per_token, per_pair = self.costs.prefill
            return per_token * count + per_pair * attention_pairs(count, seq.kv.num_computed)
        _, per_sequence, per_token = self.costs.decode
        return per_sequence + per_token * len(seq)


def _tokens_within(costs: Costs, seconds: float, cached: int) -> int:
    """Return the largest chunk that fits into `seconds`: the n that solves b × n + c × n × (cached + n / 2) = seconds."""
    _, b, c = costs.prefill
    if seconds <= 0:
        return 0
    slope = b + c * cached
    divisor = slope + math.sqrt(slope * slope + 2 * c * seconds) if math.isfinite(seconds) else 0.0
    return int(min(2 * seconds / divisor, 2**31)) if divisor else 2**31


def split(total: float, demands: Mapping[Tenant, float]) -> dict[Tenant, float]:
    """Divide `total` among tenants by weight, none getting more than it demands."""
    granted, weights = dict[Tenant, float](), sum(tenant.weight for tenant in demands)
    for tenant in sorted(demands, key=lambda tenant: demands[tenant] / tenant.weight):
        granted[tenant] = min(demands[tenant], total * tenant.weight / max(weights, tenant.weight))
        total -= granted[tenant]
        weights -= tenant.weight
    return granted


def step_shares(
    base: float, demands: Mapping[Tenant, float], creditors: Collection[Tenant] = ()
) -> dict[Tenant, float]:
    """Return the seconds that each tenant may add to a step, so that none is slowed down by more than its share asks for.

    Alone, a tenant's step would take `base` seconds and those that it demands. Beside others it may take as much longer as
    its weight is smaller than that of all, and for those who have credit, `CREDITOR_SLOWDOWN` longer because of those who
    have none. No tenant is limited if that holds anyway.

    Args:
        base: seconds of a step, whatever it computes.
        demands: seconds that all work of each tenant would add.
        creditors: tenants that have credit.
    """
    owed = {tenant: seconds for tenant, seconds in demands.items() if tenant in creditors}
    if 0 < len(owed) < len(demands):
        shares = step_shares(base, owed)
        others = {tenant: seconds for tenant, seconds in demands.items() if tenant not in owed}
        return shares | _limits((base + sum((shares or owed).values())) * CREDITOR_SLOWDOWN, others)
    if len(demands) < 2:
        return {}
    longest = min((base + seconds) / tenant.weight for tenant, seconds in demands.items())
    return _limits(longest * sum(tenant.weight for tenant in demands) - base, demands)


def _limits(total: float, demands: Mapping[Tenant, float]) -> dict[Tenant, float]:
    """Return the share of each tenant in `total` seconds; none of those that ask for none, or if that is all or none."""
    if not 0 < total < sum(demands.values()):
        return {}
    return {tenant: seconds for tenant, seconds in split(total, demands).items() if demands[tenant]}


class Credit:
    """The credit of each tenant: the time of recent steps, in forecast seconds, that was its share and that it did not use.

    A tenant begins with `CREDIT_S`, which is also the most that it can have.
    """

    def __init__(self) -> None:
        self._used: dict[Tenant, float] = {}  # all credit that is not whole

    def creditors(self, tenants: Collection[Tenant]) -> set[Tenant]:
        """Return those of the tenants that have credit."""
        return {tenant for tenant in tenants if self._used.get(tenant, 0.0) < CREDIT_S}

    def is_settled(self, tenants: Collection[Tenant]) -> bool:
        """Return whether steps of these tenants change nothing: it is one, without credit, and the others' is whole."""
        return len(tenants) < 2 and self._used == dict.fromkeys(tenants, CREDIT_S)

    def spend(self, base: float, seconds: Mapping[Tenant, float]) -> None:
        """Record a step. Each tenant in it uses what the step would take without the others.

        At most half of a step counts as a tenant's share: one that runs alone spends its credit before another one comes.

        Args:
            base: seconds of a step, whatever it computes.
            seconds: those that each tenant in it adds.
        """
        total = base + sum(seconds.values())
        tenants = self._used.keys() | seconds.keys()
        weights = 0.0
        for tenant in tenants:
            weights += tenant.weight
        for tenant in tenants:
            used = self._used.pop(tenant, 0.0) - total * min(tenant.weight / weights, 0.5)
            if tenant in seconds:
                used += base + seconds[tenant]
            if used > 0:
                self._used[tenant] = min(used, CREDIT_S)

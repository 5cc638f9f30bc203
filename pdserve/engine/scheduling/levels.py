"""Levels of tenants: how many running sequences each has, by weight, and which of these leaves for one of another tenant."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC

from pdserve.engine.sequence import Sequence
from pdserve.request import Tenant


def levels_of(running: SequenceABC[Sequence]) -> dict[Tenant, float]:
    """Return the number of running sequences of each tenant that has some, divided by its weight."""
    counts = Counter(seq.tenant for seq in running)
    return {tenant: count / tenant.weight for tenant, count in counts.items()}


def giving_way(running: SequenceABC[Sequence], tenants: Iterable[Tenant]) -> dict[Tenant, Sequence]:
    """Return which running sequence gives way to a new one of each tenant; without tenants that would rise to its level."""
    levels = levels_of(running)
    candidates = [one for one in reversed(running) if one.may_give_way]
    victim = max(candidates, key=lambda one: (levels[one.tenant], one.rank), default=None)
    if victim is None:
        return {}
    highest = levels[victim.tenant]
    return {tenant: victim for tenant in tenants if levels.get(tenant, 0.0) + 1 / tenant.weight < highest}


def last_to_run(running: SequenceABC[Sequence], tenant: Tenant) -> Sequence:
    """Return the newest running sequence of the tenant of the highest level; of this one if no other is above it."""
    levels = levels_of(running)
    candidates = [one for one in reversed(running) if one.tenant == tenant or one.may_give_way]
    return max(candidates, key=lambda one: (levels[one.tenant], one.rank))

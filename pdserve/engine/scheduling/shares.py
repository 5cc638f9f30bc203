"""Shares of an instance among tenants: how much of a step each may take. Plain Python.

Weighted max-min fairness: what a tenant does not need goes to the others, by weight. Whoever has used less than its share
lately is hardly slowed down by the others until it has made up for that, so short answers take about as long as alone.
"""

from collections.abc import Collection, Mapping

from pdserve.request import Tenant

CREDIT_S = 0.5  # the most that a tenant can make up for
CREDITOR_SLOWDOWN = 1 / 8  # of its steps by those who have no credit: these advance, but not by much


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
        total = (base + sum((shares or owed).values())) * CREDITOR_SLOWDOWN
        return shares | (split(total, others) if sum(others.values()) > total else {})
    if len(demands) < 2:
        return {}
    longest = min((base + seconds) / tenant.weight for tenant, seconds in demands.items())
    total = longest * sum(tenant.weight for tenant in demands) - base
    return split(total, demands) if sum(demands.values()) > total else {}


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

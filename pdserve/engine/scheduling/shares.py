"""Shares of an instance among tenants: how much of a step each may take. Plain Python.

Weighted max-min fairness: what a tenant does not need goes to the others, by weight.
"""

from collections.abc import Mapping

from pdserve.request import Tenant


def split(total: float, demands: Mapping[Tenant, float]) -> dict[Tenant, float]:
    """Divide `total` among tenants by weight, none getting more than it demands."""
    granted, weights = dict[Tenant, float](), sum(tenant.weight for tenant in demands)
    for tenant in sorted(demands, key=lambda tenant: demands[tenant] / tenant.weight):
        granted[tenant] = min(demands[tenant], total * tenant.weight / max(weights, tenant.weight))
        total -= granted[tenant]
        weights -= tenant.weight
    return granted


def step_shares(base: float, demands: Mapping[Tenant, float]) -> dict[Tenant, float]:
    """Return the seconds that each tenant may add to a step, so that none is slowed down by more than its share asks for.

    Alone, a tenant's step would take `base` seconds and those that it demands. Beside others it may take as much longer as
    its weight is smaller than that of all. No tenant is limited if that holds anyway.

    Args:
        base: seconds of a step, whatever it computes.
        demands: seconds that all work of each tenant would add.
    """
    if len(demands) < 2:
        return {}
    longest = min((base + seconds) / tenant.weight for tenant, seconds in demands.items())
    total = longest * sum(tenant.weight for tenant in demands) - base
    return split(total, demands) if sum(demands.values()) > total else {}

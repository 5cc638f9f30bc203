"""The account of one API key that several routers share: the level of each rate, and the choices of each router."""

from collections.abc import Mapping
from typing import Any

from pdserve.control.registry import LEASE_S

TOTALS_TTL_S = 3600.0  # what a router has reported in all is forgotten after this time without a report


def settle(account: dict[str, Any], router: str, report: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Apply the report of a router (`Quota.report`) to the account of a key; return the arguments of `Quota.update`."""
    choices = account["choices"]
    choices[router] = [report["choices"], now + LEASE_S]
    for name, (count, end) in list(choices.items()):
        if not count or end < now:
            del choices[name]
    totals = account.setdefault("totals", {})
    seen = totals.setdefault(router, {})
    left: dict[str, float] = {}
    for unit, rate in report["rates"].items():
        amount = rate["amount"]
        level, at = account["rates"].get(unit, (amount, now))
        charge = rate["total"] - seen.get(unit, rate["confirmed"])
        left[unit], seen[unit] = min(amount, level + (now - at) * amount / rate["seconds"]) - charge, rate["total"]
        account["rates"][unit] = [min(amount, left[unit]), now]
    seen["at"] = now
    for name in [name for name, entry in totals.items() if entry["at"] < now - TOTALS_TTL_S]:
        del totals[name]
    return {"choices": sum(count for name, (count, _) in choices.items() if name != router), "left": left}

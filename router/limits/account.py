"""The account of one API key that several routers share: the level of each rate, and the choices of each router."""

from collections.abc import Mapping
from typing import Any

from pdserve.control.registry import LEASE_S


def settle(account: dict[str, Any], router: str, report: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Apply the report of a router (`Quota.report`) to the account of a key; return the arguments of `Quota.update`."""
    choices = account["choices"]
    choices[router] = [report["choices"], now + LEASE_S]
    for name, (count, end) in list(choices.items()):
        if not count or end < now:
            del choices[name]
    left: dict[str, float] = {}
    for unit, rate in report["rates"].items():
        amount = rate["amount"]
        level, at = account["rates"].get(unit, (amount, now))
        left[unit] = min(amount, level + (now - at) * amount / rate["seconds"]) - rate["taken"]
        account["rates"][unit] = [min(amount, left[unit]), now]
    return {"choices": sum(count for name, (count, _) in choices.items() if name != router), "left": left}

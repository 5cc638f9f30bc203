"""API key limits enforced across routers, through one account per key: in Redis, or in a file of one machine.

    pdserve:limits:<name>:<model>    in Redis: the level of each rate, and the choices that each router has running or queued

A router decides from its local copies, so no request waits for a store. Ten times a second it reports what was taken from
keys in use and receives the new levels. Between exchanges it does not see the latest use on other routers, so at worst each
router admits a full bucket. The account then goes negative and no router admits further requests until it has refilled:
over longer periods a key gets its rate and no more. Without the store each router counts for itself, and reports what was
taken meanwhile when the store answers again: each token is charged once, whatever answers were lost.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from pdserve.control.registry import LEASE_S, Registry
from pdserve.errors import SetupError
from pdserve.lines.untrusted import read_json
from pdserve.router.limits.quota import Quota

log = logging.getLogger(__name__)

SYNC_INTERVAL_S = 0.1
ACCOUNT_TTL_S = 86400  # an unused account of Redis expires after this time
TOTALS_TTL_S = 3600.0  # what a router has reported in all is forgotten after this time without a report

Change = Callable[[dict[str, Any], float], None]  # of accounts by key, in place, at a time in seconds


def settle(account: dict[str, Any], router: str, report: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Apply the report of a router (`Quota.report`) to the account of a key; return the arguments of `Quota.update`."""
    choices = account.setdefault("choices", {})
    choices[router] = [report["choices"], now + LEASE_S]
    for name, (count, end) in list(choices.items()):
        if not count or end < now:
            del choices[name]
    totals, rates = account.setdefault("totals", {}), account.setdefault("rates", {})
    seen = totals.setdefault(router, {})
    left: dict[str, float] = {}
    for unit, rate in report["rates"].items():
        amount = rate["amount"]
        level, at = rates.get(unit, (amount, now))
        charge = rate["total"] - seen.get(unit, rate["confirmed"])
        left[unit], seen[unit] = min(amount, level + (now - at) * amount / rate["seconds"]) - charge, rate["total"]
        rates[unit] = [min(amount, left[unit]), now]
    seen["at"] = now
    for name in [name for name, entry in totals.items() if entry["at"] < now - TOTALS_TTL_S]:
        del totals[name]
    return {"choices": sum(count for name, (count, _) in choices.items() if name != router), "left": left}


class Accounts(Protocol):
    """The accounts of keys, where all routers reach them."""

    async def exchange(self, keys: Collection[str], change: Change) -> bool:
        """Change the accounts of these keys as if no other router did so meanwhile. Returns False if they are not stored.

        `change` may be called again with what another router has stored, and not at all while another router is at it.
        """


class SharedQuotas:
    """Keeps the quotas of one router in step with the accounts that all routers share."""

    def __init__(
        self,
        accounts: Accounts,
        router_id: str,
        quotas: Mapping[str, Quota],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._accounts, self._router_id, self._clock = accounts, router_id, clock
        self._quotas = {name: quota for name, quota in quotas.items() if quota.is_limited}

    async def run(self) -> None:
        """Synchronise until cancelled."""
        while True:
            await asyncio.sleep(SYNC_INTERVAL_S)
            await self.sync()

    async def sync(self) -> None:
        """Report the local use of each changed quota and apply the shared levels, once."""
        answers = dict[str, dict[str, Any]]()

        def change(accounts: dict[str, Any], now: float) -> None:
            for name, quota in changed.items():
                answers[name] = settle(accounts.setdefault(name, {}), self._router_id, quota.report(), now)

        changed = {name: quota for name, quota in self._quotas.items() if quota.needs_sync}
        if not changed:
            return
        if not await self._accounts.exchange(changed, change):  # the same use is reported again
            for quota in changed.values():
                quota.keep()
            return
        for name, answer in answers.items():
            changed[name].update(**answer, now=self._clock())


class RedisAccounts:
    """Accounts in the Redis of a registry, one value per key."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def exchange(self, keys: Collection[str], change: Change) -> bool:
        def changed(values: list[str | None], now: float) -> list[str]:
            accounts = {key: _parse(value) for key, value in zip(keys, values, strict=True)}
            change(accounts, now)
            return [json.dumps(accounts[key]) for key in keys]

        return await self._registry.change([f"limits:{key}" for key in keys], changed, ACCOUNT_TTL_S)


class FileAccounts:
    """Accounts in a file: one JSON object. An exchange never waits for another router, it leaves its turn to it.

    Args:
        clock: the same in all routers of the machine.

    Raises:
        SetupError: the file cannot be opened.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SetupError(f"--quota-file {path}: {error.strerror}") from error
        self._clock = clock

    async def exchange(self, keys: Collection[str], change: Change) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        try:
            accounts = _parse(os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0))
            change(accounts, self._clock())
            data = json.dumps(accounts).encode()
            os.pwrite(self._descriptor, data, 0)
            os.ftruncate(self._descriptor, len(data))
        except OSError as error:
            log.warning("quotas are not shared with other routers at the moment: %s", error)
            return False
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        return True


def _parse(stored: str | bytes | None) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(value := read_json(stored or "{}"), dict):
            return value
    log.warning("the quotas that routers share were damaged, perhaps by a killed router: they start anew")
    return {}

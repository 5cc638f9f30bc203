"""API key limits enforced across all registered routers, through one account per key in Redis.

    pdserve:limits:<name>:<model>    the level of each rate, and the choices that each router has running or queued

A router decides from its local copies, so no request waits for Redis. Ten times a second it reports what was taken from keys
in use and receives the new levels. Between exchanges it does not see the latest use on other routers, so at worst each
router admits a full bucket. The account then goes negative and no router admits further requests until it has refilled:
over longer periods a key gets its rate and no more. Without Redis each router counts for itself, and reports what was taken
meanwhile when Redis answers again: each token is charged once, whatever answers were lost.
"""

import asyncio
import json
import time
from collections.abc import Mapping

from pdserve.control.registry import LEASE_S, NOW, Registry
from pdserve.router.limits.account import TOTALS_TTL_S
from pdserve.router.limits.quota import Quota

SYNC_INTERVAL_S = 0.1
ACCOUNT_TTL_S = 86400  # an unused account expires after this time
# KEYS: accounts. ARGV: router id, lease in seconds, one report (`Quota.report`) per account. Returns one update per account.
SYNC_SCRIPT = f"""{NOW}
local answers = {{}}
for i, name in ipairs(KEYS) do
  local account = cjson.decode(redis.call('GET', name) or '{{"choices": {{}}}}')
  local report, answer = cjson.decode(ARGV[i + 2]), {{choices = 0, left = {{}}}}
  account.choices[ARGV[1]] = {{report.choices, now + ARGV[2]}}
  for router, entry in pairs(account.choices) do
    if entry[1] == 0 or entry[2] < now then account.choices[router] = nil
    elseif router ~= ARGV[1] then answer.choices = answer.choices + entry[1] end
  end
  local totals = account.totals or {{}}
  local seen = totals[ARGV[1]] or {{}}
  for unit, rate in pairs(report.rates) do
    local left, at = unpack(account[unit] or {{rate.amount, now}})
    left = math.min(rate.amount, left + (now - at) * rate.amount / rate.seconds)
    left = left - (rate.total - (seen[unit] or rate.confirmed))
    seen[unit] = rate.total
    account[unit], answer.left[unit] = {{math.min(rate.amount, left), now}}, left
  end
  seen.at, totals[ARGV[1]], account.totals = now, seen, totals
  for router, entry in pairs(totals) do
    if entry.at < now - {TOTALS_TTL_S} then totals[router] = nil end
  end
  redis.call('SET', name, cjson.encode(account), 'EX', {ACCOUNT_TTL_S})
  answers[i] = cjson.encode(answer)
end
return answers"""


class SharedQuotas:
    """Keeps the quotas of one router in step with the accounts that all routers share."""

    def __init__(self, registry: Registry, router_id: str, quotas: Mapping[str, Quota]) -> None:
        self._registry = registry
        self._router_id = router_id
        self._quotas = {f"limits:{name}": quota for name, quota in quotas.items() if quota.is_limited}

    async def run(self) -> None:
        """Synchronise until cancelled."""
        while True:
            await asyncio.sleep(SYNC_INTERVAL_S)
            await self.sync()

    async def sync(self) -> None:
        """Report the local use of each changed quota and apply the shared levels, once."""
        changed = {name: quota for name, quota in self._quotas.items() if quota.needs_sync}
        if not changed:
            return
        reports = [json.dumps(quota.report()) for quota in changed.values()]
        answers = await self._registry.run_script(SYNC_SCRIPT, list(changed), [self._router_id, LEASE_S, *reports])
        if answers is None:
            for quota in changed.values():
                quota.keep()
            return
        now = time.monotonic()
        for quota, answer in zip(changed.values(), answers, strict=True):
            quota.update(**json.loads(answer), now=now)

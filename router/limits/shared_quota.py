"""Limits of API keys over all routers that are registered: in Redis, each key has an account, of which routers have copies.

    pdserve:limits:<name>:<model>    what is left of its rates, and the choices that each router has under way

A router decides by its copies, so no request waits for Redis. Ten times a second it tells what was taken of keys that were
asked for, and hears what is left. Until then it does not know of the others' latest: at worst, each lets in a whole amount.
That is a debt then, and nobody is let in until it is paid, so over longer times a key has its rate and no more.
Without Redis, each router counts for itself.
"""

import asyncio
import json
import time
from collections.abc import Mapping

from pdserve.control.registry import LEASE_S, NOW, Registry
from pdserve.router.limits.quota import Quota

SETTLE_S = 0.1
ALONE = '{"choices": 0, "left": {}}'
FORGET_S = 86400  # of a key that nobody uses
SETTLE = f"""{NOW}
local answers = {{}}
for i, name in ipairs(KEYS) do
  local account = cjson.decode(redis.call('GET', name) or '{{"choices": {{}}}}')
  local told, answer = cjson.decode(ARGV[i + 2]), {{choices = 0, left = {{}}}}
  account.choices[ARGV[1]] = {{told.choices, now + ARGV[2]}}
  for router, one in pairs(account.choices) do
    if one[1] == 0 or one[2] < now then account.choices[router] = nil
    elseif router ~= ARGV[1] then answer.choices = answer.choices + one[1] end
  end
  for what, rate in pairs(told.rates) do
    local left, at = unpack(account[what] or {{rate.amount, now}})
    left = math.min(rate.amount, left + (now - at) * rate.amount / rate.seconds) - rate.taken
    account[what], answer.left[what] = {{math.min(rate.amount, left), now}}, left
  end
  redis.call('SET', name, cjson.encode(account), 'EX', {FORGET_S})
  answers[i] = cjson.encode(answer)
end
return answers"""


class SharedQuotas:
    """Keeps the quotas of one router what they are over all routers."""

    def __init__(self, registry: Registry, router_id: str, quotas: Mapping[str, Quota]) -> None:
        self._registry = registry
        self._router_id = router_id
        self._quotas = {f"limits:{name}": quota for name, quota in quotas.items() if quota.limited}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SETTLE_S)
            await self.settle()

    async def settle(self) -> None:
        """Tells and hears once."""
        stale = {name: quota for name, quota in self._quotas.items() if quota.stale}
        if not stale:
            return
        told = [json.dumps(quota.tell()) for quota in stale.values()]
        answers = await self._registry.call(SETTLE, list(stale), [self._router_id, LEASE_S, *told])
        now = time.monotonic()
        for quota, answer in zip(stale.values(), answers or [ALONE] * len(stale), strict=True):
            quota.hear(**json.loads(answer), now=now)

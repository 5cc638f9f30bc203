"""Which routers there are, as a Redis knows: routers register with a lease and renew it, instances look again and again.

    pdserve:routers:<model>    a sorted set of entries, by when their leases end on Redis's own clock

An entry is an address for instances to dial, and a seal that the control token makes of it. Instances show their token to
whom they dial, so who may write to Redis and does not know the token must not be able to name an address. Without a token,
a seal says nothing.

Nothing ends without Redis, and no request waits for it: a call that fails is counted, and what was known stays in force.
"""

import asyncio
import hmac
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from pdserve.errors import SetupError

log = logging.getLogger(__name__)

LEASE_S = 5.0  # a router that is killed is found for so long
LOOK_S = 1.0  # between two renewals, and between two looks
TIMEOUT_S = 1.0
MAX_ROUTERS = 1000
EVERYWHERE = ("0.0.0.0", "::")
NOW = "local time = redis.call('TIME') local now = time[1] + time[2] / 1e6 "
RENEW = f"""{NOW}
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('EXPIRE', KEYS[1], 3600)"""
LOOK = f"{NOW} return redis.call('ZRANGEBYSCORE', KEYS[1], now, '+inf', 'LIMIT', 0, {MAX_ROUTERS})"
WITHDRAW = "redis.call('ZREM', KEYS[1], ARGV[1])"


class Registry:
    """What one router or instance tells Redis and hears of it. Everything runs on one event loop."""

    def __init__(self, url: str, model: str, token: str, failed: Callable[[], None]) -> None:
        """`token`: what routers and instances share, or nothing; `failed` is called for each call without an answer.

        Raises:
            SetupError: the URL cannot be used. Whether a Redis answers there is not asked.
        """
        self._model, self._token, self._failed = model, token, failed
        self._answers = True
        self._strangers: list[str] = []
        try:
            self._redis = redis.asyncio.Redis.from_url(
                url,
                password=os.environ.get("REDIS_PASSWORD") or None,  # one in the URL wins
                socket_timeout=TIMEOUT_S,
                socket_connect_timeout=TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
                decode_responses=True,
                encoding_errors="replace",
            )
            self._redis.connection_pool.make_connection()  # reads the parameters
        except (TypeError, ValueError) as error:
            raise SetupError(f"--registry must be the URL of a Redis, such as redis://host:6379/0: {error}") from error

    async def announce(self, host: str, port: int) -> None:
        """Keeps a router registered until cancelled, and then withdraws it.

        Args:
            host: where instances reach it, or 0.0.0.0: where Redis sees it.
        """
        entry = ""
        try:
            while True:
                if not entry and (address := await self._address(host, port)):
                    entry = self._entry(address)
                    log.info("this router is registered as %s", address)
                if entry:
                    await self.call(RENEW, ["routers"], [entry, LEASE_S])
                await asyncio.sleep(LOOK_S)
        finally:
            await self.call(WITHDRAW, ["routers"], [entry])

    async def routers(self) -> set[str] | None:
        """The addresses of all routers that are registered. None: Redis does not say."""
        entries = await self.call(LOOK, ["routers"], [])
        if entries is None:
            return None
        named = {entry: entry.partition(" ")[0] for entry in entries}
        ours = {
            address
            for entry, address in named.items()
            if hmac.compare_digest(entry.encode(), self._entry(address).encode())
        }
        strangers = sorted(set(named.values()) - ours)
        if strangers and strangers != self._strangers:
            log.warning(
                "%d routers are registered with another --control-token, such as %r", len(strangers), strangers[0]
            )
        self._strangers = strangers
        return ours

    async def call(self, script: str, keys: Sequence[str], arguments: Sequence[str | float]) -> Any:
        """What a script in Lua returns, or None where there is no answer. `keys` are those of our model."""
        names = [f"pdserve:{key}:{self._model}" for key in keys]
        return await self._answer(self._redis.eval(script, len(names), *names, *arguments))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _address(self, host: str, port: int) -> str | None:
        if host in EVERYWHERE:
            seen = await self._answer(self._redis.client_info())
            return seen and f"{seen['addr'].rpartition(':')[0]}:{port}"
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _entry(self, address: str) -> str:
        seal = hmac.digest(self._token.encode(), f"{self._model} {address}".encode(), "sha256")
        return f"{address} {seal.hex()}"

    async def _answer(self, asked: Awaitable[Any]) -> Any:
        try:
            answer = await asked
        except (redis.RedisError, OSError) as error:
            if self._answers:
                log.warning("the registry does not answer, and what is known stays in force: %s", error)
            self._answers = False
            self._failed()
            return None
        if not self._answers:
            log.info("the registry answers again")
        self._answers = True
        return answer

"""Router registry in Redis: routers register with a lease and renew it; instances poll the list of routers.

    pdserve:routers:<model>    sorted set of entries, scored by the end of their leases on Redis's clock

An entry is an address for instances to dial, followed by its HMAC under the control token. Instances show the token to every
router that they dial, so a writer to Redis without the token must not be able to add an address. Without a token the
signature protects nothing.

Redis is never required: no request waits for it, and a failed call is counted and leaves the last known state in force.
"""

import asyncio
import hmac
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from pdserve.errors import SetupError, not_imported

if TYPE_CHECKING:
    import redis.asyncio

log = logging.getLogger(__name__)

LEASE_S = 5.0  # a killed router stays registered for this long
POLL_INTERVAL_S = 1.0  # of renewals and of lookups
TIMEOUT_S = 1.0
MAX_ROUTERS = 1000
WILDCARD_HOSTS = ("0.0.0.0", "::")
NOW = "local time = redis.call('TIME') local now = time[1] + time[2] / 1e6 "
RENEW_SCRIPT = f"""{NOW}
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('EXPIRE', KEYS[1], 3600)"""
LIST_SCRIPT = f"{NOW} return redis.call('ZRANGEBYSCORE', KEYS[1], now, '+inf', 'LIMIT', 0, {MAX_ROUTERS})"
WITHDRAW_SCRIPT = "redis.call('ZREM', KEYS[1], ARGV[1])"


def redis_client(url: str, timeout_s: float, expected: str, **options: Any) -> "redis.asyncio.Redis":
    """Return a client that tries each call once. No connection is made yet.

    Args:
        expected: what the URL must be, as the beginning of the error.

    Raises:
        SetupError: the URL is invalid, or the extra redis is not installed.
    """
    try:
        import redis.asyncio  # takes 0.2 s, so it is loaded only if it is used
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError as error:
        raise not_imported("redis", error) from error
    try:
        client = redis.asyncio.Redis.from_url(
            url,
            password=os.environ.get("REDIS_PASSWORD") or None,  # a password in the URL takes precedence
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            **options,
        )
        client.connection_pool.make_connection()  # validates the parameters
    except (TypeError, ValueError) as error:
        raise SetupError(f"{expected}: {error}") from error
    return client


class Registry:
    """Registry client of one router or instance. Runs on one event loop."""

    def __init__(self, url: str, model: str, token: str, on_failure: Callable[[], None]) -> None:
        """Parse the URL. No connection is made yet.

        Args:
            model: served model name; each model has its own list of routers.
            token: the control token that routers and instances share; may be empty.
            on_failure: called for each call that Redis does not answer.

        Raises:
            SetupError: the URL is invalid.
        """
        self._model, self._token, self._on_failure = model, token, on_failure
        self._is_answering = True
        self._rejected: list[str] = []
        what = "--registry must be the URL of a Redis, such as redis://host:6379/0"
        self._redis = redis_client(url, TIMEOUT_S, what, decode_responses=True, encoding_errors="replace")

    async def announce(self, host: str, port: int) -> None:
        """Keep a router registered until cancelled, then withdraw it.

        Args:
            host: the host that instances dial; for a wildcard address, the one that Redis sees.
        """
        entry = ""
        try:
            while True:
                if not entry and (address := await self._address(host, port)):
                    entry = self._entry(address)
                    log.info("this router is registered as %s", address)
                if entry:
                    await self.run_script(RENEW_SCRIPT, ["routers"], [entry, LEASE_S])
                await asyncio.sleep(POLL_INTERVAL_S)
        finally:
            await self.run_script(WITHDRAW_SCRIPT, ["routers"], [entry])

    async def routers(self) -> set[str] | None:
        """Return the addresses of all routers registered with our token, or None if Redis does not answer."""
        entries = await self.run_script(LIST_SCRIPT, ["routers"], [])
        if entries is None:
            return None
        address_of = {entry: entry.partition(" ")[0] for entry in entries}
        accepted = {
            address
            for entry, address in address_of.items()
            if hmac.compare_digest(entry.encode(), self._entry(address).encode())
        }
        rejected = sorted(set(address_of.values()) - accepted)
        if rejected and rejected != self._rejected:
            log.warning(
                "%d routers are registered with another --control-token, such as %r", len(rejected), rejected[0]
            )
        self._rejected = rejected
        return accepted

    async def run_script(self, script: str, keys: Sequence[str], arguments: Sequence[str | float]) -> Any:
        """Run a Lua script on keys of our model and return its result, or None if Redis does not answer."""
        names = [f"pdserve:{key}:{self._model}" for key in keys]
        return await self._result(self._redis.eval(script, len(names), *names, *arguments))

    async def change(
        self, keys: Sequence[str], changed: Callable[[list[str | None], float], list[str]], ttl_s: int
    ) -> bool:
        """Replace the values of keys of our model as if no one else did so meanwhile. Returns False if Redis does not answer.

        Args:
            changed: makes new values of those that are there and the time on Redis's clock; called again if another
                writer was faster.
            ttl_s: seconds after which a value that is not changed expires.
        """
        names = [f"pdserve:{key}:{self._model}" for key in keys]

        async def apply(pipe: Any) -> None:
            seconds, microseconds = await pipe.time()
            values = changed(await pipe.mget(names), seconds + microseconds / 1e6)
            pipe.multi()
            for name, value in zip(names, values, strict=True):
                pipe.set(name, value, ex=ttl_s)

        return await self._result(self._redis.transaction(apply, *names, watch_delay=1e-3)) is not None

    async def close(self) -> None:
        await self._redis.aclose()

    async def _address(self, host: str, port: int) -> str | None:
        if host in WILDCARD_HOSTS:
            client = await self._result(self._redis.client_info())
            return client and f"{client['addr'].rpartition(':')[0]}:{port}"
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _entry(self, address: str) -> str:
        signature = hmac.digest(self._token.encode(), f"{self._model} {address}".encode(), "sha256")
        return f"{address} {signature.hex()}"

    async def _result(self, call: Awaitable[Any]) -> Any:
        """Return the result of a Redis call, or None if it failed. Failures and recoveries are logged once."""
        import redis  # which `redis_client` has loaded

        try:
            result = await call
        except (redis.RedisError, OSError) as error:
            if self._is_answering:
                log.warning("the registry does not answer; the last known state stays in force: %s", error)
            self._is_answering = False
            self._on_failure()
            return None
        if not self._is_answering:
            log.info("the registry answers again")
        self._is_answering = True
        return result

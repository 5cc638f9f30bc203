"""Responses of /v1/responses that clients continue or read later: per API key, bounded in number and in time.

    store.get(key, id) → the stored response, or None        store.put(key, response)        store.delete(key, id) → existed

A key never sees the responses of another one. In Redis, routers share them:

    pdserve:responses:{<model>/<key>}        sorted set of ids, by the time of their storage
    pdserve:responses:{<model>/<key>}:<id>   one response as JSON
"""

import asyncio
import json
import logging
import os
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from pdserve.config import RouterConfig
from pdserve.errors import SetupError, Unavailable

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0  # of a call to Redis
MAX_MEMORY_BYTES = 256 << 20  # of all responses in a router's memory, as JSON
PUT_SCRIPT = """
local time = redis.call('TIME')
redis.call('SET', KEYS[1] .. ':' .. ARGV[1], ARGV[2], 'EX', ARGV[3])
redis.call('ZADD', KEYS[1], time[1] .. string.format('%06d', time[2]), ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[3])
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1 - ARGV[4])) do
  redis.call('DEL', KEYS[1] .. ':' .. id)
  redis.call('ZREM', KEYS[1], id)
end"""


@dataclass(frozen=True)
class StoredResponse:
    """A response, and the conversation up to its end as the messages of a chat.

    Attributes:
        num_bytes: of both as JSON; 0 before they are stored.
    """

    response: dict[str, Any]
    messages: list[dict[str, Any]]
    num_bytes: int = field(default=0, compare=False)

    @property
    def id(self) -> str:
        return str(self.response["id"])


class ResponseStore(Protocol):
    """Keeps responses. Its methods raise Unavailable if it does not answer. Threads convert from and to JSON."""

    async def get(self, key: str, response_id: str) -> StoredResponse | None: ...

    async def put(self, key: str, stored: StoredResponse) -> None:
        """Keep a response. The oldest ones of the key are dropped if it has too many."""

    async def delete(self, key: str, response_id: str) -> bool:
        """Return whether the response existed."""

    async def close(self) -> None: ...


def open_store(config: RouterConfig, now: Callable[[], float] = time.monotonic) -> ResponseStore | None:
    """Return the store of `--response-store`; None if responses are not kept.

    Raises:
        SetupError: it is neither `memory` nor the URL of a Redis.
    """
    if not config.response_store:
        return None
    if config.response_store == "memory":
        return MemoryStore(config.max_stored_responses, config.response_ttl_seconds, now)
    return RedisStore(config.response_store, config.name, config.max_stored_responses, config.response_ttl_seconds)


class MemoryStore:
    """Responses in the router's memory. `now` is a clock in seconds."""

    def __init__(
        self, max_per_key: int, ttl_s: float, now: Callable[[], float], max_bytes: int = MAX_MEMORY_BYTES
    ) -> None:
        self._max_per_key = max_per_key
        self._ttl_s = ttl_s
        self._now = now
        self._max_bytes = max_bytes
        self._num_bytes = 0
        # (key, id) → (JSON, time at which it ends), the oldest first, and the number of responses of each key
        self._entries: OrderedDict[tuple[str, str], tuple[bytes, float]] = OrderedDict()
        self._counts: defaultdict[str, int] = defaultdict(int)

    async def get(self, key: str, response_id: str) -> StoredResponse | None:
        self._drop_expired()
        entry = self._entries.get((key, response_id))
        return None if entry is None else await asyncio.to_thread(_decode, entry[0])

    async def put(self, key: str, stored: StoredResponse) -> None:
        data = await asyncio.to_thread(_encode, stored)
        self._drop_expired()
        self._remove((key, stored.id))
        self._entries[key, stored.id] = data, self._now() + self._ttl_s
        self._counts[key] += 1
        self._num_bytes += len(data)
        if self._counts[key] > self._max_per_key:
            self._remove(next(name for name in self._entries if name[0] == key))
        while self._num_bytes > self._max_bytes:
            self._remove(next(iter(self._entries)))

    async def delete(self, key: str, response_id: str) -> bool:
        self._drop_expired()
        return self._remove((key, response_id))

    async def close(self) -> None: ...

    def _drop_expired(self) -> None:
        now = self._now()
        while self._entries and next(iter(self._entries.values()))[1] <= now:
            self._remove(next(iter(self._entries)))

    def _remove(self, name: tuple[str, str]) -> bool:
        entry = self._entries.pop(name, None)
        if entry is None:
            return False
        self._num_bytes -= len(entry[0])
        self._counts[name[0]] -= 1
        if not self._counts[name[0]]:
            del self._counts[name[0]]
        return True


class RedisStore:
    """Responses in Redis, for several routers."""

    def __init__(self, url: str, model: str, max_per_key: int, ttl_s: float) -> None:
        """Parse the URL. No connection is made yet. Raises SetupError if it is invalid."""
        self._model, self._max_per_key, self._ttl_s = model, max_per_key, max(1, round(ttl_s))
        try:
            self._redis = redis.asyncio.Redis.from_url(
                url,
                password=os.environ.get("REDIS_PASSWORD") or None,  # a password in the URL takes precedence
                socket_timeout=TIMEOUT_S,
                socket_connect_timeout=TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
            )
            self._redis.connection_pool.make_connection()  # validates the parameters
        except (TypeError, ValueError) as error:
            message = "--response-store must be memory, or the URL of a Redis such as redis://host:6379/0"
            raise SetupError(f"{message}: {error}") from error

    async def get(self, key: str, response_id: str) -> StoredResponse | None:
        data = await self._call(self._redis.get(f"{self._index(key)}:{response_id}"))
        return None if data is None else await asyncio.to_thread(_decode, data)

    async def put(self, key: str, stored: StoredResponse) -> None:
        arguments = (stored.id, await asyncio.to_thread(_encode, stored), self._ttl_s, self._max_per_key)
        await self._call(self._redis.eval(PUT_SCRIPT, 1, self._index(key), *arguments))

    async def delete(self, key: str, response_id: str) -> bool:
        index = self._index(key)
        await self._call(self._redis.zrem(index, response_id))
        return bool(await self._call(self._redis.delete(f"{index}:{response_id}")))

    async def close(self) -> None:
        await self._redis.aclose()

    def _index(self, key: str) -> str:
        return f"pdserve:responses:{{{self._model}/{key}}}"

    async def _call(self, call: Any) -> Any:
        try:
            return await call
        except (redis.RedisError, OSError) as error:
            log.warning("--response-store: %s", error)
            message = "the store of responses does not answer"
            raise Unavailable(message, kind="response_store_unavailable", retry_after_s=1) from error


def _encode(stored: StoredResponse) -> bytes:
    return json.dumps({"response": stored.response, "messages": stored.messages}).encode()


def _decode(data: bytes) -> StoredResponse:
    return StoredResponse(**json.loads(data), num_bytes=len(data))

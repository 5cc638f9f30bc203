"""Responses of /v1/responses that clients continue or read later: per API key, bounded in number, bytes and time.

    store.get(key, id) → the stored response, or None        store.put(key, response)        store.delete(key, id) → existed

A key never sees the responses of another one. In Redis, routers share them:

    pdserve:responses:{<model>/<key>}        sorted set of ids, by the time of their storage
    pdserve:responses:{<model>/<key>}:<id>   one response as JSON
    pdserve:responses:{<model>/<key>}::bytes hash of the size of each, and of all (`:all`)
"""

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from pdserve.config import RouterConfig
from pdserve.control.registry import redis_client
from pdserve.errors import Unavailable
from pdserve.lines.untrusted import read_json

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0  # of a call to Redis
MAX_BYTES = 256 << 20  # of all responses in a router's memory, or of a key's in Redis, as JSON
# ':' is in no response's id. Responses of earlier versions have no size.
DROP = """
local sizes = KEYS[1] .. '::bytes'
local function drop(id)
  local size = redis.call('HGET', sizes, id)
  if size then
    redis.call('HINCRBY', sizes, ':all', -size)
    redis.call('HDEL', sizes, id)
  end
  redis.call('ZREM', KEYS[1], id)
  return redis.call('DEL', KEYS[1] .. ':' .. id)
end
"""
DELETE_SCRIPT = DROP + "return drop(ARGV[1])"
PUT_SCRIPT = (
    DROP
    + """
local time = redis.call('TIME')
drop(ARGV[1])
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', (time[1] - ARGV[3]) .. '000000')) do
  drop(id)
end
redis.call('SET', KEYS[1] .. ':' .. ARGV[1], ARGV[2], 'EX', ARGV[3])
redis.call('ZADD', KEYS[1], time[1] .. string.format('%06d', time[2]), ARGV[1])
redis.call('HSET', sizes, ARGV[1], #ARGV[2])
local total = redis.call('HINCRBY', sizes, ':all', #ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('EXPIRE', sizes, ARGV[3])
local count = redis.call('ZCARD', KEYS[1])
while count > tonumber(ARGV[4]) or (total > tonumber(ARGV[5]) and count > 0) do
  drop(redis.call('ZRANGE', KEYS[1], 0, 0)[1])
  count, total = count - 1, tonumber(redis.call('HGET', sizes, ':all'))
end"""
)


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
    """Responses in the router's memory. `now` is a clock in seconds.

    If all keys together have too many bytes, the oldest responses of the key with the most bytes are dropped.
    """

    def __init__(self, max_per_key: int, ttl_s: float, now: Callable[[], float], max_bytes: int = MAX_BYTES) -> None:
        self._max_per_key = max_per_key
        self._ttl_s = ttl_s
        self._now = now
        self._max_bytes = max_bytes
        self._num_bytes: Counter[str] = Counter()  # by key
        # key → id → (JSON, time at which it ends), the oldest first
        self._entries: defaultdict[str, dict[str, tuple[bytes, float]]] = defaultdict(dict)

    async def get(self, key: str, response_id: str) -> StoredResponse | None:
        self._drop_expired()
        entry = self._entries.get(key, {}).get(response_id)
        return None if entry is None else await asyncio.to_thread(_decode, entry[0])

    async def put(self, key: str, stored: StoredResponse) -> None:
        data = await asyncio.to_thread(_encode, stored)
        self._drop_expired()
        self._remove(key, stored.id)
        self._entries[key][stored.id] = data, self._now() + self._ttl_s
        self._num_bytes[key] += len(data)
        if len(self._entries[key]) > self._max_per_key:
            self._remove_oldest(key)
        while self._num_bytes.total() > self._max_bytes:
            self._remove_oldest(max(self._num_bytes, key=self._num_bytes.__getitem__))

    async def delete(self, key: str, response_id: str) -> bool:
        self._drop_expired()
        return self._remove(key, response_id)

    async def close(self) -> None: ...

    def _drop_expired(self) -> None:
        now = self._now()
        for key in list(self._entries):
            while key in self._entries and next(iter(self._entries[key].values()))[1] <= now:
                self._remove_oldest(key)

    def _remove_oldest(self, key: str) -> None:
        self._remove(key, next(iter(self._entries[key])))

    def _remove(self, key: str, response_id: str) -> bool:
        entries = self._entries.get(key, {})
        entry = entries.pop(response_id, None)
        if entry is None:
            return False
        self._num_bytes[key] -= len(entry[0])
        if not entries:
            del self._entries[key], self._num_bytes[key]
        return True


class RedisStore:
    """Responses in Redis, for several routers."""

    def __init__(self, url: str, model: str, max_per_key: int, ttl_s: float, max_bytes: int = MAX_BYTES) -> None:
        """Parse the URL. No connection is made yet. Raises SetupError if it is invalid."""
        self._model, self._max_per_key, self._ttl_s = model, max_per_key, max(1, round(ttl_s))
        self._max_bytes = max_bytes
        what = "--response-store must be memory, or the URL of a Redis such as redis://host:6379/0"
        self._redis = redis_client(url, TIMEOUT_S, what)

    async def get(self, key: str, response_id: str) -> StoredResponse | None:
        if ":" in response_id:  # as in what the store keeps beside the responses
            return None
        data = await self._call(self._redis.get(f"{self._index(key)}:{response_id}"))
        return None if data is None else await asyncio.to_thread(_decode, data)

    async def put(self, key: str, stored: StoredResponse) -> None:
        data = await asyncio.to_thread(_encode, stored)
        arguments = (stored.id, data, self._ttl_s, self._max_per_key, self._max_bytes)
        await self._call(self._redis.eval(PUT_SCRIPT, 1, self._index(key), *arguments))

    async def delete(self, key: str, response_id: str) -> bool:
        if ":" in response_id:
            return False
        return bool(await self._call(self._redis.eval(DELETE_SCRIPT, 1, self._index(key), response_id)))

    async def close(self) -> None:
        await self._redis.aclose()

    def _index(self, key: str) -> str:
        return f"pdserve:responses:{{{self._model}/{key}}}"

    async def _call(self, call: Any) -> Any:
        import redis  # which `redis_client` has loaded

        try:
            return await call
        except (redis.RedisError, OSError) as error:
            log.warning("--response-store: %s", error)
            message = "the store of responses does not answer"
            raise Unavailable(message, kind="response_store_unavailable", retry_after_s=1) from error


def _encode(stored: StoredResponse) -> bytes:
    return json.dumps({"response": stored.response, "messages": stored.messages}).encode()


def _decode(data: bytes) -> StoredResponse | None:
    """Return what was stored; None if it is something else, as another version or program may have written."""
    with contextlib.suppress(ValueError):
        value = read_json(data)
        if isinstance(value, dict):
            response, messages = value.get("response"), value.get("messages")
            if isinstance(response, dict) and isinstance(messages, list):
                return StoredResponse(response, messages, len(data))
    log.warning("--response-store: what is stored under the name of a response is none; it counts as missing")
    return None

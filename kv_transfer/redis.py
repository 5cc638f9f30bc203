"""`redis://user:password@host:port/db?ttl=600&value_bytes=2MiB`, `rediss://` (TLS), `redis+unix:///path/to/socket`.

    pdserve:<namespace>:<key>:<piece bytes>        the header, set last: a block without it is not there
    pdserve:<namespace>:<key>:<piece bytes>:<i>    the payload, in pieces of at most `value_bytes`, because Redis moves
                                                   large values slowly and serves nobody else meanwhile

All values of a block have the same time to live: `ttl` seconds, or the lease if that is longer, from the last store on.
A release does nothing: Redis evicts by its own policy. With `maxmemory-policy noeviction` a full server answers FULL.
"""

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.retry import Retry

from pdserve.errors import SetupError
from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.threaded import BatchedConnector, Incoming, Outgoing
from pdserve.kv_transfer.url import Query, split, without_password

_PIPELINE_BYTES = 8 << 20  # payload in one round trip
_PIPELINE_BLOCKS = 256

T = TypeVar("T")


class RedisConnector(BatchedConnector):
    scheme: ClassVar[str] = "redis"
    keeps_leases: ClassVar[bool] = False  # with an evicting `maxmemory-policy`
    faults = (redis.ConnectionError, redis.TimeoutError, redis.ResponseError, OSError)

    def configure(self, query: Query) -> None:
        self._ttl = query.seconds("ttl", 600.0)
        self._value_bytes = query.size("value_bytes", 2 << 20)
        self._address = _address(self.url)

    def open(self) -> None:
        block_bytes = self.memory.layout.block_bytes
        self._piece_bytes = min(self._value_bytes, block_bytes)
        self._starts = range(0, block_bytes, self._piece_bytes)
        self._group = max(1, min(_PIPELINE_BLOCKS, _PIPELINE_BYTES // block_bytes))
        self._pool = self._make_pool()
        try:
            for answer in self._call(("PING",)):
                _checked(answer)
        except self.faults as error:
            self._pool.disconnect()
            raise SetupError(f"No Redis answers at {without_password(self.url)}: {error}.") from error

    def shut(self) -> None:
        self._pool.disconnect()

    def put_many(self, blocks: Sequence[Outgoing], lease_s: float) -> None:
        milliseconds = int(max(self._ttl, lease_s) * 1000)
        for group in self._groups(blocks):
            names = [self._names(block.key) for block in group]
            there = self._call(*(("PEXPIRE", name, milliseconds) for each in names for name in each))
            renewed = list(_in_parts([_checked(answer) for answer in there], len(names[0])))
            for block, answers in zip(group, renewed, strict=True):
                if all(answers):
                    block.present()
            self._put_group([b for b, answers in zip(group, renewed, strict=True) if not all(answers)], milliseconds)

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        for group in self._groups(blocks):
            found = self._call(*(("MGET", *self._names(block.key)) for block in group))
            for block, values in zip(group, found, strict=True):
                *payload, header = _checked(values)
                if header is None or None in payload:
                    block.missing()
                else:
                    block.accept(header, *payload)

    def contains_many(self, keys: Sequence[bytes]) -> Iterator[bool]:
        for start in range(0, len(keys), _PIPELINE_BLOCKS):
            names = [self._names(key) for key in keys[start : start + _PIPELINE_BLOCKS]]
            counts = list(self._call(*(("EXISTS", *each) for each in names)))
            yield from (_checked(count) == len(each) for each, count in zip(names, counts, strict=True))

    def delete_many(self, keys: Sequence[bytes]) -> None:
        for answer in self._call(*(("DEL", *self._names(key)) for key in keys)):
            _checked(answer)

    def _put_group(self, blocks: Sequence[Outgoing], milliseconds: int) -> None:
        commands = [command for block in blocks for command in self._sets(block, milliseconds)]
        answers = list(_in_parts(list(self._call(*commands)), len(self._starts) + 1))
        full = [b for b, each in zip(blocks, answers, strict=True) if _has_no_room(each)]
        for block, each in zip(blocks, answers, strict=True):
            if block in full:
                block.failed(Outcome.FULL)
            else:
                for answer in each:
                    _checked(answer)
                block.stored()
        if full:
            self.delete_many([block.key for block in full])  # the pieces that still went in

    def _sets(self, block: Outgoing, milliseconds: int) -> Iterator[tuple[Any, ...]]:
        header, payload = block.read()
        *pieces, name = self._names(block.key)
        for piece, start in zip(pieces, self._starts, strict=True):
            yield "SET", piece, payload[start : start + self._piece_bytes], "PX", milliseconds
        yield "SET", name, header, "PX", milliseconds

    def _call(self, *commands: tuple[Any, ...]) -> Iterator[Any]:
        """The answers to all commands, sent in one go. Errors of single commands are among them.

        redis-py's pipeline collects all answers first. Taken one at a time, each large value is read into the memory
        that the one before has just left, which saves the page faults: they cost as much as the transfer.
        """
        connection: Any = self._pool.get_connection()  # untyped in redis-py
        try:
            connection.send_packed_command(connection.pack_commands(commands))
            for _ in commands:
                try:
                    yield connection.read_response()
                except redis.ResponseError as error:
                    yield error
        except BaseException:  # also when the caller stops half-way: answers are left in the connection
            connection.disconnect()
            raise
        finally:
            self._pool.release(connection)

    def _names(self, key: bytes) -> list[str]:
        """The pieces' names, and the header's as the last. Instances that cut differently do not see each other's."""
        name = f"pdserve:{self.namespace.hex()}:{key.hex()}:{self._piece_bytes}"
        return [*(f"{name}:{i}" for i in range(len(self._starts))), name]

    def _groups(self, blocks: Sequence[T]) -> Iterator[Sequence[T]]:
        for start in range(0, len(blocks), self._group):
            yield blocks[start : start + self._group]

    def _make_pool(self) -> redis.ConnectionPool:
        return redis.ConnectionPool.from_url(
            self._address,
            password=os.environ.get("REDIS_PASSWORD") or None,  # one in the URL wins
            socket_timeout=self.timeout,
            socket_connect_timeout=self.timeout,
            # Trying again is up to the caller, who has a deadline; a repeated store may read rows that are not his.
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            # hiredis parses answers, but its packer copies what is sent; this one sends from the pool's row.
            command_packer=PythonRespSerializer(6000, _encode),
        )


def _address(url: str) -> str:
    """What redis-py understands: without our parameters."""
    parts = split(url)
    if parts.scheme == "redis+unix":
        if not parts.path.strip("/"):
            raise SetupError(
                f"{without_password(url)!r} needs the path of a socket, such as redis+unix:///run/redis.sock."
            )
        return f"unix://{parts.netloc}{parts.path}"
    if not parts.hostname or not re.fullmatch(r"(/\d*)?", parts.path):
        raise SetupError(f"{without_password(url)!r} is not of the form redis://host:port/db.")
    return parts._replace(query="", fragment="").geturl()


def _in_parts(answers: Sequence[Any], length: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(answers), length):
        yield answers[start : start + length]


def _has_no_room(answers: Sequence[Any]) -> bool:
    return any(isinstance(answer, redis.OutOfMemoryError) for answer in answers)


def _checked(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


def _encode(value: bytes | memoryview | str | int) -> bytes | memoryview:
    return value if isinstance(value, bytes | memoryview) else str(value).encode()

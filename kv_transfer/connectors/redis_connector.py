"""`redis://user:password@host:port/db?ttl=600&value_bytes=2MiB`, `rediss://` (TLS), `redis+unix:///path/to/socket`.

    pdserve:{<namespace>:<key>}:<piece bytes>        the header, set last: a block without it is not there
    pdserve:{<namespace>:<key>}:<piece bytes>:<i>    the payload, in pieces of at most `value_bytes`, because Redis moves
                                                     large values slowly and serves nobody else meanwhile

All values of a block have the same time to live: `ttl` seconds, or the lease if that is longer, from the last store on.
A release does nothing: Redis evicts by its own policy. With `maxmemory-policy noeviction` a full server answers FULL.

TLS: the server's certificate must be one that the machine trusts, or `?ca=/path` to a file of authorities; `verify=0`
trusts everybody. `cert=/path&key=/path` show a certificate of our own, which Redis asks for unless told otherwise.
"""

import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.retry import Retry

from pdserve.errors import SetupError
from pdserve.keys import KEY_BYTES
from pdserve.kv_transfer.blocks import Incoming, Outgoing
from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.connectors.redis_replies import Answers
from pdserve.kv_transfer.threaded import BatchedConnector
from pdserve.kv_transfer.url import Query, split, without_password

_PIPELINE_BYTES = 1 << 20  # of blocks stored in one round trip
_PIPELINE_BLOCKS = 256

# A load reads values in parts, and asks for so many more before it reads one, so that the server need not wait for us.
# Other sizes and numbers were as fast or slower.
_PART_BYTES = 512 << 10
_PARTS_AHEAD = 2

Command = tuple[Any, ...] | bytes  # packed already, those that are many
T = TypeVar("T")


class Names:
    """How blocks are cut and what the pieces are called.

    All values of a block lie in one slot of a cluster, by the part in braces.
    """

    def __init__(self, namespace: bytes, longest: int, value_bytes: int) -> None:
        """`longest`: bytes of a payload. Of a shorter one, the last pieces are empty."""
        self.piece_bytes = min(value_bytes, longest)
        self.starts = range(0, longest, self.piece_bytes)
        self.group = max(1, min(_PIPELINE_BLOCKS, _PIPELINE_BYTES // longest))
        self._namespace = namespace.hex()
        name, self._asks = self._name(bytes(KEY_BYTES)).encode(), list[tuple[bytes, bytes]]()
        for command in self._loaded(name, longest):
            before, _, after = command.partition(name)
            self._asks.append((before, after))
        self.parts = len(self._asks) - 1  # of a block, behind its header
        self.at_once = max(1, len(self._asks) * _PART_BYTES // longest)  # commands of a load

    def tag(self, key: bytes) -> str:
        return f"{self._namespace}:{key.hex()}"

    def of(self, key: bytes) -> list[str]:
        """The header's name, and the pieces'. Instances that cut differently do not see each other's."""
        name = self._name(key)
        return [name, *(f"{name}:{i}" for i in range(len(self.starts)))]

    def asks(self, key: bytes) -> list[bytes]:
        """The commands that load a block, packed: the header first, then each part."""
        name = self._name(key).encode()
        return [before + name + after for before, after in self._asks]

    def _name(self, key: bytes) -> str:
        return f"pdserve:{{{self.tag(key)}}}:{self.piece_bytes}"

    def _loaded(self, name: bytes, longest: int) -> Iterator[bytes]:
        yield _packed(b"GET", name)
        for piece, start in enumerate(self.starts):
            end = min(self.piece_bytes, longest - start)  # where one byte more would be too many, and is asked for
            for first in range(0, end, _PART_BYTES):
                last = end if first + _PART_BYTES >= end else first + _PART_BYTES - 1
                yield _packed(b"GETRANGE", b"%b:%d" % (name, piece), b"%d" % first, b"%d" % last)


class Server:
    """Blocks on one Redis server. An error in answer to a block's commands leaves that block as it is, UNAVAILABLE."""

    def __init__(self, pool: redis.ConnectionPool, names: Names, complain: Callable[[Exception], None]) -> None:
        self.pool = pool
        self._names = names
        self._complain = complain

    def put(self, blocks: Sequence[Outgoing], milliseconds: int) -> None:
        for group in self._groups(blocks):
            names = [self._names.of(block.key) for block in group]
            answers = list(self.call(*(("PEXPIRE", name, milliseconds) for each in names for name in each)))
            absent = []
            for block, renewed in zip(group, _in_parts(answers, len(names[0])), strict=True):
                if self._failed(renewed):
                    continue
                if all(renewed):
                    block.present()
                else:
                    absent.append(block)
            self._put_group(absent, milliseconds)

    def get(self, blocks: Sequence[Incoming]) -> None:
        asks = (ask for block in blocks for ask in self._names.asks(block.key))
        answers = self.call(*asks, at_once=self._names.at_once)
        corrupt = []
        for header, block in zip(answers, blocks, strict=True):  # in this order: the answers are asked for their end
            parts = islice(answers, self._names.parts)
            try:
                if header is None:
                    block.missing()
                elif block.accept(_whole(header), map(_whole, parts)) is Outcome.CORRUPT:
                    corrupt.append(block)
            except redis.ResponseError as error:
                self._complain(error)
            deque(parts, 0)  # those that were not looked at
        for block, there in zip(corrupt, self.contains([block.key for block in corrupt]), strict=True):
            if not there:
                block.missing()  # evicted, in part or while it was read

    def contains(self, keys: Sequence[bytes]) -> Iterator[bool]:
        for start in range(0, len(keys), _PIPELINE_BLOCKS):
            names = [self._names.of(key) for key in keys[start : start + _PIPELINE_BLOCKS]]
            counts = list(self.call(*(("EXISTS", *each) for each in names)))
            yield from (
                not self._failed([count]) and count == len(each) for each, count in zip(names, counts, strict=True)
            )

    def delete(self, keys: Sequence[bytes]) -> None:
        for answer in self.call(*(("DEL", *self._names.of(key)) for key in keys)):
            self._failed([answer])

    def call(self, *commands: Command, at_once: int = 0) -> Iterator[Any]:
        """The answers to all commands. Errors of single commands are among them. A large value is `Arriving`, until the next
        answer is asked for.

        Args:
            at_once: commands sent in one go; 0 for all of them.
        """
        step = at_once or max(1, len(commands))
        parts = [commands[start : start + step] for start in range(0, len(commands), step)]
        unsent = iter(parts)
        connection: Any = self.pool.get_connection()  # untyped in redis-py
        try:
            for part in islice(unsent, _PARTS_AHEAD):
                _send(connection, part)
            answers: Answers = connection._parser
            for part in parts:
                for further in islice(unsent, 1):
                    _send(connection, further)
                for _ in part:
                    yield answers.read_response()
            answers.finish()
        except BaseException:  # also when the caller stops half-way: answers are left in the connection
            connection.disconnect()
            raise
        finally:
            self.pool.release(connection)

    def _put_group(self, blocks: Sequence[Outgoing], milliseconds: int) -> None:
        commands = [command for block in blocks for command in self._sets(block, milliseconds)]
        answers = list(_in_parts(list(self.call(*commands)), len(self._names.starts) + 1))
        full = []
        for block, each in zip(blocks, answers, strict=True):
            if any(isinstance(answer, redis.OutOfMemoryError) for answer in each):
                full.append(block.key)
                block.failed(Outcome.FULL)
            elif not self._failed(each):
                block.stored()
        if full:
            self.delete(full)  # the pieces that still went in

    def _sets(self, block: Outgoing, milliseconds: int) -> Iterator[tuple[Any, ...]]:
        header, payload = block.read()
        name, *pieces = self._names.of(block.key)
        for piece, start in zip(pieces, self._names.starts, strict=True):
            yield "SET", piece, payload[start : start + self._names.piece_bytes], "PX", milliseconds
        yield "SET", name, header, "PX", milliseconds

    def _failed(self, answers: Sequence[Any]) -> bool:
        for answer in answers:
            if isinstance(answer, redis.ResponseError):
                self._complain(answer)
                return True
        return False

    def _groups(self, blocks: Sequence[T]) -> Iterator[Sequence[T]]:
        for start in range(0, len(blocks), self._names.group):
            yield blocks[start : start + self._names.group]


class RedisConnector(BatchedConnector):
    scheme: ClassVar[str] = "redis"
    keeps_leases: ClassVar[bool] = False  # with an evicting `maxmemory-policy`
    faults: ClassVar[tuple[type[Exception], ...]] = (
        redis.ConnectionError,
        redis.TimeoutError,
        redis.ResponseError,
        OSError,
    )

    def configure(self, query: Query) -> None:
        self._ttl = query.seconds("ttl", 600.0)
        self._value_bytes = query.size("value_bytes", 2 << 20)
        self._tls = _tls(query) if self.url.startswith("rediss") else {}
        self._addresses = addresses(self.url)

    def open(self) -> None:
        self._server = Server(self._pool(*self._addresses), self._names(), self._complain)
        try:
            for answer in self._server.call(("PING",)):
                if isinstance(answer, Exception):
                    raise answer
        except self.faults as error:
            self._server.pool.disconnect()
            raise SetupError(f"No Redis answers at {without_password(self.url)}: {str(error).rstrip('.')}.") from error

    def shut(self) -> None:
        self._server.pool.disconnect()

    def put_many(self, blocks: Sequence[Outgoing], lease_s: float) -> None:
        self._server.put(blocks, self._milliseconds(lease_s))

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        self._server.get(blocks)

    def contains_many(self, keys: Sequence[bytes]) -> Iterator[bool]:
        return self._server.contains(keys)

    def delete_many(self, keys: Sequence[bytes]) -> None:
        self._server.delete(keys)

    def _milliseconds(self, lease_s: float) -> int:
        return int(max(self._ttl, lease_s) * 1000)

    def _names(self) -> Names:
        return Names(self.namespace, self.payload_lengths[-1], self._value_bytes)

    def _complain(self, error: Exception) -> None:
        self._complaints.add(f"{type(error).__name__}: {error}", kind=type(error).__name__)

    def _pool(self, address: str) -> redis.ConnectionPool:
        return redis.ConnectionPool.from_url(
            address,
            **self._login(),
            socket_timeout=self.timeout,
            socket_connect_timeout=self.timeout,
            # Trying again is up to the caller, who has a deadline; a repeated store may read rows that are not his.
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            # What redis-py does by itself copies large values, on the way out and in.
            command_packer=PythonRespSerializer(6000, _encode),
            parser_class=Answers,
        )

    def _login(self) -> dict[str, Any]:
        return {"password": os.environ.get("REDIS_PASSWORD") or None, **self._tls}  # one in the URL wins


def _send(connection: Any, commands: Sequence[Any]) -> None:
    packed = isinstance(commands[0], bytes)
    connection.send_packed_command([b"".join(commands)] if packed else connection.pack_commands(commands))


def _packed(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def _whole(answer: Any) -> Any:
    if isinstance(answer, redis.ResponseError):
        raise answer
    return answer


def addresses(url: str) -> list[str]:
    """What redis-py understands, one for each host, without our parameters."""
    parts = split(url)
    if parts.scheme == "redis+unix":
        if not parts.path.strip("/"):
            raise SetupError(
                f"{without_password(url)!r} needs the path of a socket, such as redis+unix:///run/redis.sock."
            )
        return [f"unix://{parts.netloc}{parts.path}"]
    scheme, plus, _ = parts.scheme.partition("+")
    login, at, hosts = parts.netloc.rpartition("@")
    found = [f"{scheme}://{login}{at}{host}{parts.path}" for host in hosts.split(",")]
    if plus:
        form, path = f"{parts.scheme}://host:port,host:port", r"/?0?"
    else:
        form, path = f"{parts.scheme}://host:port/db", r"(/\d*)?"
    several = len(found) > 1 and not plus
    if several or not re.fullmatch(path, parts.path) or not all(split(one).hostname for one in found):
        raise SetupError(f"{without_password(url)!r} is not of the form {form}.")
    return found


def _tls(query: Query) -> dict[str, Any]:
    files = {name: query.text(name, "") or None for name in ("ca", "cert", "key")}
    for name, path in files.items():
        if path is not None and not os.path.isfile(path):
            raise SetupError(f"There is no file {path!r} for {name}= of a rediss:// URL.")
    return {
        "ssl_ca_certs": files["ca"],
        "ssl_certfile": files["cert"],
        "ssl_keyfile": files["key"],
        **({} if query.flag("verify", True) else {"ssl_cert_reqs": "none", "ssl_check_hostname": False}),
    }


def _in_parts(answers: Sequence[Any], length: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(answers), length):
        yield answers[start : start + length]


def _encode(value: bytes | memoryview | str | int) -> bytes | memoryview:
    return value if isinstance(value, bytes | memoryview) else str(value).encode()

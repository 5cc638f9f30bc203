"""`redis://user:password@host:port/db?ttl=600&value_bytes=2MiB`, `rediss://` (TLS), `redis+unix:///path/to/socket`.

    pdserve:{<namespace>:<key>}:<piece bytes>        the header, set last: without it the block is missing
    pdserve:{<namespace>:<key>}:<piece bytes>:<i>    the payload, in pieces of at most `value_bytes`, because Redis is slow
                                                     with large values and blocks other clients meanwhile

All values of a block have the same time to live: `ttl` seconds, or the lease if that is longer, counted from the last
store, or from when it was prolonged.
`release` does nothing: Redis evicts by its own policy. With `maxmemory-policy noeviction`, stores to a full server end FULL.

TLS: the server's certificate must be signed by a CA that the machine trusts, or by one in the file `?ca=/path`; `verify=0`
turns verification off. `cert=/path&key=/path` give a client certificate, which Redis requires by default.
"""

import os
import re
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.retry import Retry

from pdserve.errors import SetupError, StoreOut
from pdserve.keys import KEY_BYTES
from pdserve.kv_transfer.batched import BatchedConnector
from pdserve.kv_transfer.blocks import Incoming, Outgoing, StreamedPart
from pdserve.kv_transfer.connector import Capabilities, Outcome
from pdserve.kv_transfer.connectors.redis.replies import ReplyParser
from pdserve.kv_transfer.header import HEADER_BYTES
from pdserve.kv_transfer.url import Query, split, without_password

_PIPELINE_BYTES = 1 << 20  # of blocks, per round trip of a store
_PIPELINE_BLOCKS = 256

# A load requests values in parts, and keeps this many further requests outstanding so that the server never idles.
# Other sizes and numbers were measured as equally fast or slower.
_PART_BYTES = 512 << 10
_BATCHES_AHEAD = 2

# KEYS: header and pieces of a block. ARGV: the header that was found corrupt; another one is of a block stored since.
# One that is too long was not kept, and is of no block.
_DELETE_IF_SAME = (
    f"local found = redis.call('GETRANGE', KEYS[1], 0, {HEADER_BYTES}) "
    f"return (found == ARGV[1] or #found > {HEADER_BYTES}) and redis.call('DEL', unpack(KEYS)) or 0"
)
_OUTAGES = (redis.ConnectionError, redis.TimeoutError, OSError)
_REJECTIONS = (redis.AuthenticationError, redis.InvalidResponse, redis.MaxConnectionsError)

Command = tuple[Any, ...] | bytes  # bytes: a command that is packed already
T = TypeVar("T")


class BlockNames:
    """Division of blocks into pieces, the Redis names of the pieces, and the commands that load them.

    All values of a block are in one slot of a cluster, because of the hash tag in braces.

    Attributes:
        piece_bytes: length of a piece.
        starts: offset of each piece in the payload.
        group_blocks: blocks to store per round trip.
        parts: load commands per block, without that of the header.
        batch_commands: load commands to send at once.
    """

    def __init__(self, namespace: bytes, max_payload_bytes: int, value_bytes: int) -> None:
        """For payloads of at most `max_payload_bytes`. The last pieces of a shorter payload are empty."""
        self.piece_bytes = min(value_bytes, max_payload_bytes)
        self.starts = range(0, max_payload_bytes, self.piece_bytes)
        self.group_blocks = max(1, min(_PIPELINE_BLOCKS, _PIPELINE_BYTES // max_payload_bytes))
        self._namespace = namespace.hex()
        name, self._load_templates = self._name(bytes(KEY_BYTES)).encode(), list[tuple[bytes, bytes]]()
        for command in self._pack_load(name, max_payload_bytes):
            before, _, after = command.partition(name)
            self._load_templates.append((before, after))
        self.parts = len(self._load_templates) - 1
        self.batch_commands = max(1, len(self._load_templates) * _PART_BYTES // max_payload_bytes)

    def hash_tag(self, key: bytes) -> str:
        """Return the part of the names that determines the cluster slot."""
        return f"{self._namespace}:{key.hex()}"

    def of(self, key: bytes) -> list[str]:
        """Return the names of the header and the pieces. They differ between instances with different piece sizes."""
        name = self._name(key)
        return [name, *(f"{name}:{i}" for i in range(len(self.starts)))]

    def load_commands(self, key: bytes) -> list[bytes]:
        """Return the packed commands that load a block: the header first, then each part."""
        name = self._name(key).encode()
        return [before + name + after for before, after in self._load_templates]

    def _name(self, key: bytes) -> str:
        return f"pdserve:{{{self.hash_tag(key)}}}:{self.piece_bytes}"

    def _pack_load(self, name: bytes, max_payload_bytes: int) -> Iterator[bytes]:
        yield _pack(b"GET", name)
        for piece, start in enumerate(self.starts):
            # An inclusive end: one byte more than is valid is requested, to detect a value that is too long.
            end = min(self.piece_bytes, max_payload_bytes - start)
            for first in range(0, end, _PART_BYTES):
                last = end if first + _PART_BYTES >= end else first + _PART_BYTES - 1
                yield _pack(b"GETRANGE", b"%b:%d" % (name, piece), b"%d" % first, b"%d" % last)


class RedisServer:
    """Blocks on one Redis server. A block whose commands return an error is not marked, and so ends as UNAVAILABLE."""

    def __init__(self, pool: redis.ConnectionPool, names: BlockNames, log_error: Callable[[Exception], None]) -> None:
        self.pool = pool
        self._names = names
        self._log_error = log_error

    def put(self, blocks: Sequence[Outgoing], milliseconds: int) -> None:
        for group in self._groups(blocks):
            names = [self._names.of(block.key) for block in group]
            found = self._prolong([name for block_names in names for name in block_names], milliseconds)
            absent = []
            for block, of_block in zip(group, _in_groups(found, len(names[0])), strict=True):
                if self._has_error(of_block):
                    continue
                if all(of_block):
                    block.present()
                else:
                    absent.append(block)
            self._put_group(absent, milliseconds)

    def get(self, blocks: Sequence[Incoming]) -> None:
        commands = (command for block in blocks for command in self._names.load_commands(block.key))
        replies = self.call(*commands, batch_commands=self._names.batch_commands)
        corrupt = []
        for header, block in zip(replies, blocks, strict=True):  # in this order, so that the replies are exhausted
            parts = islice(replies, self._names.parts)
            try:
                if header is None:
                    block.missing()
                elif block.accept(_short(_value(header)), map(_value, parts)) is Outcome.CORRUPT:
                    corrupt.append(block)
            except redis.ResponseError as error:
                self._log_error(error)
            deque(parts, 0)  # skips unread parts
        for block, is_stored in zip(corrupt, self.contains([block.key for block in corrupt]), strict=True):
            if not is_stored:
                block.missing()  # evicted, partly or during the read

    def contains(self, keys: Sequence[bytes]) -> Iterator[bool]:
        for start in range(0, len(keys), _PIPELINE_BLOCKS):
            names = [self._names.of(key) for key in keys[start : start + _PIPELINE_BLOCKS]]
            counts = list(self.call(*(("EXISTS", *block_names) for block_names in names)))
            yield from (
                not self._has_error([count]) and count == len(block_names)
                for block_names, count in zip(names, counts, strict=True)
            )

    def delete(self, keys: Sequence[bytes]) -> None:
        for reply in self.call(*(("DEL", *self._names.of(key)) for key in keys)):
            self._has_error([reply])

    def prolong(self, keys: Sequence[bytes], milliseconds: int) -> None:
        """Let values live for `milliseconds` at least."""
        for group in self._groups(keys):
            self._has_error(self._prolong([name for key in group for name in self._names.of(key)], milliseconds))

    def delete_corrupt(self, blocks: Sequence[Incoming]) -> None:
        """Delete blocks whose headers are still those that were read. The server compares and deletes in one step."""
        scripts = []
        for block in blocks:
            names = self._names.of(block.key)
            scripts.append(("EVAL", _DELETE_IF_SAME, len(names), *names, block.header))
        replies = list(self.call(*scripts))
        refused = [block.key for block, reply in zip(blocks, replies, strict=True) if self._has_error([reply])]
        if refused:  # a user who may not run scripts
            self.delete(refused)

    def call(self, *commands: Command, batch_commands: int = 0) -> Iterator[Any]:
        """Send commands and yield their replies in order. Error replies are yielded, not raised.

        A large value is yielded as `StreamedPart`, valid until the next reply is requested.

        Args:
            batch_commands: commands sent at once; 0 for all of them.
        """
        step = batch_commands or max(1, len(commands))
        batches = [commands[start : start + step] for start in range(0, len(commands), step)]
        unsent = iter(batches)
        connection: Any = self.pool.get_connection()  # untyped in redis-py
        try:
            for batch in islice(unsent, _BATCHES_AHEAD):
                _send(connection, batch)
            parser: ReplyParser = connection._parser
            for batch in batches:
                for next_batch in islice(unsent, 1):
                    _send(connection, next_batch)
                for _ in batch:
                    yield parser.read_response()
            parser.finish()
        except BaseException:  # also GeneratorExit: unread replies are left on the connection
            connection.disconnect()
            raise
        finally:
            self.pool.release(connection)

    def _prolong(self, names: Sequence[str], milliseconds: int) -> list[Any]:
        """Let values live for `milliseconds` at least, and return which are there; or error replies.

        `PEXPIRE … GT` would do so too, but only from Redis 7 on.
        """
        found = list(self.call(*(("PTTL", name) for name in names)))  # -2: it is not there, -1: it stays
        ending = [at for at, left in enumerate(found) if not isinstance(left, Exception) and 0 <= left < milliseconds]
        found = [left if isinstance(left, Exception) else left != -2 for left in found]
        replies = self.call(*(("PEXPIRE", names[at], milliseconds) for at in ending)) if ending else ()
        for at, reply in zip(ending, replies, strict=True):
            found[at] = reply
        return found

    def _put_group(self, blocks: Sequence[Outgoing], milliseconds: int) -> None:
        commands = [command for block in blocks for command in self._set_commands(block, milliseconds)]
        replies = list(_in_groups(list(self.call(*commands)), len(self._names.starts) + 1))
        full = []
        for block, block_replies in zip(blocks, replies, strict=True):
            if any(isinstance(reply, redis.OutOfMemoryError) for reply in block_replies):
                full.append(block.key)
                block.failed(Outcome.FULL)
            elif not self._has_error(block_replies):
                block.stored()
        if full:
            self.delete(full)  # the pieces that were stored before the server was full

    def _set_commands(self, block: Outgoing, milliseconds: int) -> Iterator[tuple[Any, ...]]:
        header, payload = block.read()
        name, *pieces = self._names.of(block.key)
        for piece, start in zip(pieces, self._names.starts, strict=True):
            yield "SET", piece, payload[start : start + self._names.piece_bytes], "PX", milliseconds
        yield "SET", name, header, "PX", milliseconds

    def _has_error(self, replies: Sequence[Any]) -> bool:
        """Log the first error among the replies. Returns True if there is one."""
        for reply in replies:
            if isinstance(reply, redis.ResponseError):
                self._log_error(reply)
                return True
        return False

    def _groups(self, blocks: Sequence[T]) -> Iterator[Sequence[T]]:
        for start in range(0, len(blocks), self._names.group_blocks):
            yield blocks[start : start + self._names.group_blocks]


class RedisConnector(BatchedConnector):
    """Stores blocks on one Redis server."""

    scheme: ClassVar[str] = "redis"
    faults: ClassVar[tuple[type[Exception], ...]] = (
        redis.ConnectionError,
        redis.TimeoutError,
        redis.ResponseError,
        redis.InvalidResponse,
        OSError,
    )

    @property
    def capabilities(self) -> Capabilities:
        # A `maxmemory-policy` may evict leased blocks.
        return replace(super().capabilities, keeps_leases=False, prolongs=True)

    def configure(self, query: Query) -> None:
        self._ttl = query.seconds("ttl", 600.0)
        self._value_bytes = query.size("value_bytes", 2 << 20)
        self._tls = _tls(query) if self.url.startswith("rediss") else {}
        self._addresses = parse_addresses(self.url)

    def open(self) -> None:
        self._server = RedisServer(self._create_pool(*self._addresses), self._block_names(), self._log_error)
        try:
            for reply in self._server.call(("PING",)):
                if isinstance(reply, Exception):
                    raise reply
        except self.faults as error:
            self._server.pool.disconnect()
            self._fail_to_open("Redis", error)

    def shut(self) -> None:
        self._server.pool.disconnect()

    def _fail_to_open(self, name: str, error: Exception) -> None:
        """Begin without the server, if it is only out and that is allowed.

        Raises:
            SetupError: otherwise.
        """
        is_out = isinstance(error, _OUTAGES) and not isinstance(error, _REJECTIONS) and not _is_of_tls(error)
        if not is_out or not self.may_start_out:
            message = f"No {name} answers at {without_password(self.url)}: {str(error).rstrip('.')}."
            raise (StoreOut if is_out else SetupError)(message) from error
        self._limited_log.warning(f"{type(error).__name__}: {error}", kind=type(error).__name__)
        self.has_started_out = True

    def put_many(self, blocks: Sequence[Outgoing], lease_s: float) -> None:
        self._server.put(blocks, self._ttl_ms(lease_s))

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        self._server.get(blocks)

    def contains_many(self, keys: Sequence[bytes]) -> Iterator[bool]:
        return self._server.contains(keys)

    def prolong_many(self, keys: Sequence[bytes], lease_s: float) -> None:
        self._server.prolong(keys, self._ttl_ms(lease_s))

    def delete_many(self, keys: Sequence[bytes]) -> None:
        self._server.delete(keys)

    def delete_corrupt(self, blocks: Sequence[Incoming]) -> None:
        self._server.delete_corrupt(blocks)

    def _ttl_ms(self, lease_s: float) -> int:
        return int(max(self._ttl, lease_s) * 1000)

    def _block_names(self) -> BlockNames:
        return BlockNames(self.namespace, self.payload_lengths[-1], self._value_bytes)

    def _log_error(self, error: Exception) -> None:
        self._limited_log.warning(f"{type(error).__name__}: {error}", kind=type(error).__name__)

    def _create_pool(self, address: str) -> redis.ConnectionPool:
        return redis.ConnectionPool.from_url(
            address,
            **self._login(),
            socket_timeout=self.timeout,
            socket_connect_timeout=self.timeout,
            # No retries: the operation has a deadline, and a late retry of a store could read rows that were reassigned.
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            # The default packer and parser of redis-py copy large values.
            command_packer=PythonRespSerializer(6000, _encode),
            parser_class=ReplyParser,
        )

    def _login(self) -> dict[str, Any]:
        return {
            "password": os.environ.get("REDIS_PASSWORD") or None,
            **self._tls,
        }  # a password in the URL takes precedence


def _is_of_tls(error: BaseException | None) -> bool:
    """Return True if TLS or the name of the host is the cause, which waiting does not mend."""
    while error is not None:
        if isinstance(error, (ssl.SSLError, socket.gaierror)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _send(connection: Any, commands: Sequence[Any]) -> None:
    are_packed = isinstance(commands[0], bytes)
    connection.send_packed_command([b"".join(commands)] if are_packed else connection.pack_commands(commands))


def _pack(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def _short(value: bytes | StreamedPart) -> bytes:
    """Return a value that is too short to be streamed; nothing for one that is not."""
    return value if isinstance(value, bytes) else b""


def _value(reply: Any) -> bytes | StreamedPart:
    """Return a reply that is a value, or raise it if it is an error."""
    if isinstance(reply, redis.ResponseError):
        raise reply
    if not isinstance(reply, bytes | StreamedPart):
        raise redis.InvalidResponse(f"Redis answered {reply!r} where a value was asked for")
    return reply


def parse_addresses(url: str) -> list[str]:
    """Return one URL per host in the form that redis-py expects, without the connector's own parameters."""
    parts = split(url)
    if parts.scheme == "redis+unix":
        if not parts.path.strip("/"):
            raise SetupError(
                f"{without_password(url)!r} must have the path of a socket, such as redis+unix:///run/redis.sock."
            )
        return [f"unix://{parts.netloc}{parts.path}"]
    scheme, plus, _ = parts.scheme.partition("+")
    login, at, hosts = parts.netloc.rpartition("@")
    urls = [f"{scheme}://{login}{at}{host}{parts.path}" for host in hosts.split(",")]
    if plus:
        form, path = f"{parts.scheme}://host:port,host:port", r"/?0?"
    else:
        form, path = f"{parts.scheme}://host:port/db", r"(/\d*)?"
    has_several = len(urls) > 1 and not plus
    if has_several or not re.fullmatch(path, parts.path) or not all(split(address).hostname for address in urls):
        raise SetupError(f"{without_password(url)!r} is not of the form {form}.")
    return urls


def _tls(query: Query) -> dict[str, Any]:
    files = {name: query.text(name, "") or None for name in ("ca", "cert", "key")}
    for name, path in files.items():
        if path is not None and not os.path.isfile(path):
            raise SetupError(f"The file {path!r} given by {name}= of a rediss:// URL does not exist.")
    return {
        "ssl_ca_certs": files["ca"],
        "ssl_certfile": files["cert"],
        "ssl_keyfile": files["key"],
        **({} if query.flag("verify", True) else {"ssl_cert_reqs": "none", "ssl_check_hostname": False}),
    }


def _in_groups(replies: Sequence[Any], length: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(replies), length):
        yield replies[start : start + length]


def _encode(value: bytes | memoryview | str | int) -> bytes | memoryview:
    return value if isinstance(value, bytes | memoryview) else str(value).encode()

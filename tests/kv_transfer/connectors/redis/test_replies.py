"""Tests of the RESP parser, with streams split at random positions, and of what it takes from redis-py."""

import random
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from redis._parsers import BaseParser
from redis.exceptions import AskError, MovedError

from pdserve.kv_transfer.blocks import StreamedPart
from pdserve.kv_transfer.connectors.redis.replies import ReplyParser


def read(stream: bytes, cuts: list[int], count: int, timeout: float | None = 60.0) -> list[Any]:
    """Parses `count` replies of `stream`, sent in pieces of these lengths."""
    client, server = socket.socketpair()
    client.settimeout(timeout)
    parser = ReplyParser(65536)
    parser.on_connect(SimpleNamespace(_sock=client))

    def send() -> None:
        at = 0
        with server, suppress(BrokenPipeError, ConnectionResetError):  # the client may close early
            for cut in [*cuts, len(stream)]:
                server.sendall(stream[at : at + cut])
                at += cut

    sender = threading.Thread(target=send)
    sender.start()
    try:
        return [to_plain(parser.read_response()) for _ in range(count)]
    finally:
        client.close()
        sender.join()


def to_plain(reply: Any) -> Any:
    if isinstance(reply, list):
        return [to_plain(item) for item in reply]
    return bytes(reply) if isinstance(reply, StreamedPart) else reply


@pytest.mark.parametrize("timeout", [60.0, None])  # direct reads, and reads as with TLS
@pytest.mark.parametrize("seed", range(20))
def test_replies_split_anywhere(seed: int, timeout: float | None) -> None:
    rng = random.Random(seed)
    values = [rng.randbytes(length) for length in (0, 1, 64, 1023, 1025, 4095, 4096, 70_000)]
    rng.shuffle(values)
    replies = [b"$%d\r\n%b\r\n" % (len(value), value) for value in values]
    stream = b"".join(replies) + b"*%d\r\n" % (len(values) + 1) + b"".join(replies) + b"$-1\r\n"
    stream += b":42\r\n+OK\r\n-OOM out of memory\r\n$3\r\n\r\n\r\r\n*-1\r\n"
    cuts = [rng.randrange(1, 5000) for _ in range(rng.randrange(40))]
    *alone, array, number, okay, error, crlf, nothing = read(stream, cuts, len(values) + 6, timeout)
    assert alone == values
    assert array == [*values, None]
    assert (number, okay, crlf, nothing) == (42, b"OK", b"\r\n\r", None)
    assert isinstance(error, redis.OutOfMemoryError)


def test_truncated_and_invalid_streams() -> None:
    with pytest.raises(redis.ConnectionError):
        read(b"$2000\r\nabc", [], 1)
    with pytest.raises(redis.InvalidResponse):
        read(b"$2000\r\n" + bytes(2001) + b"\r\n", [], 2)
    with pytest.raises(redis.InvalidResponse):
        read(b"hello\r\n", [], 1)
    with pytest.raises(redis.InvalidResponse):
        read(b"$3\r\nabcdef\r\n", [], 1)
    with pytest.raises(redis.InvalidResponse):
        read(b"+" + bytes(100_000), [], 1)
    with pytest.raises(redis.ConnectionError):
        read(b"-ERR max number of clients reached\r\n", [], 1)


@pytest.mark.parametrize(
    "reply",
    [b"$x", b"$-2", b"$1000000000", b"*x", b"*-2", b"*2000", b"*1\r\n*1\r\n:1", b"*1\r\n$2000000", b":", b":1.5"],
)
def test_a_length_is_checked_before_memory_is_reserved(reply: bytes) -> None:
    with pytest.raises(redis.InvalidResponse, match="an invalid reply"):
        read(reply + b"\r\n", [], 1)


def test_an_unread_value_is_skipped() -> None:
    client, server = socket.socketpair()
    client.settimeout(60.0)
    parser = ReplyParser(65536)
    parser.on_connect(SimpleNamespace(_sock=client))
    with client, server:
        server.sendall(b"$5000\r\n" + bytes(5000) + b"\r\n:1\r\n$2000\r\n" + b"x" * 2000)
        assert isinstance(parser.read_response(), StreamedPart)
        assert parser.read_response() == 1
        value, memory = parser.read_response(), memoryview(bytearray(1500))
        assert isinstance(value, StreamedPart)
        assert value.read_into(memory) == len(value) - 500
        assert bytes(memory) == b"x" * 1500
        assert value.read_into(memory[:500]) == 500
        client.settimeout(0.01)
        with pytest.raises(TimeoutError):
            parser.finish()
        server.sendall(b"\r\n")
        parser.finish()
        assert not parser.can_read()


# What follows is no public interface of redis-py: pyproject.toml pins the versions for which these tests have passed.


def test_redis_py_hands_its_connection_to_the_parser(start_redis: Callable[..., Any]) -> None:
    """`parser_class=`, `on_connect`, `_sock`, `_parser`, and replies that pass through the parser unchanged."""
    server = start_redis()
    pool = redis.ConnectionPool.from_url(server.url, protocol=2, parser_class=ReplyParser)
    connection: Any = pool.get_connection()
    version = f"redis-py {redis.__version__}"
    try:
        assert isinstance(getattr(connection, "_sock", None), socket.socket), (
            f"{version}: no socket in Connection._sock"
        )
        parser = getattr(connection, "_parser", None)
        assert isinstance(parser, ReplyParser), f"{version}: Connection._parser is {parser!r}, not of parser_class="
        assert parser._sock is connection._sock, f"{version} did not call on_connect of the parser"
        connection.send_packed_command(connection.pack_commands([("SET", "name", "x" * 5000), ("GET", "name")]))
        replies = [to_plain(parser.read_response()) for _ in range(2)]
        assert replies == [b"OK", b"x" * 5000], f"{version} read from the socket past the parser: {replies!r}"
        connection.disconnect()
        assert parser._sock is None, f"{version} did not call on_disconnect of the parser"
    finally:
        pool.disconnect()


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("OOM command not allowed", redis.OutOfMemoryError),
        ("ERR max number of clients reached", redis.ConnectionError),
        ("ERR anything", redis.ResponseError),
        ("ASK 3999 10.0.0.1:6381", AskError),
        ("MOVED 3999 10.0.0.1:6381", MovedError),
    ],
)
def test_redis_py_parses_errors(reply: str, expected: type[Exception]) -> None:
    """`BaseParser.parse_error`, called on the class."""
    error = BaseParser.parse_error(reply)
    assert type(error) is expected, f"redis-py {redis.__version__} makes {error!r} of the reply {reply!r}"
    if isinstance(error, AskError):
        assert (error.host, error.port) == ("10.0.0.1", 6381), f"redis-py {redis.__version__}: {vars(error)}"

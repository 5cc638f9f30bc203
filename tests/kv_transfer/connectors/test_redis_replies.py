"""Redis's answers arrive whole, however the network cuts them."""

import random
import socket
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from pdserve.kv_transfer.blocks import StreamedPart
from pdserve.kv_transfer.connectors.redis_replies import ReplyParser


def read(stream: bytes, cuts: list[int], count: int, timeout: float | None = 60.0) -> list[Any]:
    """What the parser makes of `stream`, sent in pieces of these lengths."""
    here, there = socket.socketpair()
    here.settimeout(timeout)
    parser = ReplyParser(65536)
    parser.on_connect(SimpleNamespace(_sock=here))

    def send() -> None:
        at = 0
        with there, suppress(BrokenPipeError, ConnectionResetError):  # who has seen enough does not read on
            for cut in [*cuts, len(stream)]:
                there.sendall(stream[at : at + cut])
                at += cut

    sender = threading.Thread(target=send)
    sender.start()
    try:
        return [plain(parser.read_response()) for _ in range(count)]
    finally:
        here.close()
        sender.join()


def plain(answer: Any) -> Any:
    if isinstance(answer, list):
        return [plain(one) for one in answer]
    return bytes(answer) if isinstance(answer, StreamedPart) else answer


@pytest.mark.parametrize("timeout", [60.0, None])  # straight from the system, and as with TLS
@pytest.mark.parametrize("seed", range(20))
def test_any_cuts(seed: int, timeout: float | None) -> None:
    chosen = random.Random(seed)
    values = [chosen.randbytes(length) for length in (0, 1, 64, 1023, 1025, 4095, 4096, 70_000)]
    chosen.shuffle(values)
    answers = [b"$%d\r\n%b\r\n" % (len(value), value) for value in values]
    stream = b"".join(answers) + b"*%d\r\n" % (len(values) + 1) + b"".join(answers) + b"$-1\r\n"
    stream += b":42\r\n+OK\r\n-OOM no room\r\n$3\r\n\r\n\r\r\n*-1\r\n"
    cuts = [chosen.randrange(1, 5000) for _ in range(chosen.randrange(40))]
    *alone, whole, number, okay, error, crlf, nothing = read(stream, cuts, len(values) + 6, timeout)
    assert alone == values
    assert whole == [*values, None]
    assert (number, okay, crlf, nothing) == (42, b"OK", b"\r\n\r", None)
    assert isinstance(error, redis.OutOfMemoryError)


def test_a_stream_that_ends_or_makes_no_sense() -> None:
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


def test_a_value_that_nobody_takes_is_passed_over() -> None:
    here, there = socket.socketpair()
    here.settimeout(60.0)
    parser = ReplyParser(65536)
    parser.on_connect(SimpleNamespace(_sock=here))
    with here, there:
        there.sendall(b"$5000\r\n" + bytes(5000) + b"\r\n:1\r\n$2000\r\n" + b"x" * 2000)
        assert isinstance(parser.read_response(), StreamedPart)
        assert parser.read_response() == 1
        value, memory = parser.read_response(), memoryview(bytearray(1500))
        assert isinstance(value, StreamedPart)
        assert value.read_into(memory) == len(value) - 500
        assert bytes(memory) == b"x" * 1500
        assert value.read_into(memory[:500]) == 500
        here.settimeout(0.01)
        with pytest.raises(TimeoutError):
            parser.finish()
        there.sendall(b"\r\n")
        parser.finish()
        assert not parser.can_read()

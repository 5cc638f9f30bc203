"""Reads Redis's answers without a copy of ours: large values go from the socket to where their bytes are wanted.

redis-py and hiredis copy each value three times, into memory that is new each time: twice what the transport itself costs.
"""

import os
import select
import socket
import ssl
from typing import Any, Final

import redis
from redis._parsers import BaseParser

from pdserve.kv_transfer.blocks import Arriving

_HELD_BYTES: Final = 4096  # received beyond what was wanted, and then copied once more; no line is longer
_LARGE: Final = 1024  # bytes of a value that is worth receiving in place

Answer = bytes | Arriving | int | None | list[Any] | Exception


class Answers(BaseParser):
    """The parser of a redis-py connection (`parser_class=`), for RESP 2.

    A large value is `Arriving`, until the next answer is read from the connection, or until `finish`.
    """

    def __init__(self, socket_read_size: int) -> None:
        self._buffer = bytearray(_HELD_BYTES)
        self._held = memoryview(self._buffer)
        self._start = self._end = 0  # what has been received into `_held` and not been looked at
        self._value: _Value | None = None  # that may still be arriving

    def on_connect(self, connection: Any, **_: Any) -> None:
        self._sock: socket.socket | None = connection._sock
        self._start = self._end = 0
        self._value = None
        self._readable = select.poll()
        self._readable.register(connection._sock, select.POLLIN)
        # One with a time-out does not block beneath Python. Of TLS, the system has other bytes than we want.
        encrypted = isinstance(connection._sock, ssl.SSLSocket)
        self._direct = not encrypted and not os.get_blocking(connection._sock.fileno())

    def on_disconnect(self) -> None:
        self._sock = None

    def can_read(self, timeout: float = 0) -> bool:
        return self._start < self._end or self._comes(timeout)

    def read_response(self, *_: Any, **__: Any) -> Answer:
        """Raises `redis.ConnectionError` or `OSError`; an error that is the answer is returned."""
        self.finish()
        answer = self._read()
        if isinstance(answer, redis.ConnectionError):  # such as: too many clients
            raise answer
        return answer

    def finish(self) -> None:
        """Receives the rest of a large value. The connection has nothing more of this answer then."""
        if self._value is not None:
            rest = memoryview(bytearray(min(self._value.left, 16 * _HELD_BYTES)))
            while self._value.left:
                if not self._value.take(rest[: self._value.left]):
                    self.wait()
            self._end_value()

    def take(self, memory: memoryview) -> int:
        """Moves what has come to the front of `memory`: how many bytes. Waits for nothing."""
        held = min(len(memory), self._end - self._start)
        if held or not self._direct:
            memory[:held] = self._held[self._start : self._start + held]
            self._start += held
            return held
        try:
            count = os.readv(self._socket().fileno(), (memory, self._held))
        except BlockingIOError:
            return 0
        self._start, self._end = 0, max(0, _some(count) - len(memory))
        return count - self._end

    def wait(self) -> None:
        """Until there is something to take. Raises `TimeoutError`."""
        if not self._direct:
            self._receive()
        elif not self._comes(self._socket().gettimeout()):
            raise TimeoutError("timed out")

    def _read(self, whole: bool = False) -> Answer:
        line = self._read_line()
        kind, rest = line[:1], line[1:]
        match kind:
            case b"$":
                return self._read_value(int(rest), whole) if rest != b"-1" else None
            case b"*":
                return [self._read(whole=True) for _ in range(int(rest))] if rest != b"-1" else None
            case b":":
                return int(rest)
            case b"+":
                return rest
            case b"-":
                error: Exception = BaseParser.parse_error(rest.decode(errors="replace"))
                return error
        raise redis.InvalidResponse(f"Redis answered with {line[:40]!r}")

    def _read_line(self) -> bytes:
        while (at := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            if self._end - self._start == _HELD_BYTES:
                raise redis.InvalidResponse("Redis answered with an endless line")
            self._receive()
        line = bytes(self._held[self._start : at])
        self._start = at + 2
        return line

    def _read_value(self, length: int, whole: bool) -> bytes | Arriving:
        self._value = value = _Value(self, length)
        if length > _LARGE and not whole:
            return value
        content = bytes(value)
        self._end_value()
        return content

    def _end_value(self) -> None:
        if self._read_line():
            raise redis.InvalidResponse("a value of Redis is longer than announced")
        self._value = None

    def _receive(self) -> None:
        """Some more bytes, behind those that are held."""
        held = self._end - self._start
        self._buffer[:held] = self._buffer[self._start : self._end]
        self._start, self._end = 0, held
        self._end += _some(self._socket().recv_into(self._held[held:]))

    def _comes(self, seconds: float | None) -> bool:
        self._socket()
        return bool(self._readable.poll(None if seconds is None else seconds * 1e3))

    def _socket(self) -> socket.socket:
        if self._sock is None:
            raise redis.ConnectionError("not connected")
        return self._sock


class _Value(Arriving):
    __slots__ = ("_answers", "_length", "left")

    def __init__(self, answers: Answers, length: int) -> None:
        self._answers = answers
        self._length = self.left = length

    def __len__(self) -> int:
        return self._length

    def take(self, memory: memoryview) -> int:
        assert len(memory) <= self.left
        count = self._answers.take(memory)
        self.left -= count
        return count

    def wait(self) -> None:
        self._answers.wait()


def _some(count: int) -> int:
    if count == 0:
        raise redis.ConnectionError("Redis has closed the connection")
    return count

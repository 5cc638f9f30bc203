"""Reads Redis's answers with one copy: large values go from the socket to where they are looked at.

redis-py and hiredis copy each value three times, into memory that is new each time: twice what the transport itself costs.
"""

import select
import socket
from typing import Any, Final

import redis
from redis._parsers import BaseParser

_LINE_BYTES: Final = 4096  # read at a time where a line is expected: what of a value comes along is copied twice
_LARGE: Final = 1024  # bytes of a value that is not worth a view

Answer = bytes | memoryview | int | None | list[Any] | Exception


class Answers(BaseParser):
    """The parser of a redis-py connection (`parser_class=`), for RESP 2.

    A large value is a `memoryview`, valid until the next answer is read from the connection.
    """

    def __init__(self, socket_read_size: int) -> None:
        self._line = memoryview(bytearray(_LINE_BYTES))
        self._start = self._end = 0  # what has been received into `_line` and not been looked at
        self._values = memoryview(bytearray())
        self._used = 0

    def on_connect(self, connection: Any, **_: Any) -> None:
        self._sock: socket.socket | None = connection._sock
        self._start = self._end = 0

    def on_disconnect(self) -> None:
        self._sock = None

    def can_read(self, timeout: float = 0) -> bool:
        if self._start < self._end:
            return True
        if self._sock is None:
            raise redis.ConnectionError("not connected")
        readable, _, _ = select.select([self._sock], [], [], timeout)
        return bool(readable)

    def read_response(self, *_: Any, **__: Any) -> Answer:
        """Raises `redis.ConnectionError` or `OSError`; an error that is the answer is returned."""
        self._used = 0
        answer = self._read()
        if isinstance(answer, redis.ConnectionError):  # such as: too many clients
            raise answer
        return answer

    def _read(self) -> Answer:
        line = self._read_line()
        kind, rest = line[:1], line[1:]
        match kind:
            case b"$":
                return self._read_value(int(rest)) if rest != b"-1" else None
            case b"*":
                return [self._read() for _ in range(int(rest))] if rest != b"-1" else None
            case b":":
                return int(rest)
            case b"+":
                return rest
            case b"-":
                error: Exception = BaseParser.parse_error(rest.decode(errors="replace"))
                return error
        raise redis.InvalidResponse(f"Redis answered with {bytes(line[:40])!r}")

    def _read_line(self) -> bytes:
        line = b""
        while True:
            held = bytes(self._line[self._start : self._end])
            at = (line + held).find(b"\r\n")
            if at >= 0:
                self._start += at + 2 - len(line)
                return (line + held)[:at]
            line += held
            if len(line) > 16 * _LINE_BYTES:
                raise redis.InvalidResponse("Redis answered with an endless line")
            self._start, self._end = 0, self._receive(self._line)

    def _read_value(self, length: int) -> bytes | memoryview:
        value = self._room(length)
        held = min(length, self._end - self._start)
        value[:held] = self._line[self._start : self._start + held]
        self._start += held
        while held < length:
            held += self._receive(value[held:])
        if self._read_line():
            raise redis.InvalidResponse("a value of Redis is longer than announced")
        return value if length > _LARGE else bytes(value)

    def _room(self, length: int) -> memoryview:
        """Behind the other values of the same answer, in memory that has been used before."""
        if self._used + length > len(self._values):
            self._values, self._used = memoryview(bytearray(max(length, 2 * len(self._values)))), 0
        self._used += length
        return self._values[self._used - length : self._used]

    def _receive(self, target: memoryview) -> int:
        if self._sock is None:
            raise redis.ConnectionError("not connected")
        count = self._sock.recv_into(target)
        if count == 0:
            raise redis.ConnectionError("Redis has closed the connection")
        return count

"""RESP 2 parser for redis-py that reads large values from the socket directly into their destination.

redis-py and hiredis copy each value three times, each time into newly allocated memory, which costs twice as much as the
transport itself. The names of redis-py that this takes are private ones, `redis._parsers.BaseParser`, `Connection._sock` and
`Connection._parser`: tests/kv_transfer/connectors/redis/test_replies.py says which of them a new version has changed.
"""

import os
import select
import socket
import ssl
from typing import Any, Final

import redis
from redis._parsers import BaseParser

from pdserve.kv_transfer.blocks import StreamedPart

_BUFFER_BYTES: Final = 4096  # read-ahead, copied once more; also the longest line
_STREAMED_BYTES: Final = 1024  # values longer than this are read into place
# Of what a reply may announce, since memory is reserved by it: Redis's own limit of a value, then those within an array.
_MAX_VALUE_BYTES: Final = 512 << 20
_MAX_ITEM_BYTES: Final = 1 << 20
_MAX_ITEMS: Final = 1024

Reply = bytes | StreamedPart | int | None | list[Any] | Exception


class ReplyParser(BaseParser):
    """Parser of a redis-py connection (`parser_class=`), for RESP 2.

    A large value is returned as `StreamedPart`, valid until the next reply is read from the connection, or until `finish`.
    """

    def __init__(self, socket_read_size: int) -> None:
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # the range of `_view` that is received and not parsed yet
        self._value: _Value | None = None  # the value being received

    def on_connect(self, connection: Any, **_: Any) -> None:
        self._sock: socket.socket | None = connection._sock
        self._start = self._end = 0
        self._value = None
        self._readable = select.poll()
        self._readable.register(connection._sock, select.POLLIN)
        # A socket with a timeout is non-blocking in the kernel. With TLS, the kernel only has encrypted bytes.
        encrypted = isinstance(connection._sock, ssl.SSLSocket)
        self._is_direct = not encrypted and not os.get_blocking(connection._sock.fileno())

    def on_disconnect(self) -> None:
        self._sock = None

    def can_read(self, timeout: float = 0) -> bool:
        return self._start < self._end or self._poll(timeout)

    def read_response(self, *_: Any, **__: Any) -> Reply:
        """Return the next reply. An error reply is returned; `redis.ConnectionError` and `OSError` are raised."""
        self.finish()
        reply = self._read()
        if isinstance(reply, redis.ConnectionError):  # such as: too many clients
            raise reply
        return reply

    def finish(self) -> None:
        """Receive and discard the rest of a large value, so that the connection is at the start of the next reply."""
        if self._value is not None:
            rest = memoryview(bytearray(min(self._value.remaining, 16 * _BUFFER_BYTES)))
            while self._value.remaining:
                if not self._value.read_into(rest[: self._value.remaining]):
                    self.wait()
            self._end_value()

    def read_into(self, memory: memoryview) -> int:
        """Move received bytes to the front of `memory` without blocking, and return their number."""
        buffered = min(len(memory), self._end - self._start)
        if buffered or not self._is_direct:
            memory[:buffered] = self._view[self._start : self._start + buffered]
            self._start += buffered
            return buffered
        try:
            count = os.readv(self._socket().fileno(), (memory, self._view))
        except BlockingIOError:
            return 0
        self._start, self._end = 0, max(0, _check_open(count) - len(memory))
        return count - self._end

    def wait(self) -> None:
        """Block until `read_into` can return bytes. Raises `TimeoutError`."""
        if not self._is_direct:
            self._receive()
        elif not self._poll(self._socket().gettimeout()):
            raise TimeoutError("timed out")

    def _read(self, is_item: bool = False) -> Reply:
        """Parse one reply, or an item of an array, which is no array itself and whose values are returned as bytes."""
        line = self._read_line()
        kind, rest = line[:1], line[1:]
        match kind:
            case b"$":
                length = _parse_length(line, _MAX_ITEM_BYTES if is_item else _MAX_VALUE_BYTES)
                return None if length is None else self._read_value(length, is_item)
            case b"*" if not is_item:
                count = _parse_length(line, _MAX_ITEMS)
                return None if count is None else [self._read(is_item=True) for _ in range(count)]
            case b":":
                return _parse_number(line)
            case b"+":
                return rest
            case b"-":
                error: Exception = BaseParser.parse_error(rest.decode(errors="replace"))
                return error
        raise _invalid(line)

    def _read_line(self) -> bytes:
        while (at := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            if self._end - self._start == _BUFFER_BYTES:
                raise redis.InvalidResponse(f"Redis sent a line longer than {_BUFFER_BYTES} bytes")
            self._receive()
        line = bytes(self._view[self._start : at])
        self._start = at + 2
        return line

    def _read_value(self, length: int, is_item: bool) -> bytes | StreamedPart:
        self._value = value = _Value(self, length)
        if length > _STREAMED_BYTES and not is_item:
            return value
        content = bytes(value)
        self._end_value()
        return content

    def _end_value(self) -> None:
        if self._read_line():
            raise redis.InvalidResponse("Redis sent a value that is longer than announced")
        self._value = None

    def _receive(self) -> None:
        """Receive more bytes behind those in the buffer."""
        buffered = self._end - self._start
        self._buffer[:buffered] = self._buffer[self._start : self._end]
        self._start, self._end = 0, buffered
        self._end += _check_open(self._socket().recv_into(self._view[buffered:]))

    def _poll(self, seconds: float | None) -> bool:
        self._socket()
        return bool(self._readable.poll(None if seconds is None else seconds * 1e3))

    def _socket(self) -> socket.socket:
        if self._sock is None:
            raise redis.ConnectionError("not connected")
        return self._sock


class _Value(StreamedPart):
    """A large value that is still being received."""

    __slots__ = ("_length", "_parser", "remaining")

    def __init__(self, parser: ReplyParser, length: int) -> None:
        self._parser = parser
        self._length = self.remaining = length

    def __len__(self) -> int:
        return self._length

    def read_into(self, memory: memoryview) -> int:
        assert len(memory) <= self.remaining
        count = self._parser.read_into(memory)
        self.remaining -= count
        return count

    def wait(self) -> None:
        self._parser.wait()


def _parse_length(line: bytes, maximum: int) -> int | None:
    """Return the length that a line announces; None for a reply that is null."""
    length = _parse_number(line)
    if not -1 <= length <= maximum:
        raise _invalid(line)
    return None if length < 0 else length


def _parse_number(line: bytes) -> int:
    try:
        return int(line[1:])
    except ValueError:
        raise _invalid(line) from None


def _invalid(line: bytes) -> redis.InvalidResponse:
    return redis.InvalidResponse(f"Redis sent an invalid reply: {line[:40]!r}")


def _check_open(count: int) -> int:
    """Return the number of bytes received. Raises if it is 0, which means that the connection is closed."""
    if count == 0:
        raise redis.ConnectionError("Redis closed the connection")
    return count

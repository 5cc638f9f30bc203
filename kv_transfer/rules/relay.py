"""A relay between a connector and its store, which can hold up, cut and divide what it passes."""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

_POLL_S = 0.02
_SINGLE_BYTES = 10  # at the start of each answer, passed one by one; the rest follows in pieces
_PIECE_BYTES = 16381  # divides no header or block evenly
_MAX_WAIT_FOR_READ_S = 0.02  # for each piece: a client need not read before more has come
_READ_POLL_S = 0.0001


class Relay:
    """Relays bytes between clients of a local port and the store.

    Attributes:
        port: the port on 127.0.0.1.
        relayed_bytes: in both directions.
        byte_by_byte: set it to pass the store's answers in small pieces, each after the client has read the previous one.
    """

    def __init__(self, host: str, port: int, responsive: threading.Event, gone: threading.Event) -> None:
        """`responsive` is cleared while nothing passes; `gone` is set while each connection is closed at once."""
        self._target = (host, port)
        self._responsive = responsive
        self._gone = gone
        self._closed = False
        self.relayed_bytes = 0
        self.byte_by_byte = False
        self._lock = threading.Lock()
        self._bytes_until_stall: int | None = None
        self._accepted = 0  # connections, which are numbered from 0
        self._silent_below = self._cut_below = 0  # connections with a smaller number are silent, or closed
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.port: int = self._listener.getsockname()[1]
        self._start_thread(self._accept)

    def silence(self) -> None:
        """Keep the present connections open, and pass nothing over them any more. New ones are not affected."""
        self._silent_below = self._accepted

    def cut_silent(self) -> None:
        """Close the silent connections."""
        self._cut_below = max(self._cut_below, self._silent_below)

    def cut(self) -> None:
        """Close the present connections. New ones are not affected."""
        self._cut_below = self._accepted

    def stall_after(self, count: int) -> None:
        """Clear `responsive` as soon as `count` more bytes of answers have passed."""
        with self._lock:
            self._bytes_until_stall = count

    def close(self) -> None:
        self._closed = True
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start_thread(self, run: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=run, args=arguments, name="relay", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            with contextlib.suppress(TimeoutError):
                client, _ = self._listener.accept()
                number = self._accepted
                self._accepted += 1
                self._start_thread(self._relay, client, number)

    def _relay(self, client: socket.socket, number: int) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(self._target) as store:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while self._is_open(number):
                readable, _, _ = select.select([client, store], [], [], _POLL_S)
                for source in readable:
                    if not self._wait_to_pass(number):
                        return
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    self.relayed_bytes += len(data)
                    if source is client:
                        store.sendall(data)
                    else:
                        self._send_answer(client, number, memoryview(data))

    def _is_open(self, number: int) -> bool:
        return not (self._closed or self._gone.is_set() or number < self._cut_below)

    def _wait_to_pass(self, number: int) -> bool:
        """Wait while the connection is held up. Returns False if it is to be closed."""
        while self._is_open(number):
            if number < self._silent_below:
                time.sleep(_POLL_S)
            elif self._responsive.wait(_POLL_S):
                return True
        return False

    def _send_answer(self, client: socket.socket, number: int, data: memoryview) -> None:
        sent = 0
        while sent < len(data) and self._wait_to_pass(number):
            piece = data[sent:]
            if self.byte_by_byte:
                piece = piece[: 1 if sent < _SINGLE_BYTES else _PIECE_BYTES]
            sent += self._send_before_stall(client, piece)
            if self.byte_by_byte:
                _wait_until_read(client)

    def _send_before_stall(self, client: socket.socket, piece: memoryview) -> int:
        """Send what may pass before the next stall, which then begins. Returns the number of bytes."""
        with self._lock:
            if self._bytes_until_stall is not None:
                piece = piece[: self._bytes_until_stall]
                self._bytes_until_stall -= len(piece)
                if self._bytes_until_stall == 0:
                    self._bytes_until_stall = None
                    self._responsive.clear()
        client.sendall(piece)
        return len(piece)


def _wait_until_read(client: socket.socket) -> None:
    """Wait until the peer of this socket, in the same process, has read all that was sent; without /proc only a moment."""
    ports = f":{client.getpeername()[1]:04X} 0100007F:{client.getsockname()[1]:04X} "
    give_up_at = time.monotonic() + _MAX_WAIT_FOR_READ_S
    try:
        while time.monotonic() < give_up_at and _unread_bytes(ports):
            time.sleep(_READ_POLL_S)
    except OSError:
        time.sleep(_MAX_WAIT_FOR_READ_S / 10)


def _unread_bytes(ports: str) -> int:
    """Return the bytes in the receive buffer of the socket with these ports, as /proc/net/tcp writes them."""
    with open("/proc/net/tcp") as table:
        for line in table:
            if ports in line:
                return int(line.split()[4].partition(":")[2], 16)
    return 0

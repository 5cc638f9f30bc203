"""A small key-value server over TCP for tests of the conformance kit. Its clients are in `broken_clients.py`.

request: op (one byte), bytes of the name, lease in seconds, bytes of the value; then name and value
answer:  status, bytes of the value; then the value
"""

import socket
import socketserver
import struct
import threading
import time
from collections import OrderedDict

REQUEST, ANSWER = struct.Struct("<cIdI"), struct.Struct("<BI")
ABSENT, OK, FULL = 0, 1, 2
MAX_BYTES = 64 << 20  # of a value; a broken client may send or read a length that is none


class WireServer(socketserver.ThreadingTCPServer):
    """Serves `capacity` bytes of values on a port of the loopback device. Full, it evicts values without a lease."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, capacity: int = 48 << 20) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.port: int = self.server_address[1]
        self._capacity = capacity
        self._values: OrderedDict[bytes, bytes] = OrderedDict()
        self._leases: dict[bytes, float] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self.serve_forever, name="wire-server", args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def answer(self, op: bytes, name: bytes, lease_s: float, value: bytes) -> tuple[int, bytes]:
        with self._lock:
            if op == b"P":
                return self._put(name, lease_s, value), b""
            if name not in self._values:
                return ABSENT, b""
            if op == b"G":
                self._values.move_to_end(name)
                return OK, self._values[name]
            if op == b"D":
                del self._values[name], self._leases[name]
            elif op == b"R":
                self._lease(name, lease_s)
            return OK, b""

    def _put(self, name: bytes, lease_s: float, value: bytes) -> int:
        needed = sum(map(len, self._values.values())) + len(value) - len(self._values.get(name, b""))
        for victim in [one for one in self._values if one != name and self._leases[one] <= time.monotonic()]:
            if needed <= self._capacity:
                break
            needed -= len(self._values.pop(victim))
            del self._leases[victim]
        if needed > self._capacity:
            return FULL
        self._values[name] = value
        self._lease(name, lease_s)
        return OK

    def _lease(self, name: bytes, lease_s: float) -> None:
        self._leases[name] = max(self._leases.get(name, 0.0), time.monotonic() + lease_s)


class _Handler(socketserver.BaseRequestHandler):
    server: WireServer
    request: socket.socket

    def handle(self) -> None:
        try:
            while True:
                op, name_bytes, lease_s, value_bytes = REQUEST.unpack(self._receive(REQUEST.size))
                name, value = self._receive(name_bytes), self._receive(value_bytes)
                status, answer = self.server.answer(op, name, lease_s, value)
                self.request.sendall(ANSWER.pack(status, len(answer)) + answer)
        except OSError:
            return  # the client has disconnected

    def _receive(self, count: int) -> bytes:
        if count > MAX_BYTES:
            raise ConnectionError
        received = bytearray(count)
        view = memoryview(received)
        while view:
            more = self.request.recv_into(view)
            if not more:
                raise ConnectionError
            view = view[more:]
        return bytes(received)

"""Attacks on a deployment from outside. `schema_fuzz.py` repeats them beside its requests; each must be refused or served.

Routers end connections that are silent for 10 s. So an attack that fails while its own client was stalled, on a crowded
machine, says nothing about the router: it is counted and not judged.
"""

import json
import random
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

from pdserve.control.awake_clock import AwakeClock
from pdserve.control.frame_connection import LENGTH_BYTES, NONCE_BYTES, PROTOCOL_VERSION
from pdserve.proto import pdserve_pb2 as pb

TIMEOUT_S = 3600  # for each read: ends what hangs, and nothing else, however slow the machine is
SILENT_CONNECTIONS = 50
BURST = 100
ENDLESS = 1 << 20  # bytes
ENDED = (ConnectionError, ssl.SSLError)  # how a refused connection may end
STALL_S = (
    1.0  # the client was stalled if its clock's thread, which wakes ten times in this time, did not run for so long
)
INJECTION = "\x1b[2J\r\nWARNING pdserve: forged"
NESTED: dict[str, Any] = {"type": "string"}
for _ in range(850):
    NESTED = {"type": "array", "items": NESTED}


class Attacks:
    """Attacks on a deployment, within `with Attacks(…) as attacks`.

    Attributes:
        stopped: ends `run` after the current attack.
        judged: number of attacks that were refused or served, by kind.
        unjudged: number of attacks that failed while this process was stalled for more than a second, by kind.
    """

    def __init__(self, url: str, control_port: int) -> None:
        """`url` is that of a router, and `control_port` the port for its instances."""
        parts = urlsplit(url)
        self._address = "127.0.0.1", parts.port
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context()
            self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        self._control = "127.0.0.1", control_port
        self._kinds: dict[str, Callable[[], None]] = {
            "endless header": self._endless_header,
            "many headers": self._many_headers,
            "silent connections": self._silent_connections,
            "left streams": self._left_streams,
            "burst": self._burst,
            "grammar bombs": self._grammar_bombs,
            "foreign pages": self._foreign_pages,
            "log injection": self._log_injection,
            "rogue instances": self._rogue_instances,
        }
        self._clock = _StallClock()
        self.stopped = threading.Event()
        self.judged: Counter[str] = Counter()
        self.unjudged: Counter[str] = Counter()

    def __enter__(self) -> "Attacks":
        self._clock.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._clock.stop()

    def run(self) -> None:
        """Attack until stopped, in random order.

        Raises:
            RuntimeError: an attack was neither refused nor served, or most attacks of a kind could not be judged.
        """
        while not self.stopped.is_set():
            self.attack(random.choice(list(self._kinds)))
        for kind, count in self.unjudged.items():
            if count > self.judged[kind]:
                raise RuntimeError(f"{kind}: {count} attacks could not be judged, {self.judged[kind]} could")

    def attack(self, kind: str) -> None:
        """Attack once.

        Raises:
            RuntimeError: the attack was neither refused nor served.
        """
        stalled_before_s = self._clock.stalled_s()
        try:
            self._kinds[kind]()
        except (RuntimeError, *ENDED) as error:
            if self._clock.stalled_s() < stalled_before_s + 0.01:  # not stalled
                raise RuntimeError(f"{kind}: {error!r}") from error
            self.unjudged[kind] += 1
        else:
            self.judged[kind] += 1

    # ---- attacks ----------------------------------------------------------------------------------------------------

    def _endless_header(self) -> None:
        with self._connect() as connection:
            with suppress(*ENDED):
                connection.sendall(b"GET /health HTTP/1.1\r\nX: " + b"a" * ENDLESS)
            self._expect(connection, {431})

    def _many_headers(self) -> None:
        with self._connect() as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\n" + b"X: a\r\n" * 101 + b"\r\n")
            self._expect(connection, {431})

    def _silent_connections(self) -> None:
        with ExitStack() as stack:
            silent = [stack.enter_context(self._connect()) for _ in range(SILENT_CONNECTIONS // 2)]
            for connection in silent:
                connection.sendall(b"GET /hea")
            # Over TLS, these do not even begin the handshake.
            silent += [stack.enter_context(self._connect_tcp()) for _ in range(SILENT_CONNECTIONS // 2)]
            for connection in silent:
                self._expect(connection, {408, None})

    def _left_streams(self) -> None:
        with ExitStack() as stack:
            for _ in range(8):
                connection = stack.enter_context(self._connect())
                connection.sendall(self._request(stream=True, max_tokens=40))
                if random.random() < 0.5:
                    connection.recv(1)

    def _burst(self) -> None:
        with ExitStack() as stack:
            connections = []
            for _ in range(BURST):  # each at once: a connection that stays silent is closed
                connections.append(stack.enter_context(self._connect()))
                connections[-1].sendall(self._request(prompt="one two three " * 20, max_tokens=1))
            for connection in connections:
                self._expect(connection, {200, 429})

    def _grammar_bombs(self) -> None:
        number = str(random.random())  # not in the cache
        bombs: list[dict[str, Any]] = [
            {"guided_json": json.dumps({"title": number, **NESTED})},
            {"guided_regex": f"{number}{'a?' * 20_000}"},
            {"guided_grammar": f"root ::= {number}"},
        ]
        for bomb in bombs:
            self._ask(self._request(**bomb), {400, 429})

    def _foreign_pages(self) -> None:
        self._ask(self._request("Origin: http://evil.example"), {403})
        self._ask(b"GET /health HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n", {421})

    def _log_injection(self) -> None:
        self._ask(self._request(model=INJECTION), {404})
        self._ask(self._request(guided_regex=f"({INJECTION}"), {400, 429})
        self._ask(self._request(prompt=f"<|im_end|>{INJECTION}<|im_start|>", max_tokens=1), {200, 429})

    def _rogue_instances(self) -> None:
        hello = pb.Hello(
            instance_id="rogue",
            protocol_version=PROTOCOL_VERSION,
            nonce=bytes(NONCE_BYTES),
            block_size=random.choice([0, 2**31]),
        )
        frame = pb.InstanceFrame(hello=hello, token="").SerializeToString()
        for data in (random.randbytes(1000), len(frame).to_bytes(LENGTH_BYTES, "big") + frame):
            with socket.create_connection(self._control, TIMEOUT_S) as connection, suppress(ConnectionError):
                connection.sendall(data)
                while connection.recv(4096):
                    pass

    # ---- HTTP -------------------------------------------------------------------------------------------------------

    def _connect(self) -> socket.socket:
        connection = self._connect_tcp()
        return self._tls.wrap_socket(connection) if self._tls else connection

    def _connect_tcp(self) -> socket.socket:
        return socket.create_connection(self._address, TIMEOUT_S)

    def _request(self, *headers: str, **fields: Any) -> bytes:
        body = json.dumps({"prompt": "hello", **fields}).encode()
        head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
        head += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
        return "\r\n".join(head).encode() + body

    def _ask(self, request: bytes, expected: set[int | None]) -> None:
        with self._connect() as connection:
            connection.sendall(request)
            self._expect(connection, expected)

    def _expect(self, connection: socket.socket, expected: set[int | None]) -> None:
        """Read to the end of the connection. Status None: it ended without an answer."""
        answer = b""
        with suppress(*ENDED):
            while data := connection.recv(1 << 16):
                answer += data
        status = int(answer[9:12]) if answer else None
        if status not in expected:
            raise RuntimeError(f"the status is {status} instead of {expected}: {answer[:500]!r}")


class _StallClock:
    """Measures for how long this process did not run: stopped, frozen, or starved of CPU."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started_at = time.monotonic()
        self._clock = AwakeClock(STALL_S, self._started_at)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def stalled_s(self) -> float:
        """Return the sum of all times without a tick, less `STALL_S` of each."""
        with self._lock:
            now = time.monotonic()
            return now - self._started_at - self._clock.read(now)

    def _run(self) -> None:
        while not self._stopped.wait(STALL_S / 10):
            with self._lock:
                self._clock.tick(time.monotonic())

"""What calls may cost the gRPC server: unfinished messages, connections and watches, by raw HTTP/2 frames."""

import socket
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from threading import Event
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc as stubs

from pdserve.interop import grpc_calls, grpc_health, grpc_server

Serve = Callable[..., AbstractContextManager[int]]
GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
CHECK = "/grpc.health.v1.Health/Check"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
END = ACK = 1
INITIAL_WINDOW = 65_535
SIZE = 1_000_000  # bytes of a message, by its prefix


class Connection:
    """A client's connection, which sends messages that are never complete, as fast as the server takes them.

    Attributes:
        sent: bytes of each call's message.
        ended: trailers of the calls that the server has ended, as they are on the wire.
    """

    def __init__(self, port: int) -> None:
        self.sent: Counter[int] = Counter()
        self.ended: dict[int, bytes] = {}
        self._socket = socket.create_connection(("127.0.0.1", port), 600)
        self._window = INITIAL_WINDOW
        self._credit: defaultdict[int, int] = defaultdict(int)  # granted besides the initial window of a stream
        self._received = b""
        self._initial = 0  # until the server has sent its settings
        self._send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, 0))

    def call(self, path: str, number: int, key: str = "") -> None:
        """Begin call `number`, whose message is `SIZE` bytes by its prefix."""
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost"}
        fields |= {"content-type": "application/grpc", "te": "trailers"}
        fields |= {"authorization": f"Bearer {key}"} if key else {}
        self._send(_frame(HEADERS, 4, 2 * number + 1, b"".join(_field(*item) for item in fields.items())))
        self.sent[2 * number + 1] = 0

    def push(self, done: Callable[[], bool]) -> None:
        """Send what the windows allow, all but the last byte of each message, and read frames, until `done`."""
        while True:
            while any([self._send_part(stream) for stream in self.sent]):
                pass
            if done():
                return
            self._read_frame()

    def _send_part(self, stream: int) -> bool:
        sent = self.sent[stream]
        room = min(self._initial + self._credit[stream] - sent, self._window, SIZE + 4 - sent, 16_384)
        if room <= 0 or stream in self.ended:
            return False
        data = (b"\x00" + SIZE.to_bytes(4, "big") if sent == 0 else b"") + bytes(room)
        self._send(_frame(DATA, 0, stream, data[:room]))
        self.sent[stream] += room
        self._window -= room
        return True

    def is_refused(self) -> bool:
        """Return whether the server closes the connection instead of sending its settings."""
        try:
            return not self._socket.recv(1)
        except ConnectionError:
            return True

    def close(self) -> None:
        self._socket.close()

    def _send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def _read_frame(self) -> None:
        head = self._read(9)
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:9], "big")
        payload = self._read(int.from_bytes(head[:3], "big"))
        if kind == WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(payload, "big")
        elif kind == WINDOW_UPDATE:
            self._credit[stream] += int.from_bytes(payload, "big")
        elif kind == SETTINGS and not flags & ACK:
            settings = dict(struct.iter_unpack(">HI", payload))
            self._initial = settings.get(4, INITIAL_WINDOW)
            self._send(_frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self._send(_frame(PING, ACK, 0, payload))
        elif kind == HEADERS and flags & END:
            self.ended[stream] = payload

    def _read(self, length: int) -> bytes:
        while len(self._received) < length:
            more = self._socket.recv(65_536)
            assert more, "the server has closed the connection"
            self._received += more
        data, self._received = self._received[:length], self._received[length:]
        return data


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _field(name: str, value: str) -> bytes:
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


@contextmanager
def connection(port: int) -> Iterator[Connection]:
    made = Connection(port)
    try:
        yield made
    finally:
        made.close()


def test_a_call_without_a_key_is_refused_before_its_message_is_received(serve: Serve) -> None:
    with serve(api_key="secret") as port, connection(port) as client:
        for number in range(20):
            client.call(GENERATE, number)
        client.push(lambda: len(client.ended) == 20)
        assert all(b"needs a valid API key" in trailers for trailers in client.ended.values())
        assert max(client.sent.values()) <= INITIAL_WINDOW


def test_a_bounded_number_of_messages_of_a_key_is_received_at_once(serve: Serve) -> None:
    with serve(api_key="one,two") as port, connection(port) as client:
        for number in range(40):
            client.call(GENERATE, number, "one")
        received = grpc_calls.MAX_RECEIVED
        client.push(lambda: sum(sent == SIZE + 4 for sent in client.sent.values()) >= received)
        waiting = [sent for sent in client.sent.values() if sent < SIZE + 4]
        assert len(waiting) == 40 - received and max(waiting) <= INITIAL_WINDOW
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            request = vllm.GenerateRequest(text="hello")
            metadata = [("authorization", "Bearer two")]
            assert [*stubs.VllmEngineStub(channel).Generate(request, metadata=metadata)], "another key does not wait"


def test_a_message_has_to_arrive_in_time(serve: Serve) -> None:
    with serve(api_key="one", client_timeout_seconds=0.2) as port, connection(port) as client:
        for number in range(40):
            client.call(GENERATE, number, "one")
        client.push(lambda: len(client.ended) == 40)
        assert all(b"did not arrive within 0.2 s" in trailers for trailers in client.ended.values())


@pytest.mark.parametrize("path", [CHECK, REFLECT])
def test_calls_without_a_key_are_few_and_short(serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(grpc_health, "RECEIVE_SECONDS", 600.0)
    with serve(api_key="secret") as port, connection(port) as client:
        for number in range(40):
            client.call(path, number)
        client.push(lambda: len(client.ended) == 40 - grpc_health.MAX_OPEN_CALLS)
        assert all(b"such calls are open already" in trailers for trailers in client.ended.values())
    monkeypatch.setattr(grpc_health, "RECEIVE_SECONDS", 0.2)
    with serve(api_key="secret") as port, connection(port) as client:
        client.call(path, 0)
        client.push(lambda: len(client.ended) == 1)
        [trailers] = client.ended.values()
        assert b"did not arrive" in trailers


def test_watches_are_limited_on_each_connection(serve: Serve) -> None:
    most, request = grpc_health.MAX_OPEN_CALLS, health_pb2.HealthCheckRequest(service="liveness")
    option = [("grpc.use_local_subchannel_pool", 1)]
    with (
        serve() as port,
        grpc.insecure_channel(f"127.0.0.1:{port}", option) as one,
        grpc.insecure_channel(f"127.0.0.1:{port}", option) as two,
    ):
        first: Any = health_pb2_grpc.HealthStub(one)
        second: Any = health_pb2_grpc.HealthStub(two)
        watches: list[Any] = [first.Watch(request) for _ in range(most)]
        serving = health_pb2.HealthCheckResponse.SERVING
        assert {next(watch).status for watch in watches} == {serving}
        with pytest.raises(grpc.RpcError, match="such calls are open already"):
            next(first.Watch(request))
        assert second.Check(request).status == serving
        watches.pop().cancel()
        while True:  # until the server has noticed that one ended
            with suppress(grpc.RpcError):
                assert first.Check(request).status == serving
                break


def test_connections_are_limited(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(max_connections=2) as port, connection(port), connection(port), connection(port) as third:
        assert third.is_refused()
    monkeypatch.setattr(grpc_server, "HANDSHAKE_MS", 200)
    with serve() as port, socket.create_connection(("127.0.0.1", port), 100) as silent:  # gRPC's own limit is 120 s
        while silent.recv(65_536):  # the server's settings, and then the end
            pass


def test_calls_that_send_nothing_hold_no_request(serve: Serve) -> None:
    never = Event()
    with serve(client_timeout_seconds=0.2) as port, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        generate: Any = channel.stream_stream(GENERATE)
        call = generate(iter(partial(never.wait, 600), True), timeout=600)
        with pytest.raises(grpc.RpcError, match="did not arrive") as caught:
            next(call)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        never.set()

"""Attacks on the ports for gRPC and for instances."""

import random
import socket
import struct
import time
from contextlib import ExitStack, suppress

from attacking.target import ENDED, Target, connect_to
from pdserve.control.frame_connection import LENGTH_BYTES, NONCE_BYTES, PROTOCOL_VERSION
from pdserve.proto import pdserve_pb2 as pb

SILENT = 200  # connections
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, DATA, SETTINGS, WINDOW_UPDATE = 1, 0, 4, 8  # types of HTTP/2 frames
WINDOW = 65_535  # bytes that a peer takes before it says more, of a stream and of a connection
METHOD = b"/vllm.grpc.engine.VllmEngine/Generate"
WATCH = b"/grpc.health.v1.Health/Watch"


def rogue_instances(target: Target) -> None:
    hello = pb.Hello(
        instance_id="rogue",
        protocol_version=PROTOCOL_VERSION,
        nonce=bytes(NONCE_BYTES),
        block_size=random.choice([0, 2**31]),
    )
    frame = pb.InstanceFrame(hello=hello, token="").SerializeToString()
    for data in (random.randbytes(1000), len(frame).to_bytes(LENGTH_BYTES, "big") + frame):
        with connect_to(target.control_port) as connection, suppress(ConnectionError):
            connection.sendall(data)
            while connection.recv(4096):
                pass


def silent_instances(target: Target) -> None:
    _hold(target.control_port)


def silent_callers(target: Target) -> None:
    _hold(target.grpc_port)


def unfinished_calls(target: Target) -> None:
    """Calls whose messages of 4 MiB come without a key, and never whole."""
    _calls(target, METHOD, message=b"\0" + struct.pack(">I", 4_000_000) + b"\n" * 3_999_999)


def watches(target: Target) -> None:
    _calls(target, WATCH, message=b"\0\0\0\0\0")


def _hold(port: int | None) -> None:
    with ExitStack() as stack:
        for _ in range(SILENT):
            with suppress(*ENDED):
                stack.enter_context(connect_to(port))
        time.sleep(1)


def _calls(target: Target, path: bytes, message: bytes) -> None:
    """Begin 100 calls on one connection, send of each message what flow control lets through, and hold them for a second."""
    header = _literal(b":method", b"POST") + _literal(b":scheme", b"http") + _literal(b":path", path)
    header += _literal(b":authority", b"localhost") + _literal(b"content-type", b"application/grpc")
    header += _literal(b"te", b"trailers")
    with suppress(*ENDED, TimeoutError), target.connect_grpc() as connection:
        connection.settimeout(0.1)
        connection.sendall(PREFACE + _frame(SETTINGS, 0, 0))
        rests = dict.fromkeys(range(1, 201, 2), message)
        for stream in rests:
            connection.sendall(_frame(HEADERS, 4, stream, header))
        windows, end = {0: WINDOW}, time.monotonic() + 3
        while any(rests.values()) and time.monotonic() < end:
            for stream, rest in rests.items():
                size = min(16_384, len(rest), windows[0], windows.setdefault(stream, WINDOW))
                connection.sendall(_frame(DATA, 0, stream, rest[:size]) if size else b"")
                rests[stream], windows[0], windows[stream] = rest[size:], windows[0] - size, windows[stream] - size
            for stream, more in _window_updates(connection):
                windows[stream] = windows.get(stream, WINDOW) + more
        _read_for(connection, 1.0)


def _window_updates(connection: socket.socket) -> list[tuple[int, int]]:
    """Return what has arrived of stream and bytes by which its window grows; of frames that are whole in one read."""
    updates = []
    with suppress(TimeoutError):
        data = connection.recv(1 << 16)
        if not data:
            raise ConnectionResetError
        while len(data) >= 9:
            size, kind, stream = int.from_bytes(data[:3], "big"), data[3], int.from_bytes(data[5:9], "big")
            if kind == WINDOW_UPDATE:
                updates.append((stream, int.from_bytes(data[9:13], "big")))
            data = data[9 + size :]
    return updates


def _read_for(connection: socket.socket, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and connection.recv(1 << 16):
        pass


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value

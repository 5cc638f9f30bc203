"""Framing over real socket pairs: fragmentation, back-pressure, and invalid data."""

import asyncio
import socket
from collections.abc import Coroutine
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.control.frame_connection import LENGTH_BYTES, MAX_FRAME_BYTES, FrameConnection
from pdserve.proto import pdserve_pb2 as pb


class RecordingConnection(FrameConnection[pb.RouterFrame, pb.RouterFrame]):
    """Records the request ids of Cancel frames and rejects all others."""

    def __init__(self) -> None:
        super().__init__(pb.RouterFrame)
        self.cancelled: list[str] = []

    def receive(self, frame: pb.RouterFrame) -> None:
        if not frame.HasField("cancel"):
            raise ValueError("not a Cancel frame")
        self.cancelled.append(frame.cancel.request_id)


def cancel(request_id: str) -> pb.RouterFrame:
    return pb.RouterFrame(cancel=pb.Cancel(request_id=request_id))


async def connect(sock: socket.socket) -> RecordingConnection:
    connection = RecordingConnection()
    await asyncio.get_running_loop().create_connection(lambda: connection, sock=sock)
    return connection


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 600))


@given(st.lists(st.text(max_size=40), max_size=8), st.lists(st.integers(0, 400), max_size=8))
def test_fragmented_frames_are_reassembled_in_order(ids: list[str], cuts: list[int]) -> None:
    async def scenario() -> None:
        client, server = socket.socketpair()
        connection = await connect(server)
        data = b"".join(
            len(raw).to_bytes(LENGTH_BYTES, "big") + raw for raw in (cancel(one).SerializeToString() for one in ids)
        )
        cut_points = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
        for start, stop in pairwise(cut_points):
            connection.data_received(data[start:stop])
        assert connection.cancelled == ids
        client.close()
        assert await connection.closed is None

    run(scenario())


def test_close_sends_queued_frames_first() -> None:
    async def scenario() -> None:
        one, other = map(connect, socket.socketpair())
        sender, receiver = await one, await other
        names = [f"{i}" * 5000 for i in range(100)]
        for name in names:
            sender.send(cancel(name))
        sender.close()
        sender.send(cancel("too late"))
        assert await receiver.closed is None and await sender.closed is None
        assert receiver.cancelled == names

    run(scenario())


def test_writable_is_cleared_while_the_peer_does_not_read() -> None:
    async def scenario() -> None:
        client, server = socket.socketpair()
        connection = await connect(server)
        assert connection.writable.is_set()
        while connection.writable.is_set():
            connection.send(cancel("x" * 100_000))
            await asyncio.sleep(0)
        client.close()
        assert isinstance(await connection.closed, OSError) and connection.writable.is_set()

    run(scenario())


@pytest.mark.parametrize(
    "data",
    [
        (MAX_FRAME_BYTES + 1).to_bytes(LENGTH_BYTES, "big"),
        b"GET / HTTP/1.1\r\n\r\n",
        (1).to_bytes(LENGTH_BYTES, "big") + b"\xff",  # not a protobuf message
        (0).to_bytes(LENGTH_BYTES, "big"),  # an empty message, which `receive` rejects
    ],
)
def test_invalid_data_ends_the_connection(data: bytes) -> None:
    async def scenario() -> None:
        client, server = socket.socketpair()
        connection = await connect(server)
        client.sendall(data)
        assert await connection.closed is connection.error is not None
        assert client.recv(1) == b""
        client.close()

    run(scenario())

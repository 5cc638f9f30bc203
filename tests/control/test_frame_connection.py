"""Framing over real socket pairs: fragmentation, back-pressure, invalid data; coalesced writes; the clock of leases."""

import asyncio
import socket
from collections.abc import Coroutine
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.control.frame_connection import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    AwakeClock,
    CoalescingTransport,
    FrameConnection,
)
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


class Recorder:
    """Records the calls of a transport."""

    def __init__(self) -> None:
        self.calls: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.calls.append(data)

    def is_closing(self) -> bool:
        return "close" in self.calls

    def close(self) -> None:
        self.calls.append("close")


def test_writes_of_one_turn_are_coalesced_and_close_flushes() -> None:
    async def scenario() -> None:
        recorder = Recorder()
        transport = CoalescingTransport(cast(Any, recorder))
        transport.write(b"a")
        transport.write(b"b")
        assert recorder.calls == []
        await asyncio.sleep(0)
        assert recorder.calls == [b"ab"]
        transport.write(b"c")
        transport.close()
        transport.write(b"d")
        await asyncio.sleep(0)
        assert recorder.calls == [b"ab", b"c", "close"] and transport.is_closing()

    asyncio.run(scenario())


class Hand:
    """A clock that is set by hand: calling it returns `now`."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_ticks_on_time_count_in_full() -> None:
    hand = Hand(100.0)
    clock, ticks = AwakeClock(0.25, hand), []
    for _ in range(3):
        hand.now += 0.25
        ticks.append(clock.tick())
    assert ticks == [0.25, 0.5, 0.75]


def test_a_stall_counts_one_interval() -> None:
    hand = Hand(100.0)
    clock = AwakeClock(0.25, hand)
    hand.now = 100.25
    clock.tick()
    hand.now = 100.375
    assert clock.read() == 0.375
    hand.now = 160.0
    assert clock.read() == clock.tick() == 0.5
    hand.now = 160.125
    assert clock.tick() == 0.625


@given(st.lists(st.floats(0, 1e6), max_size=50))
def test_the_clock_never_runs_faster_than_real_time(steps: list[float]) -> None:
    hand = Hand(0.0)
    clock = AwakeClock(0.25, hand)
    for step in steps:
        hand.now += step
        before = clock.time
        assert 0 <= clock.tick() - before <= 0.25 + 1e-6
        assert clock.time <= hand.now + 1e-6

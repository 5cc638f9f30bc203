"""Frames, whatever pieces they come in, and what is no frame: on a real pair of sockets."""

import asyncio
import socket
from collections.abc import Coroutine
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.control.corked import Corked
from pdserve.control.wire import LENGTH_BYTES, MAX_FRAME_BYTES, Wire
from pdserve.proto import pdserve_pb2 as pb


class End(Wire[pb.RouterFrame, pb.RouterFrame]):
    """Keeps the ids of what is cancelled."""

    def __init__(self) -> None:
        super().__init__(pb.RouterFrame)
        self.cancelled: list[str] = []

    def receive(self, frame: pb.RouterFrame) -> None:
        if not frame.HasField("cancel"):
            raise ValueError("not here")
        self.cancelled.append(frame.cancel.request_id)


def cancel(request_id: str) -> pb.RouterFrame:
    return pb.RouterFrame(cancel=pb.Cancel(request_id=request_id))


async def end_of(one: socket.socket) -> End:
    end = End()
    await asyncio.get_running_loop().create_connection(lambda: end, sock=one)
    return end


def play(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 600))


@given(st.lists(st.text(max_size=40), max_size=8), st.lists(st.integers(0, 400), max_size=8))
def test_frames_arrive_whole_and_in_order_whatever_they_are_cut_into(ids: list[str], cuts: list[int]) -> None:
    async def story() -> None:
        here, there = socket.socketpair()
        end = await end_of(there)
        data = b"".join(
            len(raw).to_bytes(LENGTH_BYTES, "big") + raw for raw in (cancel(one).SerializeToString() for one in ids)
        )
        places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
        for start, stop in pairwise(places):
            end.data_received(data[start:stop])
        assert end.cancelled == ids
        here.close()
        assert await end.closed is None

    play(story())


def test_what_was_put_comes_before_the_end() -> None:
    async def story() -> None:
        one, other = map(end_of, socket.socketpair())
        sender, receiver = await one, await other
        names = [f"{i}" * 5000 for i in range(100)]
        for name in names:
            sender.put(cancel(name))
        sender.close()
        sender.put(cancel("too late"))
        assert await receiver.closed is None and await sender.closed is None
        assert receiver.cancelled == names

    play(story())


def test_who_does_not_read_is_not_written_to_by_those_who_can_wait() -> None:
    async def story() -> None:
        here, there = socket.socketpair()
        end = await end_of(there)
        assert end.writable.is_set()
        while end.writable.is_set():
            end.put(cancel("x" * 100_000))
            await asyncio.sleep(0)
        here.close()
        assert isinstance(await end.closed, OSError) and end.writable.is_set()  # whoever waits learns of the end

    play(story())


@pytest.mark.parametrize(
    "data",
    [
        (MAX_FRAME_BYTES + 1).to_bytes(LENGTH_BYTES, "big"),
        b"GET / HTTP/1.1\r\n\r\n",
        (1).to_bytes(LENGTH_BYTES, "big") + b"\xff",  # no message
        (0).to_bytes(LENGTH_BYTES, "big"),  # an empty one, which `receive` does not take
    ],
)
def test_what_is_no_frame_ends_the_connection_and_nothing_else(data: bytes) -> None:
    async def story() -> None:
        here, there = socket.socketpair()
        end = await end_of(there)
        here.sendall(data)
        assert await end.closed is end.error is not None
        assert here.recv(1) == b""
        here.close()

    play(story())


class Recorder:
    """In place of an event loop's transport."""

    def __init__(self) -> None:
        self.done: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.done.append(data)

    def is_closing(self) -> bool:
        return "close" in self.done

    def close(self) -> None:
        self.done.append("close")


def test_what_is_written_in_one_turn_is_one_write_and_nothing_is_left_at_the_end() -> None:
    async def story() -> None:
        recorder = Recorder()
        corked = Corked(cast(Any, recorder))
        corked.write(b"a")
        corked.write(b"b")
        assert recorder.done == []
        await asyncio.sleep(0)
        assert recorder.done == [b"ab"]
        corked.write(b"c")
        corked.close()
        corked.write(b"d")
        await asyncio.sleep(0)
        assert recorder.done == [b"ab", b"c", "close"] and corked.is_closing()

    play(story())

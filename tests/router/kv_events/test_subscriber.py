"""Subscriber over real ZMQ sockets: replay, gaps, publishers that start again, and malformed messages."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from pdserve.errors import SetupError
from pdserve.keys import block_keys
from pdserve.router.kv_events import subscriber as subscriber_module
from pdserve.router.kv_events.sources import KVEventsSource, load_sources
from pdserve.router.kv_events.subscriber import STORE, Subscriber
from pdserve.router.scheduling.prefix_index import PrefixIndex

ROOT = b"r" * 16
KEYS = block_keys(ROOT, list(range(160)), 16)


class Publisher:
    """A publisher in vLLM's format. Its numbers begin with 0; it keeps all batches, until `kept` is changed.

    Args:
        port, replay_port: those of a publisher that has ended, or 0.
        topic: what repeated batches have before the number: a topic, or nothing in older versions of vLLM.
    """

    def __init__(self, port: int = 0, replay_port: int = 0, topic: Sequence[bytes] = (b"kv@x",)) -> None:
        self.kept: list[bytes] = []
        self._topic = topic
        self.live = zmq.asyncio.Context.instance().socket(zmq.PUB)
        self.replays = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self.port, self.replay_port = self._bind(self.live, port), self._bind(self.replays, replay_port)
        self._task = asyncio.create_task(self._answer())

    @staticmethod
    def _bind(socket: Any, port: int) -> int:
        if not port:
            return int(socket.bind_to_random_port("tcp://127.0.0.1"))
        for _ in range(600):  # ZMQ's own thread closes the socket that had it
            try:
                socket.bind(f"tcp://127.0.0.1:{port}")
                return port
            except zmq.ZMQError:
                time.sleep(0.1)
        raise AssertionError(f"port {port} is still in use")

    @property
    def source(self) -> KVEventsSource:
        host = "tcp://127.0.0.1"
        return KVEventsSource(endpoint=f"{host}:{self.port}", replay_endpoint=f"{host}:{self.replay_port}", topic="kv")

    async def store(self, block: int, is_sent: bool = True) -> None:
        """Publish that a block of the prompt is in the store."""
        tokens = list(range(16 * block, 16 * block + 16))
        event = ["BlockStored", [block], block - 1 if block else None, tokens, 16, None, "CPU"]
        await self.publish(msgspec.msgpack.encode([1.0, [event], 0]), is_sent)

    async def publish(self, payload: bytes, is_sent: bool = True) -> None:
        self.kept.append(payload)
        if is_sent:
            await self.live.send_multipart([b"kv@x", (len(self.kept) - 1).to_bytes(8, "big"), payload])

    async def announce(self, done: Callable[[], bool]) -> None:
        """Publish empty batches until the subscriber has them and the condition holds."""
        async with asyncio.timeout(600):
            while not done():
                await self.publish(msgspec.msgpack.encode([1.0, [], 0]))
                await asyncio.sleep(0.02)

    async def _answer(self) -> None:
        while True:
            client, _, first = await self.replays.recv_multipart()
            for number in range(int.from_bytes(first, "big"), len(self.kept)):
                if self.kept[number]:
                    frames = (*self._topic, number.to_bytes(8, "big"), self.kept[number])
                    await self.replays.send_multipart([client, b"", *frames])
            await self.replays.send_multipart([client, b"", *(b"" for _ in self._topic), b"\xff" * 8, b""])

    async def close(self) -> None:
        self._task.cancel()
        self.live.close(linger=0)
        self.replays.close(linger=0)


class Follower:
    """A running subscriber, and what it has told."""

    def __init__(self, source: KVEventsSource) -> None:
        self.index, self.counts = PrefixIndex(), Counter[str]()
        self.subscriber = Subscriber(source, self.index, lambda: ROOT, self._count)

    def _count(self, outcome: str, count: int) -> None:
        self.counts[outcome] += count

    @property
    def num_leading(self) -> int:
        return self.index.match(KEYS).get(STORE, 0)


@asynccontextmanager
async def following(source: KVEventsSource) -> AsyncIterator[Follower]:
    follower = Follower(source)
    task = asyncio.create_task(follower.subscriber.run())
    try:
        yield follower
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher may take as long as it likes to repeat its batches, and a test to send them."""
    for name in ("REPLAY_TIMEOUT_S", "LOG_INTERVAL_S"):
        monkeypatch.setattr(subscriber_module, name, 600.0)


@pytest.mark.parametrize("topic", [(b"kv@x",), ()])
def test_earlier_and_missed_batches_are_repeated(topic: Sequence[bytes]) -> None:
    async def scenario() -> None:
        publisher = Publisher(topic=topic)
        await publisher.store(0)
        await publisher.store(1)
        async with following(publisher.source) as follower:
            await publisher.announce(lambda: follower.num_leading == 2)
            await publisher.store(2, is_sent=False)
            await publisher.store(3)
            await publisher.announce(lambda: follower.num_leading == 4)
            assert set(follower.counts) == {"applied"}
        await publisher.close()

    asyncio.run(scenario())


def test_a_lost_batch_with_none_after_it_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber_module, "QUIET_S", 0.1)

    async def scenario() -> None:
        publisher = Publisher()
        async with following(publisher.source) as follower, asyncio.timeout(600):
            for block in range(3):
                await publisher.store(block, is_sent=False)
                while follower.num_leading <= block:
                    await asyncio.sleep(0.02)
            assert set(follower.counts) == {"applied"}
        await publisher.close()

    asyncio.run(scenario())


def test_an_endpoint_that_does_not_answer_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, seconds in {"QUIET_S": 0.05, "REPLAY_TIMEOUT_S": 0.05, "LOG_INTERVAL_S": 0.0}.items():
        monkeypatch.setattr(subscriber_module, name, seconds)

    async def scenario() -> None:
        requests = 0
        publisher = Publisher()
        silent = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        source = KVEventsSource(endpoint=publisher.source.endpoint, replay_endpoint=f"tcp://127.0.0.1:{port}")
        async with following(source), asyncio.timeout(600):
            while requests < 4:
                await silent.recv_multipart()
                requests += 1
        silent.close(linger=0)
        await publisher.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    [record] = caplog.records
    assert "no answer from tcp://127.0.0.1" in record.getMessage()


def test_a_gap_that_stays_makes_it_forget() -> None:
    async def scenario() -> None:
        publisher = Publisher()
        await publisher.store(0)
        async with following(publisher.source) as follower:
            await publisher.announce(lambda: follower.num_leading == 1)
            await publisher.store(1, is_sent=False)
            publisher.kept[-1] = b""  # a replay does not have it either
            await publisher.announce(lambda: follower.counts["lost"] == 1)
            assert follower.index.num_blocks(STORE) == 0
            await publisher.store(0)
            await publisher.announce(lambda: follower.num_leading == 1)
        await publisher.close()

    asyncio.run(scenario())


def test_without_a_replay_endpoint_it_begins_with_what_comes() -> None:
    async def scenario() -> None:
        publisher = Publisher()
        await publisher.store(0)
        async with following(KVEventsSource(endpoint=publisher.source.endpoint)) as follower:
            await publisher.announce(lambda: follower.counts["applied"] > 0)
            assert follower.num_leading == 0
            await publisher.store(0)
            await publisher.announce(lambda: follower.num_leading == 1)
            assert set(follower.counts) == {"applied"}
        await publisher.close()

    asyncio.run(scenario())


def test_a_publisher_that_starts_again_is_followed_from_its_first_batch_on() -> None:
    async def scenario() -> None:
        first = Publisher()
        async with following(first.source) as follower:
            for block in range(5):
                await first.store(block)
            await first.announce(lambda: follower.num_leading == 5)
            await first.close()
            second = Publisher(first.port, first.replay_port)
            await second.store(0)
            await second.announce(lambda: follower.num_leading == 1)
        await second.close()

    asyncio.run(scenario())


def test_malformed_messages_are_counted_and_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        publisher = Publisher()
        async with following(publisher.source) as follower:
            await publisher.announce(lambda: follower.counts["applied"] > 0)
            for frames in ([b"kv"], [b"kv", b"12", b"x"], [b"kv", b"\xff" * 8, b"x"], [b"kv"] * 5):
                await publisher.live.send_multipart(frames)
            await publisher.publish(b"no msgpack")
            await publisher.store(0)
            await publisher.announce(lambda: follower.num_leading == 1)
            assert follower.counts["refused"] == 5 and follower.counts["lost"] == 0
        await publisher.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    [record] = caplog.records
    assert "a message must be a topic, a number in 8 bytes, and a batch" in record.getMessage()


@pytest.mark.parametrize("steps", range(8))
def test_a_cancellation_while_the_end_of_a_replay_arrives_ends_it(steps: int) -> None:
    """It comes so many steps of the event loop after the message, of which one is that in which the message is received."""

    async def scenario() -> None:
        replays = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        port = replays.bind_to_random_port("tcp://127.0.0.1")
        publisher = Publisher()
        source = KVEventsSource(endpoint=publisher.source.endpoint, replay_endpoint=f"tcp://127.0.0.1:{port}")
        async with following(source):
            client, _, _ = await replays.recv_multipart()
            await replays.send_multipart([client, b"", b"", b"\xff" * 8, b""])
            time.sleep(0.02)  # not asyncio's: the message lies in the subscriber's socket when the loop goes on
            for _ in range(steps):
                await asyncio.sleep(0)
        replays.close(linger=0)
        await publisher.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Invalid JSON"),
        ('{"endpoint": "tcp://a:1"}', "valid array"),
        ('[{"endpoint": ""}]', "0.endpoint: String should have at least 1"),
        ('[{"endpoint": "tcp://a:1", "port": 1}]', "0.port: unknown key; known are endpoint, replay_endpoint, topic"),
    ],
)
def test_invalid_settings(text: str, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        load_sources(text)


def test_invalid_endpoints_are_errors_at_the_start() -> None:
    async def scenario(source: KVEventsSource) -> None:
        Follower(source)

    for source in (
        KVEventsSource(endpoint="5557"),
        KVEventsSource(endpoint="tcp://127.0.0.1:5557", replay_endpoint="tcp://127.0.0.1"),
    ):
        with pytest.raises(SetupError, match=r"--kv-events-subscribe: .*: Invalid argument"):
            asyncio.run(scenario(source))

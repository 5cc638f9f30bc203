"""The link of an instance to a router that the test plays: one that reads, one that is restarted, one that does not."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.cli.deployment import free_port
from pdserve.control.wire import Wire
from pdserve.engine.block_pool import BlockPool
from pdserve.instance.kv_events import KVEventPublisher
from pdserve.instance.router_link import NEWS_KEYS, Links
from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.scheduling.prefix_index import PrefixIndex

BLOCKS = 3000


class Router(Wire[pb.InstanceFrame, pb.RouterFrame]):
    """Keeps an index."""

    def __init__(self) -> None:
        super().__init__(pb.InstanceFrame)
        self.index = PrefixIndex()
        self.frames: list[pb.InstanceFrame] = []

    def receive(self, frame: pb.InstanceFrame) -> None:
        self.frames.append(frame)
        if frame.HasField("hello"):
            self.put(pb.RouterFrame(welcome=pb.Welcome()))
        self.index.remove("i", split(frame.blocks.removed))
        self.index.add("i", split(frame.blocks.added))

    def read(self, *, on: bool) -> None:
        assert self._transport is not None
        (self._transport.resume_reading if on else self._transport.pause_reading)()


def split(joined: bytes) -> list[bytes]:
    return [joined[i : i + 16] for i in range(0, len(joined), 16)]


class Stage:
    """An instance's links and pool, without an engine, and a router at the other end."""

    def __init__(self) -> None:
        self.port = free_port()
        self.pool, self.news = BlockPool(BLOCKS, 16), KVEventPublisher()
        self.pool.on_change = self.news.changed
        self.links = Links([f"127.0.0.1:{self.port}"])
        self.next_key = 0
        instance = SimpleNamespace(
            news=self.news, load=pb.Heartbeat(), others=lambda link: pb.Load(), drop_link=lambda link: None
        )
        hello = pb.Hello(instance_id="i")
        self.serving = asyncio.create_task(self.links.run(instance, hello))  # type: ignore[arg-type]  # what links use of an instance

    @asynccontextmanager
    async def router(self) -> AsyncIterator[Router]:
        router = Router()
        server = await asyncio.get_running_loop().create_server(lambda: router, "127.0.0.1", self.port)
        try:
            yield router
        finally:
            server.close()
            router.abort()

    def compute(self, count: int) -> None:
        """That many new blocks, in the place of the oldest."""
        for _ in range(count):
            (block,) = self.pool.allocate(1)
            self.pool.register(block, self.next_key.to_bytes(16))
            self.pool.release([block])
            self.next_key += 1

    def keys(self) -> set[bytes]:
        return {number.to_bytes(16) for number in range(max(0, self.next_key - BLOCKS), self.next_key)}


async def converged(stage: Stage, router: Router) -> None:
    expected = stage.keys()
    while router.index.blocks("i") != len(expected) or not all(router.index.match([key]) for key in expected):
        await asyncio.sleep(0.02)


def play(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 600))


def test_a_router_that_comes_late_or_again_learns_everything() -> None:
    async def story() -> None:
        stage = Stage()
        stage.compute(BLOCKS - 100)
        for _ in range(2):
            async with stage.router() as router:
                await converged(stage, router)
                stage.compute(300)
                await converged(stage, router)
                told = [frame.blocks for frame in router.frames if frame.HasField("blocks")]
                assert max(len(blocks.added + blocks.removed) for blocks in told) <= NEWS_KEYS * 16
                assert told[-1].untold == 0
            stage.compute(10)  # nobody is told
        stage.serving.cancel()

    play(story())


def test_tokens_do_not_wait_behind_a_pools_content() -> None:
    async def story() -> None:
        stage = Stage()
        stage.compute(BLOCKS)
        async with stage.router() as router:
            while not stage.news._routers or len(stage.news._routers[0]) == BLOCKS:
                await asyncio.sleep(0)
            stage.links.broadcast(pb.InstanceFrame(step=pb.Step()))
            await converged(stage, router)
            kinds = [frame.WhichOneof("frame") for frame in router.frames]
            assert kinds.count("blocks") == 3 and "step" in kinds[: -kinds[::-1].index("blocks") - 1]
        stage.serving.cancel()

    play(story())


def test_a_router_that_does_not_read_costs_no_more_than_the_pools_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.instance.router_link.NEWS_S", 0.001)  # fills sooner what sockets buffer, some MB

    async def story() -> None:
        stage = Stage()
        async with stage.router() as router:
            stage.compute(1)
            await converged(stage, router)
            router.read(on=False)
            (untold,) = stage.news._routers
            stuck_since, loop = 0.0, asyncio.get_running_loop()
            while not stuck_since or loop.time() - stuck_since < 1.0:
                stage.compute(BLOCKS // 10)
                assert len(untold) <= 2 * BLOCKS
                before = len(untold)
                await asyncio.sleep(0.005)
                stuck_since = 0.0 if len(untold) < before else stuck_since or loop.time()
            router.read(on=True)
            await converged(stage, router)
        stage.serving.cancel()

    play(story())


def test_a_router_that_says_nothing_is_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.instance.router_link.SILENCE_S", 0.3)

    async def story() -> None:
        stage, told = Stage(), 0
        while told < 2:  # on a busy machine, the instance may hang up before it has sent a heartbeat
            async with stage.router() as router:
                await router.closed
                assert router.frames[0].HasField("hello")
                told += any(frame.HasField("heartbeat") for frame in router.frames)
        stage.serving.cancel()

    play(story())

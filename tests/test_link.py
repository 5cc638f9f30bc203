"""The stream of an instance to a router that the test plays: one that reads, one that is restarted, one that does not."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from pdserve.block_news import BlockNews
from pdserve.deployment import free_port
from pdserve.engine.block_pool import BlockPool
from pdserve.link import NEWS_KEYS, Links
from pdserve.outbox import MESSAGE_BYTES, Outbox
from pdserve.proto import pdserve_pb2 as pb
from pdserve.proto.pdserve_pb2_grpc import RouterServicer, add_RouterServicer_to_server
from pdserve.router.prefix_index import PrefixIndex

BLOCKS = 3000


class Router(RouterServicer):
    """Keeps an index, while `reading` is set."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.messages: list[pb.InstanceFrames] = []
        self.frames: list[pb.InstanceFrame] = []
        self.reading = asyncio.Event()
        self.reading.set()

    async def Attach(self, messages: AsyncIterator[pb.InstanceFrames], context: Any) -> AsyncIterator[pb.RouterFrames]:
        yield pb.RouterFrames(frames=[pb.RouterFrame(welcome=pb.Welcome())])
        async for message in messages:
            self.messages.append(message)
            for frame in message.frames:
                self.frames.append(frame)
                self.index.remove("i", split(frame.blocks.removed))
                self.index.add("i", split(frame.blocks.added))
            await self.reading.wait()


def split(joined: bytes) -> list[bytes]:
    return [joined[i : i + 16] for i in range(0, len(joined), 16)]


class Stage:
    """An instance's links and pool, without an engine, and a router at the other end."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.pool, self.news = BlockPool(BLOCKS, 16), BlockNews()
        self.pool.on_change = self.news.changed
        self.links = Links([self.address])
        self.next_key = 0
        instance = SimpleNamespace(
            news=self.news, load=pb.Heartbeat(), others=lambda link: pb.Load(), drop_link=lambda link: None
        )
        hello = pb.Hello(instance_id="i")
        self.serving = asyncio.create_task(self.links.run(instance, hello))  # type: ignore[arg-type]  # what links use of an instance

    @asynccontextmanager
    async def router(self) -> AsyncIterator[Router]:
        router, server = Router(), grpc.aio.server()
        add_RouterServicer_to_server(router, server)
        server.add_insecure_port(self.address)
        await server.start()
        try:
            yield router
        finally:
            await server.stop(None)

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
    asyncio.run(asyncio.wait_for(story, 40))


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
    monkeypatch.setattr("pdserve.link.NEWS_S", 0.001)  # fills sooner what gRPC buffers, some MB

    async def story() -> None:
        stage = Stage()
        async with stage.router() as router:
            await converged(stage, router)
            router.reading.clear()
            (untold,) = stage.news._routers
            stuck_since, loop = 0.0, asyncio.get_running_loop()
            while not stuck_since or loop.time() - stuck_since < 1.0:
                stage.compute(BLOCKS // 10)
                assert len(untold) <= 2 * BLOCKS
                before = len(untold)
                await asyncio.sleep(0.005)
                stuck_since = 0.0 if len(untold) < before else stuck_since or loop.time()
            router.reading.set()
            await converged(stage, router)
        stage.serving.cancel()

    play(story())


def test_frames_that_wait_share_a_message_in_order() -> None:
    async def story() -> None:
        stage = Stage()
        async with stage.router() as router:
            while not router.frames:
                await asyncio.sleep(0)
            for name in "abc":
                step = pb.Step(outputs=[pb.Output(request_id=name, token_ids=[7])])
                stage.links.broadcast(pb.InstanceFrame(step=step))
            while not (said := [message for message in router.messages if message.frames[0].HasField("step")]):
                await asyncio.sleep(0)
            (message,) = said
            assert [frame.step.outputs[0].request_id for frame in message.frames] == ["a", "b", "c"]
        stage.serving.cancel()

    play(story())


def test_a_message_does_not_grow_past_its_limit_and_the_end_comes_last() -> None:
    async def story() -> None:
        outbox = Outbox[pb.RouterFrame]()
        small = pb.RouterFrame(cancel=pb.Cancel(request_id="r"))
        large = pb.RouterFrame(cancel=pb.Cancel(request_id="r" * MESSAGE_BYTES))
        for frame in (small, small, large, large, small, None):
            outbox.put_nowait(frame)
        assert [len(await outbox.take()) for _ in range(4)] == [3, 1, 1, 0]

    play(story())

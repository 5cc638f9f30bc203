"""Links of an instance to a simulated router: reading, restarted, not reading, and silent."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.cli.deployment import free_port
from pdserve.control.frame_connection import FrameConnection
from pdserve.engine.memory.blocks import BlockPool
from pdserve.instance.kv_events import KVEventPublisher
from pdserve.instance.router_link import MAX_KEYS_PER_FRAME, MAX_RENEWALS, RouterLink, RouterLinks
from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.scheduling.prefix_index import PrefixIndex

BLOCKS = 3000


class Router(FrameConnection[pb.InstanceFrame, pb.RouterFrame]):
    """Router end of a link, with a prefix index of the instance's pool."""

    def __init__(self) -> None:
        super().__init__(pb.InstanceFrame)
        self.index = PrefixIndex()
        self.frames: list[pb.InstanceFrame] = []

    def receive(self, frame: pb.InstanceFrame) -> None:
        self.frames.append(frame)
        if frame.HasField("hello"):
            self.send(pb.RouterFrame(welcome=pb.Welcome()))
        self.index.remove("i", split(frame.blocks.removed))
        self.index.add("i", split(frame.blocks.added))

    def set_reading(self, *, on: bool) -> None:
        assert self._transport is not None
        (self._transport.resume_reading if on else self._transport.pause_reading)()


def split(joined: bytes) -> list[bytes]:
    return [joined[i : i + 16] for i in range(0, len(joined), 16)]


class Harness:
    """The links and the pool of an instance without an engine, and a router at the other end."""

    def __init__(self, port: int = 0) -> None:
        self.port = port or free_port()
        self.kv_events = KVEventPublisher()
        self.pool = BlockPool(BLOCKS, 16)
        self.pool.listeners.append(self.kv_events)
        self.links = RouterLinks([f"127.0.0.1:{self.port}"])
        self.next_key = 0
        self.instance = instance = SimpleNamespace(
            kv_events=self.kv_events,
            reporter=SimpleNamespace(heartbeat=pb.Heartbeat(), other_load=lambda link: pb.Load()),
            drop_link=lambda link: None,
        )
        hello = pb.Hello(instance_id="i")
        self.serving = asyncio.create_task(self.links.run(instance, hello))  # type: ignore[arg-type]  # the attributes that links use

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
        """Cache `count` new blocks, which evict the oldest ones."""
        for _ in range(count):
            (block,) = self.pool.allocate(1)
            self.pool.register(block, self.next_key.to_bytes(16))
            self.pool.release([block])
            self.next_key += 1

    def keys(self) -> set[bytes]:
        return {number.to_bytes(16) for number in range(max(0, self.next_key - BLOCKS), self.next_key)}


async def wait_until_synced(harness: Harness, router: Router) -> None:
    expected = harness.keys()
    while router.index.num_blocks("i") != len(expected) or not all(router.index.match([key]) for key in expected):
        await asyncio.sleep(0.02)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 600))


def test_a_router_that_attaches_late_or_again_receives_the_whole_pool() -> None:
    async def scenario() -> None:
        harness = Harness()
        harness.compute(BLOCKS - 100)
        for _ in range(2):
            async with harness.router() as router:
                await wait_until_synced(harness, router)
                harness.compute(300)
                await wait_until_synced(harness, router)
                received = [frame.blocks for frame in router.frames if frame.HasField("blocks")]
                assert max(len(blocks.added + blocks.removed) for blocks in received) <= MAX_KEYS_PER_FRAME * 16
                assert received[-1].untold == 0
            harness.compute(10)  # while no router is attached
        harness.serving.cancel()

    run(scenario())


def test_tokens_do_not_queue_behind_kv_events() -> None:
    async def scenario() -> None:
        harness = Harness()
        harness.compute(BLOCKS)
        async with harness.router() as router:
            while not harness.kv_events._subscribers or len(harness.kv_events._subscribers[0]) == BLOCKS:
                await asyncio.sleep(0)
            harness.links.broadcast(pb.InstanceFrame(outputs=b""))
            await wait_until_synced(harness, router)
            kinds = [frame.WhichOneof("frame") for frame in router.frames]
            assert kinds.count("blocks") == 3 and "outputs" in kinds[: -kinds[::-1].index("blocks") - 1]
        harness.serving.cancel()

    run(scenario())


def test_a_frame_of_the_engine_thread_tells_how_long_it_waited_to_be_written() -> None:
    async def scenario() -> None:
        harness, links = Harness(), list[str]()
        harness.instance.submit = lambda link, submit: links.append(link)
        async with harness.router() as router:
            while not router.frames:
                await asyncio.sleep(0.01)
            router.send(pb.RouterFrame(submit=pb.Submit()))
            while not links:
                await asyncio.sleep(0.01)
            harness.links.send(links[0], pb.InstanceFrame(outputs=b""))
            time.sleep(0.3)  # as if the engine kept this thread from running
            while not (outputs := [one for one in router.frames if one.HasField("outputs")]):
                await asyncio.sleep(0.01)
            assert outputs[0].waited >= 0.3
        harness.serving.cancel()

    run(scenario())


def test_pending_events_of_a_router_that_does_not_read_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pdserve.instance.router_link.UPDATE_INTERVAL_S", 0.001
    )  # fills the socket buffers, some MB, sooner

    async def scenario() -> None:
        harness = Harness()
        async with harness.router() as router:
            harness.compute(1)
            await wait_until_synced(harness, router)
            router.set_reading(on=False)
            (pending,) = harness.kv_events._subscribers
            stuck_since, loop = 0.0, asyncio.get_running_loop()
            while not stuck_since or loop.time() - stuck_since < 1.0:
                harness.compute(BLOCKS // 10)
                assert len(pending) <= 2 * BLOCKS
                before = len(pending)
                await asyncio.sleep(0.005)
                stuck_since = 0.0 if len(pending) < before else stuck_since or loop.time()
            router.set_reading(on=True)
            await wait_until_synced(harness, router)
        harness.serving.cancel()

    run(scenario())


def test_an_instance_that_is_refused_after_its_welcome_dials_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.instance.router_link.RETRY_DELAYS_S", (0.0, 0.0, 0.0, 600.0))

    class RefusingRouter(Router):
        def receive(self, frame: pb.InstanceFrame) -> None:
            super().receive(frame)
            self.send(pb.RouterFrame(refused=pb.Refused(message="block_size is 0")))
            self.close()

    async def scenario() -> None:
        routers, port = list[RefusingRouter](), free_port()

        def accept() -> RefusingRouter:
            routers.append(RefusingRouter())
            return routers[-1]

        async with await asyncio.get_running_loop().create_server(accept, "127.0.0.1", port):
            harness = Harness(port)
            while len(routers) < 4:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.2)  # time for a fifth
            assert len(routers) == 4
            harness.serving.cancel()

    run(scenario())


def test_heartbeats_that_say_nothing_new_are_replaced_by_a_renewal_of_the_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdserve.instance.router_link.HEARTBEAT_INTERVAL_S", 0.01)

    async def scenario() -> None:
        harness = Harness()
        async with harness.router() as router:
            while (kinds := [frame.WhichOneof("frame") for frame in router.frames]).count("heartbeat") < 3:
                await asyncio.sleep(0.01)
            assert kinds[:2] == ["hello", "heartbeat"]
            assert kinds[2:12] == ["others"] * MAX_RENEWALS + ["heartbeat"]
            harness.instance.reporter.heartbeat = pb.Heartbeat(running=1, counters={"engine_steps": 1.0})
            while not any(frame.heartbeat.running for frame in router.frames):
                await asyncio.sleep(0.01)
        harness.serving.cancel()

    run(scenario())


def test_a_silent_router_is_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.instance.router_link.SILENCE_TIMEOUT_S", 0.3)

    async def scenario() -> None:
        harness, num_alive = Harness(), 0
        while num_alive < 2:  # a busy instance may close the link before its first heartbeat
            async with harness.router() as router:
                await router.closed
                assert router.frames[0].HasField("hello")
                num_alive += any(frame.HasField("heartbeat") for frame in router.frames)
        harness.serving.cancel()

    run(scenario())


def test_a_stall_of_the_instance_does_not_close_its_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.instance.router_link.SILENCE_TIMEOUT_S", 0.3)
    over = threading.Event()

    def talk(listener: socket.socket) -> None:
        """Play a router that sends frames all the time."""
        connection, _ = listener.accept()
        frame = pb.RouterFrame(heard=pb.Heard()).SerializeToString()
        with connection:
            while not over.wait(0.02):
                connection.sendall(len(frame).to_bytes(4, "big") + frame)

    async def scenario(port: int) -> None:
        link = RouterLink(f"127.0.0.1:{port}", "link", SimpleNamespace(), asyncio.Queue())  # type: ignore[arg-type]  # unused here
        await link.dial(None)
        stalls = iter([0.6])

        async def wait(futures: list[asyncio.Future[Any]], timeout: float) -> None:
            """Wake up late, and before the frames that have arrived meanwhile are read."""
            if stall := next(stalls, 0):
                time.sleep(stall)
            else:
                await futures[0]

        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "wait", wait)
            closed = asyncio.create_task(link.wait_closed())
            await asyncio.sleep(0)
        assert next(stalls, None) is None and link.error is None
        over.set()
        assert await closed is None

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=talk, args=(listener,))
        thread.start()
        try:
            asyncio.run(asyncio.wait_for(scenario(listener.getsockname()[1]), 600))
        finally:
            over.set()
            thread.join(600)

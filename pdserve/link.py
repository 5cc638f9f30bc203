"""The asyncio side of an instance: one stream to each router, heartbeats on it, and a new attempt when it breaks.

The engine thread hands frames over with `send`; frames from the router become calls of `Instance`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from itertools import count

import grpc

from pdserve.block_news import Untold
from pdserve.certificates import unreachable
from pdserve.instance import Instance
from pdserve.outbox import Outbox
from pdserve.proto import pdserve_pb2 as pb
from pdserve.proto.pdserve_pb2_grpc import RouterStub
from pdserve.registry import LOOK_S, Registry

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 2
HEARTBEAT_S = 0.4
NEWS_S = 0.1  # between two looks for changes in the pool, and in what other routers have sent
NEWS_KEYS = 1024  # in a frame at most: tokens must not wait behind a pool's content
RETRY_S = (0.1, 0.2, 0.5, 1.0)  # between attempts to reach a router; the last one repeats
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


class Links:
    """All streams of one instance. `send` may be called from the engine thread; everything else runs on the loop."""

    def __init__(
        self,
        routers: list[str],
        token: str = "",
        registry: Registry | None = None,
        tls: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`token` is what the routers' --control-token says. With a registry, the routers are those that it names. Without
        `tls`, the channels are plain."""
        self._routers = set(routers)
        self._served: set[str] = set()
        self._connections = count(1)
        self._registry = registry
        self._tls = tls
        self._metadata = [("authorization", f"Bearer {token}")] if token else []
        self._loop = asyncio.get_running_loop()
        self._outboxes: dict[str, Outbox[pb.InstanceFrame]] = {}
        self._draining = self._closing = False
        self.drains: asyncio.Queue[str] = asyncio.Queue()  # asked for, with the role to take afterwards; empty: end

    def send(self, link: str, frame: pb.InstanceFrame) -> None:
        """Queues a frame. Frames for a link that has gone are dropped: its router has dropped the requests too."""
        self._loop.call_soon_threadsafe(self._put, link, frame)

    def broadcast(self, frame: pb.InstanceFrame) -> None:
        """Queues a frame for every router that is attached."""
        for outbox in self._outboxes.values():
            outbox.put_nowait(frame)

    def drain(self) -> None:
        """Tells routers, also those that come later, to ask for nothing new."""
        self._draining = True
        self.broadcast(pb.InstanceFrame(draining=pb.Draining()))

    def serve_as(self, hello: pb.Hello) -> None:
        """Takes requests again, in the role that `hello` has by now."""
        self._draining = False
        self.broadcast(pb.InstanceFrame(hello=hello))

    def close(self) -> None:
        """Makes `run` return once routers have read what is queued for them."""
        self._closing = True
        for outbox in self._outboxes.values():
            self._loop.call_soon(outbox.put_nowait, None)  # behind what the engine thread has sent

    def _put(self, link: str, frame: pb.InstanceFrame) -> None:
        if link in self._outboxes:
            self._outboxes[link].put_nowait(frame)

    async def run(self, instance: Instance, hello: pb.Hello) -> None:
        """Serves every router until cancelled or closed."""
        async with asyncio.TaskGroup() as group:
            while not self._closing:
                if self._registry is not None and (found := await self._registry.routers()) is not None:
                    self._routers = found
                for address in self._routers - self._served:
                    self._served.add(address)
                    group.create_task(self._serve_forever(address, instance, hello))
                if self._registry is None:
                    return
                await asyncio.sleep(LOOK_S)

    async def _serve_forever(self, address: str, instance: Instance, hello: pb.Hello) -> None:
        """While it is one of the routers; a stream that lasts is left alone, whatever the registry says."""
        attempt = 0
        while address in self._routers and not self._closing:
            link = f"{address}#{next(self._connections)}"
            self._outboxes[link] = Outbox()
            untold = instance.news.open()
            try:
                async with self._channel(address) as channel:
                    frames = self._frames(link, instance, hello, untold)
                    stub = RouterStub(channel)
                    async for message in stub.Attach(frames, metadata=self._metadata):
                        attempt = 0
                        for frame in message.frames:
                            self._receive(address, link, frame, instance)
                if not self._closing:
                    log.warning("router %s closed the stream", address)
            except grpc.aio.AioRpcError as error:
                refused = error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED)
                if refused or attempt in (0, 10):
                    said = error.details() or ""
                    log.warning("router %s: %s", address, said if refused else f"{unreachable(said)}, trying on")
            finally:
                del self._outboxes[link]
                instance.news.close(untold)
                instance.drop_link(link)
            await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
            attempt += 1
        self._served.discard(address)
        if not self._closing:
            log.info("router %s is not in the registry any more", address)

    def _channel(self, address: str) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(address, self._tls, options=CHANNEL_OPTIONS)

    async def _frames(
        self, link: str, instance: Instance, hello: pb.Hello, untold: Untold
    ) -> AsyncIterator[pb.InstanceFrames]:
        """What goes to the router: Hello, then steps as they come, news of the pool and of others soon after, heartbeats."""
        yield pb.InstanceFrames(frames=[pb.InstanceFrame(hello=hello)])
        if self._draining:
            yield pb.InstanceFrames(frames=[pb.InstanceFrame(draining=pb.Draining())])
        outbox = self._outboxes[link]
        beat = news = self._loop.time()
        told = pb.Load()
        while True:
            now, frames = self._loop.time(), list[pb.InstanceFrame]()
            if now >= beat:
                frames.append(pb.InstanceFrame(heartbeat=instance.load))
                beat = now + HEARTBEAT_S
            if now >= news:
                if (others := instance.others(link)) != told:
                    told = others
                    frames.append(pb.InstanceFrame(others=others))
                if untold:
                    removed, added = untold.take(NEWS_KEYS)
                    blocks = pb.Blocks(removed=b"".join(removed), added=b"".join(added), untold=len(untold))
                    frames.append(pb.InstanceFrame(blocks=blocks))
                news = now + (0 if untold else NEWS_S)
            if frames:
                yield pb.InstanceFrames(frames=frames)
            try:
                async with asyncio.timeout_at(min(beat, news)):
                    frames = await outbox.take()
            except TimeoutError:
                continue
            if not frames:
                return
            yield pb.InstanceFrames(frames=frames)

    def _receive(self, address: str, link: str, frame: pb.RouterFrame, instance: Instance) -> None:
        match frame.WhichOneof("frame"):
            case "welcome":
                log.info("attached to router %s at %s", frame.welcome.router_id, address)
            case "submit":
                instance.submit(link, frame.submit)
            case "hand_over":
                instance.hand_over(link, frame.hand_over)
            case "cancel":
                instance.cancel(link, frame.cancel.request_id)
            case "drain":
                self.drains.put_nowait(frame.drain.role)
            case other:
                log.warning("router %s sent a frame of an unknown kind (%s)", address, other)

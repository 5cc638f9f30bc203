"""The asyncio side of an instance: one link to each router, heartbeats on it, and a new attempt when it breaks.

The engine thread hands frames over with `send`; frames from the router become calls of `Instance`.
"""

import asyncio
import logging
import ssl
from itertools import count

from pdserve.control.certificates import unreachable
from pdserve.control.registry import LOOK_S, Registry
from pdserve.control.wire import Wire
from pdserve.instance.engine_loop import Instance
from pdserve.instance.kv_events import PendingKVEvents
from pdserve.proto import pdserve_pb2 as pb

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.4
NEWS_S = 0.1  # between two looks for changes in the pool, and in what other routers have sent
NEWS_KEYS = 1024  # in a frame at most: tokens must not wait behind a pool's content
DIAL_S = 5.0
SILENCE_S = 20.0  # of a router that is sent heartbeats: it is frozen, or cut off
RETRY_S = (0.1, 0.2, 0.5, 1.0)  # between attempts to reach a router; the last one repeats


class Link(Wire[pb.RouterFrame, pb.InstanceFrame]):
    """A connection to a router.

    Attributes:
        name: what jobs that came by it are marked with.
        welcomed: the router has let the instance in.
        refusal: or why it has not.
    """

    def __init__(self, address: str, name: str, instance: Instance, drains: "asyncio.Queue[str]") -> None:
        super().__init__(pb.RouterFrame)
        self.address, self.name = address, name
        self.known = True  # whoever answers at a router's address
        self.welcomed, self.refusal = asyncio.Event(), ""
        self._instance, self._drains = instance, drains

    async def dial(self, tls: ssl.SSLContext | None) -> None:
        """Raises OSError, or ValueError where the address is none."""
        host, _, port = self.address.rpartition(":")
        async with asyncio.timeout(DIAL_S):
            await self._loop.create_connection(lambda: self, host.strip("[]"), int(port), ssl=tls)

    def receive(self, frame: pb.RouterFrame) -> None:
        match frame.WhichOneof("frame"):
            case "submit":
                self._instance.submit(self.name, frame.submit)
            case "hand_over":
                self._instance.hand_over(self.name, frame.hand_over)
            case "cancel":
                self._instance.cancel(self.name, frame.cancel.request_id)
            case "heard":
                pass
            case "welcome":
                self.welcomed.set()
                log.info("attached to router %s at %s", frame.welcome.router_id, self.address)
            case "refused":
                self.refusal = frame.refused.message
            case "drain":
                self._drains.put_nowait(frame.drain.role)
            case other:
                log.warning("router %s sent a frame of an unknown kind (%s)", self.address, other)

    async def tell(self, untold: PendingKVEvents) -> None:
        """Once it is let in, sends heartbeats, and soon after they have changed what the pool has and what other routers have
        sent; for ever, but not to a router that does not read."""
        await self.welcomed.wait()
        beat = news = self._loop.time()
        told = pb.Load()
        while True:
            await self.writable.wait()
            now = self._loop.time()
            if now >= beat:
                self.put(pb.InstanceFrame(heartbeat=self._instance.load))
                beat = now + HEARTBEAT_S
            if now >= news:
                if (others := self._instance.others(self.name)) != told:
                    told = others
                    self.put(pb.InstanceFrame(others=others))
                if untold:
                    removed, added = untold.take(NEWS_KEYS)
                    blocks = pb.Blocks(removed=b"".join(removed), added=b"".join(added), untold=len(untold))
                    self.put(pb.InstanceFrame(blocks=blocks))
                news = now + (0 if untold else NEWS_S)
            await asyncio.sleep(min(beat, news) - now)

    async def over(self) -> Exception | None:
        """Waits for the end, which comes at the latest when the router is silent for long; the error, if it was one."""
        while not self.closed.done():
            await asyncio.wait([self.closed], timeout=SILENCE_S / 4)
            if self._loop.time() - self.heard > SILENCE_S:
                self.abort(TimeoutError(f"nothing came for {SILENCE_S:g} s"))
        return self.closed.result()


class Links:
    """All links of one instance. `send` may be called from the engine thread; everything else runs on the loop."""

    def __init__(
        self,
        routers: list[str],
        token: str = "",
        registry: Registry | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`token` is what the routers' --control-token says. With a registry, the routers are those that it names. Without
        `tls`, the links are plain."""
        self._routers = set(routers)
        self._served: set[str] = set()
        self._connections = count(1)
        self._registry = registry
        self._tls = tls
        self._token = token
        self._loop = asyncio.get_running_loop()
        self._links: dict[str, Link] = {}
        self._draining = self._closing = False
        self.drains: asyncio.Queue[str] = asyncio.Queue()  # asked for, with the role to take afterwards; empty: end

    def send(self, link: str, frame: pb.InstanceFrame) -> None:
        """Queues a frame. Frames for a link that has gone are dropped: its router has dropped the requests too."""
        self._loop.call_soon_threadsafe(self._put, link, frame)

    def broadcast(self, frame: pb.InstanceFrame) -> None:
        """Queues a frame for every router that is attached."""
        for link in self._links.values():
            link.put(frame)

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
        for link in self._links.values():
            self._loop.call_soon(link.close)  # behind what the engine thread has sent

    def _put(self, link: str, frame: pb.InstanceFrame) -> None:
        if link in self._links:
            self._links[link].put(frame)

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
        """While it is one of the routers; a link that lasts is left alone, whatever the registry says."""
        attempt = 0
        while address in self._routers and not self._closing:
            link = Link(address, f"{address}#{next(self._connections)}", instance, self.drains)
            try:
                await link.dial(self._tls)
                error = await self._serve(link, instance, hello)
            except (OSError, ValueError) as failure:  # the latter where it is no address
                error = failure
            if link.welcomed.is_set():
                attempt = 0
            if not self._closing and (link.welcomed.is_set() or link.refusal or attempt in (0, 10)):
                log.warning("router %s: %s", address, _why(link, error))
            await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
            attempt += 1
        self._served.discard(address)
        if not self._closing:
            log.info("router %s is not in the registry any more", address)

    async def _serve(self, link: Link, instance: Instance, hello: pb.Hello) -> Exception | None:
        """Until the link ends; why it did, if that was an error."""
        link.put(pb.InstanceFrame(hello=hello, token=self._token))
        if self._draining:
            link.put(pb.InstanceFrame(draining=pb.Draining()))
        self._links[link.name] = link
        untold = instance.news.open()
        telling = asyncio.create_task(link.tell(untold))
        try:
            return await link.over()
        finally:
            telling.cancel()
            link.close()
            del self._links[link.name]
            instance.news.close(untold)
            instance.drop_link(link.name)


def _why(link: Link, error: Exception | None) -> str:
    """Why a link has ended, for people."""
    if link.refusal:
        return link.refusal
    if link.welcomed.is_set():
        return f"the connection was lost: {error}" if error else "it closed the connection"
    return f"{unreachable(error, link.opened)}, trying on"

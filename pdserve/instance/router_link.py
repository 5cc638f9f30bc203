"""Connections of an instance to its routers: dials each router, sends heartbeats and KV events, and reconnects.

These run on the asyncio loop. The engine thread sends frames with `RouterLinks.send`; frames from routers become calls of
`Instance`.

    dial ─► Hello ─► Welcome ─► heartbeats, KV events, outputs ─► connection lost, or router silent ─► dial again
"""

import asyncio
import logging
import random
import ssl
from itertools import count

from pdserve.control.certificates import describe_failure
from pdserve.control.frame_connection import AwakeClock, FrameConnection
from pdserve.control.registry import POLL_INTERVAL_S, Registry
from pdserve.instance.instance import Instance
from pdserve.instance.kv_events import PendingKVEvents
from pdserve.proto import pdserve_pb2 as pb

log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 0.4
MAX_RENEWALS = 9  # in a row, of a lease by a frame of 2 bytes, in place of a heartbeat that says nothing new
DRAIN_POLL_S = 0.2
UPDATE_INTERVAL_S = 0.1  # of KV events and of other routers' load
MAX_KEYS_PER_FRAME = 1024  # so that tokens do not queue behind the keys of a whole pool
DIAL_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 20.0  # routers answer heartbeats: one that is silent for this long is frozen or cut off
TICKS_PER_TIMEOUT = 4  # number of times that the silence is checked within the timeout
RETRY_DELAYS_S = (0.1, 0.2, 0.5, 1.0)  # between attempts to reach a router; the last one repeats
REPEAT_ATTEMPTS = 100  # after which a failure that goes on is told again


class RouterLink(FrameConnection[pb.RouterFrame, pb.InstanceFrame]):
    """Connection to one router.

    Attributes:
        name: unique name of the connection; identifies the jobs that arrived over it.
        welcomed: set once the router has accepted the instance.
        rejection: the router's reason for rejecting the instance, or empty.
    """

    def __init__(self, address: str, name: str, instance: Instance, drain_requests: "asyncio.Queue[str]") -> None:
        super().__init__(pb.RouterFrame)
        self.address, self.name = address, name
        self.is_trusted = True  # the instance chose this address
        self.welcomed, self.rejection = asyncio.Event(), ""
        self._instance, self._drain_requests = instance, drain_requests

    async def dial(self, tls: ssl.SSLContext | None) -> None:
        """Connect to the router.

        Raises:
            OSError: the router cannot be reached within `DIAL_TIMEOUT_S`.
            ValueError: the address is malformed.
        """
        host, _, port = self.address.rpartition(":")
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            await self._loop.create_connection(lambda: self, host.strip("[]"), int(port), ssl=tls)

    def receive(self, frame: pb.RouterFrame) -> None:
        match frame.WhichOneof("frame"):
            case "submit":
                self._instance.submit(self.name, frame.submit)
            case "hand_over":
                self._instance.hand_over(self.name, frame.hand_over)
            case "cancel":
                self._instance.cancel(self.name, frame.cancel.request_id)
            case "reset_cache":
                self._instance.reset_cache(frame.reset_cache.epoch)
            case "change_adapter":
                self._instance.change_adapter(self.name, frame.change_adapter)
            case "heard":
                pass
            case "welcome":
                self.welcomed.set()
                log.info("attached to router %s at %s", frame.welcome.router_id, self.address)
            case "refused":
                self.rejection = frame.refused.message
            case "drain":
                self._drain_requests.put_nowait(frame.drain.role)
            case other:
                log.warning("router %s sent a frame of an unknown kind (%s)", self.address, other)

    async def send_updates(self, pending: PendingKVEvents) -> None:
        """Send heartbeats, KV events and other routers' load once the router has accepted the instance. Never returns.

        Nothing is sent while the router does not read.
        """
        await self.welcomed.wait()
        next_heartbeat_at = next_update_at = self._loop.time()
        last_sent, last_heartbeat, renewals = pb.Load(), None, 0
        while True:
            await self.writable.wait()
            now = self._loop.time()
            if now >= next_heartbeat_at:
                heartbeat = self._instance.reporter.heartbeat
                renewals = renewals + 1 if heartbeat == last_heartbeat and renewals < MAX_RENEWALS else 0
                if renewals:
                    self.send(pb.InstanceFrame(others=last_sent))
                else:
                    last_heartbeat = heartbeat
                    self.send(pb.InstanceFrame(heartbeat=heartbeat))
                next_heartbeat_at = now + HEARTBEAT_INTERVAL_S
            if now >= next_update_at:
                if (load := self._instance.reporter.other_load(self.name)) != last_sent:
                    last_sent = load
                    self.send(pb.InstanceFrame(others=load))
                removed, added = pending.pop_batch(MAX_KEYS_PER_FRAME)
                untold = len(pending)
                if removed or added:
                    blocks = pb.Blocks(removed=b"".join(removed), added=b"".join(added), untold=untold)
                    self.send(pb.InstanceFrame(blocks=blocks))
                next_update_at = now + (0 if untold else UPDATE_INTERVAL_S)
            await asyncio.sleep(min(next_heartbeat_at, next_update_at) - now)

    async def wait_closed(self) -> Exception | None:
        """Wait for the end of the connection and return its error, if any.

        Aborts it after `SILENCE_TIMEOUT_S` of silence. The time in which this instance was stalled itself does not count.
        """
        interval_s = SILENCE_TIMEOUT_S / TICKS_PER_TIMEOUT
        clock = AwakeClock(interval_s, self._loop.time)
        received_at, heard_at = self.last_received_at, clock.time
        while not self.closed.done():
            await asyncio.wait([self.closed], timeout=interval_s)
            now = clock.tick()
            if self.last_received_at != received_at:
                received_at, heard_at = self.last_received_at, now
            elif now - heard_at > SILENCE_TIMEOUT_S:
                self.abort(TimeoutError(f"no frame for {SILENCE_TIMEOUT_S:g} s"))
        return self.closed.result()


class RouterLinks:
    """All router links of one instance. `send` may be called from the engine thread; everything else runs on the loop.

    Args:
        routers: addresses of the routers; ignored if there is a registry, which then supplies them.
        token: must equal the routers' --control-token.
        tls: TLS context for dialling; None for plain TCP.

    Attributes:
        drain_requests: requests to drain, each with the role to serve in afterwards; empty to exit.
        is_draining: the instance accepts no new requests.
    """

    def __init__(
        self,
        routers: list[str],
        token: str = "",
        registry: Registry | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._routers = set(routers)
        self._served: set[str] = set()
        self._connection_ids = count(1)
        self._registry = registry
        self._tls = tls
        self._token = token
        self._loop = asyncio.get_running_loop()
        self._links: dict[str, RouterLink] = {}
        self.is_draining = self._is_closing = False
        self.drain_requests: asyncio.Queue[str] = asyncio.Queue()

    def send(self, link: str, frame: pb.InstanceFrame) -> None:
        """Queue a frame for one link. Frames for a closed link are dropped: its router has dropped the requests too."""
        if (target := self._links.get(link)) is not None:
            self._loop.call_soon_threadsafe(target.send, frame, self._loop.time())

    @property
    def num_attached(self) -> int:
        """Number of routers that have accepted the instance."""
        return sum(link.welcomed.is_set() and not link.rejection for link in self._links.values())

    def broadcast(self, frame: pb.InstanceFrame) -> None:
        """Queue a frame for every attached router."""
        for link in self._links.values():
            link.send(frame)

    def drain(self) -> None:
        """Ask all routers, including those that attach later, to send no new requests."""
        self.is_draining = True
        self.broadcast(pb.InstanceFrame(draining=pb.Draining()))

    def serve_as(self, hello: pb.Hello) -> None:
        """Accept requests again, in the role that `hello` states."""
        self.is_draining = False
        self.broadcast(pb.InstanceFrame(hello=hello))

    def announce_adapters(self, hello: pb.Hello, adapters: list[pb.Adapter]) -> None:
        """Tell all routers, including those that attach later, which adapters are here."""
        del hello.adapters[:]
        hello.adapters.extend(adapters)
        self.broadcast(pb.InstanceFrame(hello=hello))

    def close(self) -> None:
        """Make `run` return once routers have read their queued frames."""
        self._is_closing = True
        for link in self._links.values():
            self._loop.call_soon(link.close)  # after the frames that the engine thread has queued

    async def run(self, instance: Instance, hello: pb.Hello) -> None:
        """Serve all routers until cancelled or closed."""
        async with asyncio.TaskGroup() as group:
            while not self._is_closing:
                if self._registry is not None and (routers := await self._registry.routers()) is not None:
                    self._routers = routers
                for address in self._routers - self._served:
                    self._served.add(address)
                    group.create_task(self._serve_router(address, instance, hello))
                if self._registry is None:
                    return
                await asyncio.sleep(POLL_INTERVAL_S)

    async def _serve_router(self, address: str, instance: Instance, hello: pb.Hello) -> None:
        """Serve one router, reconnecting as long as it is registered. An open link outlives its registration."""
        attempt, told = 0, ""
        while address in self._routers and not self._is_closing:
            link = RouterLink(address, f"{address}#{next(self._connection_ids)}", instance, self.drain_requests)
            try:
                await link.dial(self._tls)
                error = await self._serve_link(link, instance, hello)
            except (OSError, ValueError) as failure:  # ValueError: the address is malformed
                error = failure
            is_accepted = link.welcomed.is_set() and not link.rejection
            if is_accepted:
                attempt = 0
            is_news = is_accepted or link.rejection != told or attempt == 10 or attempt % REPEAT_ATTEMPTS == 0
            if is_news and not self._is_closing:
                told = link.rejection
                # If a router that has closed the link does not come back, dialling it will warn.
                level = logging.INFO if is_accepted and error is None else logging.WARNING
                log.log(level, "router %s: %s", address, _close_reason(link, error))
            # By chance, so that the instances of a large fleet do not all dial a router at once that is back.
            await asyncio.sleep(RETRY_DELAYS_S[min(attempt, len(RETRY_DELAYS_S) - 1)] * random.uniform(0.5, 1.5))
            attempt += 1
        self._served.discard(address)
        if not self._is_closing:
            log.info("router %s is no longer in the registry", address)

    async def _serve_link(self, link: RouterLink, instance: Instance, hello: pb.Hello) -> Exception | None:
        """Serve an established link until it ends; return the error that ended it, if any."""
        link.send(pb.InstanceFrame(hello=hello, token=self._token))
        if self.is_draining:
            link.send(pb.InstanceFrame(draining=pb.Draining()))
        self._links[link.name] = link
        pending = instance.kv_events.subscribe()
        updates = asyncio.create_task(link.send_updates(pending))
        try:
            return await link.wait_closed()
        finally:
            updates.cancel()
            link.close()
            del self._links[link.name]
            instance.kv_events.unsubscribe(pending)
            instance.drop_link(link.name)


def _close_reason(link: RouterLink, error: Exception | None) -> str:
    """Explain to users why a link has ended."""
    if link.rejection:
        return link.rejection
    if link.welcomed.is_set():
        return f"the connection was lost: {error}" if error else "it closed the connection"
    return f"{describe_failure(error, link.was_established)}, retrying"

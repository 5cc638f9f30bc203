"""Control server: accepts connections from instances, authenticates them, and passes their frames to the fleet.

connected ── Hello accepted ──► member of the fleet ── connection lost or lease expired ──► closed
    ├────── no Hello in time, wrong token, or rejected by the fleet ──► Refused frame ─────────▲
    └────── the oldest of too many without a Hello ────────────────────────────────────────────┘
"""

import asyncio
import hmac
import logging
import math
import ssl

from pdserve.control.frame_connection import FrameConnection
from pdserve.errors import SetupError
from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.instances.arrivals import Arrival, Arrivals, default_max_waiting, listen
from pdserve.router.instances.fleet import Fleet, InstanceHandle
from pdserve.router.instances.frame_checks import MAX_INSTANCE_ID_CHARS

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0  # from the connection to the first frame
CLOSE_TIMEOUT_S = 2.0  # for instances to read the frames that are still to be sent
REPEAT_S = 100.0  # after which a refusal that goes on is logged again
MAX_TOLD = 1000  # refusals that are remembered for it


class ControlServer:
    """The router's server for instances. Everything runs on one event loop.

    Attributes:
        connections: all open connections, before and after their Hello.
    """

    def __init__(self, fleet: Fleet, token: str = "") -> None:
        """If `token` is not empty, instances have to send it."""
        self.fleet = fleet
        self.connections: set[InstanceConnection] = set()
        self._token = token
        self._arrivals: Arrivals | None = None
        self._told: dict[tuple[str, str], float] = {}  # when a refusal was logged, by the peer's host and the reason

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Start to accept connections, unencrypted if `tls` is None. Return the port: a free one if `port` is 0.

        Raises:
            SetupError: the port is taken.
        """
        try:
            listeners = listen(host.strip("[]"), port)
        except OSError as error:
            raise SetupError(
                f"control port {host}:{port} is in use or not permitted; choose another --control-port"
            ) from error
        bound: int = listeners[0].getsockname()[1]
        self._arrivals = Arrivals(
            listeners, tls, lambda: InstanceConnection(self), HELLO_TIMEOUT_S, default_max_waiting()
        )
        return bound

    async def close(self) -> None:
        """Close all connections; abort those whose instances do not read within `CLOSE_TIMEOUT_S`."""
        if self._arrivals is not None:
            await self._arrivals.close()
        for instance in list(self.fleet.instances.values()):
            self.fleet.deregister(instance, "the router is shutting down")
        for connection in self.connections:
            connection.close()
        if self.connections:
            await asyncio.wait([connection.closed for connection in self.connections], timeout=CLOSE_TIMEOUT_S)
        for connection in list(self.connections):
            connection.abort()

    def log_refusal(self, peer: str, name: str, reason: str) -> None:
        """Log that a peer was refused, if that is news: refused instances dial again every second."""
        now, key = self.fleet.now(), (peer.rpartition(":")[0], reason)
        if now - self._told.get(key, -math.inf) > REPEAT_S:
            if len(self._told) >= MAX_TOLD:
                self._told.clear()
            self._told[key] = now
            log.warning("refused %s: %s", name, reason, extra={"event": "refused", "instance": name})

    def is_authorized(self, token: str) -> bool:
        """Compare in constant time. Any token is accepted if none is configured."""
        return not self._token or hmac.compare_digest(token.encode(), self._token.encode())


class InstanceConnection(FrameConnection[pb.InstanceFrame, pb.RouterFrame], Arrival):
    """Connection of one instance, which becomes a member of the fleet with its first frame.

    Attributes:
        introduced: resolves with that frame, or when the connection ends.
    """

    def __init__(self, server: ControlServer) -> None:
        super().__init__(pb.InstanceFrame)
        self._server = server
        self._instance: InstanceHandle | None = None
        self.introduced = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.connections.add(self)
        self._hello_timer = self._loop.call_later(
            HELLO_TIMEOUT_S, self._reject, self.peer, f"no Hello within {HELLO_TIMEOUT_S:g} s"
        )

    def receive(self, frame: pb.InstanceFrame) -> None:
        fleet = self._server.fleet
        if self._instance is not None:
            fleet.handle_frame(self._instance, frame)
        elif not self._server.is_authorized(frame.token):
            self._reject(self.peer, "this router requires another --control-token")
        elif reason := fleet.rejection_reason(frame):
            self._reject(f"{frame.hello.instance_id[:MAX_INSTANCE_ID_CHARS]!r} at {self.peer}", reason)
        else:
            self._hello_timer.cancel()
            self._introduce()
            self.is_trusted = True
            self._instance = fleet.register(frame.hello, self)
            self.send(pb.RouterFrame(welcome=fleet.welcome()))
            fleet.on_joined(self._instance)

    def _introduce(self) -> None:
        if not self.introduced.done():
            self.introduced.set_result(None)

    def _reject(self, name: str, reason: str) -> None:
        self._server.log_refusal(self.peer, name, reason)
        self.send(pb.RouterFrame(refused=pb.Refused(message=reason)))
        self.close()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._hello_timer.cancel()
        self._server.connections.discard(self)
        self._introduce()
        if self._instance is not None:
            self._instance.may_be_poisoned = self.error is not None
            reason = f"a frame could not be handled: {self.error!r}" if self.error else "the connection was lost"
            self._server.fleet.deregister(self._instance, reason)
        elif self.error is not None:
            self._server.log_refusal(self.peer, self.peer, str(self.error))

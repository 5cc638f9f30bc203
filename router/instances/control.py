"""Where instances dial in. The first frame of each says who it is; all that follow go to the fleet."""

import asyncio
import hmac
import logging
import ssl

from pdserve.control.wire import Wire
from pdserve.errors import SetupError
from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.instances.fleet import MAX_NAME, Fleet, InstanceHandle

log = logging.getLogger(__name__)

HELLO_S = 10.0  # from the connection to the first frame
CLOSE_S = 2.0  # for instances to read what they were sent


class Control:
    """The control server of a router. Everything runs on one event loop."""

    def __init__(self, fleet: Fleet, token: str = "") -> None:
        """Instances have to know the token, if there is one."""
        self.fleet = fleet
        self.connections: set[InstanceConnection] = set()
        self._token = token
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Answers from now on, without `tls` in plain; the port, a free one for 0.

        Raises:
            SetupError: the port is taken.
        """
        loop = asyncio.get_running_loop()
        try:
            patience = HELLO_S if tls else None
            self._server = await loop.create_server(
                lambda: InstanceConnection(self), _bindable(host), port, ssl=tls, ssl_handshake_timeout=patience
            )
        except OSError as error:
            raise SetupError(
                f"control port {host}:{port} is in use or not ours to take; choose another --control-port"
            ) from error
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Ends all connections; those whose other end does not read, after a while."""
        if self._server is not None:
            self._server.close()
        for instance in list(self.fleet.instances.values()):
            self.fleet.deregister(instance, "this router ends")
        for connection in self.connections:
            connection.close()
        if self.connections:
            await asyncio.wait([connection.closed for connection in self.connections], timeout=CLOSE_S)
        for connection in list(self.connections):
            connection.abort()

    def knows(self, token: str) -> bool:
        return not self._token or hmac.compare_digest(token.encode(), self._token.encode())


class InstanceConnection(Wire[pb.InstanceFrame, pb.RouterFrame]):
    """An instance that has dialled in: a member of the fleet from its first frame on."""

    def __init__(self, control: Control) -> None:
        super().__init__(pb.InstanceFrame)
        self._control = control
        self._instance: InstanceHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._control.connections.add(self)
        self._patience = self._loop.call_later(HELLO_S, self._refuse, self.peer, f"it says nothing for {HELLO_S:g} s")

    def receive(self, frame: pb.InstanceFrame) -> None:
        fleet = self._control.fleet
        if self._instance is not None:
            fleet.handle_frame(self._instance, frame)
        elif not self._control.knows(frame.token):
            self._refuse(self.peer, "this router asks for another --control-token")
        elif refusal := fleet.refusal(frame):
            self._refuse(f"{frame.hello.instance_id[:MAX_NAME]!r} at {self.peer}", refusal)
        else:
            self._patience.cancel()
            self.known = True
            self._instance = fleet.register(frame.hello, self)
            self.put(pb.RouterFrame(welcome=fleet.welcome()))

    def _refuse(self, who: str, refusal: str) -> None:
        log.warning("refused %s: %s", who, refusal, extra={"event": "refused", "instance": who})
        self.put(pb.RouterFrame(refused=pb.Refused(message=refusal)))
        self.close()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._patience.cancel()
        self._control.connections.discard(self)
        if self._instance is not None:
            reason = f"a frame could not be handled: {self.error!r}" if self.error else "its connection ended"
            self._control.fleet.deregister(self._instance, reason)
        elif self.error is not None:
            log.warning("refused %s: %s", self.peer, self.error, extra={"event": "refused", "instance": self.peer})


def _bindable(host: str) -> str | None:
    """As event loops want it: `::` alone would leave IPv4 out."""
    return None if host.strip("[]") == "::" else host.strip("[]")

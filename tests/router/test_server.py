"""The router's process: how it listens."""

import asyncio
import socket

import pytest

from pdserve.config import RouterConfig
from pdserve.router.dispatch.dispatcher import Dispatcher
from pdserve.router.server import serve
from pdserve.router.web.listening import listen


def test_small_writes_leave_at_once() -> None:
    """An answer is two writes or more: the second would wait for the client's delayed acknowledgement, some 40 ms."""

    async def story() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listening = listen(RouterConfig(port=0))
        async with await asyncio.start_server(connected, sock=listening):
            _, writer = await asyncio.open_connection(*listening.getsockname())
            writer.close()
            return await asyncio.wait_for(accepted, 600)

    assert asyncio.run(story()) != 0


def test_a_router_whose_clock_has_stopped_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would serve on, and nothing would ever be late."""

    async def stopped(_: Dispatcher) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(Dispatcher, "watch", stopped)
    with pytest.raises(RuntimeError, match="a defect"):
        serve(RouterConfig(model="demo", port=0, control_port=0))

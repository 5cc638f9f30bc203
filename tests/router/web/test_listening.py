"""The listening socket."""

import asyncio
import socket

from pdserve.config import RouterConfig
from pdserve.router.web.listening import listen


def test_small_writes_leave_at_once() -> None:
    """TCP_NODELAY is set: otherwise the second write of a response waits for a delayed acknowledgement, about 40 ms."""

    async def scenario() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listening = listen(RouterConfig(port=0))
        async with await asyncio.start_server(connected, sock=listening):
            _, writer = await asyncio.open_connection(*listening.getsockname())
            writer.close()
            return await asyncio.wait_for(accepted, 60)

    assert asyncio.run(scenario()) != 0

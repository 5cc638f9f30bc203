"""The listening socket."""

import asyncio
import errno
import socket

import pytest

from pdserve.config import RouterConfig
from pdserve.errors import SetupError
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


def test_a_machine_without_ipv6_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", without)
    with pytest.raises(SetupError, match=r"cannot listen on ::1:80: Address family not supported by protocol; choose"):
        listen(RouterConfig(host="::1", port=80))

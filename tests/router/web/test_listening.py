"""The listening socket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.applications import Starlette

from pdserve.config import RouterConfig
from pdserve.router.web.listening import listen

if TYPE_CHECKING:
    from tests.router.conftest import ScriptedBackend

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "demo", "prompt": "hello"}


def test_a_client_that_reads_nothing_is_cut_off(
    app: Starlette, backend: ScriptedBackend, serving: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    backend.generates([5] * 2000, finish_reason=None, hang=True)
    listening = listen(RouterConfig(port=0, client_timeout_seconds=1))
    with serving(app, listening) as url, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        address = urlsplit(url)
        client.connect((address.hostname, address.port))
        body = json.dumps({**HELLO, "stream": True}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        eventually(lambda: [stream.cancelled for stream in backend.streams] == [True])


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

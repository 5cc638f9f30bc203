"""The control server over real connections: authentication, rejections, and the load of other routers."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from pdserve.control.frame_connection import FIRST_FRAME_BYTES
from pdserve.instance.router_link import RouterLinks
from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.instances.control_server import ControlServer
from pdserve.router.instances.fleet import Fleet
from pdserve.router.scheduling.policy import Load

if TYPE_CHECKING:
    from tests.router.instances.conftest import IdleInstance, MakeHello

Body = Callable[[ControlServer, int], Awaitable[None]]


def with_server(body: Body, token: str = "", tls: ssl.SSLContext | None = None) -> None:
    """Run `body(server, port)` with a control server on a free port."""

    async def run() -> None:
        fleet = Fleet("router", "model", 60.0, time.monotonic)
        fleet.listener = cast(Any, SimpleNamespace(on_lost=lambda instance: None))
        server = ControlServer(fleet, token)
        await body(server, await server.listen("127.0.0.1", 0, tls))
        await server.close()

    asyncio.run(asyncio.wait_for(run(), 600))


async def stop(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_load_of_other_routers_arrives(make_hello: MakeHello, make_idle_instance: type[IdleInstance]) -> None:
    async def body(server: ControlServer, port: int) -> None:
        instance, instances = make_idle_instance(), server.fleet.instances
        links = RouterLinks([f"127.0.0.1:{port}"])
        task = asyncio.create_task(links.run(cast(Any, instance), make_hello("decode-0")))
        while not instances:
            await asyncio.sleep(0.01)
        load = instances["decode-0"].candidate
        instances["decode-0"].assign("ours", Load(output_tokens=7))
        for other in (pb.Load(requests=2, output_tokens=5, context_tokens=9), pb.Load(requests=1), pb.Load()):
            instance.load = other
            while (load.requests, load.output_tokens) != (1 + other.requests, 7 + other.output_tokens):
                await asyncio.sleep(0.01)
            assert load.context_tokens == other.context_tokens
        await stop(task)

    with_server(body)


def test_instances_need_the_token(
    make_hello: MakeHello, make_idle_instance: type[IdleInstance], caplog: pytest.LogCaptureFixture
) -> None:
    async def body(server: ControlServer, port: int) -> None:
        tasks = []
        for name, token in {"prefill-0": "right", "decode-0": "wrong", "decode-1": ""}.items():
            links = RouterLinks([f"127.0.0.1:{port}"], token)
            tasks.append(asyncio.create_task(links.run(cast(Any, make_idle_instance()), make_hello(name))))
        while not server.fleet.instances or caplog.text.count("requires another --control-token") < 2:
            await asyncio.sleep(0.01)
        assert list(server.fleet.instances) == ["prefill-0"]
        await stop(*tasks)

    with_server(body, token="right")


def test_an_instance_that_dials_in_vain_is_rarely_told_of(
    make_hello: MakeHello,
    make_idle_instance: type[IdleInstance],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdserve.instance.router_link.RETRY_DELAYS_S", (0.0,))
    attempts = list[str]()

    async def body(server: ControlServer, port: int) -> None:
        monkeypatch.setattr(server, "is_authorized", attempts.append)
        links = RouterLinks([f"127.0.0.1:{port}"], "wrong")
        task = asyncio.create_task(links.run(cast(Any, make_idle_instance()), make_hello("decode-0")))
        while len(attempts) < 110:
            await asyncio.sleep(0.01)
        await stop(task)

    with_server(body, token="right")
    told = [record.name for record in caplog.records if "requires another --control-token" in record.message]
    assert told.count("pdserve.router.instances.control_server") == 1
    assert told.count("pdserve.instance.router_link") == 3, "at first, after 10 attempts, and after 100"


def test_unknown_peers_are_rejected_with_a_reason_in_time(
    make_hello: MakeHello, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(port: int, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        received = await reader.read()
        writer.close()
        return received

    async def body(server: ControlServer, port: int) -> None:
        for data in (b"GET / HTTP/1.1\r\n\r\n", (FIRST_FRAME_BYTES + 1).to_bytes(4, "big") + bytes(100)):
            assert await answer(port, data) == b""
        with monkeypatch.context() as patch:
            patch.setattr("pdserve.router.instances.control_server.HELLO_TIMEOUT_S", 0.2)
            assert b"no Hello within 0.2 s" in await answer(port, b"")
        forged = pb.InstanceFrame(hello=make_hello("prefill-0\nrouter: all is well")).SerializeToString()
        assert b"all of them printable" in await answer(port, len(forged).to_bytes(4, "big") + forged)
        while server.connections:
            await asyncio.sleep(0.01)

    with_server(body)
    assert not any("\n" in message for message in caplog.messages)
    assert caplog.text.count("the data is not of the control protocol") == 1, "of one host, it is told once in a while"


@pytest.mark.parametrize("with_tls", [False, True])
def test_the_oldest_connections_without_a_hello_are_closed(
    make_hello: MakeHello, make_idle_instance: type[IdleInstance], monkeypatch: pytest.MonkeyPatch, with_tls: bool
) -> None:
    monkeypatch.setattr("pdserve.router.instances.control_server.default_max_waiting", lambda: 3)
    monkeypatch.setattr("pdserve.router.instances.control_server.HELLO_TIMEOUT_S", 3600)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if with_tls else None

    async def body(server: ControlServer, port: int) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(10)]
        for reader, _ in silent[:7]:
            assert await reader.read() == b""
        if not with_tls:  # which has no certificate here
            links = RouterLinks([f"127.0.0.1:{port}"])
            task = asyncio.create_task(links.run(cast(Any, make_idle_instance()), make_hello("decode-0")))
            while not server.fleet.instances:
                await asyncio.sleep(0.01)
            more = [await asyncio.open_connection("127.0.0.1", port) for _ in range(10)]
            for reader, _ in more[:7]:
                assert await reader.read() == b""
            silent += more
            assert [*server.fleet.instances] == ["decode-0"], "it has introduced itself"
            await stop(task)
        assert not any(reader.at_eof() for reader, _ in silent[-3:])
        for _, writer in silent:
            writer.close()

    with_server(body, tls=tls)


def test_unreachable_routers_do_not_affect_the_others(
    make_hello: MakeHello, make_idle_instance: type[IdleInstance], caplog: pytest.LogCaptureFixture
) -> None:
    async def body(server: ControlServer, port: int) -> None:
        links = RouterLinks(["nowhere", "a..b:1", f"127.0.0.1:{port}"])
        task = asyncio.create_task(links.run(cast(Any, make_idle_instance()), make_hello("decode-0")))
        while not server.fleet.instances or caplog.text.count("not reachable") < 2:
            await asyncio.sleep(0.01)
        await stop(task)

    with_server(body)


def test_no_instance_is_lost_while_the_router_itself_is_stalled(
    make_hello: MakeHello, make_idle_instance: type[IdleInstance]
) -> None:
    """The check of the leases wakes up late, and before the heartbeats that have arrived meanwhile are read."""
    lease_seconds, over = 0.6, threading.Event()

    async def serve(port: int) -> None:
        links = RouterLinks([f"127.0.0.1:{port}"])
        task = asyncio.create_task(links.run(cast(Any, make_idle_instance()), make_hello("decode-0")))
        await asyncio.to_thread(over.wait)
        await stop(task)

    async def scenario() -> None:
        fleet = Fleet("router", "model", lease_seconds, time.monotonic)
        fleet.listener = cast(Any, SimpleNamespace(on_lost=lambda instance: None))
        server = ControlServer(fleet)
        port = await server.listen("127.0.0.1", 0)
        thread = threading.Thread(target=lambda: asyncio.run(serve(port)))
        thread.start()
        while not fleet.instances:
            await asyncio.sleep(0.01)
        time.sleep(2 * lease_seconds)
        fleet.expire_leases()
        remaining = list(fleet.instances)
        over.set()
        await asyncio.to_thread(thread.join, 600)
        await server.close()
        assert remaining == ["decode-0"]

    asyncio.run(asyncio.wait_for(scenario(), 600))

"""Who may serve together, and what decode is told of the layout that prefill stores in."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pdserve.control.frame_connection import FIRST_FRAME_BYTES, PROTOCOL_VERSION

from pdserve.config import RouterConfig
from pdserve.instance.kv_events import KVEventPublisher
from pdserve.instance.router_link import RouterLinks
from pdserve.keys import Layout
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request, SamplingParams
from pdserve.router.dispatch.dispatcher import Dispatcher
from pdserve.router.instances.control_server import ControlServer
from pdserve.router.instances.fleet import Fleet, InstanceHandle
from pdserve.router.scheduling.policy import Load
from pdserve.router.telemetry.metrics import Metrics


def hello_of(
    name: str, *, block_size: int = 16, dtype: str = "bfloat16", convert: bool = False, **other: Any
) -> pb.Hello:
    layout = pb.Layout(
        model_fingerprint="m", num_layers=2, num_kv_heads=2, head_dim=8, block_size=block_size, dtype=dtype, version=1
    )
    layout.itemsize = 4 if dtype == "float32" else 2
    layout.MergeFrom(pb.Layout(**other))
    return pb.Hello(
        instance_id=name,
        role=name.partition("-")[0],
        model="model",
        protocol_version=PROTOCOL_VERSION,
        namespace=Layout.from_message(layout).namespace,
        layout=layout,
        block_size=block_size,
        convert_kv=convert,
        max_model_len=100,
    )


class SentFrames(list[pb.RouterFrame]):
    """In place of a connection to an instance: what it was sent."""

    send = list.append

    def close(self) -> None: ...

    def abort(self) -> None: ...


def refusal(there: pb.Hello, comes: pb.Hello) -> str:
    """What the second one is told."""
    fleet = Fleet("router", "model", 1.0)
    fleet.register(there, SentFrames())
    return fleet.rejection_reason(pb.InstanceFrame(hello=comes))


@pytest.mark.parametrize(
    ("there", "comes"),
    [
        (hello_of("prefill-0"), hello_of("decode-0")),
        (hello_of("prefill-0"), hello_of("decode-0", block_size=32, convert=True)),
        (hello_of("decode-0", dtype="float32", convert=True), hello_of("prefill-0")),
        (hello_of("prefill-0"), hello_of("prefill-1", block_size=32)),  # no KV goes from one to the other
        (hello_of("decode-0"), hello_of("decode-1", block_size=32)),
        (hello_of("both-0", convert=True), hello_of("both-1", block_size=32, convert=True)),
        (hello_of("both-0"), hello_of("decode-0", block_size=32, convert=True)),
    ],
)
def test_those_that_can_hand_over_may_serve_together(there: pb.Hello, comes: pb.Hello) -> None:
    assert refusal(there, comes) == ""


@pytest.mark.parametrize(
    ("there", "comes", "who"),
    [
        (hello_of("prefill-0"), hello_of("decode-0", block_size=32), "decode-0"),
        (hello_of("decode-0"), hello_of("prefill-0", dtype="float32"), "decode-0"),
        (hello_of("prefill-0", convert=True), hello_of("decode-0", block_size=32), "decode-0"),
        (hello_of("both-0", convert=True), hello_of("both-1", block_size=32), "both-1"),
        (hello_of("both-0"), hello_of("prefill-0", block_size=32), "both-0"),
    ],
)
def test_others_are_told_what_would_help(there: pb.Hello, comes: pb.Hello, who: str) -> None:
    said = refusal(there, comes)
    assert said.endswith(f"make them the same, or start {who} with --convert-kv")
    assert f"{there.instance_id} " in said and f"{comes.instance_id} " in said


@pytest.mark.parametrize("change", [{"model_fingerprint": "n"}, {"num_kv_heads": 1}, {"head_dim": 4}, {"version": 2}])
def test_what_cannot_be_converted_is_refused(change: dict[str, Any]) -> None:
    said = refusal(hello_of("prefill-0"), hello_of("decode-0", convert=True, **change))
    assert said == "its weights or its KV layout differ from those of prefill-0"


def submits(instance: InstanceHandle) -> list[pb.Submit]:
    assert isinstance(instance.connection, SentFrames)
    return [frame.submit for frame in instance.connection if frame.WhichOneof("frame") == "submit"]


def test_decode_is_told_the_writer_s_layout_where_it_is_another() -> None:
    async def story() -> None:
        fleet = Fleet("router", "model", 1.0)
        dispatcher = Dispatcher(RouterConfig(model="model"), fleet, Metrics(fleet))
        prefill = fleet.register(hello_of("prefill-0"), SentFrames())
        decode = fleet.register(hello_of("decode-0", block_size=32, convert=True), SentFrames())
        request = Request(request_id="r", prompt=[1, 2, 3], sampling=SamplingParams(max_tokens=4))
        dispatcher.open(request)
        (asked,), (told,) = submits(prefill), submits(decode)
        assert told.writer == prefill.hello.layout and not asked.HasField("writer")

        same = fleet.register(hello_of("prefill-1", block_size=32), SentFrames())
        fleet.deregister(decode, "test")  # the request moves: other instances, another pair of layouts
        fleet.deregister(prefill, "test")
        again = fleet.register(hello_of("decode-1", block_size=32, convert=True), SentFrames())
        dispatcher.open(Request(request_id="s", prompt=[1, 2, 3], sampling=SamplingParams(max_tokens=4)))
        assert [submit.HasField("writer") for submit in submits(again)] == [False]
        assert submits(same)

    asyncio.run(story())


class Idle:
    """What links need of an instance that has nothing to do."""

    def __init__(self) -> None:
        self.kv_events = KVEventPublisher()

        self.heartbeat, self.left = pb.Heartbeat(), pb.Load()

    def other_load(self, link: str) -> pb.Load:
        return self.left

    def drop_link(self, link: str) -> None: ...


def test_a_router_hears_what_others_have_sent() -> None:
    async def scenario() -> None:
        fleet, instance = Fleet("router", "model", 60.0), Idle()
        fleet.listener = cast(Any, SimpleNamespace(on_lost=lambda instance: None))
        control = ControlServer(fleet)
        port = await control.listen("127.0.0.1", 0)
        task = asyncio.create_task(RouterLinks([f"127.0.0.1:{port}"]).run(cast(Any, instance), hello_of("decode-0")))
        async with asyncio.timeout(600):
            while not fleet.instances:
                await asyncio.sleep(0.01)
            load = fleet.instances["decode-0"].load
            fleet.instances["decode-0"].assign("ours", Load(output_tokens=7))
            for others in (pb.Load(requests=2, output_tokens=5, context_tokens=9), pb.Load(requests=1), pb.Load()):
                instance.left = others
                while (load.requests, load.output_tokens) != (1 + others.requests, 7 + others.output_tokens):
                    await asyncio.sleep(0.01)
                assert load.context_tokens == others.context_tokens
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await control.close()

    asyncio.run(scenario())


def test_instances_have_to_know_the_token(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        fleet = Fleet("router", "model", 60.0)
        fleet.listener = cast(Any, SimpleNamespace(on_lost=lambda instance: None))
        control = ControlServer(fleet, "right")
        port = await control.listen("127.0.0.1", 0)
        tokens = {"prefill-0": "right", "decode-0": "wrong", "decode-1": ""}
        tasks = []
        for name, token in tokens.items():
            links = RouterLinks([f"127.0.0.1:{port}"], token)
            tasks.append(asyncio.create_task(links.run(cast(Any, Idle()), hello_of(name))))
        async with asyncio.timeout(600):
            while len(fleet.instances) < 1 or caplog.text.count("asks for another --control-token") < 2:
                await asyncio.sleep(0.01)
        assert list(fleet.instances) == ["prefill-0"]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await control.close()

    asyncio.run(scenario())


def test_strangers_are_told_why_they_have_to_go_and_soon(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(port: int, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        said = await reader.read()
        writer.close()
        return said

    async def scenario() -> None:
        control = ControlServer(Fleet("router", "model", 60.0))
        port = await control.listen("127.0.0.1", 0)
        for data in (b"GET / HTTP/1.1\r\n\r\n", (FIRST_FRAME_BYTES + 1).to_bytes(4, "big") + bytes(100)):
            assert await answer(port, data) == b""
        with monkeypatch.context() as patch:
            patch.setattr("pdserve.router.instances.control_server.HELLO_TIMEOUT_S", 0.2)
            assert b"it says nothing for 0.2 s" in await answer(port, b"")
        nobody = pb.InstanceFrame(hello=hello_of("prefill-0\nrouter: all is well")).SerializeToString()
        assert b"all of which can be printed" in await answer(port, len(nobody).to_bytes(4, "big") + nobody)
        while control.connections:
            await asyncio.sleep(0.01)
        await control.close()

    asyncio.run(asyncio.wait_for(scenario(), 600))
    assert not any("\n" in message for message in caplog.messages)
    assert caplog.text.count("the data is not of the control protocol") == 2


def test_each_heartbeat_is_answered() -> None:
    fleet, told = Fleet("router", "model", 1.0), SentFrames()
    fleet.listener = cast(Any, SimpleNamespace())
    fleet.handle_frame(fleet.register(hello_of("prefill-0"), told), pb.InstanceFrame(heartbeat=pb.Heartbeat()))
    assert [frame.WhichOneof("frame") for frame in told] == ["heard"]


def test_no_address_among_the_routers_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        fleet = Fleet("router", "model", 60.0)
        fleet.listener = cast(Any, SimpleNamespace(on_lost=lambda instance: None))
        control = ControlServer(fleet)
        port = await control.listen("127.0.0.1", 0)
        links = RouterLinks(["nowhere", "a..b:1", f"127.0.0.1:{port}"])
        task = asyncio.create_task(links.run(cast(Any, Idle()), hello_of("decode-0")))
        while not fleet.instances or caplog.text.count("not reachable") < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await control.close()

    asyncio.run(asyncio.wait_for(scenario(), 600))

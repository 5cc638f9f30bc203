"""Registrations of instances, a recording connection, and an idle instance for real connections."""

from collections.abc import Callable
from typing import Any

import pytest

from pdserve.control.frame_connection import NONCE_BYTES, PROTOCOL_VERSION
from pdserve.instance.kv_events import KVEventPublisher
from pdserve.keys import Layout
from pdserve.proto import pdserve_pb2 as pb

MakeHello = Callable[..., pb.Hello]


class SentFrames(list[pb.RouterFrame]):
    """Fake connection to an instance; records the frames that were sent."""

    send = list.append

    def close(self) -> None: ...

    def abort(self) -> None: ...


@pytest.fixture(scope="session")
def make_connection() -> type[SentFrames]:
    return SentFrames


@pytest.fixture(scope="session")
def make_hello() -> MakeHello:
    """make_hello(name, **fields of the layout) → the registration of an instance whose role is the name's first part."""

    def make(
        name: str,
        *,
        block_size: int = 16,
        dtype: str = "bfloat16",
        convert: bool = False,
        inexact: bool = False,
        **layout_fields: Any,
    ) -> pb.Hello:
        layout = pb.Layout(
            model_fingerprint="m",
            num_layers=2,
            num_kv_heads=2,
            head_dim=8,
            block_size=block_size,
            dtype=dtype,
            itemsize=4 if dtype == "float32" else 2,
            version=1,
        )
        layout.MergeFrom(pb.Layout(**layout_fields))
        return pb.Hello(
            instance_id=name,
            role=name.partition("-")[0],
            model="model",
            protocol_version=PROTOCOL_VERSION,
            namespace=Layout.from_message(layout).namespace,
            layout=layout,
            block_size=block_size,
            convert_kv=convert,
            allow_inexact=inexact,
            max_model_len=100,
            vocab_size=50,
            num_blocks=99,
            block_bytes=Layout.from_message(layout).block_bytes,
            nonce=bytes(NONCE_BYTES),
        )

    return make


class IdleInstance:
    """An instance without requests, as far as `RouterLinks` needs it."""

    def __init__(self) -> None:
        self.kv_events = KVEventPublisher()
        self.heartbeat, self.load = pb.Heartbeat(), pb.Load()
        self.reporter = self.status = self

    def other_load(self, link: str) -> pb.Load:
        return self.load

    def drop_link(self, link: str) -> None: ...


@pytest.fixture
def make_idle_instance() -> type[IdleInstance]:
    return IdleInstance

"""Mutual TLS between routers and instances: accepted peers, and the messages for rejected ones."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trustme

from pdserve.config import InstanceConfig, RouterConfig
from pdserve.control.certificates import CLOSED_EARLY, NAME_MISMATCH, NO_TLS, UNTRUSTED, client_context, server_context
from pdserve.control.frame_connection import NONCE_BYTES, PROTOCOL_VERSION
from pdserve.errors import SetupError
from pdserve.instance.kv_events import KVEventPublisher
from pdserve.instance.router_link import RouterLinks
from pdserve.keys import Layout
from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.instances.control_server import ControlServer
from pdserve.router.instances.fleet import Fleet

Write = Callable[..., dict[str, str]]
LAYOUT = Layout(
    model_fingerprint="m", num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32", itemsize=4
)
PLAIN = {"control_certfile": "", "control_keyfile": "", "control_cafile": ""}


def make_hello(name: str) -> pb.Hello:
    return pb.Hello(
        instance_id=name,
        role="decode",
        model="model",
        protocol_version=PROTOCOL_VERSION,
        nonce=bytes(NONCE_BYTES),
        namespace=LAYOUT.namespace,
        layout=pb.Layout(**asdict(LAYOUT)),
        block_size=LAYOUT.block_size,
        block_bytes=LAYOUT.block_bytes,
        num_blocks=9,
        max_model_len=100,
        vocab_size=50,
    )


def test_peers_without_a_certificate_of_the_ca_are_rejected(
    control_files: Write, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.instance.router_link.DIAL_TIMEOUT_S", 600.0)
    ca, other_ca = trustme.CA(), trustme.CA()
    right, foreign = control_files(ca), control_files(other_ca)
    elsewhere = control_files(ca, "elsewhere.test")
    only_ca = right["control_cafile"]
    instances = {
        "decode-right": ("tls", right, ""),
        "decode-anywhere": ("tls", elsewhere, ""),  # an instance's certificate may name anything
        "decode-foreign": ("tls", {**foreign, "control_cafile": only_ca}, CLOSED_EARLY),
        "decode-plain": ("tls", PLAIN, CLOSED_EARLY),
        "decode-distrusts": ("tls", foreign, UNTRUSTED),
        "decode-misled": ("elsewhere", right, NAME_MISMATCH),
        "decode-secret": ("plain", right, NO_TLS),
    }

    def failures() -> Counter[str]:
        return Counter(message for message in caplog.messages if message.endswith("retrying"))

    async def scenario() -> None:
        fleets, controls, ports, tasks = {}, [], {}, []
        for name, files in (("tls", right), ("elsewhere", elsewhere), ("plain", PLAIN)):
            fleets[name] = Fleet(name, "model", 60.0, time.monotonic)
            fleets[name].listener = cast(Any, SimpleNamespace(on_lost=lambda member: None))
            tls = server_context(RouterConfig(model="model", **cast(Any, files)))
            controls.append(ControlServer(fleets[name]))
            ports[name] = await controls[-1].listen("127.0.0.1", 0, tls)
        idle_instance = SimpleNamespace(
            kv_events=KVEventPublisher(),
            reporter=SimpleNamespace(heartbeat=pb.Heartbeat(), other_load=lambda link: pb.Load()),
            drop_link=lambda link: None,
        )
        for name, (where, files, _) in instances.items():
            tls = client_context(InstanceConfig(model="model", **cast(Any, files)))
            links = RouterLinks([f"127.0.0.1:{ports[where]}"], tls=tls)
            tasks.append(asyncio.create_task(links.run(cast(Any, idle_instance), make_hello(name))))
        expected = Counter(
            f"router 127.0.0.1:{ports[where]}: {why}, retrying" for where, _, why in instances.values() if why
        )
        async with asyncio.timeout(600):
            while len(fleets["tls"].instances) < 2 or not expected <= failures():
                await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for control in controls:
            await control.close()
        assert expected.keys() == failures().keys()
        joined = {message.partition(" joined")[0] for message in caplog.messages if " joined" in message}
        assert joined == {"decode-anywhere", "decode-right"}

    with caplog.at_level("INFO"):
        asyncio.run(scenario())


def test_invalid_files_are_reported_in_one_sentence(control_files: Write, tmp_path: Path) -> None:
    right, other = control_files(trustme.CA()), control_files(trustme.CA())
    (tmp_path / "text").write_text("no PEM\n")
    wrong: dict[str, dict[str, str]] = {
        r"--control-certfile nowhere: No such file": {"control_certfile": "nowhere"},
        r"--control-keyfile nowhere: No such file": {"control_keyfile": "nowhere"},
        r"--control-cafile nowhere: No such file": {"control_cafile": "nowhere"},
        r"with --control-keyfile .*key values mismatch": {"control_keyfile": other["control_keyfile"]},
        r"--control-certfile .*text with .*PEM": {"control_certfile": str(tmp_path / "text")},
        r"--control-cafile .*text holds no certificate": {"control_cafile": str(tmp_path / "text")},
        r"belong together: give all or none": {"control_cafile": ""},
    }
    for message, change in wrong.items():
        for credentials, config in (
            (server_context, RouterConfig(**cast(Any, right))),
            (client_context, InstanceConfig(**cast(Any, right))),
        ):
            with pytest.raises(SetupError, match=message) as error:
                credentials(replace(config, **cast(Any, change)))
            assert "\n" not in str(error.value)

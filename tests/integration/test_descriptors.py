"""A router with few file descriptors: connections to one of its ports leave some for the others, however many there are."""

import resource
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.cli.deployment import free_port
from pdserve.control.frame_connection import LENGTH_BYTES
from pdserve.proto import pdserve_pb2 as pb

DESCRIPTORS = 200


@pytest.fixture
def ports(checkpoint: Callable[[str], Path], start: Callable[..., Any]) -> dict[str, int]:
    """The ports of a router that may open `DESCRIPTORS` files, by the names of their flags."""
    ports = {"port": free_port()}
    ports["control-port"] = free_port(exclude=ports["port"])
    ports["grpc-port"] = next(port for port in iter(free_port, None) if port not in ports.values())
    flags = [text for name, port in ports.items() for text in (f"--{name}", str(port))]
    router = start("router", "--model", str(checkpoint("llama")), *flags)
    resource.prlimit(router.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    while not all(map(_accepts, ports.values())):
        assert router.poll() is None
        time.sleep(0.05)
    return ports


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _open_many(stack: ExitStack, port: int) -> None:
    for _ in range(2 * DESCRIPTORS):
        stack.enter_context(socket.create_connection(("127.0.0.1", port)))


@pytest.mark.parametrize("flooded", [["port"], ["grpc-port", "control-port"]], ids=str)
def test_silent_connections_leave_descriptors_for_instances_and_clients(
    ports: dict[str, int], flooded: list[str]
) -> None:
    hello = pb.InstanceFrame(hello=pb.Hello(instance_id="late", protocol_version=1)).SerializeToString()
    with ExitStack() as stack:
        for name in flooded:
            _open_many(stack, ports[name])
        instance = stack.enter_context(socket.create_connection(("127.0.0.1", ports["control-port"]), timeout=600))
        instance.sendall(len(hello).to_bytes(LENGTH_BYTES, "big") + hello)
        assert b"speaks control protocol" in instance.recv(4096)
        if "port" not in flooded:
            assert httpx.get(f"http://127.0.0.1:{ports['port']}/health", timeout=600).status_code == 200

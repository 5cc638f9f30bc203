"""A router with few file descriptors keeps some for its instances, however many connections clients open."""

import resource
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.deployment import free_port
from pdserve.control.frame_connection import LENGTH_BYTES
from pdserve.proto import pdserve_pb2 as pb

DESCRIPTORS = 200


@pytest.fixture
def control_and_client_port(checkpoint: Callable[[str], Path], start: Callable[..., Any]) -> tuple[int, int]:
    """The ports of a router that may open `DESCRIPTORS` files."""
    port = free_port()
    control_port = free_port(exclude=port)
    ports = "--port", str(port), "--control-port", str(control_port)
    router = start("router", "--model", str(checkpoint("llama")), *ports)
    resource.prlimit(router.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    while not _accepts(port) or not _accepts(control_port):
        assert router.poll() is None
        time.sleep(0.05)
    return control_port, port


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def test_clients_leave_descriptors_for_instances(control_and_client_port: tuple[int, int]) -> None:
    control_port, port = control_and_client_port
    hello = pb.InstanceFrame(hello=pb.Hello(instance_id="late", protocol_version=1)).SerializeToString()
    with ExitStack() as stack:
        for _ in range(2 * DESCRIPTORS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        instance = stack.enter_context(socket.create_connection(("127.0.0.1", control_port), timeout=600))
        instance.sendall(len(hello).to_bytes(LENGTH_BYTES, "big") + hello)
        assert b"speaks control protocol" in instance.recv(4096)

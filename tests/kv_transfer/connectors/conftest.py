"""Fixtures for the connectors' tests: shared-memory segments, and processes that serve their pools over NIXL."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.keys import Layout
from pdserve.kv_transfer.connector import PoolMemory, Result
from pdserve.kv_transfer.connectors.nixl.connector import NixlConnector
from pdserve.kv_transfer.connectors.shm import slab
from pdserve.kv_transfer.connectors.shm.connector import ShmConnector, unlink
from pdserve.kv_transfer.header import Row
from pdserve.kv_transfer.rules.context import make_layout

# Shared memory.


def size_of_segment(slots: int, block_bytes: int) -> int:
    return slab.Geometry.of(slots // 16, block_bytes).total_bytes + 4096


@pytest.fixture
def segment_bytes() -> Callable[[int, int], int]:
    """The size to ask for to get a segment with this number of slots for blocks of this length."""
    return size_of_segment


@pytest.fixture
def name() -> Iterator[str]:
    """The name of segments that are removed after the test."""
    name = f"test-{uuid.uuid4().hex}"
    yield name
    unlink(f"shm://{name}")


@pytest.fixture
def small(name: str) -> str:
    """The URL of the smallest segment for 4 KiB blocks, with 32 slots."""
    return f"shm://{name}?size={size_of_segment(32, 4096)}"


@pytest.fixture
def attach_shm() -> Callable[[str, Layout], ShmConnector]:
    """Attaches a pool of two blocks; the test closes it."""

    def attach(url: str, layout: Layout) -> ShmConnector:
        connector = ShmConnector(url)
        connector.attach(PoolMemory(np.zeros((2, layout.block_bytes), np.uint8), layout))
        return connector

    return attach


# NIXL.

BLOCK_BYTES = 16384

# NIXL imports torch to detect the CUDA version, which takes seconds for each process.
NO_TORCH = "" if torch.version.cuda else "import sys; sys.modules['torch'] = None"

OWNER = """
import json, sys, time
import numpy as np
from pdserve.kv_transfer.connector import PoolMemory
from pdserve.kv_transfer.connectors.nixl.connector import NixlConnector
from pdserve.kv_transfer.rules.context import make_layout

url, block_bytes, blocks, seed = sys.argv[1], *map(int, sys.argv[2:5])
rows = np.random.default_rng(seed).integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
connector = NixlConnector(url)
connector.attach(PoolMemory(rows, make_layout(block_bytes)))
held = []

def store(keys, ids, lease_s):
    result = connector.store([bytes.fromhex(key) for key in keys], ids, lease_s=lease_s).result(60)
    held.append(result.held)
    return {"outcomes": result.outcomes, "ticket": result.ticket.hex(), "store": len(held) - 1}

def released(store, wait):
    give_up_at = time.monotonic() + wait
    while not held[store].done() and time.monotonic() < give_up_at:
        time.sleep(0.001)
    return held[store].done()

def fill(row, value):
    rows[row] = value

def close():
    connector.close()
    return all(future.done() for future in held)

print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    name, arguments = json.loads(line)
    print(json.dumps(globals()[name](**arguments)), flush=True)
"""


@dataclass(frozen=True)
class Stored:
    """A store of an `Owner`, with its ticket."""

    ticket: bytes
    number: int


class Owner:
    """A process with a pool of known random bytes, which stores on request."""

    def __init__(self, seed: int = 1, *, block_bytes: int = BLOCK_BYTES, blocks: int = 64, tls: str = "") -> None:
        self.rows: Row = np.random.default_rng(seed).integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
        command = [sys.executable, "-c", NO_TORCH + OWNER, "nixl://", *map(str, (block_bytes, blocks, seed))]
        environment = os.environ | ({"UCX_TLS": tls} if tls else {})
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def wait_ready(self) -> None:
        assert self._read_reply() == "ready"

    def store(self, keys: Sequence[bytes], ids: Sequence[int], lease_s: float = 60.0) -> Stored:
        reply = self.call("store", keys=[key.hex() for key in keys], ids=list(ids), lease_s=lease_s)
        assert reply["outcomes"] == ["ok"] * len(keys)
        return Stored(bytes.fromhex(reply["ticket"]), reply["store"])

    def has_released(self, stored: Stored, wait: float = 60.0) -> bool:
        return bool(self.call("released", store=stored.number, wait=wait))

    def call(self, name: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, arguments]) + "\n")
        self.process.stdin.flush()
        return self._read_reply()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def _read_reply(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


class Reader:
    """A pool of this process with a connector. All its bytes are 7 at first."""

    def __init__(self, url: str = "nixl://", layout: Layout | None = None, blocks: int = 64) -> None:
        self.layout = layout or make_layout(BLOCK_BYTES)
        self.rows: Row = np.full((blocks, self.layout.block_bytes), 7, np.uint8)
        self.connector = NixlConnector(url)
        self.connector.attach(PoolMemory(self.rows, self.layout))

    def load(self, keys: Sequence[bytes], ids: Sequence[int], *stored: Stored | bytes) -> Result:
        return self.start(keys, ids, *stored).result(60)

    def start(self, keys: Sequence[bytes], ids: Sequence[int], *stored: Stored | bytes) -> Future[Result]:
        return self.connector.load(keys, ids, tickets=[one if isinstance(one, bytes) else one.ticket for one in stored])


StartOwners = Callable[..., list[Owner]]
StartReader = Callable[..., Reader]


@pytest.fixture(scope="module")
def nixl_installed() -> None:
    pytest.importorskip("nixl", reason="NIXL is not installed: pip install -e '.[nixl]'")


@pytest.fixture
def owners(nixl_installed: None) -> Iterator[StartOwners]:
    """Starts processes, such as `owners(2, blocks=8)`, and waits until all are ready."""
    started: list[Owner] = []

    def start(count: int = 1, **settings: Any) -> list[Owner]:
        new = [Owner(len(started) + seed, **settings) for seed in range(1, count + 1)]
        started.extend(new)
        for owner in new:
            owner.wait_ready()
        return new

    yield start
    for owner in started:
        owner.kill()


@pytest.fixture(scope="module")
def owner(nixl_installed: None) -> Iterator[Owner]:
    """A process shared by the tests of a module that do not affect it."""
    owner = Owner()
    owner.wait_ready()
    yield owner
    owner.kill()


@pytest.fixture
def reader(nixl_installed: None) -> Iterator[StartReader]:
    """Attaches pools in this process."""
    readers: list[Reader] = []

    def start(*arguments: Any, **settings: Any) -> Reader:
        readers.append(Reader(*arguments, **settings))
        return readers[-1]

    yield start
    for started in readers:
        started.connector.close()

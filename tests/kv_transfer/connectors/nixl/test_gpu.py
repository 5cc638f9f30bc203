"""`nixl://` with pools in GPU memory, over a double of NIXL's agent and with tensors on the CPU in place of a GPU's.

The double checks what NIXL is told: kind of memory, device, and that every transfer lies within registered memory. Neither a
GPU nor NIXL itself has run this.
"""

import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from pdserve.kernels import reference
from pdserve.kernels.gpu.copies import PoolCopies
from pdserve.kernels.gpu.rows import GPURows
from pdserve.kv_transfer.connector import Outcome, PoolMemory
from pdserve.kv_transfer.connectors.nixl.connector import NixlConnector
from pdserve.kv_transfer.rules.context import make_layout
from tests.stream_order import StreamChecker, rows_of, watching

BLOCK_BYTES, BLOCKS, DEVICE = 4096, 12, 3
KEYS = [bytes([i]) * 16 for i in range(8)]
OK, CORRUPT, MISSING = Outcome.OK, Outcome.CORRUPT, Outcome.MISSING


class AgentDouble:
    """Stands in for `nixl_agent`. Agents of one process reach each other by their metadata."""

    agents: dict[str, "AgentDouble"] = {}  # noqa: RUF012 - emptied by the fixture
    synchronous = True  # as through shared memory; otherwise the transfer is done when it is asked about
    during_read: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, name: str, config: object) -> None:
        self.name = name
        self.backends = {"UCX": object()}
        self.ucx_settings = {key: value for key, value in os.environ.items() if key.startswith("UCX_CUDA_IPC")}
        self.registered: list[tuple[int, int, str, int]] = []  # address, bytes, kind, device
        self._notifications: dict[str, list[bytes]] = {}
        self.agents[name] = self

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> Any:
        self.registered += [(address, nbytes, kind, device) for address, nbytes, device, _ in regions]
        return regions, kind

    def deregister_memory(self, registration: Any) -> None: ...

    def get_agent_metadata(self) -> bytes:
        return json.dumps([self.name, self.registered]).encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        return str(json.loads(metadata)[0])

    def remove_remote_agent(self, name: str) -> None: ...

    def prep_xfer_dlist(self, peer: str, rows: Any, kind: str) -> Any:
        owner = self if peer == "NIXL_INIT_AGENT" else self.agents[peer]
        for address, nbytes, device in rows.tolist():
            assert any(
                first <= address and address + nbytes <= first + size and (kind, device) == place
                for first, size, *place_ in owner.registered
                if (place := tuple(place_))
            ), (address, kind, device, owner.registered)
        return SimpleNamespace(rows=rows.tolist(), release=lambda: None)

    def make_prepped_xfer(self, way: str, local: Any, local_rows: Any, remote: Any, remote_rows: Any) -> Any:
        assert way == "READ"
        pairs = zip([local.rows[i] for i in local_rows], [remote.rows[i] for i in remote_rows], strict=True)
        return SimpleNamespace(pairs=list(pairs), release=lambda: None)

    def transfer(self, transfer: Any) -> str:
        self.during_read()
        for (target, nbytes, _), (source, _, _) in transfer.pairs:
            ctypes.memmove(target, source, nbytes)
        return "DONE" if self.synchronous else "PROC"

    def check_xfer_state(self, transfer: Any) -> str:
        return "DONE"

    def send_notif(self, peer: str, message: bytes) -> None:
        self.agents[peer]._notifications.setdefault(self.name, []).append(message)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        received, self._notifications = self._notifications, {}
        return received


@pytest.fixture(params=[True, False], ids=["synchronous", "asynchronous"])
def agents(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, AgentDouble]:
    api, bindings = ModuleType("nixl._api"), ModuleType("nixl._bindings")
    api.nixl_agent, api.nixl_agent_config = AgentDouble, lambda **settings: settings  # type: ignore[attr-defined]
    bindings.nixlRemoteDisconnectError = type("nixlRemoteDisconnectError", (Exception,), {})  # type: ignore[attr-defined]
    for name, module in (("nixl", ModuleType("nixl")), ("nixl._api", api), ("nixl._bindings", bindings)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(AgentDouble, "agents", {})
    monkeypatch.setattr(AgentDouble, "synchronous", request.param)
    monkeypatch.setattr(AgentDouble, "during_read", staticmethod(lambda: None))
    return AgentDouble.agents


@pytest.fixture
def attach() -> Iterator[Callable[..., tuple[NixlConnector, torch.Tensor]]]:
    """attach() → a connector, and its pool of random bytes on a "GPU"; attach(on_gpu=False), on the host."""
    connectors = list[NixlConnector]()

    def make(*, on_gpu: bool = True, seed: int = 0, cuda: Any = None) -> tuple[NixlConnector, torch.Tensor]:
        layout = make_layout(BLOCK_BYTES)
        pool = torch.randint(0, 256, (BLOCKS, BLOCK_BYTES), dtype=torch.uint8, generator=torch.manual_seed(seed))
        rows, gpu = pool.numpy(), None
        if on_gpu:
            gpu = PoolCopies(pool, reference, cuda).in_place()
            gpu.device = DEVICE
            rows = np.broadcast_to(np.uint8(0), rows.shape)
        connectors.append(NixlConnector("nixl://?timeout=60&piece=8KiB"))
        connectors[-1].attach(PoolMemory(rows, layout, gpu))
        connectors[-1]._opening.join()
        return connectors[-1], pool

    yield make
    for connector in connectors:
        connector.close()


@pytest.mark.usefixtures("agents")
def test_rows_on_a_gpu_are_read_bit_exact_and_released(
    agents: dict[str, AgentDouble], attach: Callable[..., tuple[NixlConnector, torch.Tensor]]
) -> None:
    (owner, source), (reader, target) = attach(), attach(seed=1)
    before = target.clone()
    stored = owner.store(KEYS, [7, 0, 3, 1, 5, 2, 6, 4], lease_s=60).result(60)
    assert stored.outcomes == [OK] * 8 and stored.held is not None and not stored.held.done()
    loaded = reader.load(KEYS, range(2, 10), tickets=[stored.ticket]).result(60)
    assert loaded.outcomes == [OK] * 8
    assert torch.equal(target[2:10], source[[7, 0, 3, 1, 5, 2, 6, 4]])
    assert torch.equal(target[[0, 1, 10, 11]], before[[0, 1, 10, 11]])
    stored.held.result(60)
    places = {
        tuple(place) for agent in agents.values() for *_, kind, device in agent.registered for place in [(kind, device)]
    }
    assert places == {("VRAM", DEVICE)} or places == {("VRAM", DEVICE), ("VRAM", 0)}


@pytest.mark.usefixtures("agents")
def test_a_row_that_changes_after_its_checksum_is_corrupt(
    attach: Callable[..., tuple[NixlConnector, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (owner, source), (reader, _) = attach(), attach(seed=1)
    stored = owner.store(KEYS, range(8), lease_s=60).result(60)
    source[5, 100] ^= 1

    def overwrite() -> None:
        source[7, 4000] ^= 128

    monkeypatch.setattr(AgentDouble, "during_read", staticmethod(overwrite))
    outcomes = reader.load(KEYS, range(8), tickets=[stored.ticket]).result(60).outcomes
    assert outcomes[:5] == [OK] * 5 and outcomes[5] == CORRUPT


@pytest.mark.usefixtures("agents")
def test_host_memory_and_a_gpu_do_not_read_each_other(
    attach: Callable[..., tuple[NixlConnector, torch.Tensor]],
) -> None:
    (on_gpu, _), (on_host, target) = attach(), attach(on_gpu=False, seed=1)
    before = target.clone()
    for owner, reader in ((on_gpu, on_host), (on_host, on_gpu)):
        stored = owner.store(KEYS[:2], [0, 1], lease_s=60).result(60)
        assert reader.load(KEYS[:2], [4, 5], tickets=[stored.ticket]).result(60).outcomes == [CORRUPT] * 2
    assert torch.equal(target, before)
    stored = on_gpu.store(KEYS[:2], [0, 1], lease_s=60).result(60)
    assert on_gpu.load(KEYS[:3], [4, 5, 6], tickets=[stored.ticket]).result(60).outcomes == [OK, OK, MISSING]


@pytest.mark.parametrize("chosen", ["", "auto"])
def test_without_nvlink_memory_of_gpus_is_not_read_over_tcp(
    chosen: str,
    agents: dict[str, AgentDouble],
    attach: Callable[..., tuple[NixlConnector, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """UCX would, unless it is told otherwise; on hosts without GPUs it would warn of the setting. The user's value wins."""
    if chosen:
        monkeypatch.setenv("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", chosen)
    attach()
    assert [agent.ucx_settings for agent in agents.values()] == 2 * [{"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": chosen or "on"}]
    assert os.environ.get("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "") == chosen
    agents.clear()
    monkeypatch.delenv("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", raising=False)
    attach(on_gpu=False)
    assert [agent.ucx_settings for agent in agents.values()] == 2 * [{}]


def test_checksums_tell_any_change_of_a_row() -> None:
    rows = torch.zeros(1, BLOCK_BYTES, dtype=torch.uint8)
    memory, seen = GPURows(rows), set[bytes]()
    seen.add(memory.digests([0])[0])
    random = np.random.default_rng(2)
    for _ in range(300):
        place, bit = int(random.integers(BLOCK_BYTES)), 1 << int(random.integers(8))
        rows[0, place] ^= bit
        seen.add(memory.digests([0])[0])
    assert len(seen) == 301
    rows[0] = torch.arange(BLOCK_BYTES) % 251
    before = memory.digests([0])[0]
    words = rows.view(torch.int64)
    words[0, [3, 9]] = words[0, [9, 3]]
    assert memory.digests([0])[0] != before, "also of the order of words"
    words[0, [3, 9]] = words[0, [9, 3]]
    assert memory.digests([0])[0] == before and len(before) == 8


@pytest.mark.usefixtures("agents")
def test_stores_and_loads_wait_for_the_steps_before_them(
    attach: Callable[..., tuple[NixlConnector, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = list[str]()
    digests = GPURows.digests

    def log_and_digest(self: GPURows, rows: list[int]) -> list[bytes]:
        log.append("checksum")
        return digests(self, rows)

    monkeypatch.setattr(GPURows, "mark", lambda self: log.append("mark"))
    monkeypatch.setattr(GPURows, "wait", lambda self, mark: log.append("wait for the mark"))
    monkeypatch.setattr(GPURows, "digests", log_and_digest)
    monkeypatch.setattr(AgentDouble, "during_read", staticmethod(lambda: log.append("read")))
    (owner, _), (reader, _) = attach(), attach(seed=1)
    stored = owner.store(KEYS[:1], [3], lease_s=60).result(60)
    assert log == ["mark", "wait for the mark", "checksum"]
    log.clear()
    assert reader.load(KEYS[:1], [2], tickets=[stored.ticket]).result(60).outcomes == [OK]
    assert log[:3] == ["mark", "wait for the mark", "read"]


def test_marks_are_events_of_the_models_stream() -> None:
    """Neither the checksum of a row nor a peer's bytes may cross with a late write of the model."""
    log = list[str]()

    class Event:
        def record(self, stream: str) -> None:
            log.append(f"mark on {stream}")

        def synchronize(self) -> None:
            log.append("wait for the mark")

    stream = SimpleNamespace(synchronize=lambda: log.append("synchronize"))
    cuda = SimpleNamespace(
        Event=Event,
        Stream=lambda device: stream,
        stream=lambda stream: nullcontext(),
        current_stream=lambda device: "model",
    )
    memory = GPURows(torch.zeros(2, 64, dtype=torch.uint8), cuda)
    mark = memory.mark()
    memory.wait(mark)
    memory.digests([1])
    assert log == ["mark on model", "wait for the mark", "synchronize"]


@pytest.mark.usefixtures("agents")
def test_accesses_to_a_pool_are_ordered(
    attach: Callable[..., tuple[NixlConnector, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of steps, of checksums, and of reads by peers, which no stream orders."""
    checker = StreamChecker()

    class WatchedAgent(AgentDouble):
        def transfer(self, transfer: Any) -> str:
            for (target, nbytes, _), (source, _, _) in transfer.pairs:
                checker.on_host("a read of a peer", [(source, source + nbytes)], [(target, target + nbytes)])
            return super().transfer(transfer)

    monkeypatch.setattr(sys.modules["nixl._api"], "nixl_agent", WatchedAgent)
    with watching(checker):
        with _disable_current_modes():
            (owner, source), (reader, target) = attach(cuda=checker), attach(seed=1, cuda=checker)
        for turn in range(4):
            keys = [bytes([turn, i]) * 8 for i in range(8)]
            checker.launch("a step", [], [*rows_of(source, range(8)), *rows_of(target, range(8))])
            stored = owner.store(keys, range(8), lease_s=60)
            checker.launch("a step", rows_of(source, range(8)), rows_of(source, range(8, 12)))
            ticket = stored.result(60).ticket
            loading = reader.load(keys, range(8), tickets=[ticket])
            checker.launch("a step", [], rows_of(target, range(8, 12)))
            assert loading.result(60).outcomes == [OK] * 8
            checker.launch("a step", rows_of(target, range(8)), [])
        for connector in (owner, reader):
            connector.close()
    assert checker.errors == []

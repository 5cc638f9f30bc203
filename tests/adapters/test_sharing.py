"""Adapters in KV stores: what is put there comes back whole, or not at all."""

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.adapters.checkpoint import Files
from pdserve.adapters.sharing import AdapterStore, Copy, StoreError
from pdserve.cli.deployment import free_port
from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.connectors import memory
from pdserve.kv_transfer.connectors.shm.connector import count_leases, unlink

CHUNK = 3000  # bytes
FILES = Files(Path("sql"), b'{"r": 8}', bytes(range(256)) * 100)


@pytest.mark.parametrize(
    "url",
    [
        "memory://{name}?timeout=600",
        "shm://{name}?size=1MiB&codec=int8&timeout=600",
        "shm://{name}?codec=lz4&size=1MiB&timeout=600",
        "file://{folder}?timeout=600",
        "{redis}?timeout=600",
        "tiered://memory://{name}?codec=fp8&timeout=600,file://{folder}?codec=zstd&timeout=600",
    ],
)
def test_files_come_back(url: str, redis_server: Any, tmp_path: Path) -> None:
    """Lossy codecs do not touch them, and a second instance finds what the first has stored."""
    name = f"test-{uuid.uuid4().hex}"
    url = url.format(name=name, folder=tmp_path, redis=redis_server.url)
    others = [Files(Path("x"), b"{}", bytes(size)) for size in (0, CHUNK - 18, CHUNK - 17)]
    try:
        giver, taker = AdapterStore(url, CHUNK), AdapterStore(url, CHUNK)
        for digest, files in enumerate((FILES, *others)):
            giver.put(bytes([digest]) * 16, files)
            giver.put(bytes([digest]) * 16, files)
            assert taker.get(bytes([digest]) * 16, files.path) == files
        with pytest.raises(StoreError, match="the KV store does not have it") as refused:
            taker.get(bytes(15) + b"x", FILES.path)
        assert refused.value.outcome is Outcome.MISSING
    finally:
        unlink(f"shm://{name}")
        memory.unlink(f"memory://{name}")


def test_more_than_one_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.adapters.sharing.READ_BYTES", 3 * CHUNK)
    store = AdapterStore("memory://several", CHUNK)
    store.put(bytes(16), FILES)
    assert store.get(bytes(16), FILES.path) == FILES


def test_stores_that_have_no_room_or_do_not_answer() -> None:
    def refuse(url: str, outcome: Outcome, message: str) -> None:
        for act in (AdapterStore(url, CHUNK).put, AdapterStore(url, CHUNK).get):
            with pytest.raises(StoreError, match=message) as refused:
                act(bytes(16), FILES)  # type: ignore[arg-type]
            assert refused.value.outcome is outcome and "\n" not in str(refused.value)

    with pytest.raises(StoreError, match="has no room for it"):
        AdapterStore("memory://small?size=10KiB", CHUNK).put(bytes(16), FILES)
    refuse(f"redis://127.0.0.1:{free_port()}/0", Outcome.UNAVAILABLE, "adapter 0{32}: .*redis")
    refuse("", Outcome.UNAVAILABLE, "is not a connector URL")


def test_a_store_that_hangs(start_redis: Callable[..., Any]) -> None:
    """It ends within the connector's time-out, whenever it began to hang."""
    server = start_redis()
    patient, store = AdapterStore(f"{server.url}?timeout=600", CHUNK), AdapterStore(f"{server.url}?timeout=1", CHUNK)
    patient.put(bytes(16), FILES)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(StoreError):
            store.get(bytes(16), FILES.path)
        assert time.monotonic() - began < 300
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert patient.get(bytes(16), FILES.path) == FILES


def test_what_is_stored_stays_for_a_while_and_nothing_else_does() -> None:
    """The instances that lack it are told at once; the connector of a transfer ends with it."""
    url, before = f"shm://test-{uuid.uuid4().hex}?size=1MiB", set(threading.enumerate())
    store = AdapterStore(url, CHUNK)
    try:
        store.put(bytes(16), FILES)
        assert count_leases(url) == -(-(16 + len(FILES.config) + len(FILES.weights)) // CHUNK)
        assert store.get(bytes(16), FILES.path) == FILES
        assert set(threading.enumerate()) <= before
    finally:
        unlink(url)


def test_a_copy_has_the_files_of_an_adapter() -> None:
    for files in (FILES, Files(Path("x"), b"{}", b"")):
        copy = Copy(files)
        assert copy.read() == copy.read() == files

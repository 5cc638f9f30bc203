"""Layers with adapters on several ranks: rank 0 passes on what it does, and the followers do the same to their parts.

An adapter's files go to all ranks, and each takes its part. Whatever fails, fails on all of them alike.
"""

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from pdserve.adapters.checkpoint import AdapterError, Files
from pdserve.adapters.layers import AdaptedLayers, LoadedAdapter
from pdserve.adapters.sharing import Copy
from pdserve.config import EngineConfig
from pdserve.ranks.messages import OnAdapters
from pdserve.ranks.runners import FollowingRunner, LeadingRunner


class LeadingLayers(AdaptedLayers):
    """Those of rank 0."""

    def __init__(self, runner: LeadingRunner, config: EngineConfig) -> None:
        super().__init__(runner, config)
        self._alone, self._followers = runner.alone, runner.followers
        self._lock = threading.Lock()
        self._known = WeakSet[LoadedAdapter]()

    def prepare(self, files: Files, copy: Copy | None = None) -> LoadedAdapter:
        adapter = super().prepare(files, copy)
        with self._lock:
            self._send("load", str(files.path), files.config, files.weights)
            self._known.add(adapter)
        return adapter

    def attach(self, adapter: LoadedAdapter) -> None:
        with self._lock:
            self._send("attach_known", adapter.digest, [*{one.digest for one in self._known}])
        with self._alone():
            super().attach(adapter)

    def fill(self, slot: int, adapter: LoadedAdapter) -> None:
        self._send("fill_known", slot, adapter.digest)
        super().fill(slot, adapter)

    def set_rows(self, slots: list[int]) -> None:
        if self._is_on or max(slots, default=-1) >= 0:
            self._send("set_rows", slots)
        super().set_rows(slots)

    def _send(self, method: str, *arguments: Any) -> None:
        self._followers.send(OnAdapters(method, [*arguments]))


class FollowingLayers(AdaptedLayers):
    """Those of another rank, with the adapters that rank 0 has."""

    def __init__(self, runner: FollowingRunner, config: EngineConfig) -> None:
        super().__init__(runner, config)
        self._known: dict[bytes, LoadedAdapter] = {}

    def load(self, path: str, config: bytes, weights: bytes) -> None:
        """Keep an adapter."""
        adapter = self.prepare(Files(Path(path), config, weights))
        self._known[adapter.digest] = adapter

    def attach_known(self, digest: bytes, known: list[bytes]) -> None:
        """Let an adapter's layers add from now on, and forget those that are not known any more."""
        self._known = {one: self._known[one] for one in known}
        with suppress(AdapterError):  # as on rank 0, which answers
            self.attach(self._known[digest])

    def fill_known(self, slot: int, digest: bytes) -> None:
        """Put an adapter into a slot."""
        self.fill(slot, self._known[digest])

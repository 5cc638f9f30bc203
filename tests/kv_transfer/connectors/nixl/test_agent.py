"""Tests of errors at the creation of a NIXL agent, and of reads that hang."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pdserve.errors import SetupError
from pdserve.kv_transfer.connectors.nixl import agent
from pdserve.kv_transfer.connectors.nixl.agent import Agent

StartReader = Callable[..., Any]


def test_unknown_devices_are_refused(reader: StartReader) -> None:
    with pytest.raises(SetupError, match="NIXL cannot start with the network devices 'nosuch'"):
        reader("nixl://?devices=nosuch")


def test_without_nixl_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "nixl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(SetupError, match=r"pip install -e '\.\[nixl\]'"):
        Agent("lo")


class Hanging:
    """NIXL, with a peer that is read once it `answers`."""

    backends = ("UCX",)

    def __init__(self) -> None:
        self.began, self.answers = threading.Event(), threading.Event()
        self.num_released = 0

    def make_prepped_xfer(self, *_: Any) -> Any:
        return self

    def transfer(self, _: Any) -> str:
        self.began.set()
        return "PROC"

    def check_xfer_state(self, _: Any) -> str:
        return "DONE" if self.answers.is_set() else "PROC"

    def get_new_notifs(self) -> dict[Any, list[bytes]]:
        return {b"peer": [b"read"]}

    def release(self) -> None:
        self.num_released += 1


def test_a_read_that_hangs_keeps_nobody_from_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no lease of this instance would end meanwhile: their thread polls the same agent."""
    nixl, rows = Hanging(), np.zeros(1, np.int32)
    modules = {
        "nixl._api": SimpleNamespace(nixl_agent_config=lambda **_: None, nixl_agent=lambda *_: nixl),
        "nixl._bindings": SimpleNamespace(nixlRemoteDisconnectError=ConnectionError),
    }
    monkeypatch.setattr(agent, "_import", modules.__getitem__)
    one = Agent("lo")
    with ThreadPoolExecutor(2) as threads:
        reading = threads.submit(one.read, None, rows, None, rows)
        try:
            assert nixl.began.wait(60)
            assert threads.submit(one.poll).result(60) == [b"read"]
            assert not reading.done()
        finally:
            nixl.answers.set()
        assert reading.result(60) is False and nixl.num_released == 1

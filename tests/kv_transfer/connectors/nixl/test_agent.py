"""Tests of errors at the creation of a NIXL agent."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from pdserve.errors import SetupError
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

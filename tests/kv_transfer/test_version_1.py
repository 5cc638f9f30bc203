"""Connectors of other packages for version 1 of the contract go on working, as both kinds of class."""

import logging
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pdserve.kv_transfer.conformance import Verdict, rules_named, try_rule
from pdserve.kv_transfer.connector import Capabilities, Outcome, PoolMemory
from pdserve.kv_transfer.registry import _adapt_version_1, connect
from pdserve.kv_transfer.rules.context import make_layout

QUICK_RULES = ["round-trip", "results", "leading-match", "missing", "following", "whole-blocks", "concurrent-stores"]
QUICK_RULES += ["flipped-bytes", "foreign-namespace", "older-layout", "lease", "release", "cancelled"]
QUICK_RULES += ["requested-cancel", "two-connectors", "many-threads", "counts", "content-stays", "clean-close"]
SCHEMES = ["v1-threaded", "v1-plain"]


@pytest.fixture(params=SCHEMES)
def url(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    install_connectors: Callable[[Path, str, Path, dict[str, str]], None],
) -> str:
    """The URL of a connector that is installed as pip would install its package."""
    source = Path(__file__).parent / "plugins" / "version_1.py"
    install_connectors(tmp_path, "first_plugin", source, {"v1-threaded": "Threaded", "v1-plain": "Plain"})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "first_plugin", raising=False)
    return f"{request.param}://{uuid.uuid4().hex}"


def test_blocks_are_stored_matched_loaded_and_released(url: str, new_keys: Callable[[int], list[bytes]]) -> None:
    layout = make_layout(4096)
    rows = np.random.default_rng(1).integers(0, 256, (8, 4096), dtype=np.uint8)
    connector, keys = connect(url), new_keys(3)
    connector.attach(PoolMemory(rows, layout))
    assert connector.store(keys[:2], [0, 1], lease_s=60).result(30).leading == 2
    assert connector.match(keys).result(30) == 2
    assert connector.load(keys, [4, 5, 6]).result(30).outcomes == [Outcome.OK, Outcome.OK, Outcome.MISSING]
    assert np.array_equal(rows[4:6], rows[:2])
    connector.release(keys)
    assert connector.stats().blocks == {"store": 2, "load": 2}
    connector.close()


def test_class_attributes_become_capabilities(url: str, caplog: pytest.LogCaptureFixture) -> None:
    _adapt_version_1.cache_clear()
    with caplog.at_level(logging.WARNING):
        connector, _ = connect(url), connect(url)
    expected = {
        "v1-threaded": Capabilities(
            timeout_s=60.0,  # of the fixture `patient_stores`
            follows=True,
            cancels=True,
            keeps_leases=False,
            relayable=False,
        ),
        "v1-plain": Capabilities(timeout_s=7.0, skips_hanging=True),
    }
    assert connector.capabilities == expected[connector.scheme]
    assert (connector.follows, connector.in_place) == (connector.scheme == "v1-threaded", False)
    assert [record.getMessage() for record in caplog.records] == [
        f"first_plugin.{type(connector).__name__} was written for version 1 of the connector contract "
        "and is adapted to version 2"
    ]


@pytest.mark.parametrize("rule", QUICK_RULES)
def test_the_kit_finds_no_broken_rule(rule: str, url: str) -> None:
    report = try_rule(rules_named([rule])[0], url, seconds=0.3)
    assert report.verdict is Verdict.HOLDS, report.detail

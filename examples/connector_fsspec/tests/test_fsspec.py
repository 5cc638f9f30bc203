"""Tests of the installed package: the conformance kit, URLs, and payload lengths."""

import uuid
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import SetupError
from pdserve.kv_transfer.conformance import Verdict, rules_named, try_rule
from pdserve.kv_transfer.registry import connect

pytest_plugins = ["pdserve.kv_transfer.pytest_plugin"]


def test_conformance_in_a_directory(connector_rule: Any, tmp_path: Path) -> None:
    connector_rule(f"fsspec+file://{tmp_path}/kv")


def test_conformance_in_memory(connector_rule: Any) -> None:
    connector_rule(f"fsspec+memory://{uuid.uuid4().hex}")


def test_values_may_be_shorter_than_a_block(tmp_path: Path) -> None:
    (rule,) = rules_named(["leading-match"])
    assert try_rule(rule, f"fsspec+file://{tmp_path}/kv?codec=zstd").verdict is Verdict.HOLDS


@pytest.mark.parametrize("url", ["fsspec://", "fsspec+file://", "fsspec://file", "fsspec+s3://"])
def test_urls_without_a_path_are_refused(url: str) -> None:
    with pytest.raises(SetupError, match="not of the form"):
        connect(url)


def test_a_protocol_may_be_given_by_name(tmp_path: Path) -> None:
    connector: Any = connect(f"fsspec://file{tmp_path}/kv?timeout=1")
    assert (connector._protocol, connector._root, connector.timeout) == ("file", f"{tmp_path}/kv", 1.0)

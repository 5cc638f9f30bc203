"""Tests of finding and creating connectors by URL."""

import sys
from importlib import metadata
from importlib.metadata import EntryPoint

import pytest

from pdserve.errors import SetupError
from pdserve.kv_transfer import check_command, registry
from pdserve.kv_transfer.conformance import list_connectors
from pdserve.kv_transfer.connector import Connector
from pdserve.kv_transfer.connectors.memory import MemoryConnector


class OtherVersion(MemoryConnector):
    API_VERSION = 99


class NoConnector:
    pass


@pytest.fixture
def plug_ins(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Adds entry points to the installed ones."""
    here = __name__
    monkeypatch.setitem(__import__("sys").modules, here, request.module)
    added = [
        EntryPoint("other", f"{here}:OtherVersion", registry.ENTRY_POINT_GROUP),
        EntryPoint("none", f"{here}:NoConnector", registry.ENTRY_POINT_GROUP),
        EntryPoint("gone", "no_such_package.connector:Gone", registry.ENTRY_POINT_GROUP),
        EntryPoint("lost", f"{here}:Lost", registry.ENTRY_POINT_GROUP),
        EntryPoint("my_store", f"{here}:MemoryConnector", registry.ENTRY_POINT_GROUP),
        EntryPoint("MyStore", f"{here}:MemoryConnector", registry.ENTRY_POINT_GROUP),
        EntryPoint("twice", f"{here}:OtherVersion", registry.ENTRY_POINT_GROUP),
        EntryPoint("twice", f"{here}:NoConnector", registry.ENTRY_POINT_GROUP),
    ]
    real = metadata.entry_points

    def entry_points(*, group: str, name: str | None = None) -> list[EntryPoint]:
        found = [*real(group=group), *added]
        return [entry for entry in found if name in (None, entry.name)]

    monkeypatch.setattr(registry, "entry_points", entry_points)


def test_the_bundled_connectors_are_installed() -> None:
    found = {one.scheme: one for one in registry.installed()}
    assert {"memory", "shm", "file", "redis"} <= set(found)
    assert found["shm"].target == "pdserve.kv_transfer.connectors.shm.connector:ShmConnector"
    assert found["shm"].package == "pdserve"


def test_every_bundled_connector_can_be_created() -> None:
    for url in ("memory://name", "shm://name?size=1GiB", "file:///path?fsync=1", "redis://host:1/0?ttl=5"):
        assert isinstance(registry.connect(url), Connector)
    assert isinstance(registry.connect("MEMORY://name"), MemoryConnector)


def test_an_unknown_scheme_is_refused_with_the_installed_ones() -> None:
    with pytest.raises(SetupError, match=r"no connector for s3://; installed schemes: .*file.*memory.*redis.*shm"):
        registry.connect("s3://bucket")


def test_the_report_of_a_check_does_not_begin_before_the_url_is_right(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SetupError, match="no connector for s3://"):
        check_command.run("s3://bucket", [], 0.1, as_json=False)
    assert capfd.readouterr() == ("", "")


def test_a_string_without_scheme_is_refused_with_the_installed_ones() -> None:
    with pytest.raises(SetupError, match=r"'shm' is not a connector URL; .*shm://"):
        registry.connect("shm")


@pytest.mark.parametrize(
    ("scheme", "sentence"),
    [
        ("other", "was written for version 99 of the connector contract; this pdserve supports version 2"),
        ("none", "is not a subclass of Connector"),
        ("gone", "cannot be imported: No module named 'no_such_package'"),
        ("lost", "cannot be imported"),
        ("my_store", "'my_store' is no URL scheme: it has lower-case letters"),
        ("twice", "Several installed packages register twice://"),
    ],
)
@pytest.mark.usefixtures("plug_ins")
def test_unusable_plug_ins_are_refused_with_the_reason(scheme: str, sentence: str) -> None:
    with pytest.raises(SetupError, match=sentence):
        registry.connect(f"{scheme}://x")


@pytest.mark.usefixtures("plug_ins")
def test_names_that_urls_cannot_have_are_not_usable() -> None:
    rows = {row.scheme: row for row in list_connectors()}
    for name in ("my_store", "MyStore"):
        assert not rows[name].usable and rows[name].why.startswith(f"{name!r} is no URL scheme")


def test_the_list_tells_what_to_install_for_connectors_whose_packages_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package in ("mooncake", "nixl", "redis"):
        monkeypatch.setitem(sys.modules, package, None)
    for module in [name for name in sys.modules if name.startswith("pdserve.kv_transfer.connectors.redis")]:
        monkeypatch.delitem(sys.modules, module)
    rows = {row.scheme: row for row in list_connectors()}
    for scheme, extra in (("mooncake", "mooncake"), ("nixl", "nixl"), ("redis", "redis"), ("redis+cluster", "redis")):
        assert not rows[scheme].usable and rows[scheme].why.endswith(f"pip install -e '.[{extra}]'")
    assert rows["shm"].usable


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(SetupError, match="valid parameters are codec, size, threads, timeout"):
        registry.connect("shm://name?colour=blue")

"""Tests of connector URLs."""

import pytest

from pdserve.errors import SetupError
from pdserve.kv_transfer.url import Query, split, without_password


def test_parameters_are_read_by_type() -> None:
    query = Query("x://name?size=1GiB&timeout=0.5&threads=3&fsync=1")
    assert query.size("size", None) == 1 << 30
    assert query.seconds("timeout", 5.0) == 0.5
    assert query.count("threads", 2) == 3
    assert query.flag("fsync", False) is True
    assert query.size("max_bytes", None) is None
    query.done()


def test_an_unknown_parameter_is_refused_with_the_valid_ones() -> None:
    query = Query("x://name?siez=1GiB")
    query.size("size", None)
    query.seconds("timeout", 5.0)
    with pytest.raises(SetupError, match=r"no parameter 'siez'; valid parameters are size, timeout\."):
        query.done()


@pytest.mark.parametrize("value", ["", "x", "-1", "0", "nan", "inf", "1e300"])
def test_invalid_seconds(value: str) -> None:
    with pytest.raises(SetupError, match="timeout is invalid"):
        Query(f"x://name?timeout={value}").seconds("timeout", 5.0)


@pytest.mark.parametrize("value", ["", "1QiB", "-5", "0", "GiB", "inf", "1e30"])
def test_invalid_sizes(value: str) -> None:
    with pytest.raises(SetupError, match="size is invalid"):
        Query(f"x://name?size={value}").size("size", None)


@pytest.mark.parametrize("value", ["", "0", "-1", "1.5"])
def test_invalid_counts(value: str) -> None:
    with pytest.raises(SetupError, match="threads is invalid"):
        Query(f"x://name?threads={value}").count("threads", 2)


def test_invalid_flags() -> None:
    with pytest.raises(SetupError, match="fsync is invalid"):
        Query("x://name?fsync=maybe").flag("fsync", False)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:secret@host:1/0?ttl=1", "redis://user:***@host:1/0?ttl=1"),
        ("redis://:se@cret@host/0", "redis://:***@host/0"),
        ("redis://host:1/0", "redis://host:1/0"),
        ("file:///a@b:c", "file:///a@b:c"),
        ("redis+cluster://me:secret@a:1,b:2?ttl=1", "redis+cluster://me:***@a:1,b:2?ttl=1"),
        ("tiered://redis://u:secret@a,redis://v:secret@b/0", "tiered://redis://u:***@a,redis://v:***@b/0"),
        ("tiered://?buffer=1MiB,shm://a,redis://:secret@b", "tiered://?buffer=1MiB,shm://a,redis://:***@b"),
        ("redis://user:se/cret@host:1/0", "redis://user:***@host:1/0"),
        ("redis://:se#cret@host", "redis://:***@host"),
        ("redis://u:1?2@host", "redis://u:***@host"),
        ("tiered://redis://u:se/cret@a:1,file:///a@b", "tiered://redis://u:***@a:1,file:///a@b"),
        ("tiered://redis://host:1,file:///a@b", "tiered://redis://host:1,file:///a@b"),
        ("nonsense", "nonsense"),
    ],
)
def test_passwords_are_masked(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_a_malformed_url_is_refused_without_its_password() -> None:
    with pytest.raises(SetupError, match="cannot be parsed") as caught:
        split("redis://user:secret@host:99999999/0")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("size", ["inf", "1e999GiB", "nan", "0"])
def test_what_is_no_size_is_named(size: str) -> None:
    with pytest.raises(SetupError, match="size is invalid"):
        Query(f"shm://a?size={size}").size("size", None)

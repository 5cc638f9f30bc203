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


def test_an_unknown_parameter_is_answered_with_the_right_ones() -> None:
    query = Query("x://name?siez=1GiB")
    query.size("size", None)
    query.seconds("timeout", 5.0)
    with pytest.raises(SetupError, match=r"no parameter 'siez'; valid parameters are size, timeout\."):
        query.done()


@pytest.mark.parametrize("value", ["", "x", "-1", "0", "nan", "inf"])
def test_seconds_that_are_none(value: str) -> None:
    with pytest.raises(SetupError, match="timeout is invalid"):
        Query(f"x://name?timeout={value}").seconds("timeout", 5.0)


@pytest.mark.parametrize("value", ["", "1QiB", "-5", "0", "GiB"])
def test_sizes_that_are_none(value: str) -> None:
    with pytest.raises(SetupError, match="size is invalid"):
        Query(f"x://name?size={value}").size("size", None)


@pytest.mark.parametrize("value", ["", "0", "-1", "1.5"])
def test_counts_that_are_none(value: str) -> None:
    with pytest.raises(SetupError, match="threads is invalid"):
        Query(f"x://name?threads={value}").count("threads", 2)


def test_flags_that_are_none() -> None:
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
        ("nonsense", "nonsense"),
    ],
)
def test_passwords_are_not_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_a_url_that_cannot_be_read() -> None:
    with pytest.raises(SetupError, match="cannot be parsed") as caught:
        split("redis://user:secret@host:99999999/0")
    assert "secret" not in str(caught.value)

"""JSON and TOML of others: whatever is wrong is a ValueError, deep nesting included."""

from pathlib import Path

import pytest

from pdserve.lines.untrusted import read_json, read_toml

ROOT = Path(__file__).parents[2]
# Where the nesting is that of code or of a request's body, whose decoder says where.
OTHERS = (
    *("lines/untrusted", "text/tokenizer", "parsers/pythonic", "parsers/output"),
    *("web/parse_queue", "api/grammars", "api/parsing", "router/parse_server"),
)


def test_values_are_read() -> None:
    assert read_json(b'{"a": [1, null]}') == {"a": [1, None]} and read_json('"\u2028"') == "\u2028"
    assert read_toml(b"[a]\nb = 1") == {"a": {"b": 1}}


@pytest.mark.parametrize("text", [b"[" * 100_000, b"{", b"\xff", b""])
def test_whatever_is_wrong_in_json_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=" "):
        read_json(text)


@pytest.mark.parametrize("text", [b"a = " + b"[" * 100_000, b"a", b"\xff"])
def test_whatever_is_wrong_in_toml_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=" "):
        read_toml(text)


def test_nothing_else_looks_for_deep_nesting() -> None:
    files = [file for folder in ("pdserve", "router", "kv_transfer") for file in (ROOT / folder).rglob("*.py")]
    own = [str(file) for file in files if "RecursionError" in file.read_text()]
    assert [file for file in own if not file.removesuffix(".py").endswith(OTHERS)] == []

"""JSON objects that models write: valid ones pass unchanged, faulty ones become JSON, however the text is cut."""

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.router.text.parsers.json_object import JsonObject, mended
from tests.cpu_time import cpu_seconds

TAGS = ("<end>", "[TAG]", "```")


def read(pieces: Sequence[str]) -> tuple[str, str, JsonObject]:
    """Return the text of an object, what follows it, and its state at the end."""
    value, out, rest = JsonObject(TAGS), "", ""
    for number, piece in enumerate(pieces, 1):
        rest += piece
        while not value.is_over:
            length, text = value.read(rest, is_last=number == len(pieces))
            out, rest = out + text, rest[length:]
            if not length:
                break
    return out + (value.close() if value.is_over else ""), rest, value


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda one: st.lists(one) | st.dictionaries(st.text(), one), max_leaves=8)
FRAGMENTS = [
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    '"',
    "\\",
    "\\u",
    "\\ud83d",
    "\\ude00",
    "12",
    "-",
    "1e400",
    "true",
    "None",
    "NaN",
]
FRAGMENTS += [" ", "\n", "\x00", "\ufdd0", "a", "é", "'", ";", *TAGS, '{"a": ', '"b": ', '"x"', "<e"]


@given(st.dictionaries(st.text(), VALUES), st.sampled_from([None, 2]), st.booleans(), st.text(max_size=5))
def test_valid_objects_are_passed_on_unchanged(value: object, indent: int | None, ascii_only: bool, rest: str) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert read([text + rest])[:2] == (text, rest)
    assert read(list(text))[0] == text


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join), st.data())
def test_what_has_ended_is_json_however_the_text_is_cut(tail: str, data: st.DataObject) -> None:
    text = "{" + tail
    out, rest, value = read([text])
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=20))
    pieces = [text[first:last] for first, last in pairwise([0, *sorted(cuts), len(text)])]
    assert read(pieces)[:2] == read([*text])[:2] == (out, rest)
    assert text.endswith(rest)
    if value.is_over:
        assert isinstance(json.loads(out), dict)
        out.encode()
    else:
        assert not rest and isinstance(json.loads(out + value.close()), dict)


@pytest.mark.parametrize(
    ("text", "value", "rest"),
    [
        ('{"code": "a\n\tb\x00"}', {"code": "a\n\tb\x00"}, ""),
        (r'{"re": "\d+\.\w \' \u12 \\d"}', {"re": r"\d+\.\w ' \u12 \d"}, ""),
        (r'{"half": "\ud83d", "whole": "\ud83d\ude00"}', {"half": "\ufffd", "whole": "😀"}, ""),
        ('{"a": [1, 2,], "b": {"c": True,},}', {"a": [1, 2], "b": {"c": True}}, ""),
        ('{"a": NaN, "b": 1e400, "c": 007, "d": }', {"a": "NaN", "b": "1e400", "c": "007", "d": None}, ""),
        ('{"code": "print("hi")"}', {"code": 'print("hi")'}, ""),
        ('{"a": [1, {"b": 2}}', {"a": [1, {"b": 2}]}, ""),
        ('{"a": [1<end>', {"a": [1]}, "<end>"),
        ('{"a": "x"\n```', {"a": "x"}, "\n```"),
        ('{"a"<end>', {"a": None}, "<end>"),
        ('{"a": "<end>"}x', {"a": "<end>"}, "x"),
        ('{"a": 1 and text', {"a": 1}, "and text"),
        ('{"a": 1, and text', {"a": 1}, "and text"),
    ],
)  # fmt: skip
def test_faults_are_mended(text: str, value: object, rest: str) -> None:
    out, left, _ = read([text])
    assert (json.loads(out), left.strip()) == (value, rest.strip())
    assert read([*text])[0] == out


@pytest.mark.slow
@pytest.mark.parametrize("text", ["[],", '"a\nb",', "word,", "1,      "])
def test_mending_a_long_text_takes_as_long_for_each_of_its_characters(text: str) -> None:
    def seconds(count: int) -> float:
        return cpu_seconds(lambda: mended('{"a": [' + text * count))

    assert seconds(64_000) < 32 * 2 * seconds(2000)
    assert isinstance(json.loads(mended('{"a": [' + text * 64_000)), dict)


def test_a_tag_ends_an_object_and_other_text_breaks_it() -> None:
    assert read(['{"a": 1<end>'])[2].is_whole and read(['{"a": 1}'])[2].is_whole
    assert not read(['{"a": 1 b'])[2].is_whole and not read(['{"a": 1'])[2].is_over


def test_brackets_within_each_other_are_limited() -> None:
    out, _, value = read(['{"a": ' + "[" * 100_000])
    assert value.is_over and not value.is_whole and len(out) < 1000
    json.loads(out)

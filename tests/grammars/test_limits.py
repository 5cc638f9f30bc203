"""Limits of grammars that are checked before anything is computed."""

import json
from typing import Any

import pytest

from pdserve.grammars.formats import either, specified, tag
from pdserve.grammars.limits import MAX_CHARS, MAX_DEPTH, GrammarTooComplex, check_grammar, mask_budget_s


def nested(levels: int) -> dict[str, Any]:
    """Return a schema of nested arrays with so many levels of objects."""
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "spec",
    [
        {"json": nested(MAX_DEPTH)},
        {"json": {"anyOf": [{"type": "string"}] * 1000}},
        {"json": True},
        {"regex": "(" * MAX_DEPTH + ")" * MAX_DEPTH},
        {"regex": "(a)" * 1000 + r"\(" * 1000},
        {"choice": ["((" * 1000]},
        {"format": tag("<", specified({"json": nested(MAX_DEPTH)}), ">")},
    ],
)
def test_grammars_within_the_limits(spec: dict[str, Any]) -> None:
    check_grammar(json.dumps(spec))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"json": nested(MAX_DEPTH + 1)}, "response_format is nested too deeply; at most 64 levels are allowed"),
        ({"json": {"enum": [nested(850)]}}, "response_format is nested too deeply"),
        ({"format": either(*[specified({"text": nested(MAX_DEPTH + 1)})] * 2)}, "response_format is nested too deeply"),
        ({"regex": "(" * (MAX_DEPTH + 1) + ")" * (MAX_DEPTH + 1)}, "response_format is nested too deeply"),
        ({"grammar": "root ::= " + "(" * 100 + '"a"' + ")" * 100}, "response_format is nested too deeply"),
        ({"regex": "a" * MAX_CHARS}, "response_format has 65549 characters as JSON; at most 65536 are allowed"),
    ],
)
def test_grammars_beyond_the_limits(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarTooComplex, match=message) as raised:
        check_grammar(json.dumps(spec), "response_format")
    assert (raised.value.status, raised.value.kind, raised.value.param) == (400, "invalid_grammar", "response_format")


def test_the_budget_for_masks_grows_with_the_tokens() -> None:
    assert mask_budget_s(1) == pytest.approx(1.02)
    assert mask_budget_s(1000) == pytest.approx(21)

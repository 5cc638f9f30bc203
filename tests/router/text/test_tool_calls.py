"""The tool-call parser: calls are found in output that arrives in arbitrary pieces."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.router.text.tool_calls import ToolCallParser

ARGUMENTS = '{"city": "Par}is \\"</tool_call>\\"", "days": [1, {"a": {}}]}'
CALL = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama": f'{{"name": "weather", "parameters": {ARGUMENTS}}}',
}
WEATHER = ("weather", ARGUMENTS)
HERMES: list[tuple[str, str, list[tuple[str, str]]]] = [
    (CALL["hermes"], "", [WEATHER]),
    (f"Let me see.\n{CALL['hermes']}", "Let me see.", [WEATHER]),
    (CALL["hermes"] * 2, "", [WEATHER] * 2),
    (f"{CALL['hermes']}\n{CALL['hermes']}\n", "", [WEATHER] * 2),
    (CALL["hermes"].removesuffix("\n</tool_call>") + " done", "done", [WEATHER]),
    ('<tool_call>{"arguments": {"a": 1}, "name": "time"}</tool_call>', "", [("time", '{"a": 1}')]),
    ('<tool_call>{"name": "time", "arguments": {}}', "", [("time", "{}")]),
    ('<tool_call>{"name": "time", "arguments": {"a', "", [("time", '{"a')]),
    ("a < b <tool", "a < b <tool", []),
    ("no call \n", "no call \n", []),
    ("<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
    ('<tool_call>{"name": "rm", "arguments": {}}', '<tool_call>{"name": "rm", "arguments": {}}', []),
    ('<tool_call>{"name": [], "arguments": {}}', '<tool_call>{"name": [], "arguments": {}}', []),
    ('<tool_call>{"name": "time", "arguments": 5}x', '<tool_call>{"name": "time", "arguments": 5}x', []),
    ('<tool_call>{"na', '<tool_call>{"na', []),
]
LLAMA: list[tuple[str, str, list[tuple[str, str]]]] = [
    (CALL["llama"], "", [WEATHER]),
    (f" \n{CALL['llama']}; {CALL['llama']}", "", [WEATHER] * 2),
    (f"As JSON: {CALL['llama']}", f"As JSON: {CALL['llama']}", []),
    ('{"answer": [1, 2]} it is; {"name": "time", "parameters": {}}',) * 2 + ([],),
    ('{"answer"', '{"answer"', []),
]


def parse(
    tool_format: str, pieces: list[str], single_call: bool = False, names: Collection[str] = ("weather", "time")
) -> tuple[str, list[tuple[str, str]]]:
    """Return the text outside of calls, and the name and arguments of each call."""
    parser = ToolCallParser(tool_format, names, single_call)
    text = ""
    found: dict[int, tuple[str, str]] = {}
    for output in [*map(parser.push, pieces), parser.finish()]:
        text += output.text
        for delta in output.calls:
            name, arguments = found.get(delta.index, (delta.name, ""))
            found[delta.index] = name, arguments + delta.arguments
    return text, [found[i] for i in sorted(found)]


@pytest.mark.parametrize(
    ("tool_format", "case"), [("hermes", case) for case in HERMES] + [("llama", case) for case in LLAMA]
)
def test_calls_in_text(tool_format: str, case: tuple[str, str, list[tuple[str, str]]]) -> None:
    whole, text, calls = case
    assert parse(tool_format, [whole]) == (text, calls)

    @settings(max_examples=8, deadline=None)
    @given(st.lists(st.integers(0, len(whole)), max_size=len(whole)))
    def check(cuts: list[int]) -> None:
        ends = [0, *sorted(cuts), len(whole)]
        assert parse(tool_format, [whole[a:b] for a, b in pairwise(ends)]) == (text, calls)

    check()
    assert parse(tool_format, list(whole)) == (text, calls)


def test_arguments_are_emitted_as_they_arrive() -> None:
    parser = ToolCallParser("hermes", {"time"})
    assert not parser.push('<tool_call>{"name": "tim').calls
    [head, first] = parser.push('e", "arguments": {"a": ').calls
    assert (head.name, head.arguments, first.arguments) == ("time", "", '{"a": ')
    assert [delta.arguments for delta in parser.push('"bc').calls] == ['"bc']
    assert [delta.arguments for delta in parser.push('"}}').calls] == ['"}']


def test_calls_after_the_first_may_be_dropped() -> None:
    assert parse("hermes", [CALL["hermes"] * 3], single_call=True) == ("", [WEATHER])

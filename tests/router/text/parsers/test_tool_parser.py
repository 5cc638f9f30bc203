# ruff: noqa: E501 - a transcript is one line
"""Tool-call parsers: transcripts in each published format give the same calls however they are cut."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.router.text.parsers.output_parser import MARK
from pdserve.router.text.parsers.registry import TOOL_PARSERS
from pdserve.router.text.parsers.tool_parser import Tools
from tests.cpu_time import cpu_seconds

Calls = list[tuple[str, str]]  # name and arguments
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "array", "items": {"type": "integer"}},
            "detailed": {"type": "boolean"},
            "note": {"type": ["string", "null"]},
            "unit": {"enum": ["C", "F"]},
        },
    },
    "time": {"type": "object"},
    "no_schema": {},
}
ARGUMENTS = '{"city": "Par}is \\"</tool_call>\\"", "days": [1, {"a": {}}]}'
WEATHER = ("weather", ARGUMENTS)
TIME = ("time", "{}")
HERMES_CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
LLAMA_CALL = f'{{"name": "weather", "parameters": {ARGUMENTS}}}'
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"
V3_CALL = DEEPSEEK_CALL.format(f"function<｜tool▁sep｜>weather\n```json\n{ARGUMENTS}\n```")
V31_CALL = DEEPSEEK_CALL.format(f"weather<｜tool▁sep｜>{ARGUMENTS}")
KIMI_CALL = f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
QWEN_CALL = (
    '<tool_call>\n<function=weather>\n<parameter=city>\nNew\n"York"\n</parameter>\n<parameter=days>\n[1, 2]\n</parameter>\n'
    "<parameter=detailed>\nTrue\n</parameter>\n<parameter=note>\nnull\n</parameter>\n</function>\n</tool_call>"
)
GLM_CALL = (
    '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>New\n"York"</arg_value>\n<arg_key>days</arg_key>\n'
    "<arg_value>[1, 2]</arg_value>\n<arg_key>detailed</arg_key>\n<arg_value>true</arg_value>\n<arg_key>note</arg_key>\n"
    "<arg_value>null</arg_value>\n</tool_call>"
)
XML_WEATHER = ("weather", '{"city": "New\\n\\"York\\"", "days": [1, 2], "detailed": true, "note": null}')
PYTHON_CALL = "weather(city='it\\'s \"Paris\"', days=[1, -2.5e3, (True, None)], note={'a': \"b, c]\"},)"
PYTHON_WEATHER = (
    "weather",
    '{"city": "it\'s \\"Paris\\"", "days": [1, -2500.0, [true, null]], "note": {"a": "b, c]"}}',
)
HARMONY_CALL = (
    f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
)

# Parser, output, and the text and the calls in it.
TRANSCRIPTS: list[tuple[str, str, str, Calls]] = [
    ("hermes", HERMES_CALL, "", [WEATHER]),
    ("hermes", f"Let me see.\n{HERMES_CALL}", "Let me see.", [WEATHER]),
    ("hermes", HERMES_CALL * 2, "", [WEATHER] * 2),
    ("hermes", f"{HERMES_CALL}\n{HERMES_CALL}\n", "", [WEATHER] * 2),
    ("hermes", HERMES_CALL.removesuffix("\n</tool_call>") + " done", "done", [WEATHER]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "time"}</tool_call>', "", [("time", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "time", "arguments": {}}', "", [TIME]),
    ("hermes", HERMES_CALL.removesuffix("\n</tool_call>") + '\n{"name": "time", "arguments": {}}\n</tool_call> done', "done", [WEATHER, TIME]),
    ("hermes", f'<tool_call>[{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "time"}}]</tool_call>done', "done", [WEATHER, TIME]),
    ("hermes", HERMES_CALL.removesuffix("\n</tool_call>") + ' {"a": 1}</tool_call>', '{"a": 1}</tool_call>', [WEATHER]),
    ("hermes", '<tool_call>{"name": "time", "arguments": {"a', "", [("time", '{"a')]),
    ("granite", f"<|tool_call|>[{{\"name\": \"weather\", \"arguments\": {ARGUMENTS}}}, {{\"name\": \"time\", \"arguments\": {{}}}}]", "", [WEATHER, TIME]),
    ("granite", '<tool_call> [{"arguments": {}, "name": "time"}]', "", [TIME]),
    ("granite", '<|tool_call|>[{"name": "time", "arguments": {}}, {"name": "rm"}] x', '{"name": "rm"}] x', [TIME]),
    ("llama3_json", LLAMA_CALL, "", [WEATHER]),
    ("llama3_json", f" \n{LLAMA_CALL}; {LLAMA_CALL}", "", [WEATHER] * 2),
    ("llama3_json", f"<|python_tag|>{LLAMA_CALL}", "", [WEATHER]),
    ("llama3_json", f'[{LLAMA_CALL}, {{"name": "time", "parameters": {{}}}}]', "", [WEATHER, TIME]),
    ("llama3_json", f" <|python_tag|> [ {LLAMA_CALL}];{LLAMA_CALL}\n", "", [WEATHER] * 2),
    ("llama3_json", '[{"name": "time", "parameters": {}}, {"name": "rm"}] x', '{"name": "rm"}] x', [TIME]),
    ("deepseek_v3", f"Hm.<｜tool▁calls▁begin｜>{V3_CALL}\n{V3_CALL}<｜tool▁calls▁end｜>", "Hm.", [WEATHER] * 2),
    ("deepseek_v31", f"Hm.<｜tool▁calls▁begin｜>{V31_CALL}{V31_CALL}<｜tool▁calls▁end｜>", "Hm.", [WEATHER] * 2),
    ("kimi_k2", f"Hm. <|tool_calls_section_begin|>{KIMI_CALL}{KIMI_CALL}<|tool_calls_section_end|>", "Hm.", [WEATHER] * 2),
    ("mistral", f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "time", "arguments": {{}}}}]', "", [WEATHER, TIME]),
    ("mistral", f"Hm.[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]time[ARGS]{{}}", "Hm.", [WEATHER, TIME]),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{ARGUMENTS}", "", [WEATHER]),
    ("mistral", f"[TOOL_CALLS]weather{ARGUMENTS}", "", [WEATHER]),
    ("qwen3_coder", f"Hm.\n{QWEN_CALL}\n{QWEN_CALL}", "Hm.", [XML_WEATHER] * 2),
    ("qwen3_coder", "<function=time>\n</function>", "", [TIME]),
    ("qwen3_coder", "<function=time><parameter=a>x</parameter></function>", "", [("time", '{"a": "x"}')]),
    ("qwen3_coder", QWEN_CALL[:80], "", [("weather", XML_WEATHER[1].partition(', "days"')[0])]),
    ("glm45", f"Hm.\n{GLM_CALL}\n{GLM_CALL}", "Hm.", [XML_WEATHER] * 2),
    ("glm45", "<tool_call>time</tool_call>", "", [TIME]),
    ("glm45", "<tool_call>weather<arg_key>unit</arg_key><arg_value>C</arg_value></tool_call>", "", [("weather", '{"unit": "C"}')]),
    ("pythonic", f"[{PYTHON_CALL}, time()]", "", [PYTHON_WEATHER, TIME]),
    ("pythonic", "[time(), rm()] x", "rm()] x", [TIME]),
    ("pythonic", "[time(a='''b\n\"c\"''', d=[+1, .5, (2,),], e='f' \"g\")]", "", [("time", '{"a": "b\\n\\"c\\"", "d": [1, 0.5, [2]], "e": "fg"}')]),
    ("llama4_pythonic", f"<|python_start|>[{PYTHON_CALL}]<|python_end|>", "", [PYTHON_WEATHER]),
    ("openai", HARMONY_CALL, "", [WEATHER]),
    ("openai", "Hm.<|start|>assistant to=functions.time<|channel|>commentary json<|message|>{}<|call|>", "Hm.", [TIME]),
]  # fmt: skip
NO_CALLS: list[tuple[str, str]] = [
    ("hermes", "a < b <tool"),
    ("hermes", "no call \n"),
    ("hermes", "<tool_call>no JSON</tool_call>"),
    ("hermes", '<tool_call>{"name": "rm", "arguments": {}}'),
    ("hermes", '<tool_call>{"name": [], "arguments": {}}'),
    ("hermes", '<tool_call>{"name": "time", "arguments": 5}x'),
    ("hermes", '<tool_call>{"na'),
    ("hermes", '<tool_call>{"arguments": {"a": "<tool_call>"}, "name": "time"}'),
    ("granite", "<|tool_call|>[]"),
    ("llama3_json", f"As JSON: {LLAMA_CALL}"),
    ("llama3_json", '{"answer": [1, 2]} it is; {"name": "time", "parameters": {}}'),
    ("llama3_json", '{"answer"'),
    ("llama3_json", "[1] says so"),
    ("llama3_json", ' <|python_tag|> [{"answer": 1}, {"name": "time", "parameters": {}}]'),
    ("llama3_json", "["),
    ("deepseek_v3", V31_CALL.removesuffix("<｜tool▁call▁end｜>")),
    ("deepseek_v31", "<｜tool▁call▁begin｜>rm<｜tool▁sep｜>{}"),
    ("deepseek_v31", "<｜tool▁call▁begin｜>" + "x" * 300 + "<｜tool▁sep｜>{}"),
    ("deepseek_v3", "<｜tool▁call▁begin｜>" + "x" * 300 + "<｜tool▁sep｜>"),
    ("mistral", "[TOOL_CALLS]time[CALL_ID]" + "x" * 300 + "[ARGS]{}"),
    ("kimi_k2", "<|tool_call_begin|>weather<|tool_call_argument_begin|>{}"),
    ("kimi_k2", "<|tool_call_begin|>functions.time:0<|tool_call_argument_begin|>[]"),
    ("mistral", "[TOOL_CALLS]time[ARGS]5"),
    ("mistral", "[TOOL_CALLS][1]"),
    ("qwen3_coder", "<tool_call>\n<function=rm>\n</function>"),
    ("qwen3_coder", "<tool_call>\n<function=time>\nx</function>"),
    ("glm45", "<tool_call>rm</tool_call>"),
    ("glm45", "<tool_call>time"),
    ("pythonic", "[1, 2]"),
    ("pythonic", "[time(1)]"),
    ("pythonic", "[time(a=1, *[.5])]"),
    ("pythonic", "[time(a=1, **{'b': .5})]"),
    ("pythonic", "[time(a={.5, 1})]"),
    ("pythonic", "[time(a='''\\ud800''')]"),
    ("pythonic", "[time(a=" + "[" * 300 + "]" * 300 + ")]"),
    ("pythonic", "[weather(city=open('x'))]"),
    ("pythonic", "[time(a=[1)]"),
    ("pythonic", "[time("),
    ("openai", "<|start|>assistant<|channel|>commentary to=functions.rm<|message|>{}<|call|>"),
]


def parse(
    name: str, pieces: Sequence[str], *, single_call: bool = False, marks: dict[str, str] | None = None
) -> tuple[str, Calls]:
    """Return the text outside of calls, and the name and arguments of each call."""
    parser = TOOL_PARSERS[name](Tools(SCHEMAS, single_call), marks or {})
    text = ""
    found: dict[int, tuple[str, str]] = {}
    for output in [*map(parser.push, pieces), parser.push("", is_end=True)]:
        text += output.text
        for delta in output.calls:
            assert bool(delta.name) == bool(delta.id) == (delta.index not in found)
            begun, arguments = found.get(delta.index, (delta.name, ""))
            found[delta.index] = begun, arguments + delta.arguments
    return text, [found[i] for i in sorted(found)]


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    ends = [0, *sorted(cuts), len(text)]
    return [text[first:last] for first, last in pairwise(ends)]


@pytest.mark.parametrize(
    ("name", "output", "text", "calls"), [*TRANSCRIPTS, *((name, output, output, []) for name, output in NO_CALLS)]
)
def test_transcripts(name: str, output: str, text: str, calls: Calls) -> None:
    assert parse(name, [output]) == (text, calls)
    assert parse(name, list(output)) == (text, calls)
    for cut in range(len(output)):
        assert parse(name, [output[:cut], output[cut:]]) == (text, calls)


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_every_parser_has_a_transcript(name: str) -> None:
    aliases = {"glm47": "glm45", "granite4": "hermes", "llama4_json": "llama3_json", "qwen3_xml": "qwen3_coder"}
    assert any(aliases.get(name, name) == one[0] for one in TRANSCRIPTS)


FRAGMENTS = sorted(
    {tag for parser in TOOL_PARSERS.values() for tag in parser.TAGS}
    | {output for _, output, *_ in TRANSCRIPTS}
    | {"weather", "time", "functions.time:0", '{"name": "time", "arguments": ', "{", "}", "[", "]", ",", '"', "\\", "(", ")", "'"}
    | {"<parameter=a>", "</parameter>", "</function>", "<function=time>", "time(a=1)", "\n```json\n", "```", " ", "\n", "=", "1"}
    | {"commentary to=functions.time", "assistant", "rm", "x", "é", "\ufffd"}
)  # fmt: skip


def without_silent_tags(name: str, output: str) -> str:
    silent = TOOL_PARSERS[name].SILENT
    return re.sub("|".join(map(re.escape, silent)), "", output) if silent else output


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_arbitrary_text_gives_the_same_calls_however_it_is_cut(name: str) -> None:
    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=8)), max_size=12).map("".join), st.data())
    def check(output: str, data: st.DataObject) -> None:
        cuts = data.draw(st.lists(st.integers(0, len(output)), max_size=30))
        whole = parse(name, [output])
        assert parse(name, pieces_of(output, cuts)) == whole
        assert parse(name, list(output)) == whole
        if not whole[1]:
            assert whole[0] == without_silent_tags(name, output)

    check()


@pytest.mark.parametrize(("name", "output", "text", "calls"), TRANSCRIPTS)
def test_strings_of_special_tokens_are_text(name: str, output: str, text: str, calls: Calls) -> None:
    tags = TOOL_PARSERS[name].TAGS
    marks = {tag: MARK + tag for tag in tags}
    if any(tag in output for tag in tags):
        assert parse(name, [output], marks=marks)[1] == [] or name in (
            "llama3_json",
            "pythonic",
            "llama4_pythonic",
            "qwen3_coder",
        )
    special = output
    for tag in tags:
        special = special.replace(tag, marks[tag])
    if MARK not in json.dumps(calls):
        assert [name for name, _ in parse(name, list(special), marks=marks)[1]] == [name for name, _ in calls]


def test_arguments_are_emitted_as_they_arrive() -> None:
    parser = TOOL_PARSERS["hermes"](Tools(SCHEMAS), {})
    assert not parser.push('<tool_call>{"name": "tim').calls
    [head, first] = parser.push('e", "arguments": {"a": ').calls
    assert (head.name, head.arguments, first.arguments) == ("time", "", '{"a": ')
    assert [delta.arguments for delta in parser.push('"bc').calls] == ['"bc']
    assert [delta.arguments for delta in parser.push('"}}').calls] == ['"}']


def test_strings_in_tags_are_emitted_as_they_arrive() -> None:
    parser = TOOL_PARSERS["qwen3_coder"](Tools(SCHEMAS), {})
    parser.push("<tool_call>\n<function=weather>\n<parameter=city>\n")
    assert [delta.arguments for delta in parser.push('New "Y').calls] == ['New \\"Y']


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1e999"])
def test_arguments_are_json(number: str) -> None:
    """A value that JSON cannot express is a string, or the call is text."""
    tools = Tools({"f": {"properties": {"a": {"type": "number"}}}})
    call = f"<tool_call>\n<function=f>\n<parameter=a>\n{number}\n</parameter>\n</function>\n</tool_call>"
    output = TOOL_PARSERS["qwen3_coder"](tools, {}).push(call, is_end=True)
    assert "".join(delta.arguments for delta in output.calls) == f'{{"a": "{number}"}}'
    output = TOOL_PARSERS["pythonic"](tools, {}).push(f"[f(a={number})]", is_end=True)
    assert "".join(delta.arguments for delta in output.calls) in ("", f'{{"a": "{number}"}}')


def test_calls_after_the_first_may_be_dropped() -> None:
    assert parse("hermes", [HERMES_CALL * 3], single_call=True) == ("", [WEATHER])
    assert parse("qwen3_coder", [QWEN_CALL * 2], single_call=True) == ("", [XML_WEATHER])


def test_ids_of_kimi_are_the_models() -> None:
    parser = TOOL_PARSERS["kimi_k2"](Tools(SCHEMAS), {})
    assert parser.push(KIMI_CALL).calls[0].id == "functions.weather:0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "output"),
    [("qwen3_coder", "<function=weather><parameter=city>x"), ("hermes", '<tool_call>{"name": "rm", "arguments": {}}')],
)
def test_a_long_text_takes_as_long_for_each_of_its_characters(name: str, output: str) -> None:
    def seconds(count: int) -> float:
        return cpu_seconds(lambda: parse(name, [output * count]))

    assert seconds(12_000) < 8 * 2 * seconds(1500)

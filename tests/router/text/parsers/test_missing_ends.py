# ruff: noqa: E501 - a form of a call is one line
"""Calls whose end is missing, in every format: their arguments are JSON, and the calls and the text after them are found."""

import json
from itertools import product
from typing import Any

import pytest

from pdserve.router.text.parsers.output_parser import MARK
from pdserve.router.text.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from pdserve.router.text.parsers.tool_parser import Tools

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
}
SCHEMAS: dict[str, Any] = {"weather": SCHEMA, "time": {"type": "object", "properties": {}}}
JSON_ARGUMENTS = '{"city": "Ulm"'
# By parser: a call up to its end, its end in parts, each of which may be missing, and a whole call of `time`.
DEEPSEEK_V31 = (
    "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>" + JSON_ARGUMENTS,
    ["}", "<｜tool▁call▁end｜>"],
    "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
)
GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ulm",
    ["</arg_value>", "\n</tool_call>"],
    "<tool_call>time</tool_call>",
)
HERMES = (
    '<tool_call>\n{"name": "weather", "arguments": ' + JSON_ARGUMENTS,
    ["}", "}", "\n</tool_call>"],
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
)
LLAMA = ('{"name": "weather", "parameters": ' + JSON_ARGUMENTS, ["}", "}"], '; {"name": "time", "parameters": {}}')
PYTHONIC = ("[weather(city='Ulm')", ["]"], "")
QWEN = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nUlm",
    ["\n</parameter>", "\n</function>", "\n</tool_call>"],
    "<tool_call>\n<function=time>\n</function>\n</tool_call>",
)
Form = tuple[str, list[str], str]
FORMS: list[tuple[str, Form]] = [
    ("deepseek_v3", ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n" + JSON_ARGUMENTS, ["}", "\n```", "<｜tool▁call▁end｜>"], "<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```<｜tool▁call▁end｜>")),
    ("deepseek_v31", DEEPSEEK_V31),
    ("glm45", GLM),
    ("glm47", GLM),
    ("granite", ('<|tool_call|>[{"name": "weather", "arguments": ' + JSON_ARGUMENTS, ["}", "}", "]"], '<|tool_call|>[{"name": "time", "arguments": {}}]')),
    ("granite4", HERMES),
    ("hermes", HERMES),
    ("kimi_k2", ("<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>" + JSON_ARGUMENTS, ["}", "<|tool_call_end|>"], "<|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{}<|tool_call_end|>")),
    ("llama3_json", LLAMA),
    ("llama4_json", LLAMA),
    ("llama4_pythonic", PYTHONIC),
    ("mistral", ("[TOOL_CALLS]weather[ARGS]" + JSON_ARGUMENTS, ["}"], "[TOOL_CALLS]time[ARGS]{}")),
    ("mistral", ('[TOOL_CALLS][{"name": "weather", "arguments": ' + JSON_ARGUMENTS, ["}", "}", "]"], '[TOOL_CALLS][{"name": "time", "arguments": {}}]')),
    ("openai", ("<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + JSON_ARGUMENTS, ["}", "<|call|>"], "<|start|>assistant<|channel|>commentary to=functions.time<|message|>{}<|call|>")),
    ("pythonic", PYTHONIC),
    ("qwen3_coder", QWEN),
    ("qwen3_xml", QWEN),
]  # fmt: skip
ENDS = [(name, form, present) for name, form in FORMS for present in product([True, False], repeat=len(form[1]))]


def parse(name: str, text: str, *, marked: bool = False, schemas: dict[str, Any] = SCHEMAS) -> tuple[str, list[tuple[str, str]], int]:  # fmt: skip
    """Return the text, the calls and the number of complete ones, which are the same in one piece and in characters."""
    tags = {*TOOL_PARSERS[name].TAGS, *REASONING_PARSERS["openai_gptoss"].TAGS} if marked else set()
    marks = {tag: MARK + tag for tag in tags}
    for tag, mark in marks.items():
        text = text.replace(tag, mark)
    results = []
    for pieces in ([text], [*text]):
        parser = TOOL_PARSERS[name](Tools(schemas), marks)
        out = [*map(parser.push, pieces), parser.push("", is_end=True)]
        deltas = [delta for one in out for delta in one.calls]
        calls = [
            (head.name, "".join(delta.arguments for delta in deltas if delta.index == head.index))
            for head in deltas
            if head.name
        ]
        results.append(("".join(one.text for one in out).replace(MARK, ""), calls, parser.num_calls))
    assert results[0] == results[1]
    return results[0]


def test_every_format_is_here() -> None:
    assert {name for name, _ in FORMS} == set(TOOL_PARSERS)


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(("name", "form", "present"), ENDS)
def test_the_next_call_is_found(name: str, form: Form, present: tuple[bool, ...], marked: bool) -> None:
    call, end, following = form
    end_text = "".join(part for part, is_there in zip(end, present, strict=True) if is_there)
    if following:
        text, calls, num_calls = parse(name, f"{call}{end_text}\n{following}\nDone.", marked=marked)
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [
            ("weather", {"city": "Ulm"}),
            ("time", {}),
        ]
        assert (text, num_calls) == ("Done.", 2)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_the_text_is_found(name: str, form: Form) -> None:
    """The arguments are complete, and each part of the end after them is missing, and all that follow it."""
    call, [close, *end], _ = form
    call, end = (call, [close, *end]) if name in ("pythonic", "llama4_pythonic") else (call + close, end)
    for length in range(len(end)):
        text, calls, num_calls = parse(name, call + "".join(end[:length]) + "\nIt rains.")
        assert ([(name, json.loads(arguments)) for name, arguments in calls], num_calls) == (
            [("weather", {"city": "Ulm"})],
            1,
        )
        assert text == "It rains."


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_text_that_ends_anywhere_has_no_markup_in_arguments(name: str, form: Form) -> None:
    """The arguments are a part of those of the whole, and the call counts if they are complete."""
    call, end, _ = form
    whole = call + "".join(end)
    [(_, arguments)] = parse(name, whole)[1]
    for length in range(len(whole)):
        text, calls, num_calls = parse(name, whole[:length])
        assert len(calls) <= 1 and all(arguments.startswith(one) for _, one in calls)
        assert num_calls == sum(one == arguments for _, one in calls)
        assert not calls or not text


@pytest.mark.parametrize(
    "name",
    ["deepseek_v3", "deepseek_v31", "kimi_k2", "mistral", "openai"],
)
def test_a_special_token_ends_a_string(name: str) -> None:
    [(_, (call, end, following)), *_] = [one for one in FORMS if one[0] == name]
    tags = [part for part in end if part in TOOL_PARSERS[name].TAGS]
    text, calls, num_calls = parse(name, call + "".join(tags) + following, marked=True)
    cut = call.removesuffix('"') + "".join(tags) + following
    assert parse(name, cut, marked=True) == (text, calls, num_calls)
    assert num_calls == 2


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_of_a_parameter_given_twice_the_first_value_counts(name: str) -> None:
    values = [("city", "Ulm"), ("days", "3"), ("city", "Bonn"), ("days", "4"), ("note", "x")]
    if name == "glm45":
        body = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in values)
        text = f"<tool_call>weather{body}</tool_call>"
    else:
        body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
        text = f"<tool_call>\n<function=weather>\n{body}</function>\n</tool_call>"
    [(_, arguments)] = parse(name, text)[1]
    assert json.loads(arguments, object_pairs_hook=list) == [("city", "Ulm"), ("days", 3), ("note", "x")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<function=weather><parameter=city>Ulm<parameter=days>3</function>"),
        ("qwen3_coder", "<tool_call>\n<function=weather\n<parameter=city\nUlm\n</parameter>\n<parameter=days>\n3\n</function>"),
        ("glm45", "<tool_call>weather<arg_key>city</arg_key><arg_value>Ulm<arg_key>days</arg_key><arg_value>3</tool_call>"),
        ("glm45", "<tool_call>weather\n<arg_key>city\n<arg_value>Ulm</arg_value>\n<arg_key>days\n<arg_value>3</arg_value></tool_call>"),
    ],
)  # fmt: skip
def test_the_next_parameter_is_found(name: str, text: str) -> None:
    assert parse(name, text) == ("", [("weather", '{"city": "Ulm", "days": 3}')], 1)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "time"}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": "time"</tool_call>'),
        ("hermes", '<tool_call>{"name": "time", "arguments": null}</tool_call>'),
        ("hermes", '<tool_call>{"name": "time", "arguments": "{}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "time", "arguments": {}}}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": "time", "arguments": {}, "id": "c1"}</tool_call>'),
        ("granite", '<|tool_call|>[{"name": "time"}]'),
        ("llama3_json", '{"name": "time", "parameters": null}'),
        ("mistral", "[TOOL_CALLS]time[ARGS][TOOL_CALLS]time[ARGS]"),
        ("openai", "<|start|>assistant<|channel|>commentary to=functions.time<|message|><|call|>"),
        ("kimi_k2", "<|tool_call_begin|>functions.time:0<|tool_call_argument_begin|><|tool_call_end|>"),
    ],
)  # fmt: skip
def test_calls_without_arguments(name: str, text: str) -> None:
    found, calls, num_calls = parse(name, text)
    assert calls[0] == ("time", "{}") and num_calls == 1 and found in ("", "[TOOL_CALLS]time[ARGS]")


def test_an_answer_that_is_json_with_the_name_of_a_function_is_no_call() -> None:
    assert parse("llama3_json", '{"name": "time"}') == ('{"name": "time"}', [], 0)

# ruff: noqa: E501 - a transcript is one line
"""Reasoning parsers: transcripts give the same reasoning and text however they are cut, and harmony's channels are told apart."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.router.text.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, ModelParsers
from pdserve.router.text.parsers.tool_parser import Tools

HARMONY = (
    "<|channel|>analysis<|message|>Hm. 漢<|end|><|start|>assistant<|channel|>commentary to=functions.time "
    '<|constrain|>json<|message|>{"a": 1}<|call|>'
)
CALL = "<|start|>assistant<|channel|>commentary to=functions.time <|constrain|>json<|message|>{}<|call|>"
KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.time:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
)
# Parser, whether the prompt ends inside of reasoning, output, reasoning, text.
TRANSCRIPTS: list[tuple[str, bool, str, str, str]] = [
    ("deepseek_r1", True, "Hm.\n</think>\n\nParis.", "Hm.", "Paris."),
    ("deepseek_r1", True, "<think>\nHm.\n\nYes.\n</think>\n\nParis.\n", "Hm.\n\nYes.", "Paris.\n"),
    ("deepseek_r1", True, "cut off </thin", "cut off </thin", ""),
    ("deepseek_v3", False, "Paris.", "", "Paris."),
    ("deepseek_v3", True, "Hm.</think>Paris.", "Hm.", "Paris."),
    ("qwen3", False, "<think>\nHm.\n</think>\n\nParis.", "Hm.", "Paris."),
    ("qwen3", False, "<think>\n\n</think>\n\nParis.", "", "Paris."),
    ("qwen3", False, "  Paris <think>no</think>", "", "  Paris <think>no</think>"),
    ("qwen3", False, "<thin", "", "<thin"),
    ("glm45", False, "\n<think>Hm.</think>\nParis.", "Hm.", "Paris."),
    ("kimi_k2", False, f"<think>Hm.{KIMI_CALL}", "Hm.", KIMI_CALL),
    ("mistral", False, "[THINK]Hm.[/THINK]Paris.", "Hm.", "Paris."),
    ("granite", False, "<think>Hm.</think><response>Paris.</response>", "Hm.", "Paris."),
    ("granite", False, "Here is my thought process: Hm.\n\nHere is my response: Paris.", " Hm.", "Paris."),
    ("granite", False, "Here is my answer.", "", "Here is my answer."),
    ("openai_gptoss", False, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Paris.<|return|>", "Hm.", "Paris."),
    ("openai_gptoss", False, "<|channel|>final<|message|>Paris.", "", "Paris."),
    ("openai_gptoss", False, "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b", "a\n\nb", ""),
    ("openai_gptoss", False, "<|channel|>commentary<|message|>I look.<|end|>" + CALL, "", "I look." + CALL),
    ("openai_gptoss", False, "no messages at all", "", "no messages at all"),
    ("openai_gptoss", False, "<|start|>assistant", "", "<|start|>assistant"),
]  # fmt: skip


def parse(name: str, is_open: bool, pieces: list[str]) -> tuple[str, str]:
    parser = REASONING_PARSERS[name](is_open, {})
    outputs = [*map(parser.push, pieces), parser.push("", is_end=True)]
    return "".join(output.reasoning for output in outputs), "".join(output.text for output in outputs)


@pytest.mark.parametrize(("name", "is_open", "output", "reasoning", "text"), TRANSCRIPTS)
def test_transcripts(name: str, is_open: bool, output: str, reasoning: str, text: str) -> None:
    assert parse(name, is_open, [output]) == (reasoning, text)
    assert parse(name, is_open, list(output)) == (reasoning, text)
    for cut in range(len(output)):
        assert parse(name, is_open, [output[:cut], output[cut:]]) == (reasoning, text)


def test_every_parser_has_a_transcript() -> None:
    assert {"glm45" if name == "glm47" else name for name in REASONING_PARSERS} == {one[0] for one in TRANSCRIPTS}


@pytest.mark.parametrize("name", REASONING_PARSERS)
def test_arbitrary_text_gives_the_same_however_it_is_cut(name: str) -> None:
    tags = sorted(
        {*REASONING_PARSERS[name].TAGS, *(one[2] for one in TRANSCRIPTS), "analysis", "to=functions.time", "\n"}
    )

    @settings(max_examples=40, deadline=None)
    @given(st.booleans(), st.lists(st.one_of(st.sampled_from(tags), st.text(max_size=8)), max_size=12).map("".join))
    def check(is_open: bool, output: str) -> None:
        assert parse(name, is_open, list(output)) == parse(name, is_open, [output])

    check()


@pytest.mark.parametrize("size", [1, 3, len(HARMONY)])
def test_harmony_by_special_tokens(size: int) -> None:
    """The delimiters are special tokens; the same strings as ordinary text are not."""
    special = {tag: i for i, tag in enumerate(REASONING_PARSERS["openai_gptoss"].TAGS)}
    parsers = ModelParsers(REASONING_PARSERS["openai_gptoss"], TOOL_PARSERS["openai"], special)
    for escape, expected in (
        (True, ("Hm. 漢", "", [("time", '{"a": 1}')])),
        (False, ("", HARMONY, [])),
    ):
        parser = parsers.open(parsers.tools, Tools({"time": {}}), begins_in_reasoning=False)
        assert parser is not None
        text = HARMONY
        for tag, i in special.items():
            text = text.replace(tag, parser.special_tokens[i]) if escape else text
        outputs = [parser.push(text[i : i + size]) for i in range(0, len(text), size)] + [parser.push("", is_end=True)]
        calls = [call for output in outputs for call in output.calls]
        named = [(calls[0].name, "".join(call.arguments for call in calls))] if calls else []
        found = ("".join(one.reasoning for one in outputs), "".join(one.text for one in outputs), named)
        assert found == expected


CALLS = {
    "hermes": '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=time>\n</function>\n</tool_call>",
    "glm45": "<tool_call>time\n</tool_call>",
    "granite": '<|tool_call|>[{"name": "time", "arguments": {}}]',
    "mistral": "[TOOL_CALLS]time[ARGS]{}",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": KIMI_CALL,
}


def parse_all(parsers: ModelParsers, pieces: list[str], *, ends: bool = True) -> tuple[str, str, str]:
    """Return the reasoning, the text and the arguments of calls of `time`, of an output that begins inside of reasoning."""
    parser = parsers.open(parsers.tools, Tools({"time": {}}), begins_in_reasoning=True, calls_end_reasoning=ends)
    assert parser is not None
    outputs = [*map(parser.push, pieces), parser.push("", is_end=True)]
    arguments = "".join(call.arguments for one in outputs for call in one.calls)
    return "".join(one.reasoning for one in outputs), "".join(one.text for one in outputs), arguments


@pytest.mark.parametrize("name", CALLS)
def test_a_call_ends_reasoning_that_was_not_closed(name: str) -> None:
    """Wherever the output is cut; the tag alone is reasoning, which speaks of it, and so is the call of no function."""
    parsers = ModelParsers(REASONING_PARSERS["qwen3"], TOOL_PARSERS[name])
    tag = TOOL_PARSERS[name].BEGINS[0]
    said = f"I use {tag} {tag}{CALLS[name].replace('time', 'date')} as told:"
    output = said + CALLS[name]
    for cut in range(len(output)):
        assert parse_all(parsers, [output[:cut], output[cut:]]) == (said, "", "{}")
    assert parse_all(parsers, list(output)) == (said, "", "{}")
    assert parse_all(parsers, list(f"{output} Done.</think>"))[1] == "Done.</think>"
    for cut in range(len(said)):
        assert parse_all(parsers, list(output[:cut]))[::2] == (output[:cut].rstrip("\n"), "")
    assert parse_all(parsers, list(said + "</think>" + CALLS[name])) == (said, "", "{}")
    assert parse_all(parsers, [output], ends=False) == (output, "", "")


def test_tokens_of_reasoning_are_counted() -> None:
    parser = ModelParsers(REASONING_PARSERS["qwen3"]).open(None, None, begins_in_reasoning=False)
    assert parser is not None
    for token in ["<think>", "\n", "Hm", ".", "</think>", "\n\n", "Yes"]:
        parser.push(token, 1)
    assert parser.num_reasoning_tokens == 3

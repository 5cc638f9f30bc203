"""Chooses the parsers of a model: by their names in vLLM, or by its chat template. Packages register further ones.

    [project.entry-points."pdserve.tool_parsers"]
    my_format = "my_package.my_parser:MyParser"

The classes are subclasses of `ToolParser`, and of `ReasoningParser` in the group `pdserve.reasoning_parsers`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar, cast

from pdserve import plugins
from pdserve.errors import SetupError
from pdserve.router.text.parsers.harmony import HarmonyParser, HarmonyReasoning
from pdserve.router.text.parsers.json_calls import GraniteParser, HermesParser, Llama3JsonParser
from pdserve.router.text.parsers.named_calls import DeepSeekV3Parser, DeepSeekV31Parser, KimiK2Parser, MistralParser
from pdserve.router.text.parsers.output_parser import MARK, OutputParser
from pdserve.router.text.parsers.pythonic import PythonicParser
from pdserve.router.text.parsers.reader import Reader
from pdserve.router.text.parsers.reasoning import (
    DeepSeekR1Reasoning,
    GraniteReasoning,
    KimiK2Reasoning,
    MistralReasoning,
    ReasoningParser,
)
from pdserve.router.text.parsers.tool_parser import ToolParser, Tools
from pdserve.router.text.parsers.xml_calls import Glm45Parser, Qwen3CoderParser

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "glm45": Glm45Parser,
    "glm47": Glm45Parser,
    "granite": GraniteParser,
    "granite4": HermesParser,
    "hermes": HermesParser,
    "kimi_k2": KimiK2Parser,
    "llama3_json": Llama3JsonParser,
    "llama4_json": Llama3JsonParser,
    "llama4_pythonic": PythonicParser,
    "mistral": MistralParser,
    "openai": HarmonyParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
    "qwen3_xml": Qwen3CoderParser,
}
REASONING_PARSERS: dict[str, type[ReasoningParser]] = {
    "deepseek_r1": DeepSeekR1Reasoning,
    "deepseek_v3": ReasoningParser,
    "glm45": ReasoningParser,
    "glm47": ReasoningParser,
    "granite": GraniteReasoning,
    "kimi_k2": KimiK2Reasoning,
    "mistral": MistralReasoning,
    "openai_gptoss": HarmonyReasoning,
    "qwen3": ReasoningParser,
}
# Names by strings that the chat template of their models has, all of them; the first match counts.
TOOL_TEMPLATES = (
    (("<|channel|>", "<|message|>"), "openai"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<arg_key>",), "glm45"),
    (("<|tool_call_argument_begin|>",), "kimi_k2"),
    (("<｜tool▁sep｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁sep｜>",), "deepseek_v31"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "hermes"),
    (("[func_name1(",), "pythonic"),
    (('"parameters": ',), "llama3_json"),
)
REASONING_TEMPLATES = (
    (("<|channel|>analysis",), "openai_gptoss"),
    (("[THINK]",), "mistral"),
    (("Here is my thought process",), "granite"),
    (("<think>", "<response>"), "granite"),
    (("<think>", "<|tool_call_argument_begin|>"), "kimi_k2"),
    (("<think>", "<arg_key>"), "glm45"),
    (("</think>", "<｜Assistant｜>", "thinking"), "deepseek_v3"),
    (("</think>", "<｜Assistant｜>"), "deepseek_r1"),
    (("<think>",), "qwen3"),
    (("</think>",), "qwen3"),
)
AUTO, NONE = "auto", "none"
TOOL_GROUP, REASONING_GROUP = "pdserve.tool_parsers", "pdserve.reasoning_parsers"

Parser = TypeVar("Parser", bound=Reader)


@dataclass(frozen=True)
class ModelParsers:
    """The parsers of one model.

    Attributes:
        special_tokens: id of the tokenizer's special tokens by their strings.
    """

    reasoning: type[ReasoningParser] | None = None
    tools: type[ToolParser] | None = None
    special_tokens: Mapping[str, int] = field(default_factory=dict)

    def open(
        self,
        tool_parser: type[ToolParser] | None,
        tools: Tools | None,
        *,
        begins_in_reasoning: bool,
        shows_reasoning: bool = True,
        calls_end_reasoning: bool = True,
    ) -> OutputParser | None:
        """Return the parser of one choice; None if there is nothing to look for in its text.

        Args:
            tool_parser: that of the calls, which need not be the model's own; None if there are none.
            begins_in_reasoning: the prompt ends inside of reasoning.
            calls_end_reasoning: a call ends reasoning that has not been closed.
        """
        if tool_parser is None and self.reasoning is None:
            return None
        tags = {*(self.reasoning.TAGS if self.reasoning else ()), *(tool_parser.TAGS if tool_parser else ())}
        marks = {tag: MARK + tag for tag in tags if tag in self.special_tokens}
        reasoning = self.reasoning(begins_in_reasoning, marks) if self.reasoning else None
        calls = tool_parser(tools, marks) if tool_parser is not None and tools is not None else None
        if reasoning is not None and tool_parser is not None and tools is not None and calls_end_reasoning:
            reasoning.open_calls = partial(tool_parser, tools, marks)
        by_id = {self.special_tokens[tag]: mark for tag, mark in marks.items()}
        return OutputParser(reasoning, calls, by_id, shows_reasoning=shows_reasoning)


def choose_parsers(
    tool_call_parser: str, reasoning_parser: str, tool_template: str, template: str, special_tokens: Mapping[str, int]
) -> ModelParsers:
    """Return the parsers with these names; `auto` chooses by the chat templates (with tools, and without), `none` has none.

    Raises:
        SetupError: there is no parser with such a name, or it cannot be imported.
    """
    if tool_call_parser == AUTO:
        tool_call_parser = _by_template(tool_template, TOOL_TEMPLATES) if "tools" in tool_template else NONE
    if reasoning_parser == AUTO:
        reasoning_parser = _by_template(template, REASONING_TEMPLATES)
    tools = _find("--tool-call-parser", tool_call_parser, TOOL_PARSERS, TOOL_GROUP, ToolParser)
    reasoning = _find("--reasoning-parser", reasoning_parser, REASONING_PARSERS, REASONING_GROUP, ReasoningParser)
    return ModelParsers(reasoning, tools, special_tokens)


def _by_template(template: str, rules: tuple[tuple[tuple[str, ...], str], ...]) -> str:
    return next((name for strings, name in rules if all(string in template for string in strings)), NONE)


def _find(
    flag: str, name: str, builtin: Mapping[str, type[Parser]], group: str, base: type[Parser]
) -> type[Parser] | None:
    """Return the class with this name, built in or of another package."""
    if name == NONE:
        return None
    if name in builtin:
        return builtin[name]
    others = plugins.names(group)
    if name not in others:
        names = ", ".join([AUTO, NONE, *sorted({*builtin, *others})])
        raise SetupError(f"{flag} {name!r} is not known; the names are {names}")
    return cast(type[Parser], plugins.load(group, name, base))

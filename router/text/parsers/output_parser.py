"""The parser of one choice: special tokens, reasoning and tool calls, in this order."""

from collections.abc import Mapping
from dataclasses import replace

from pdserve.router.text.parsers.output import ParsedOutput
from pdserve.router.text.parsers.reasoning import ReasoningParser
from pdserve.router.text.parsers.tool_parser import ToolParser

# Precedes the string of a special token in text that is to be parsed. Unicode reserves it for such purposes: it is not a
# character, so text does not contain it.
MARK = "\ufdd0"


class OutputParser:
    """Splits the text of one choice into reasoning, text and tool calls.

    Attributes:
        special_tokens: id → what the text must have in place of a special token that delimits parts of the format.
        num_reasoning_tokens: tokens of reasoning so far, without the tags.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        special_tokens: Mapping[int, str],
        *,
        shows_reasoning: bool = True,
    ) -> None:
        self.special_tokens = special_tokens
        self.num_reasoning_tokens = 0
        self._reasoning = reasoning
        self._tools = tools
        self._shows_reasoning = shows_reasoning

    @property
    def is_reasoning(self) -> bool:
        """True while the text so far ends inside of reasoning."""
        return self._reasoning is not None and self._reasoning.is_reasoning

    @property
    def may_reason(self) -> bool:
        """True while there may be more reasoning. Until then tokens should be pushed one by one, to be counted."""
        return self._reasoning is not None and not self._reasoning.is_over

    @property
    def num_calls(self) -> int:
        """Number of complete calls so far."""
        return self._tools.num_calls if self._tools is not None else 0

    def push(self, text: str, num_tokens: int = 0, *, is_end: bool = False) -> ParsedOutput:
        """Parse the next piece of text, which is that of so many tokens; at its end, also return what was held back."""
        was_reasoning = self.is_reasoning
        output = ParsedOutput(text)
        if self._reasoning is not None:
            output = self._reasoning.push(text, is_end=is_end)
        self.num_reasoning_tokens += num_tokens if was_reasoning and self.is_reasoning else 0
        if self._tools is not None:
            parsed = self._tools.push(output.text, is_end=is_end)
            output.text, output.calls = parsed.text, parsed.calls
        if not self._shows_reasoning:
            output.reasoning = ""
        return _without_marks(output) if self.special_tokens else output


def _without_marks(output: ParsedOutput) -> ParsedOutput:
    calls = [
        replace(call, arguments=call.arguments.replace(MARK, ""), at=call.at - output.text.count(MARK, 0, call.at))
        for call in output.calls
    ]
    return ParsedOutput(output.text.replace(MARK, ""), output.reasoning.replace(MARK, ""), calls)

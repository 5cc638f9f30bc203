"""Reasoning before an answer, between two tags; the template may already have written the first one.

deepseek_r1  <think>…</think>, begun by the template or not             (DeepSeek R1, QwQ)
qwen3, glm45, deepseek_v3  the same, where the template turns it off    (Qwen3, GLM 4.5, DeepSeek V3.1)
kimi_k2      the same; a call ends it, too                              (Kimi K2 Thinking)
mistral      [THINK]…[/THINK]                                           (Magistral)
granite      <think>…</think><response>…</response>, or sentences       (Granite 3.2, 3.3)
"""

from collections.abc import Callable, Mapping
from typing import ClassVar

from pdserve.router.text.parsers.reader import Reader, Steps
from pdserve.router.text.parsers.tool_parser import ToolParser


class ReasoningParser(Reader):
    """Splits output into reasoning, if it begins with that, and text. White space between them is dropped.

    Attributes:
        OPEN, CLOSE: the tags around reasoning, the usual one first.
        ENDS: further tags that end reasoning, and belong to what follows.
        WRAPS: the tags around the text after reasoning, if any.
        ALWAYS: the output begins with reasoning, with or without a tag, unless the prompt has closed it.
        OPTIONAL: the output may begin without reasoning though the prompt does not close it.
        CLOSING: what closes the reasoning when its budget is used up; empty: the first tag of CLOSE.
        is_reasoning: the text so far ends inside of reasoning.
        is_over: no reasoning follows.
        open_calls: makes a parser of calls; a call that it finds ends reasoning without its tag. None: no call does.
    """

    OPEN: ClassVar[tuple[str, ...]] = ("<think>",)
    CLOSE: ClassVar[tuple[str, ...]] = ("</think>",)
    ENDS: ClassVar[tuple[str, ...]] = ()
    WRAPS: ClassVar[tuple[str, str] | None] = None
    ALWAYS: ClassVar[bool] = False
    OPTIONAL: ClassVar[bool] = False
    CLOSING: ClassVar[str] = ""
    TAGS: ClassVar[tuple[str, ...]] = ("<think>", "</think>")

    def __init__(self, is_open: bool, marks: Mapping[str, str]) -> None:
        """`is_open`: the prompt ends inside of reasoning."""
        super().__init__(marks)
        self.is_reasoning = self._is_open = is_open
        self.is_over = False
        self.open_calls: Callable[[], ToolParser] | None = None
        self._line_breaks = ""  # at the end of the reasoning so far
        self._has_begun = False

    @classmethod
    def opens(cls, prompt_end: str) -> bool:
        """Return whether the output begins inside of reasoning, by the end of the prompt with its special tokens."""
        prompt_end = prompt_end.rstrip()
        return prompt_end.endswith(cls.OPEN) or (cls.ALWAYS and not cls.closes(prompt_end))

    @classmethod
    def closes(cls, prompt_end: str) -> bool:
        """Return whether the prompt has already ended the reasoning."""
        return prompt_end.rstrip().endswith(cls.CLOSE)

    def _parse(self) -> Steps[None]:
        space = yield from self._skip_space()
        tag = yield from self._match(*self._tags(*self.OPEN))
        if tag or self._is_open:
            if not tag:
                self._reason(space)
            yield from self._parse_reasoning()
        else:
            self.is_over = True
            self._text(space)
        yield from self._copy_until((), self._text)

    def _parse_reasoning(self) -> Steps[None]:
        """Parse from inside of reasoning up to the text after it."""
        self.is_reasoning = True
        ends = self._tags(*self.ENDS)
        begins = tuple(tag for tag in self._call_tags() if tag not in ends)
        tags = (*self._tags(*self.CLOSE), *ends, *begins)
        while (tag := (yield from self._copy_until(tags, self._reason))) in begins:
            if (yield from self._begins_call(tag)):
                ends = begins
                break
            self._reason(tag)
        self.is_reasoning, self.is_over = False, True
        if tag in ends:
            self._unread(tag)
            return
        yield from self._skip_space()
        if self.WRAPS is not None and (yield from self._match(self._tag(self.WRAPS[0]))):
            yield from self._skip_space()
            yield from self._copy_until((self._tag(self.WRAPS[1]),), self._text)

    def _call_tags(self) -> tuple[str, ...]:
        """Return the tags with which calls begin that end reasoning."""
        calls = self.open_calls() if self.open_calls else None
        return self._tags(*calls.BEGINS, *calls.SILENT) if calls else ()

    def _begins_call(self, tag: str) -> Steps[bool]:
        """Return whether the parser of calls finds one at a tag that was consumed; reasoning may also speak of the tag."""
        assert self.open_calls is not None
        calls, length = self.open_calls(), 0
        found = calls.push(tag)
        while not (found.calls or found.text) and not (self._has_ended and length == len(self._buffer)):
            if length == len(self._buffer):
                yield
            found, length = calls.push(self._buffer[length:], is_end=self._has_ended), len(self._buffer)
        return bool(found.calls) and not found.calls[0].at  # not a later one

    def _reason(self, text: str) -> None:
        """Emit reasoning without the line breaks around it, which templates write themselves."""
        text = text if self._has_begun else text.lstrip("\n")
        if body := text.rstrip("\n"):
            self._output.reasoning += self._line_breaks + body
            self._line_breaks, self._has_begun = "", True
        self._line_breaks += text[len(body) :]

    def _text(self, text: str) -> None:
        self._output.text += text


class DeepSeekR1Reasoning(ReasoningParser):
    """Reasoning of DeepSeek R1, which always reasons."""

    ALWAYS = True


class KimiK2Reasoning(ReasoningParser):
    """Reasoning of Kimi K2 Thinking."""

    ENDS = ("<|tool_calls_section_begin|>",)
    TAGS = ("<think>", "</think>", *ENDS)


class MistralReasoning(ReasoningParser):
    """Reasoning of Magistral, which a system prompt may ask for."""

    OPEN, CLOSE = ("[THINK]",), ("[/THINK]",)
    TAGS = ("[THINK]", "[/THINK]")
    OPTIONAL = True


class GraniteReasoning(ReasoningParser):
    """Reasoning of Granite 3.2 and 3.3, which the template's variable `thinking` turns on."""

    OPEN = ("<think>", "Here is my thought process:", "Here's my thought process:")
    CLOSE = ("</think>", "Here is my response:", "Here's my response:")
    WRAPS = ("<response>", "</response>")
    TAGS = ("<think>", "</think>", *WRAPS)
    OPTIONAL = True

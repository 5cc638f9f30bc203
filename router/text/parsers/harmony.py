"""Harmony, the format of gpt-oss: messages with a channel and perhaps a recipient, delimited by special tokens.

    openai_gptoss, openai
        <|channel|>analysis<|message|>REASONING<|end|>
        <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
        <|start|>assistant<|channel|>final<|message|>TEXT<|return|>

The recipient may also follow the role. The prompt ends after `<|start|>assistant`. openai-harmony parses the same, but needs
a vocabulary from the network besides the checkpoint's, and would not parse the tokens of another tokenizer.
"""

import re
from collections.abc import Callable

from pdserve.grammars import formats
from pdserve.grammars.formats import Format
from pdserve.router.text.parsers.reader import Steps
from pdserve.router.text.parsers.reasoning import ReasoningParser
from pdserve.router.text.parsers.tool_parser import Functions, ToolParser

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w-]+)", re.ASCII)


class HarmonyReasoning(ReasoningParser):
    """The analysis channel. Messages to a recipient are passed on as they are, each from its `<|start|>` on."""

    OPEN, CLOSE = (f"{CHANNEL}analysis{MESSAGE}",), (f"{CHANNEL}final{MESSAGE}",)
    CLOSING = f"<|end|>{START}assistant{CHANNEL}final{MESSAGE}"
    ENDS = (f"{CHANNEL}commentary", f"{CHANNEL}analysis to", f"{START}assistant to")  # calls, in any channel
    TAGS = (START, CHANNEL, MESSAGE, "<|constrain|>", *MESSAGE_ENDS)

    def _parse(self) -> Steps[None]:
        start, channel, message = self._tags(START, CHANNEL, MESSAGE)
        while (yield from self._has_text()):
            self._begin_trial()
            header, tag = yield from self._take_until(message)
            if not tag:
                self._rewind()
                self._text((yield from self._match(start)))
                yield from self._copy_message(self._text)
                continue
            self._commit()
            header = header.removeprefix(start)
            if RECIPIENT.search(header):
                self._text(f"{start}{header}{message}")
                self._text((yield from self._copy_message(self._text)))
            elif f"{channel}analysis" in header:
                self._reason("\n\n" if self._has_begun else "")
                self.is_reasoning = True
                yield from self._copy_message(self._reason)
                self.is_reasoning = False
            else:
                self.is_over = f"{channel}final" in header
                yield from self._copy_message(self._text)

    def _copy_message(self, emit: Callable[[str], None]) -> Steps[str]:
        """Emit the text of a message; consume and return the tag that ends it."""
        start = self._tag(START)
        tag = yield from self._copy_until((*self._tags(*MESSAGE_ENDS), start), emit)
        if tag != start:
            return tag
        self._unread(tag)  # of the next message: this one has no end
        return ""


class HarmonyParser(ToolParser):
    """Messages to functions."""

    BEGINS = (START, CHANNEL)
    TAGS = HarmonyReasoning.TAGS
    SAYS_REASONING = True
    ENDS_STRINGS = True

    @classmethod
    def call_formats(cls, functions: Functions) -> list[Format]:
        kind = _any_of(" <|constrain|>json", "<|constrain|>json", " json", "")
        calls = []
        for name, schema in functions.items():
            to = f" to=functions.{name}"
            channels = [f"{CHANNEL}{channel}" for channel in ("commentary", "analysis")]
            head = _any_of(*(channel + to for channel in channels), *(to + channel for channel in channels))
            calls.append(formats.sequence(head, kind, formats.literal(MESSAGE), cls._arguments_format(schema)))
        return calls

    @classmethod
    def output_format(cls, functions: Functions, *, single: bool, text: Format | None) -> Format:
        """Return the format of messages: of any, and then of calls or, if `text` is given, of a final one with that text."""
        said, end = formats.any_text(*cls.TAGS), _any_of(*MESSAGE_ENDS, "")
        start = formats.sequence(end, formats.literal(f"{START}assistant"))
        channels = ("analysis", "commentary", *(() if text else ("final",)))
        message = formats.sequence(_any_of(*(f"{CHANNEL}{channel}{MESSAGE}" for channel in channels)), said)
        call = formats.either(*cls.call_formats(functions))
        calls = call if single else formats.sequence(call, formats.repeated(formats.sequence(start, call)))
        # The prompt may end within a message. What looks like a recipient there would be taken for that of the next one.
        goes_on = formats.any_text(
            *cls.TAGS, *(f"to={prefix}{name}" for name in functions for prefix in ("functions.", ""))
        )
        if text is None:
            lasts, firsts = [message, calls], [message, goes_on, calls]
        else:
            lasts = [formats.sequence(formats.literal(f"{CHANNEL}final{MESSAGE}"), text), calls]
            firsts = [text, *lasts]
        began = formats.sequence(formats.either(message, goes_on), start)
        further = formats.repeated(formats.sequence(message, start))
        ends = [formats.sequence(one, end) for one in firsts]
        return formats.either(*ends, *(formats.sequence(began, further, one, end) for one in lasts))

    def _calls(self, tag: str) -> Steps[None]:
        header, _ = yield from self._take_until(self._tag(MESSAGE))
        recipient = RECIPIENT.search(header)
        if recipient and (yield from self._call_with_json(recipient[1])):
            yield from self._skip_tags(*self._tags(*MESSAGE_ENDS))


def _any_of(*texts: str) -> Format:
    return formats.either(*map(formats.literal, texts))

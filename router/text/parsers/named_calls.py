"""Calls as a name between tags, followed by the arguments as JSON.

deepseek_v3   <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME⏎```json⏎{…}⏎```<｜tool▁call▁end｜>    (DeepSeek V3 and R1)
deepseek_v31  <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>                       (DeepSeek V3.1)
kimi_k2       <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>
mistral       [TOOL_CALLS]NAME[ARGS]{…}, and [TOOL_CALLS][{"name": "f", "arguments": {…}}, …]
"""

import re

from pdserve.grammars import formats
from pdserve.router.text.parsers.json_calls import JsonCallParser
from pdserve.router.text.parsers.reader import Steps
from pdserve.router.text.parsers.tool_parser import ToolParser

KIMI_ID = re.compile(r"\s*((?:functions\.)?([\w-]+):\d+)\s*", re.ASCII)


class DeepSeekV31Parser(ToolParser):
    """Calls of DeepSeek V3.1."""

    BEGINS = ("<｜tool▁call▁begin｜>",)
    SILENT = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
    TAGS = (*BEGINS, *SILENT, "<｜tool▁sep｜>")
    ENDS_STRINGS = True
    FORMS = (("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),)
    LIST = (formats.maybe("<｜tool▁calls▁begin｜>"), formats.maybe("<｜tool▁calls▁end｜>"))

    def _calls(self, tag: str) -> Steps[None]:
        name, _ = yield from self._take_until(self._tag("<｜tool▁sep｜>"))
        yield from self._call_with_json(name.strip())


class DeepSeekV3Parser(DeepSeekV31Parser):
    """Calls of DeepSeek V3 and R1."""

    ENDS = ("```",)
    FORMS = (("<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n", "\n```<｜tool▁call▁end｜>"),)

    def _calls(self, tag: str) -> Steps[None]:
        _, tag = yield from self._take_until(self._tag("<｜tool▁sep｜>"))
        if not tag:
            return
        name, _ = yield from self._take_until("\n```json\n")
        if (yield from self._call_with_json(name.strip())):
            yield from self._skip_end("```")


class KimiK2Parser(ToolParser):
    """Calls of Kimi K2. Their ids are the model's, because its template shows them to it again."""

    BEGINS = ("<|tool_call_begin|>",)
    SILENT = ("<|tool_calls_section_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>")
    TAGS = (*BEGINS, *SILENT, "<|tool_call_argument_begin|>")
    ENDS_STRINGS = True
    FORMS = (("<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>", "<|tool_call_end|>"),)
    LIST = (formats.maybe("<|tool_calls_section_begin|>"), formats.maybe("<|tool_calls_section_end|>"))

    def _calls(self, tag: str) -> Steps[None]:
        head, _ = yield from self._take_until(self._tag("<|tool_call_argument_begin|>"))
        if match := KIMI_ID.fullmatch(head):
            yield from self._call_with_json(match[2], match[1])


class MistralParser(JsonCallParser):
    """Calls of Mistral, in the forms of its older and of its newer tokenizers."""

    BEGINS = ("[TOOL_CALLS]",)
    TAGS = (*BEGINS, "[ARGS]", "[CALL_ID]")
    ENDS_STRINGS = True
    FORMS = (("[TOOL_CALLS]NAME[ARGS]", ""), ('[TOOL_CALLS][{"name": "NAME", "arguments": ', "}]"))

    def _calls(self, tag: str) -> Steps[None]:
        yield from self._skip_space()
        if (yield from self._match("[")):
            yield from self._json_calls()
            return
        arguments, call_id = self._tags("[ARGS]", "[CALL_ID]")
        name, tag = yield from self._take_until(arguments, call_id, "{")
        given_id = ""
        if tag == call_id:
            given_id, tag = yield from self._take_until(arguments)
        if not tag:
            return
        if tag == "{":
            self._unread(tag)
        yield from self._call_with_json(name.strip(), given_id.strip())

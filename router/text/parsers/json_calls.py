"""Calls as JSON objects that hold the name.

hermes       <tool_call>{"name": "f", "arguments": {…}}</tool_call>, among text      (Hermes, Qwen 2.5 and 3, Granite 4)
granite      <|tool_call|>[{"name": "f", "arguments": {…}}, …], among text           (Granite 3)
llama3_json  {"name": "f", "parameters": {…}}; {…}, or a list, in place of text       (Llama 3, Llama 4)
"""

import json
import re

from pdserve.router.text.parsers.json_object import JsonObject
from pdserve.router.text.parsers.output import parse_value
from pdserve.router.text.parsers.reader import MAX_NAME, Steps
from pdserve.router.text.parsers.tool_parser import ToolParser, text_without

# The beginning of a call's JSON up to the bracket of its arguments; group 1 is the name as a JSON string.
HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{')
FIELD_OR_END = re.compile(r'\}|,\s*"')


class JsonCallParser(ToolParser):
    """Base for formats whose calls are JSON objects with a name and arguments."""

    def _json_call(self) -> Steps[bool]:
        """Parse a call; return False if the text goes on with something else, which is consumed in part."""
        yield from self._skip_space()
        if not ((yield from self._has_text()) and self._buffer[0] == "{"):
            return False
        call, body, is_within = self._json(), "", False
        while (text := (yield from self._read(call))) is not None:
            body += text
            if call.is_over:
                return call.is_whole and self._whole_call(body + call.close())
            if call.depth == 2 and not is_within and (head := HEAD.fullmatch(body)):
                return (yield from self._named_call(parse_value(head[1]), call))
            is_within |= call.depth == 2  # later brackets are not those of a head, which would be compared for each
            recent = body[-len(text) - MAX_NAME :]
            if any(tag in recent for tag in self._tags(*self.BEGINS)):  # else many tags would each be parsed to the end
                return False
        return False

    def _named_call(self, name: object, call: JsonObject) -> Steps[bool]:
        """Emit a call whose arguments have begun."""
        if not self._knows(name):
            return False
        self._begin_call(str(name))
        self._arguments("{")
        if (yield from self._copy_arguments(call, 1)) and not call.is_over:
            yield from self._skip_call_end(call)
        return True

    def _skip_call_end(self, call: JsonObject) -> Steps[None]:
        """Skip what follows the arguments up to the end of the call, which may be missing."""
        yield from self._skip_space()
        while not self._has_ended and self._buffer.rstrip() in ("", ","):
            yield  # a comma may be followed by a field, or by the next call
        if FIELD_OR_END.match(self._buffer) or (self._has_ended and self._buffer.rstrip() == ","):
            while not call.is_over and (yield from self._read(call)) is not None:
                pass

    def _whole_call(self, text: str) -> bool:
        """Emit a complete call whose name is not its first field; return False if it is not a valid call."""
        body = parse_value(text)
        if not isinstance(body, dict) or not self._knows(body.get("name")):
            return False
        arguments = body.get("arguments", body.get("parameters", {} if self.BEGINS else ""))
        if isinstance(arguments, str):
            arguments = parse_value(arguments)
        elif arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            return False
        self._begin_call(body["name"])
        self._arguments(json.dumps(arguments, ensure_ascii=False))
        self._end_call()
        return True

    def _json_calls(self, *, is_list: bool = True) -> Steps[None]:
        """Parse the calls of a list, after its bracket; what is not a call, and what follows it, is text.

        Without `is_list`, a bracket may be missing, and the commas too.
        """
        yield from self._json_call()
        while self._consumed is None:
            yield from self._skip_space()
            separator = yield from self._match(",", "]")
            if separator != "," and (is_list or separator):
                return
            self._begin_trial()
            if not (yield from self._json_call()):
                self._rewind()
                return


class HermesParser(JsonCallParser):
    """Calls of Hermes and Qwen."""

    TAGS = ("<tool_call>", "</tool_call>")
    BEGINS = ("<tool_call>",)
    FORMS = (('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),)

    def _calls(self, tag: str) -> Steps[None]:
        yield from self._skip_space()
        yield from self._match("[")
        yield from self._json_calls(is_list=False)  # models also write several objects between the tags
        if self._consumed is None:
            yield from self._skip_end(self._tag("</tool_call>"))


class GraniteParser(JsonCallParser):
    """Calls of Granite 3."""

    TAGS = ("<|tool_call|>", "<tool_call>")
    BEGINS = TAGS
    FORMS = tuple((f'{tag}[{{"name": "NAME", "arguments": ', "}]") for tag in ("<|tool_call|>", "<tool_call>"))

    def _calls(self, tag: str) -> Steps[None]:
        yield from self._skip_space()
        if (yield from self._match("[")):
            yield from self._json_calls()


class Llama3JsonParser(JsonCallParser):
    """Calls of Llama 3. The output is either text or calls."""

    TAGS = ("<|python_tag|>",)
    BEGINS = ()
    ENDS = (";",)
    FORMS = tuple((f'{tag}{{"name": "NAME", "parameters": ', "}") for tag in ("", "<|python_tag|>"))
    TEXT = text_without(r"{\[")

    def _parse(self) -> Steps[None]:
        space = yield from self._skip_space()
        tag = yield from self._match(self._tag("<|python_tag|>"))
        self._begin_trial()
        yield from self._skip_space()
        if (yield from self._match("[")):
            yield from self._json_calls()
        if self._consumed is not None:
            self._rewind()
        else:
            yield from self._skip_separators()
        while self._buffer or not self._has_ended:
            self._begin_trial()
            if not (yield from self._json_call()):
                self._rewind()
                break
            yield from self._skip_separators()
        if self._index < 0:
            self._text(space + tag)
        yield from self._copy_until((), self._text)
        self._end_text()

    def _skip_separators(self) -> Steps[None]:
        while (yield from self._has_text()):
            self._take(len(self._buffer) - len(self._buffer.lstrip(" \n;,")))
            if self._buffer:
                return

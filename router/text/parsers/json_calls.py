"""Calls as JSON objects that hold the name.

hermes       <tool_call>{"name": "f", "arguments": {…}}</tool_call>, among text      (Hermes, Qwen 2.5 and 3, Granite 4)
granite      <|tool_call|>[{"name": "f", "arguments": {…}}, …], among text           (Granite 3)
llama3_json  {"name": "f", "parameters": {…}}; {…}, in place of text                 (Llama 3, Llama 4)
"""

import json
import re

from pdserve.router.text.parsers.output import parse_json
from pdserve.router.text.parsers.reader import Steps
from pdserve.router.text.parsers.tool_parser import JsonEnd, ToolParser, text_without

# The beginning of a call's JSON up to its arguments; group 1 is the name as a JSON string.
HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class JsonCallParser(ToolParser):
    """Base for formats whose calls are JSON objects with a name and arguments."""

    def _json_call(self) -> Steps[bool]:
        """Parse a call; return False if the text goes on with something else, which is consumed in part."""
        yield from self._skip_space()
        if not ((yield from self._has_text()) and self._buffer[0] == "{"):
            return False
        json_end, body, name = JsonEnd(), "", None
        while (yield from self._has_text()):
            end = json_end.find(self._buffer)
            body += self._take(end or len(self._buffer))
            if head := HEAD.match(body):
                name = parse_json(head[1])
                return (yield from self._named_call(name, body[head.end() :], is_whole=bool(end)))
            if any(tag in body for tag in self._tags(*self.BEGINS)):  # else many tags would each be parsed to the end
                return False
            if end:
                return self._whole_call(body)
        return False

    def _named_call(self, name: object, arguments: str, *, is_whole: bool) -> Steps[bool]:
        """Emit a call whose arguments have begun; with `is_whole` they and the call have ended, too."""
        if not self._knows(name):
            return False
        self._begin_call(str(name))
        json_end = JsonEnd()
        end = json_end.find(arguments)
        self._arguments(arguments[:end] if end else arguments)
        rest = arguments[end:] if end else ""
        while not end and (yield from self._has_text()):
            end = json_end.find(self._buffer)
            self._arguments(self._take(end or len(self._buffer)))
        if end and (is_whole or (yield from self._skip_call_end(rest))):
            self._end_call()
        return True

    def _skip_call_end(self, rest: str) -> Steps[bool]:
        """Skip what follows the arguments up to the end of the call; return False if the text ends earlier."""
        json_end = JsonEnd()
        json_end.find("{")
        if json_end.find(rest):
            return True
        while (yield from self._has_text()):
            end = json_end.find(self._buffer)
            self._take(end or len(self._buffer))
            if end:
                return True
        return False

    def _whole_call(self, text: str) -> bool:
        """Emit a complete call whose name is not its first field; return False if it is not a valid call."""
        body = parse_json(text)
        if not isinstance(body, dict) or not self._knows(body.get("name")):
            return False
        arguments = body.get("arguments", body.get("parameters"))
        if not isinstance(arguments, dict):
            return False
        self._begin_call(body["name"])
        self._arguments(json.dumps(arguments, ensure_ascii=False))
        self._end_call()
        return True

    def _json_calls(self) -> Steps[None]:
        """Parse the calls of a list, after its bracket; what is not a call, and what follows it, is text."""
        yield from self._json_call()
        while self._consumed is None:
            yield from self._skip_space()
            if (yield from self._match(",", "]")) != ",":
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
        if (yield from self._json_call()):
            yield from self._skip_space()
            yield from self._match(self._tag("</tool_call>"))


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
    FORMS = tuple((f'{tag}{{"name": "NAME", "parameters": ', "}") for tag in ("", "<|python_tag|>"))
    TEXT = text_without("{")

    def _parse(self) -> Steps[None]:
        space = yield from self._skip_space()
        tag = yield from self._match(self._tag("<|python_tag|>"))
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

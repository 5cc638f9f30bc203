"""Incremental parser that separates tool calls from the text of a model's output.

The format follows from the chat template that the model was prompted with:

    hermes  <tool_call>{"name": "f", "arguments": {…}}</tool_call>, among text   (Hermes, Qwen)
    llama   {"name": "f", "parameters": {…}}; {…}, instead of text               (Llama 3)

The name of a call is emitted as soon as it is complete, and its arguments as they are generated, in the model's own
spelling. Output that looks like a call but names no tool of the request is emitted as text.
"""

import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field

from pdserve.router.text.detokenizer import overlap

OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"
# The beginning of a call's JSON up to its arguments; group 1 is the name as a JSON string.
CALL_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


@dataclass(frozen=True)
class ToolCallDelta:
    """An increment of one call; only its first delta has the name and the id."""

    index: int
    arguments: str
    name: str = ""
    id: str = ""


@dataclass
class ParsedOutput:
    """The result of parsing a piece of output: text outside of calls, and increments of calls."""

    text: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


class _CallScanner:
    """Scans the JSON of one call character by character.

    Attributes:
        text: the JSON so far.
        is_complete: the JSON object has ended, or the text turned out not to be an object.
        is_named: the name of a known tool was found, and the first delta was emitted.
        index: number of the call in the output.
    """

    def __init__(self, index: int, names: Collection[str]) -> None:
        self.text = ""
        self.is_complete = False
        self.is_named = False
        self.index = index
        self._names = names
        self._sent = 0  # characters of `text` that are emitted or precede the arguments
        self._depth = 0
        self._in_string = self._escaped = False
        self._inner_ends: list[int] = []  # offsets in `text` where objects directly within the call end

    def push(self, text: str) -> tuple[list[ToolCallDelta], str]:
        """Add text; return the new deltas and the rest of the text after the end of the call."""
        for i, character in enumerate(text):
            self._scan(character)
            if self.is_complete:
                return self._take_deltas(), text[i + 1 :]
        return self._take_deltas(), ""

    def _scan(self, character: str) -> None:
        self.text += character
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = not self._escaped and character == "\\"
        elif self._depth == 0 and character != "{":
            self.is_complete = not character.isspace()  # not an object
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 1:
                self._inner_ends.append(len(self.text))
            self.is_complete = self._depth <= 0

    def _take_deltas(self) -> list[ToolCallDelta]:
        deltas = []
        if not self.is_named:
            head = CALL_HEAD.match(self.text)
            if head is None:
                return self._parse_whole() if self.is_complete else []
            name = _parse_json(head[1])
            if name not in self._names:
                return []
            self.is_named, self._sent = True, head.end()
            deltas.append(ToolCallDelta(self.index, "", str(name), new_call_id()))
        end = self._inner_ends[0] if self._inner_ends else len(self.text)
        if end > self._sent:
            deltas.append(ToolCallDelta(self.index, self.text[self._sent : end]))
            self._sent = end
        return deltas

    def _parse_whole(self) -> list[ToolCallDelta]:
        """Return one delta for a complete call whose name is not its first field; none if it is not a valid call."""
        body = _parse_json(self.text)
        if not isinstance(body, dict) or not isinstance(body.get("name"), str) or body["name"] not in self._names:
            return []
        arguments = body.get("arguments", body.get("parameters"))
        if not isinstance(arguments, dict):
            return []
        self.is_named = True
        return [ToolCallDelta(self.index, json.dumps(arguments, ensure_ascii=False), body["name"], new_call_id())]


class ToolCallParser:
    """Splits the output of one choice into text and tool calls.

    Args:
        tool_format: `hermes` or `llama`.
        names: the tools of the request.
        single_call: drop calls after the first.

    Attributes:
        num_calls: complete calls so far.
    """

    def __init__(self, tool_format: str, names: Collection[str], single_call: bool = False) -> None:
        assert tool_format in ("hermes", "llama")
        self.num_calls = 0
        self._is_hermes = tool_format == "hermes"
        self._names = names
        self._single_call = single_call
        self._call: _CallScanner | None = None
        self._held = ""  # text that may begin a call, or white space before one
        self._expects_close_tag = False  # hermes: after a call's JSON, before its closing tag
        self._is_text_only = False  # llama: the output began with text, so it contains no calls

    def push(self, text: str) -> ParsedOutput:
        """Parse the next piece of output."""
        output = ParsedOutput()
        while text:
            text = self._parse_call(text, output) if self._call is not None else self._parse_text(text, output)
        return output

    def finish(self) -> ParsedOutput:
        """Return the text held back, at the end of the output."""
        output = ParsedOutput()
        if self._call is not None and not self._call.is_named:
            output.text += self._call_as_text()
        elif not self._expects_close_tag and (not self.num_calls or self._held.strip()):
            output.text += self._held
        self._call, self._held = None, ""
        return output

    def _parse_call(self, text: str, output: ParsedOutput) -> str:
        """Parse text inside a call; return the rest after it."""
        assert self._call is not None
        deltas, rest = self._call.push(text)
        if not (self._single_call and self._call.index):
            output.calls += deltas
        if not self._call.is_complete:
            return ""
        if self._call.is_named:
            self.num_calls += 1
            self._expects_close_tag = self._is_hermes
        else:
            output.text += self._call_as_text()
            self._is_text_only = not self._is_hermes
        self._call = None
        return rest

    def _call_as_text(self) -> str:
        assert self._call is not None
        return (OPEN_TAG if self._is_hermes else "") + self._call.text

    def _parse_text(self, text: str, output: ParsedOutput) -> str:
        """Parse text outside of calls up to the beginning of a call; return the rest."""
        text, self._held = self._held + text, ""
        if self._expects_close_tag:
            return self._skip_close_tag(text)
        if self._is_hermes:
            before, tag, rest = text.partition(OPEN_TAG)
            if tag:
                output.text += before.rstrip()
                self._call = _CallScanner(self.num_calls, self._names)
                return rest
            return self._emit(text, len(text) - overlap(text, OPEN_TAG), output)
        stripped = text.lstrip(" \n;" if self.num_calls else " \n")
        if stripped.startswith("{") and not self._is_text_only:
            self._call = _CallScanner(self.num_calls, self._names)
            return stripped
        if not stripped and not self._is_text_only:
            self._held = "" if self.num_calls else text  # separators between calls are not text
            return ""
        self._is_text_only = True
        return self._emit(text, len(text), output)

    def _skip_close_tag(self, text: str) -> str:
        """Return the text after the closing tag; the tag may be missing."""
        text = text.lstrip()
        if text != CLOSE_TAG and CLOSE_TAG.startswith(text):
            self._held = text
            return ""
        self._expects_close_tag = False
        return text.removeprefix(CLOSE_TAG)

    def _emit(self, text: str, end: int, output: ParsedOutput) -> str:
        """Emit the text up to `end` without its trailing white space, which is dropped if a call follows."""
        end = len(text[:end].rstrip())
        output.text += text[:end]
        self._held = text[end:]
        return ""


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _parse_json(text: str) -> object:
    """Return the parsed value, or None if the text is not valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None

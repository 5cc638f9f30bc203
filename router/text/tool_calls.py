"""Tool calls in the text that a model writes, taken out of it while it comes.

Two formats, told apart by the chat template that teaches them to the model:

    hermes  <tool_call>{"name": "f", "arguments": {…}}</tool_call>, among text   (Hermes, Qwen)
    llama   {"name": "f", "parameters": {…}}; {…}, instead of text               (Llama 3)

A call's name goes out as soon as it is there, and its arguments as they come, in the model's own spelling. What turns out to
be no call of a tool that the request brought is text.
"""

import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field

from pdserve.router.text.detokenizer import overlap

OPEN, CLOSE = "<tool_call>", "</tool_call>"
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


@dataclass(frozen=True)
class CallPart:
    """What is new of one call; its first part has the name and the id."""

    index: int
    arguments: str
    name: str = ""
    id: str = ""


@dataclass
class Parts:
    """What some text has brought: `text` is not part of any call."""

    text: str = ""
    calls: list[CallPart] = field(default_factory=list)


class _Call:
    """The JSON of one call, as it comes."""

    def __init__(self, index: int, names: Collection[str]) -> None:
        self.text = ""
        self.over = False
        self.known = False  # its name is out
        self.index = index
        self._names = names
        self._sent = 0
        self._depth = 0
        self._in_string = self._escaped = False
        self._closed: list[int] = []  # where objects directly within it end

    def push(self, text: str) -> tuple[list[CallPart], str]:
        """What is new, and the text behind its end."""
        for i, character in enumerate(text):
            self._scan(character)
            if self.over:
                return self._news(), text[i + 1 :]
        return self._news(), ""

    def _scan(self, character: str) -> None:
        self.text += character
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = not self._escaped and character == "\\"
        elif self._depth == 0 and character != "{":
            self.over = not character.isspace()  # no object
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 1:
                self._closed.append(len(self.text))
            self.over = self._depth <= 0

    def _news(self) -> list[CallPart]:
        parts = []
        if not self.known:
            head = HEAD.match(self.text)
            if head is None:
                return self._whole() if self.over else []
            name = _parsed(head[1])
            if name not in self._names:
                return []
            self.known, self._sent = True, head.end()
            parts.append(CallPart(self.index, "", str(name), new_id()))
        end = self._closed[0] if self._closed else len(self.text)
        if end > self._sent:
            parts.append(CallPart(self.index, self.text[self._sent : end]))
            self._sent = end
        return parts

    def _whole(self) -> list[CallPart]:
        """A call whose name does not come first."""
        body = _parsed(self.text)
        if not isinstance(body, dict) or not isinstance(body.get("name"), str) or body["name"] not in self._names:
            return []
        arguments = body.get("arguments", body.get("parameters"))
        if not isinstance(arguments, dict):
            return []
        self.known = True
        return [CallPart(self.index, json.dumps(arguments, ensure_ascii=False), body["name"], new_id())]


class ToolCalls:
    """One answer's text, divided into calls and what is none. `calls` counts the calls.

    Args:
        single: calls after the first are left out.
    """

    def __init__(self, kind: str, names: Collection[str], single: bool = False) -> None:
        assert kind in ("hermes", "llama")
        self.calls = 0
        self._hermes = kind == "hermes"
        self._names = names
        self._single = single
        self._call: _Call | None = None
        self._held = ""  # may be the beginning of a call, or white space before one
        self._closing = False  # behind a call's JSON, before its closing tag
        self._text_only = False  # of llama: it has begun with text

    def push(self, text: str) -> Parts:
        parts = Parts()
        while text:
            text = self._inside(text, parts) if self._call is not None else self._outside(text, parts)
        return parts

    def finish(self) -> Parts:
        """The rest, at the end."""
        parts = Parts()
        if self._call is not None and not self._call.known:
            parts.text += self._refused()
        elif not self._closing and (not self.calls or self._held.strip()):
            parts.text += self._held
        self._call, self._held = None, ""
        return parts

    def _inside(self, text: str, parts: Parts) -> str:
        assert self._call is not None
        news, rest = self._call.push(text)
        if not (self._single and self._call.index):
            parts.calls += news
        if not self._call.over:
            return ""
        if self._call.known:
            self.calls += 1
            self._closing = self._hermes
        else:
            parts.text += self._refused()
            self._text_only = not self._hermes
        self._call = None
        return rest

    def _refused(self) -> str:
        assert self._call is not None
        return (OPEN if self._hermes else "") + self._call.text

    def _outside(self, text: str, parts: Parts) -> str:
        text, self._held = self._held + text, ""
        if self._closing:
            return self._behind(text)
        if self._hermes:
            before, tag, rest = text.partition(OPEN)
            if tag:
                parts.text += before.rstrip()
                self._call = _Call(self.calls, self._names)
                return rest
            return self._give(text, len(text) - overlap(text, OPEN), parts)
        begun = text.lstrip(" \n;" if self.calls else " \n")
        if begun.startswith("{") and not self._text_only:
            self._call = _Call(self.calls, self._names)
            return begun
        if not begun and not self._text_only:
            self._held = "" if self.calls else text  # what stands between calls is none of the text
            return ""
        self._text_only = True
        return self._give(text, len(text), parts)

    def _behind(self, text: str) -> str:
        """Without the closing tag, if there is one."""
        text = text.lstrip()
        if text != CLOSE and CLOSE.startswith(text):
            self._held = text
            return ""
        self._closing = False
        return text.removeprefix(CLOSE)

    def _give(self, text: str, end: int, parts: Parts) -> str:
        """Gives out the text up to there, but for white space at its end, which would be left out before a call."""
        end = len(text[:end].rstrip())
        parts.text += text[:end]
        self._held = text[end:]
        return ""


def new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None

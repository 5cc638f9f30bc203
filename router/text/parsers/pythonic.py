"""Calls as a list in Python's syntax, in place of text.

pythonic         [f(a=1, b=["x"]), g()]                                    (Llama 3.2)
llama4_pythonic  the same, or between <|python_start|> and <|python_end|>  (Llama 4)
"""

import ast
import json
import re

from pdserve.grammars import formats
from pdserve.grammars.formats import Format
from pdserve.grammars.limits import MAX_CHARS
from pdserve.router.text.parsers.arguments import arguments_of
from pdserve.router.text.parsers.output import parse_value
from pdserve.router.text.parsers.reader import Steps
from pdserve.router.text.parsers.tool_parser import Schema, ToolParser, text_without

CALL = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*\((.*)\)\s*", re.DOTALL)
# The elements of a literal: strings, numbers, names, punctuation, white space.
ELEMENT = re.compile(
    r"""(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<number>-?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)"""
    r"|(?P<name>[A-Za-z_]\w*)|(?P<mark>[\[\](){},:=])|\s+",
    re.DOTALL,
)
NAMES = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
MAX_PYTHON = 1 << 16  # characters of arguments that Python's own parser reads


class PythonicParser(ToolParser):
    """Calls in Python's syntax, each emitted once it is complete. The output is either text or calls."""

    BEGINS = ()
    TAGS = ("<|python_start|>", "<|python_end|>")
    FORMS = (("NAME(", ")"),)
    LIST = (
        formats.sequence(formats.maybe("<|python_start|>"), formats.literal("[")),
        formats.sequence(formats.literal("]"), formats.maybe("<|python_end|>")),
    )
    SEPARATOR = ", "
    TEXT = text_without(r"\[")

    @classmethod
    def _arguments_format(cls, schema: Schema | None) -> Format:
        if schema is None:
            one = _argument_format(formats.pattern("[A-Za-z_][A-Za-z0-9_]*"), {})
            return formats.optional(formats.sequence(one, formats.repeated(_after_comma(one))))
        arguments, beginnings = list[Format](), list[Format]()
        size = total = 0  # characters of the arguments, and of the beginnings that hold them
        for argument in reversed(arguments_of(schema)):
            if not (argument.name.isidentifier() and argument.name.isascii()) or argument.name in NAMES:
                raise ValueError(f"an argument with the name {argument.name!r}")
            one = _argument_format(formats.literal(argument.name), argument.schema)
            size += len(json.dumps(one))
            total = size if argument.is_required else total + size
            if total > MAX_CHARS:
                raise ValueError("so many optional arguments")
            beginning = formats.sequence(one, *arguments)
            beginnings = [beginning] if argument.is_required else [beginning, *beginnings]
            follower = _after_comma(one)
            arguments.insert(0, follower if argument.is_required else formats.optional(follower))
        return formats.either(*beginnings, *([] if schema.get("required") else [formats.literal("")]))

    def _parse(self) -> Steps[None]:
        self._begin_trial()
        yield from self._skip_space()
        if (yield from self._match(self._tag("<|python_start|>"))):
            yield from self._skip_space()
        if (yield from self._match("[")):
            yield from self._list()
        if self._consumed is not None:
            self._rewind()
        else:
            yield from self._skip_space()
            yield from self._match(self._tag("<|python_end|>"))
        yield from self._copy_until((), self._text)
        self._end_text()

    def _list(self) -> Steps[None]:
        """Parse the calls of a list, after its bracket; from the first that is none on, it is text."""
        while True:
            if self._consumed is None:
                self._begin_trial()
            text = yield from self._element()
            match = CALL.fullmatch(text)
            arguments = None
            if match and self._knows(match[1]):
                arguments = _parse_arguments(match[2]) or _python_arguments(match[2])
            if match is None or arguments is None:
                if self._index >= 0:
                    self._rewind()
                return
            self._begin_call(match[1])
            self._arguments(arguments)
            self._end_call()
            yield from self._skip_space()
            if (yield from self._match(",", "]")) != ",":
                return

    def _element(self) -> Steps[str]:
        """Consume and return the text before the next comma or bracket of the list; empty if the output ends earlier."""
        text, depth, quote, escaped = "", 0, "", False
        while (yield from self._has_text()):
            for i, character in enumerate(self._buffer):
                if quote:
                    quote = "" if character == quote and not escaped else quote
                    escaped = not escaped and character == "\\"
                elif character in "'\"":
                    quote = character
                elif character in "([{":
                    depth += 1
                elif depth == 0 and character in ",]":
                    return text + self._take(i)
                elif character in ")]}":
                    depth -= 1
                    if depth == 0 and character == ")":  # a call, whatever follows
                        return text + self._take(i + 1)
            text += self._take(len(self._buffer))
        return ""


def _argument_format(name: Format, schema: Schema) -> Format:
    value = formats.specified({"json": schema, "place": "python"})
    return formats.sequence(name, formats.literal("="), value)


def _after_comma(argument: Format) -> Format:
    return formats.sequence(formats.literal(", "), argument)


def parse_literal(text: str) -> object:
    """Return the value of a literal in Python's syntax, perhaps with JSON's names of constants; None if it is none."""
    found = parse_value(_parse_arguments(f"value={text}") or _python_arguments(f"value={text}") or "")
    return found["value"] if isinstance(found, dict) and found.keys() == {"value"} else None


def _parse_arguments(text: str) -> str | None:
    """Return the keyword arguments of a call as JSON, or None if they are not literals."""
    parts: list[str] = []
    brackets: list[str] = []
    position = 0
    while position < len(text):
        match = ELEMENT.match(text, position)
        if match is None:
            return None
        position = match.end()
        translated = _translate(match, brackets)
        if translated is None:
            return None
        parts.append(translated)
    arguments = parse_value("{" + re.sub(r",$", "", "".join(parts)) + "}")
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else None


def _python_arguments(text: str) -> str | None:
    """Return the same for arguments in forms that only Python has, such as long strings and a comma before a bracket."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body if len(text) <= MAX_PYTHON else None
        if not isinstance(call, ast.Call) or call.args or any(one.arg is None for one in call.keywords):
            return None
        arguments = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
        return json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode().decode()
    except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError):  # or half of a surrogate pair
        return None


def _translate(element: re.Match[str], brackets: list[str]) -> str | None:
    """Return an element in JSON's syntax; None if it has no place there. `brackets` are the open ones."""
    text, kind = element[0], element.lastgroup
    if kind is None:
        return ""
    if kind == "string":
        try:
            literal = ast.literal_eval(re.sub(r"(?<!\\)[\n\r]", lambda end: repr(end[0])[1:-1], text))
            return json.dumps(str(literal).encode().decode(), ensure_ascii=False)
        except (SyntaxError, ValueError):  # or half of a surrogate pair
            return None
    if kind == "name":
        return json.dumps(text) if not brackets and text not in NAMES else NAMES.get(text)
    if kind == "number":
        return text + "0" if text.endswith(".") else text
    if text == "=":
        return ":" if not brackets else None
    if text in "([{":
        brackets.append(text)
    elif text in ")]}" and (not brackets or brackets.pop() + text not in ("()", "[]", "{}")):
        return None
    return text.translate(str.maketrans("()", "[]"))

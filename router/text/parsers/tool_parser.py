"""Base of the parsers of tool calls: finds the tags with which calls begin, and tells calls from text that looks like one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pdserve.grammars import formats
from pdserve.grammars.formats import Format
from pdserve.router.text.parsers.output import ToolCallDelta, new_call_id
from pdserve.router.text.parsers.reader import Reader, Steps

SPACE = r" \t-\r\x1c-\x1f\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
NOTHING = formats.literal("")
Schema = Mapping[str, Any]
Functions = Mapping[str, Schema | None]  # schemas of the arguments by name; None: any arguments


@dataclass(frozen=True)
class Tools:
    """The functions that the model may call.

    Attributes:
        schemas: the JSON schema of the parameters by the name of the function.
        single_call: drop calls after the first.
    """

    schemas: Mapping[str, Schema]
    single_call: bool = False


class ToolParser(Reader):
    """Splits text into text and calls.

    The name of a call is emitted as soon as it is known, and its arguments as they are generated, in the model's own spelling
    where the format has JSON. What looks like a call but names no tool of the request, or is malformed before its arguments,
    is text. White space around calls is dropped.

    Attributes:
        BEGINS: tags with which a call, or a list of them, begins.
        SILENT: tags around calls that say nothing, and are dropped.
        FORMS: what precedes and follows the arguments of a call of the function NAME, INDEX being any number; several if it
            may be written in several ways. Empty: no grammar can hold the arguments to a JSON schema.
        LIST: formats of what precedes and follows calls that are not among text, with SEPARATOR between them.
        TEXT: regular expression of text that is not taken for calls, where BEGINS is empty.
        SAYS_REASONING: the format of outputs includes reasoning, however it begins.
        num_calls: complete calls so far.
    """

    BEGINS: ClassVar[tuple[str, ...]]
    SILENT: ClassVar[tuple[str, ...]] = ()
    FORMS: ClassVar[tuple[tuple[str, str], ...]] = ()
    LIST: ClassVar[tuple[Format, Format]] = (NOTHING, NOTHING)
    SEPARATOR: ClassVar[str] = "\n"
    TEXT: ClassVar[str] = ""
    SAYS_REASONING: ClassVar[bool] = False

    def __init__(self, tools: Tools, marks: Mapping[str, str]) -> None:
        super().__init__(marks)
        self.num_calls = 0
        self._tools = tools
        self._index = -1  # of the last call
        self._space = ""  # white space that is dropped if a call follows
        self._follows_call = False

    def _parse(self) -> Steps[None]:
        begins = self._tags(*self.BEGINS)
        tags = [*begins, *self._tags(*self.SILENT)]
        while tag := (yield from self._copy_until(tags, self._text)):
            if tag not in begins:
                continue
            yield from self._try_call(tag)
        self._end_text()

    def _try_call(self, tag: str) -> Steps[bool]:
        """Parse what follows a tag; if it is no call, the tag is text, and what follows is parsed as such."""
        self._begin_trial()
        yield from self._calls(tag)
        if self._consumed is None:
            return True
        self._rewind()
        self._text(tag)
        return False

    def _calls(self, tag: str) -> Steps[None]:
        """Parse the calls after a tag. Returns without `_begin_call` if there is none."""
        yield from ()

    # ---- what grammars allow ----------------------------------------------------------------------------------------

    @classmethod
    def output_format(cls, functions: Functions, *, single: bool, text: Format | None) -> Format:
        """Return the format of outputs with calls of these functions, of one at most with `single`.

        Args:
            text: the format of an output without calls; None: any text, with calls among it if the parser finds them there.

        Raises:
            ValueError: calls of this format cannot be held to one of the schemas.
        """
        calls = cls.call_formats(functions)
        if text is None and cls.BEGINS:
            return formats.among_text(calls, cls.BEGINS, single=single)
        begin, end = cls.LIST
        listed = formats.listed(calls, cls.SEPARATOR, single=single)
        return formats.either(formats.sequence(begin, listed, end), text or formats.pattern(cls.TEXT))

    @classmethod
    def call_formats(cls, functions: Functions) -> list[Format]:
        """Return the formats of calls, one for each function and form. Raises `ValueError`, as `output_format`."""
        return [_call(*form, name, cls._arguments_format(functions[name])) for name in functions for form in cls.FORMS]

    @classmethod
    def forced_format(cls, functions: Functions) -> Format:
        """Return the format of one call, of any of these functions, in the first of FORMS. Raises `ValueError` likewise."""
        form, schemas = cls.FORMS[0], functions.items()
        return formats.either(*(_call(*form, name, cls._arguments_format(schema)) for name, schema in schemas))

    @classmethod
    def _arguments_format(cls, schema: Schema | None) -> Format:
        return formats.specified({"json": {"type": "object"} if schema is None else schema})

    # ---- what is found --------------------------------------------------------------------------------------------

    def _text(self, text: str) -> None:
        if self._follows_call:
            text = text.lstrip()
            self._follows_call = not text
        text = self._space + text
        body = text.rstrip()
        self._output.text += body
        self._space = text[len(body) :]

    def _end_text(self) -> None:
        self._output.text += self._space
        self._space = ""

    def _knows(self, name: object) -> bool:
        return isinstance(name, str) and name in self._tools.schemas

    def _begin_call(self, name: str, call_id: str = "") -> None:
        self._commit()
        self._space, self._follows_call = "", True
        self._index += 1
        self._emit(ToolCallDelta(self._index, "", name, call_id or new_call_id()))

    def _arguments(self, text: str) -> None:
        if text:
            self._emit(ToolCallDelta(self._index, text))

    def _end_call(self) -> None:
        self.num_calls += not (self._tools.single_call and self._index)

    def _emit(self, delta: ToolCallDelta) -> None:
        if not (self._tools.single_call and delta.index):
            self._output.calls.append(delta)

    def _call_with_json(self, name: str, call_id: str = "") -> Steps[bool]:
        """Parse the arguments of a call, a JSON object; return False if the text goes on otherwise, or ends."""
        yield from self._skip_space()
        if not (self._knows(name) and (yield from self._has_text()) and self._buffer[0] == "{"):
            return False
        self._begin_call(name, call_id)
        json_end = JsonEnd()
        while (yield from self._has_text()):
            end = json_end.find(self._buffer)
            self._arguments(self._take(end or len(self._buffer)))
            if end:
                self._end_call()
                return True
        return False


def _call(begin: str, end: str, name: str, arguments: Format) -> Format:
    begin, index, rest = begin.replace("NAME", name).partition("INDEX")
    number = [formats.pattern("[0-9]+"), formats.literal(rest)] if index else []
    return formats.tag(begin, formats.sequence(*number, arguments) if number else arguments, end)


def text_without(begin: str) -> str:
    """Return the pattern of text that begins neither with this character or `<|`, nor with white space before them."""
    return rf"(([^{begin}<{SPACE}]|<[^|])(?s:.*))?"


class JsonEnd:
    """Finds the end of a JSON object or list that arrives in pieces; what is between its brackets is not checked."""

    def __init__(self) -> None:
        self.depth = 0
        self._in_string = self._escaped = False

    def find(self, text: str) -> int:
        """Return the length of the text up to the end; 0 if it is not in the text."""
        for i, character in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = not self._escaped and character == "\\"
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    return i + 1
        return 0

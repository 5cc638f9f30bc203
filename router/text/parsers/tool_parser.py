"""Base of the parsers of tool calls: finds the tags with which calls begin, and tells calls from text that looks like one."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pdserve.grammars import formats
from pdserve.grammars.formats import Format
from pdserve.router.text.parsers.json_object import JsonObject
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
    where the format has valid JSON. They are JSON unless the text ends inside of them. A tag of the format ends a call whose
    own end is missing. What looks like a call but names no tool of the request, or is malformed before its arguments, is
    text. White space around calls is dropped.

    Attributes:
        BEGINS: tags with which a call, or a list of them, begins.
        SILENT: tags around calls that say nothing, and are dropped.
        FORMS: what precedes and follows the arguments of a call of the function NAME, INDEX being any number; several if it
            may be written in several ways. Empty: no grammar can hold the arguments to a JSON schema.
        LIST: formats of what precedes and follows calls that are not among text, with SEPARATOR between them.
        ENDS: strings beside TAGS that end a call's JSON.
        ENDS_STRINGS: those of TAGS that are special tokens end a call's JSON even inside of a string.
        TEXT: regular expression of text that is not taken for calls, where BEGINS is empty.
        SAYS_REASONING: the format of outputs includes reasoning, however it begins.
        num_calls: complete calls so far.
    """

    BEGINS: ClassVar[tuple[str, ...]]
    SILENT: ClassVar[tuple[str, ...]] = ()
    FORMS: ClassVar[tuple[tuple[str, str], ...]] = ()
    LIST: ClassVar[tuple[Format, Format]] = (NOTHING, NOTHING)
    SEPARATOR: ClassVar[str] = "\n"
    ENDS: ClassVar[tuple[str, ...]] = ()
    ENDS_STRINGS: ClassVar[bool] = False
    TEXT: ClassVar[str] = ""
    SAYS_REASONING: ClassVar[bool] = False

    def __init__(self, tools: Tools, marks: Mapping[str, str]) -> None:
        super().__init__(marks)
        self.num_calls = 0
        self._tools = tools
        self._index = -1  # of the last call
        self._space: list[str] = []  # white space that is dropped if a call follows
        self._follows_call = False

    def _parse(self) -> Steps[None]:
        begins = self._tags(*self.BEGINS)
        tags = [*begins, *self._tags(*self.SILENT)]
        while tag := (yield from self._copy_until(tags, self._text)):
            if tag not in begins:
                continue
            if (yield from self._try_call(tag)):
                yield from self._skip_tags(*self._tags(*self.SILENT))
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
        if body := text.rstrip():
            self._end_text()
            self._output.text += body
        self._space.append(text[len(body) :])

    def _end_text(self) -> None:
        self._output.text += "".join(self._space)
        self._space.clear()

    def _knows(self, name: object) -> bool:
        return isinstance(name, str) and name in self._tools.schemas

    def _begin_call(self, name: str, call_id: str = "") -> None:
        self._commit()
        self._space.clear()
        self._follows_call = True
        self._index += 1
        self._emit(ToolCallDelta(self._index, "", name, call_id or new_call_id()))

    def _arguments(self, text: str) -> None:
        if text:
            self._emit(ToolCallDelta(self._index, text))

    def _end_call(self) -> None:
        self.num_calls += not (self._tools.single_call and self._index)

    def _emit(self, delta: ToolCallDelta) -> None:
        calls, delta = self._output.calls, replace(delta, at=len(self._output.text))
        if self._tools.single_call and delta.index:
            return
        if calls and not (calls[-1].name or delta.name):
            delta = replace(delta, arguments=calls.pop().arguments + delta.arguments)
        calls.append(delta)

    def _call_with_json(self, name: str, call_id: str = "") -> Steps[bool]:
        """Parse the arguments of a call, a JSON object; return False if the text goes on otherwise, or ends."""
        yield from self._skip_space()
        if not (self._knows(name) and (yield from self._has_text())):
            return False
        if self._buffer[0] != "{":
            return (yield from self._call_without_arguments(name, call_id))
        self._begin_call(name, call_id)
        return (yield from self._copy_arguments(self._json(), 0))

    def _call_without_arguments(self, name: str, call_id: str) -> Steps[bool]:
        """Emit a call if the text goes on with a tag of the format, which is left there."""
        tag = yield from self._match(*self._tags(*self.TAGS))
        if tag:
            self._unread(tag)
            self._begin_call(name, call_id)
            self._arguments("{}")
            self._end_call()
        return bool(tag)

    def _json(self) -> JsonObject:
        tags = self._tags(*self.TAGS)
        hard = [tag for tag in tags if tag not in self.TAGS] if self.ENDS_STRINGS else []
        return JsonObject((*tags, *self.ENDS), hard)

    def _read(self, json: JsonObject) -> Steps[str | None]:
        """Consume a JSON object up to its next bracket, or a piece of it, and return that; None at the end of the text."""
        while (yield from self._has_text()):
            length, text = json.read(self._buffer, is_last=self._has_ended)
            self._take(length)
            if length or json.is_over:
                return text
            yield
        return None

    def _copy_arguments(self, json: JsonObject, depth: int) -> Steps[bool]:
        """Emit a JSON object until a given number of brackets is open; return False if the text ends before."""
        while (text := (yield from self._read(json))) is not None:
            self._arguments(text)
            if json.is_over or json.depth <= depth:
                self._arguments(json.close(depth))
                if json.is_whole or not json.is_over:
                    self._end_call()
                return True
        return False

    def _skip_tags(self, *tags: str) -> Steps[None]:
        """Skip white space and tags after a call."""
        while (yield from self._skip_space()) or (yield from self._match(*tags)):
            pass
        self._drop_part(*tags)

    def _drop_part(self, *tags: str) -> bool:
        """Drop the rest of the text if it is the beginning of a tag, and return whether it is."""
        is_part = self._has_ended and any(tag.startswith(self._buffer) for tag in tags)
        self._take(len(self._buffer) if is_part else 0)
        return is_part

    def _skip_end(self, tag: str) -> Steps[None]:
        """Skip the tag that ends a call, and brackets too many before it."""
        self._begin_trial()
        while (yield from self._skip_space()) or (yield from self._match("}", "]")):
            pass
        if (yield from self._match(tag)) or self._drop_part(tag):
            self._commit()
        else:
            self._rewind()


def _call(begin: str, end: str, name: str, arguments: Format) -> Format:
    begin, index, rest = begin.replace("NAME", name).partition("INDEX")
    number = [formats.pattern("[0-9]+"), formats.literal(rest)] if index else []
    return formats.tag(begin, formats.sequence(*number, arguments) if number else arguments, end)


def text_without(begin: str) -> str:
    """Return the pattern of text that begins neither with this character or `<|`, nor with white space before them."""
    return rf"(([^{begin}<{SPACE}]|<[^|])(?s:.*))?"

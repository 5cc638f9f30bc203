"""Calls with a tag per argument, whose values are JSON or, where the schema says so, plain strings.

qwen3_coder  <tool_call>⏎<function=NAME>⏎<parameter=KEY>⏎VALUE⏎</parameter>⏎…</function>⏎</tool_call>
glm45        <tool_call>NAME⏎<arg_key>KEY</arg_key>⏎<arg_value>VALUE</arg_value>⏎…</tool_call>
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

from pdserve.grammars import formats
from pdserve.grammars.formats import Format
from pdserve.router.text.parsers.arguments import ANNOTATIONS, DEFINITIONS, allows, arguments_of, keywords_in, may_match
from pdserve.router.text.parsers.output import parse_value
from pdserve.router.text.parsers.pythonic import MAX_PYTHON, parse_literal
from pdserve.router.text.parsers.reader import Steps
from pdserve.router.text.parsers.tool_parser import Schema, ToolParser

KEY = re.compile(r"[^<>\s]([^<>\n]{0,100}[^<>\s])?")
LIMITS = {"pattern", "format", "minLength", "maxLength"}  # keywords of strings
PYTHON_VALUES: dict[str, object] = {"True": True, "False": False, "None": None}


class XmlCallParser(ToolParser):
    """Base: emits arguments as JSON, strings as they arrive and other values once they are complete.

    Attributes:
        LEAD: what precedes the arguments, KEY: what surrounds a key, VALUE_END: what follows a value.
        ENDS_OF_VALUE: what may not be in a value, because the parser ends it there.
    """

    LEAD: ClassVar[Format]
    KEY: ClassVar[tuple[Format, Format]]
    VALUE_END: ClassVar[Format]
    ENDS_OF_VALUE: ClassVar[tuple[str, ...]]

    @classmethod
    def _arguments_format(cls, schema: Schema | None) -> Format:
        lead = cls.LEAD
        if schema is None:
            anything = cls._argument_format(formats.pattern(r"[^<>\s]{1,64}"), formats.any_text(*cls.ENDS_OF_VALUE))
            return formats.sequence(lead, formats.repeated(anything))
        arguments = []
        for one in arguments_of(schema):
            if not KEY.fullmatch(one.name):
                raise ValueError(f"an argument with the name {one.name!r}")
            argument = cls._argument_format(formats.literal(one.name), _value_format(one.schema, cls.ENDS_OF_VALUE))
            arguments.append(argument if one.is_required else formats.optional(argument))
        return formats.sequence(lead, *arguments)

    @classmethod
    def _argument_format(cls, key: Format, value: Format) -> Format:
        begin, end = cls.KEY
        return formats.sequence(begin, key, end, value, cls.VALUE_END)

    def _call_with_values(
        self, name: str, key: tuple[str, ...], value_begin: str, value_ends: tuple[str, ...], ends: tuple[str, ...]
    ) -> Steps[None]:
        """Parse the arguments of a call, of which there may be none. Of one that is given twice the first value counts.

        Args:
            key: the tag before a key, and those after it.
            value_begin: what is between a key and its value, apart from white space; empty: at most a line break.
            value_ends: the tags after a value, and those before which its end may be missing; with the line breaks before
                them that are no part of a value.
            ends: the tag after the last value, and others that end the call if that is missing.
        """
        if not self._knows(name):
            return
        yield from self._skip_space()
        tag = yield from self._match(key[0], *ends)
        if not tag:
            return
        self._begin_call(name)
        known = set[str]()
        while tag == key[0]:
            self._begin_trial()
            argument, tag = yield from self._take_until(*key[1:])
            if not tag:
                self._rewind()
                break
            self._commit()
            argument = argument.strip()
            if value_begin:
                yield from self._skip_space()
                if tag != value_begin and not (yield from self._match(value_begin)):
                    self._drop_part(value_begin)
            else:
                yield from self._match("\n")
            emit = self._arguments if argument not in known else _drop
            emit(f"{', ' if known else '{'}{_dump(argument)}: ")
            known.add(argument)
            tag = yield from self._value(name, argument, value_ends, emit)
            if not tag:
                return
            tag = tag.removeprefix("\n")
            if tag not in (key[0], *ends):
                yield from self._skip_space()
                tag = yield from self._match(key[0], *ends)
        if not tag and self._has_ended:
            self._take(len(self._buffer))  # a part of a tag
            return
        if tag in self._tags(*self.BEGINS):
            self._unread(tag)
        self._arguments("}" if known else "{}")
        self._end_call()

    def _value(self, name: str, argument: str, ends: tuple[str, ...], emit: Callable[[str], None]) -> Steps[str]:
        """Emit a value; consume and return the tag that ends it, which is empty at the end of the text."""
        root = self._tools.schemas[name]
        properties = root.get("properties")
        schema = properties.get(argument) if isinstance(properties, Mapping) else None
        if _types(schema) == {"string"}:
            emit('"')
            tag = yield from self._copy_until(ends, lambda text: emit(_dump(text)[1:-1]), drops_part=True)
            emit('"' if tag else "")
            return tag
        text, tag = yield from self._take_until(*ends, most=None)
        if tag:
            emit(_dump(_parse_value(text, schema, root)))
        return tag


class Qwen3CoderParser(XmlCallParser):
    """Calls of Qwen3-Coder."""

    BEGINS = ("<tool_call>", "<function=")
    FORMS = (
        ("<tool_call>\n<function=NAME>", "</function>\n</tool_call>"),
        ("<function=NAME>", "</function>"),
    )
    LEAD, KEY = formats.literal("\n"), (formats.literal("<parameter="), formats.literal(">\n"))
    VALUE_END = formats.literal("\n</parameter>\n")
    ENDS_OF_VALUE = ("</parameter>", "<parameter=", "</function>", "\n</tool_call>", "\n<tool_call>", "\n<function=")
    TAGS = ("<tool_call>", "</tool_call>")

    def _calls(self, tag: str) -> Steps[None]:
        if tag != "<function=":
            yield from self._skip_space()
            if not (yield from self._match("<function=")):
                return
        name, _ = yield from self._take_until(">", "\n")
        ends = ("</function>", *self._tags("</tool_call>", "<tool_call>"), "<function=")
        value_ends = (*_framed("</parameter>", "<parameter=", ends[0]), *(f"\n{tag}" for tag in ends[1:]))
        yield from self._call_with_values(name.strip(), ("<parameter=", ">", "\n"), "", value_ends, ends)
        if self._consumed is None:
            yield from self._skip_tags(self._tag("</tool_call>"))


class Glm45Parser(XmlCallParser):
    """Calls of GLM 4.5."""

    BEGINS = ("<tool_call>",)
    FORMS = (("<tool_call>NAME", "</tool_call>"),)
    LEAD = formats.maybe("\n")
    KEY_END = formats.sequence(formats.literal("</arg_key>"), LEAD, formats.literal("<arg_value>"))
    KEY = (formats.literal("<arg_key>"), KEY_END)
    VALUE_END = formats.sequence(formats.literal("</arg_value>"), LEAD)
    ENDS_OF_VALUE = ("</arg_value>", "<arg_key>", "</tool_call>", "<tool_call>")
    TAGS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def _calls(self, tag: str) -> Steps[None]:
        begin, end, key, key_end, value, value_end = self._tags(*self.TAGS)
        name, tag = yield from self._take_until(key, end)
        if tag:
            self._unread(tag)

        value_ends = (value_end, *_framed(key, end, begin))
        yield from self._call_with_values(name.strip(), (key, key_end, value), value, value_ends, (end, begin))


def _value_format(schema: Schema, ends: tuple[str, ...]) -> Format:
    """Return the format of an argument's value, in which none of the tags `ends` may be. Raises `ValueError`."""
    text = json.dumps(schema, ensure_ascii=False)
    if found := [end for end in ends if end.lstrip("\n") in text]:
        raise ValueError(f"a value with {found[0].lstrip()!r}")
    for key, value in keywords_in(schema):
        is_map = key == "patternProperties" and isinstance(value, dict)
        patterns = [value] if key == "pattern" else value if is_map else ()
        if any(isinstance(pattern, str) and may_match(pattern, "<") for pattern in patterns):
            raise ValueError("a pattern that may match '<'")
    if _types(schema) != {"string"}:
        return formats.specified({"json": schema, "place": "xml"})
    if others := schema.keys() - ANNOTATIONS - LIMITS - {"type", "enum", "const", *DEFINITIONS}:
        raise ValueError(f"{min(others)} beside the type string")
    if "const" in schema or "enum" in schema:
        choices = [schema["const"]] if "const" in schema else schema["enum"]
        texts = [choice for choice in choices if isinstance(choice, str)] if isinstance(choices, list) else []
        if not texts:
            raise ValueError("an argument of the type string without a string among its values")
        return formats.either(*map(formats.literal, texts))
    return formats.specified({"text": schema}) if LIMITS & schema.keys() else formats.any_text(*ends)


def _types(schema: object) -> set[str]:
    """Return the types of a JSON schema, as far as it lists them; of none, a string."""
    if not isinstance(schema, Mapping):
        return {"string"}
    kind, choices = schema.get("type", "any"), schema.get("enum")
    if isinstance(choices, list) and all(isinstance(value, str) for value in choices):
        return {"string"}
    return set(map(str, kind if isinstance(kind, list) else [kind]))


def _parse_value(text: str, schema: object, root: Schema) -> object:
    """Return the value of a text: what it is in JSON or in Python, where the schema allows that, or else the text."""
    word = text.strip()
    value = PYTHON_VALUES[word] if word in PYTHON_VALUES else parse_value(word)
    if value is None and word[:1] in ("{", "[") and len(word) <= MAX_PYTHON and not allows(schema, text, root):
        value = parse_literal(word)  # such as {'a': True}, or JSON with a line break in a string
    if value is None and word not in ("null", "None"):
        return text
    return value if allows(schema, value, root) or not allows(schema, text, root) else text


def _framed(*tags: str) -> Iterator[str]:
    """Yield the tags with a line break before them and without."""
    for tag in tags:
        yield from (f"\n{tag}", tag)


def _drop(_: str) -> None:
    """Take what is not emitted."""


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)

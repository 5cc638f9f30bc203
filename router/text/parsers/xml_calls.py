"""Calls with a tag per argument, whose values are JSON or, where the schema says so, plain strings.

qwen3_coder  <tool_call>⏎<function=NAME>⏎<parameter=KEY>⏎VALUE⏎</parameter>⏎…</function>⏎</tool_call>
glm45        <tool_call>NAME⏎<arg_key>KEY</arg_key>⏎<arg_value>VALUE</arg_value>⏎…</tool_call>
"""

import json
import re
from collections.abc import Mapping
from typing import ClassVar

from pdserve.grammars import formats
from pdserve.grammars.formats import Format
from pdserve.router.text.parsers.arguments import ANNOTATIONS, DEFINITIONS, arguments_of, keywords_in, may_match
from pdserve.router.text.parsers.output import parse_json
from pdserve.router.text.parsers.reader import Steps
from pdserve.router.text.parsers.tool_parser import Schema, ToolParser

KEY = re.compile(r"[^<>\s]([^<>\n]{0,100}[^<>\s])?")
LIMITS = {"pattern", "format", "minLength", "maxLength"}  # keywords of strings
PYTHON_VALUES: dict[str, object] = {"True": True, "False": False, "None": None}


class XmlCallParser(ToolParser):
    """Base: emits arguments as JSON, strings as they arrive and other values once they are complete.

    Attributes:
        LEAD: what precedes the arguments, KEY: what surrounds a key, VALUE_END: what follows a value.
        END: the tag after a value, which may not be in it.
    """

    LEAD: ClassVar[Format]
    KEY: ClassVar[tuple[Format, Format]]
    VALUE_END: ClassVar[Format]
    END: ClassVar[str]

    @classmethod
    def _arguments_format(cls, schema: Schema | None) -> Format:
        lead = cls.LEAD
        if schema is None:
            anything = cls._argument_format(formats.pattern(r"[^<>\s]{1,64}"), formats.any_text(cls.END))
            return formats.sequence(lead, formats.repeated(anything))
        arguments = []
        for one in arguments_of(schema):
            if not KEY.fullmatch(one.name):
                raise ValueError(f"an argument with the name {one.name!r}")
            argument = cls._argument_format(formats.literal(one.name), _value_format(one.schema, cls.END))
            arguments.append(argument if one.is_required else formats.optional(argument))
        return formats.sequence(lead, *arguments)

    @classmethod
    def _argument_format(cls, key: Format, value: Format) -> Format:
        begin, end = cls.KEY
        return formats.sequence(begin, key, end, value, cls.VALUE_END)

    def _call_with_values(
        self, name: str, key: tuple[str, str], value_begin: str, value_ends: tuple[str, ...], end: str
    ) -> Steps[None]:
        """Parse the arguments of a call, of which there may be none.

        Args:
            key: the tags around a key.
            value_begin: what is between a key and its value, apart from white space; empty: at most a line break.
            value_ends: the tags after a value, of which the first ends with the others.
            end: the tag after the last value.
        """
        if not self._knows(name):
            return
        yield from self._skip_space()
        tag = yield from self._match(key[0], end)
        if not tag:
            return
        self._begin_call(name)
        properties = self._tools.schemas[name].get("properties")
        separator = "{"
        while tag == key[0]:
            self._begin_trial()
            argument, tag = yield from self._take_until(key[1])
            if not tag:
                self._rewind()
                break
            self._commit()
            if value_begin:
                yield from self._skip_space()
                yield from self._match(value_begin)
            else:
                yield from self._match("\n")
            self._arguments(f"{separator}{_dump(argument.strip())}: ")
            schema = properties.get(argument.strip()) if isinstance(properties, Mapping) else None
            if not (yield from self._value(schema, value_ends)):
                return
            separator = ", "
            yield from self._skip_space()
            tag = yield from self._match(key[0], end)
        if tag or not self._has_ended:
            self._arguments("{}" if separator == "{" else "}")
            self._end_call()
        else:
            self._take(len(self._buffer))  # a part of a tag

    def _value(self, schema: object, ends: tuple[str, ...]) -> Steps[bool]:
        """Emit a value; return False if the text ends before it does."""
        types = _types(schema)
        if types == {"string"}:
            self._arguments('"')
            tag = yield from self._copy_until(ends, lambda text: self._arguments(_dump(text)[1:-1]))
            self._arguments('"' if tag else "")
            return bool(tag)
        text, tag = yield from self._take_until(*ends, most=None)
        if tag:
            self._arguments(_dump(_parse_value(text.strip())))
        return bool(tag)


class Qwen3CoderParser(XmlCallParser):
    """Calls of Qwen3-Coder."""

    BEGINS = ("<tool_call>", "<function=")
    FORMS = (
        ("<tool_call>\n<function=NAME>", "</function>\n</tool_call>"),
        ("<function=NAME>", "</function>"),
    )
    LEAD, KEY = formats.literal("\n"), (formats.literal("<parameter="), formats.literal(">\n"))
    VALUE_END, END = formats.literal("\n</parameter>\n"), "</parameter>"
    TAGS = ("<tool_call>", "</tool_call>")

    def _calls(self, tag: str) -> Steps[None]:
        if tag != "<function=":
            yield from self._skip_space()
            if not (yield from self._match("<function=")):
                return
        name, _ = yield from self._take_until(">")
        ends = ("\n</parameter>", "</parameter>")
        yield from self._call_with_values(name.strip(), ("<parameter=", ">"), "", ends, "</function>")
        if self._consumed is None:
            yield from self._skip_space()
            yield from self._match(self._tag("</tool_call>"))


class Glm45Parser(XmlCallParser):
    """Calls of GLM 4.5."""

    BEGINS = ("<tool_call>",)
    FORMS = (("<tool_call>NAME", "</tool_call>"),)
    END, LEAD = "</arg_value>", formats.maybe("\n")
    KEY_END = formats.sequence(formats.literal("</arg_key>"), LEAD, formats.literal("<arg_value>"))
    KEY = (formats.literal("<arg_key>"), KEY_END)
    VALUE_END = formats.sequence(formats.literal(END), LEAD)
    TAGS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def _calls(self, tag: str) -> Steps[None]:
        end, key, key_end, value, value_end = self._tags(*self.TAGS[1:])
        name, tag = yield from self._take_until(key, end)
        if tag:
            self._unread(tag)
        yield from self._call_with_values(name.strip(), (key, key_end), value, (value_end,), end)


def _value_format(schema: Schema, end: str) -> Format:
    """Return the format of an argument's value, in which the tag `end` must not be. Raises `ValueError`."""
    if end in json.dumps(schema, ensure_ascii=False):
        raise ValueError(f"a value with {end!r}")
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
    return formats.specified({"text": schema}) if LIMITS & schema.keys() else formats.any_text(end)


def _types(schema: object) -> set[str]:
    """Return the types of a JSON schema, as far as it lists them; of none, a string."""
    if not isinstance(schema, Mapping):
        return {"string"}
    kind, choices = schema.get("type", "any"), schema.get("enum")
    if isinstance(choices, list) and all(isinstance(value, str) for value in choices):
        return {"string"}
    return set(map(str, kind if isinstance(kind, list) else [kind]))


def _parse_value(text: str) -> object:
    """Return the value of a text that is not known to be a string."""
    if text in PYTHON_VALUES:
        return PYTHON_VALUES[text]
    value = parse_json(text)
    return text if value is None and text != "null" else value


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)

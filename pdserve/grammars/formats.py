"""Formats of outputs: xgrammar's structural tags as plain data, whose leaves may be specifications (`specification.py`)."""

from collections.abc import Iterator
from typing import Any

Format = dict[str, Any]


def literal(text: str) -> Format:
    return {"type": "const_string", "value": text}


def pattern(regex: str) -> Format:
    return {"type": "regex", "pattern": regex}


def any_text(*excludes: str) -> Format:
    """Return the format of any text, even none, without these strings."""
    return {"type": "any_text", "excludes": list(excludes)}


def specified(spec: dict[str, Any]) -> Format:
    """Return the format of what a specification allows."""
    return {"type": "specified", "spec": spec}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Format) -> Format:
    return {"type": "or", "elements": list(elements)} if len(elements) > 1 else elements[0]


def optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def repeated(content: Format) -> Format:
    """Return the format of any number of contents, even none."""
    return {"type": "star", "content": content}


def tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def among_text(tags: list[Format], triggers: tuple[str, ...], *, single: bool) -> Format:
    """Return the format of tags among any text; they begin where one of the triggers ends. `single`: at most one."""
    return {"type": "triggered_tags", "tags": tags, "triggers": list(triggers), "stop_after_first": single}


def listed(tags: list[Format], separator: str, *, single: bool) -> Format:
    """Return the format of a list of at least one tag; `single`: of one."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": single,
    }


def specifications(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the specifications in a format."""
    if isinstance(value, dict) and value.get("type") == "specified":
        yield value["spec"]
    elif isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from specifications(child)

"""Formats of outputs as plain data: texts, regular expressions, and specifications (`specification.py`) in sequences."""

from collections.abc import Iterator
from typing import Any

Format = dict[str, Any]


def literal(text: str) -> Format:
    """Return the format of a text. Special tokens in it are meant as tokens."""
    return {"type": "literal", "text": text}


def pattern(regex: str) -> Format:
    """Return the format of what a regular expression in Rust's syntax matches as a whole."""
    return {"type": "pattern", "regex": regex}


def any_text(*excludes: str) -> Format:
    """Return the format of any text, even none, without these strings."""
    return {"type": "text", "excludes": list(excludes)}


def specified(spec: dict[str, Any]) -> Format:
    """Return the format of what a specification allows."""
    return {"type": "specified", "spec": spec}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Format) -> Format:
    return {"type": "either", "elements": list(elements)} if len(elements) > 1 else elements[0]


def maybe(text: str) -> Format:
    """Return the format of a text or none, of which what surrounds it says enough to tell."""
    return either(literal(text), literal(""))


def optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def repeated(content: Format) -> Format:
    """Return the format of any number of contents, even none."""
    return {"type": "repeated", "content": content}


def tag(begin: str, content: Format, end: str) -> Format:
    return sequence(literal(begin), content, literal(end))


def among_text(tags: list[Format], triggers: tuple[str, ...], *, single: bool) -> Format:
    """Return the format of tags among any text; each begins with a trigger, and none is text.

    `single`: at most one, with which the output ends.
    """
    calls = []
    for trigger in triggers:
        rests = [rest for one in tags if (rest := _after(trigger, one))]
        calls.append(sequence(any_text(*triggers), literal(trigger), either(*rests)))
    text = any_text(*triggers)
    return either(*calls, text) if single else sequence(repeated(either(*calls)), text)


def listed(tags: list[Format], separator: str, *, single: bool) -> Format:
    """Return the format of a list of at least one tag; `single`: of one."""
    one = either(*tags)
    return one if single else sequence(one, repeated(sequence(literal(separator), one)))


def specifications(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the specifications in a format."""
    if isinstance(value, dict) and value.get("type") == "specified":
        yield value["spec"]
    elif isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from specifications(child)


def _after(trigger: str, one: Format) -> Format | None:
    """Return what follows the trigger with which a tag begins; None if it begins otherwise."""
    begin, *others = one["elements"]
    if not begin["text"].startswith(trigger):
        return None
    return sequence(literal(begin["text"].removeprefix(trigger)), *others)

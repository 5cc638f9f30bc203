"""Grammar specifications, and the grammar of one in Lark's syntax with the extensions of llguidance.

A specification is JSON with one of

    json     a JSON schema. `place` may be `python`, where literals may be Python's, or `xml`, where no string has a `<`
             unless the schema lists it. `at` is the place in it of the schema that is meant, if not all of it
    text     the JSON schema of a string that is written without quotes, and without `<`
    regex    a regular expression
    choice   a list of strings
    grammar  EBNF
    format   a format of `formats.py`

llguidance cuts an output into lexemes, the longest that its terminals match, before it parses them. So a format whose parts
are regular is one terminal: with a terminal for each part, one could take what the next begins with.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from pdserve.grammars import regexes
from pdserve.grammars.ebnf_rules import lark_rules
from pdserve.grammars.formats import Format, specified
from pdserve.grammars.json_rules import JsonRules
from pdserve.grammars.schema import prepared
from pdserve.grammars.schema_keywords import text_patterns

# Any token that continues the text is allowed, not only those with which the tokenizer would write it.
OPTIONS = '%llguidance {"no_forcing": true}'
ANYTHING = "/(?s:.*)/"
NOTHING = '""'


def lark_grammar(spec: dict[str, Any], special: Mapping[str, int | None]) -> str:
    """Return the grammar of a specification.

    Args:
        special: ids of the special tokens by their strings; None for those that end the output.

    Raises:
        ValueError: it is invalid, or the grammar cannot hold it.
    """
    writer = _Writer(special)
    form = spec.get("format", specified(spec))
    start = writer.expression(form)
    return "\n".join([OPTIONS, f"start: {start}", *writer.lines])


class _Writer:
    """Collects the rules and the terminals of a grammar."""

    def __init__(self, special: Mapping[str, int | None]) -> None:
        self._special = special
        self._number = itertools.count().__next__
        self.lines: list[str] = []

    def expression(self, form: Format) -> str:
        """Return the expression of a format in a rule."""
        if (terminal := self._terminal(form)) is not None:
            return self._name("T", terminal)
        match form["type"]:
            case "token":
                return f"<[{form['id']}]>"
            case "specified":
                return self._specified(form["spec"])
            case "either":
                return "(" + " | ".join(map(self.expression, form["elements"])) + ")"
            case "optional":
                return f"({self.expression(form['content'])})?"
            case "repeated":
                return f"({self.expression(form['content'])})*"
        parts = list[str]()
        for is_regular, group in itertools.groupby(self._elements(form), lambda one: self._terminal(one) is not None):
            if is_regular:
                parts.append(self._name("T", " ".join(str(self._terminal(one)) for one in group)))
            else:
                parts += map(self.expression, group)
        return " ".join(parts)

    def _elements(self, form: Format) -> list[Format]:
        """Return the elements of a sequence, of which none is a sequence, nor a text with special tokens in it."""
        if form["type"] == "sequence":
            return [part for element in form["elements"] for part in self._elements(element)]
        return self._split(form["text"]) if form["type"] == "literal" else [form]

    def _terminal(self, form: Format) -> str | None:
        """Return the expression of a format in a terminal; None if it is not regular."""
        match form["type"]:
            case "literal":
                parts = self._split(form["text"])
                return _text(parts[0]["text"]) if len(parts) == 1 and "text" in parts[0] else None
            case "pattern":
                return f"({regexes.between_slashes(form['regex'])})"
            case "text":
                return _text_without([one for one in form["excludes"] if one not in self._special])
            case "sequence" | "either" as kind:
                found = [one for element in form["elements"] if (one := self._terminal(element)) is not None]
                if len(found) < len(form["elements"]):
                    return None
                return "(" + (" " if kind == "sequence" else " | ").join(found) + ")"
            case "specified":
                return _specified_terminal(form["spec"])
        return None

    def _specified(self, spec: dict[str, Any]) -> str:
        if "json" in spec:
            place = spec.get("place", "")
            document = prepared(spec["json"], is_in_tags=place == "xml", at=spec.get("at", ()))
            return JsonRules(document, self._name, self._reserved, is_python=place == "python").start
        name = f"g{self._number()}_"
        self.lines += lark_rules(spec["grammar"], name)
        return f"{name}root"

    def _name(self, kind: str, expression: str) -> str:
        name = f"{kind}{self._number()}"
        self.lines.append(f"{name}: {expression}")
        return name

    def _reserved(self, parameter: str) -> tuple[str, Callable[[str], None]]:
        """Return the name of a rule, and the function that sets its expression."""
        name = f"r{self._number()}"
        return name, lambda expression: self.lines.append(f"{name}{parameter}: {expression}")

    def _split(self, text: str) -> list[Format]:
        """Return the parts of a text: special tokens, without those that end the output, and what is between them."""
        for token, token_id in self._special.items():
            if token in text:
                before, _, after = text.partition(token)
                found = [] if token_id is None else [{"type": "token", "id": token_id}]
                parts = [*self._split(before), *found, *self._split(after)]
                return [part for part in parts if part.get("text") != ""] or parts[:1]
        return [{"type": "literal", "text": text}]


def _specified_terminal(spec: dict[str, Any]) -> str | None:
    if "regex" in spec:
        return f"({regexes.between_slashes(regexes.translated(spec['regex']) or '(?:)')})"
    if "choice" in spec:
        return "(" + " | ".join(map(_text, spec["choice"])) + ")"
    if "text" in spec:
        patterns = [regexes.between_slashes(one) for one in text_patterns(spec["text"])]
        return "(" + " & ".join([*patterns, _text_without(["<"])]) + ")"
    return None


def _text(text: str) -> str:
    return regexes.between_slashes(regexes.literal(text)) if text else NOTHING


def _text_without(texts: list[str]) -> str:
    if not texts:
        return ANYTHING
    # One complement: with one for each text, llguidance finds no more than a few of them.
    return f"({ANYTHING} & ~/(?s:.*)({'|'.join(map(regexes.literal, texts))})(?s:.*)/)"

"""EBNF, as xgrammar and llama.cpp write it, in Lark's syntax.

    root ::= item ("," item)*      # the output
    item ::= "a" | [^b-d\\n]{1,3} | "\\u00e9"?

Lark's terminals are lexemes, of which llguidance takes the longest; EBNF has none. So every character is a terminal here. A
run of characters of one class is a terminal only if `runs.py` finds that no output can be read otherwise.
"""

import re
from dataclasses import dataclass
from typing import NoReturn

from pdserve.grammars.character_sets import CharacterSet

TOKEN = re.compile(
    r'(?P<space>(?:\s|#[^\n]*)+)|(?P<defines>::=)|(?P<name>[A-Za-z_.][\w.-]*)|(?P<string>"(?:\\.|[^"\\\n])*")'
    r"|(?P<set>\[(?:\\.|[^\]\\])*\])|(?P<count>\{\s*\d+\s*(?:,\s*(?:-1|\d*)\s*)?\})|(?P<lookahead>\(=)|(?P<mark>[()|*+?])",
    re.ASCII | re.DOTALL,
)
ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|([^\\])", re.DOTALL)
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "e": "\x1b"}
COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


@dataclass(frozen=True)
class Characters:
    """One character of a set."""

    characters: CharacterSet


@dataclass(frozen=True)
class Run:
    """Characters of a set, at least one."""

    characters: CharacterSet
    most: int | None


@dataclass(frozen=True)
class Reference:
    name: str


@dataclass(frozen=True)
class Sequence:
    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Choice:
    options: tuple["Node", ...]


@dataclass(frozen=True)
class Repeat:
    part: "Node"
    least: int
    most: int | None


Node = Characters | Run | Reference | Sequence | Choice | Repeat
EMPTY = Sequence(())


def parse_ebnf(text: str) -> dict[str, Node]:
    """Return the rules of a grammar by their names.

    Raises:
        ValueError: it is invalid, with the line.
    """
    return _Parser(text).rules()


class _Parser:
    """A parser by recursive descent."""

    def __init__(self, text: str) -> None:
        self._text, self._tokens, position = text, list[tuple[str, str, int]](), 0
        while position < len(text):
            match = TOKEN.match(text, position)
            if match is None:
                self._fail(position, f"{text[position]!r} begins nothing that EBNF has")
            if match.lastgroup != "space":
                self._tokens.append((str(match.lastgroup), match[0], position))
            position = match.end()
        self._tokens += [("end", "", len(text))] * 2
        self._next = 0

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        while self._tokens[self._next][0] != "end":
            kind, name, position = self._take()
            if kind != "name" or self._take()[0] != "defines":
                self._fail(position, "a rule must begin with its name and ::=")
            if name in found:
                self._fail(position, f"the rule {name!r} is defined twice")
            found[name] = self._choice()
            kind, token, position = self._tokens[self._next]
            if kind != "end" and not self._begins_rule():
                self._fail(position, f"{token!r} is not expected here")
        return found

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._tokens[self._next][1] == "|":
            self._take()
            options.append(self._sequence())
        return Choice(tuple(options)) if len(options) > 1 else options[0]

    def _sequence(self) -> Node:
        parts = list[Node]()
        while self._tokens[self._next][0] in ("name", "string", "set", "lookahead", "mark") and not self._begins_rule():
            if self._tokens[self._next][1] in ("|", ")"):
                break
            parts.append(self._repeated(self._part()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repeated(self, part: Node) -> Node:
        while True:
            kind, token, position = self._tokens[self._next]
            if kind == "count":
                counts = [int(one) if one else None for one in re.split(r"\s*,\s*", token[1:-1].strip())]
                least, most = counts[0] or 0, counts[-1]
                most = None if most == -1 else most
                if most is not None and most < least:
                    self._fail(position, f"{token} asks for more than it allows")
            elif token in COUNTS and kind == "mark":
                least, most = COUNTS[token]
            else:
                return part
            self._take()
            part = Repeat(part, least, most)

    def _part(self) -> Node:
        kind, token, position = self._take()
        if kind == "name":
            if self._tokens[self._next][1] == "(" and self._tokens[self._next][2] == position + len(token):
                self._fail(position, f"{token}(…) is not supported")
            return Reference(token)
        if kind == "string":
            return _sequence_of([Characters(CharacterSet.of(one)) for one in self._characters(token[1:-1], position)])
        if kind == "set":
            return Characters(self._set(token[1:-1], position))
        if kind == "lookahead":
            self._fail(position, "lookaheads are not supported")
        if token != "(":
            self._fail(position, f"{token!r} is not expected here")
        inner = self._choice()
        if self._take()[1] != ")":
            self._fail(position, "a parenthesis is not closed")
        return inner

    def _set(self, text: str, position: int) -> CharacterSet:
        is_negated = text.startswith("^")
        elements = [(found[0], self._character(found, position)) for found in ESCAPE.finditer(text[is_negated:])]
        ranges, i = list[tuple[int, int]](), 0
        while i < len(elements):
            first = last = elements[i][1]
            if i + 2 < len(elements) and elements[i + 1][0] == "-":
                i, last = i + 2, elements[i + 2][1]
            if last < first:
                self._fail(position, f"the range {first}-{last} is empty")
            ranges.append((ord(first), ord(last)))
            i += 1
        found = CharacterSet.from_ranges(ranges)
        found = found.complement() if is_negated else found
        if not found:
            self._fail(position, f"[{text}] has no characters")
        return found

    def _characters(self, text: str, position: int) -> list[str]:
        return [self._character(found, position) for found in ESCAPE.finditer(text)]

    def _character(self, found: re.Match[str], position: int) -> str:
        if digits := found[1] or found[2] or found[3]:
            code = int(digits, 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                self._fail(position, f"{found[0]} is no character")
            return chr(code)
        if found[4] is None:
            return found[5]
        if found[4].isalnum() and found[4] not in ESCAPES:
            self._fail(position, f"{found[0]} is not an escape")
        return ESCAPES.get(found[4], found[4])

    def _begins_rule(self) -> bool:
        return self._tokens[self._next][0] == "name" and self._tokens[self._next + 1][0] == "defines"

    def _take(self) -> tuple[str, str, int]:
        token = self._tokens[self._next]
        self._next = min(self._next + 1, len(self._tokens) - 2)
        return token

    def _fail(self, position: int, reason: str) -> NoReturn:
        raise ValueError(f"{reason} (line {self._text.count(chr(10), 0, position) + 1})")


def _sequence_of(parts: list[Node]) -> Node:
    return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

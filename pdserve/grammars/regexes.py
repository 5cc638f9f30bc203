"""Regular expressions of clients in the syntax of llguidance, which is that of Rust's `regex` without anchors inside."""

import itertools
import re
from collections.abc import Iterable, Iterator

SHORTHANDS = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t-\r"}  # ASCII, which all readers of a pattern agree on
# What ECMAScript, Python or Rust takes for one, for sets that exclude them.
WIDE = {
    "d": r"\p{Nd}",
    "w": r"\p{Alphabetic}\p{M}\p{N}\p{Pc}\p{Join_Control}",
    "s": r"\p{White_Space}\x{1c}-\x{1f}\x{feff}",
}
EVERYTHING = [{SHORTHANDS[name], f"[^{WIDE[name]}]"} for name in SHORTHANDS]  # what is in [\s\S]
DOT = r"[^\n\r\x{2028}\x{2029}]"  # in ECMAScript
TOKEN = re.compile(
    r"\\u[0-9A-Fa-f]{4}|\\u\{[0-9A-Fa-f]+\}|\\x[0-9A-Fa-f]{2}|\\[pP]\{[\w=:^-]+\}|\\.|\{\d+(?:,\d*)?\}|\(\?P?<\w+>|.",
    re.DOTALL,
)
NUL = re.compile(r"\x00|\\(?:0|x00|u0000|u\{0+\})")
PLAIN = " <>=:,;_!@%'\""  # characters of no meaning in regular expressions
ONLY = re.compile(r"\^?\[((?:\\.|[^\\\]^])(?:\\.|[^\\\]])*)\]\*\$")  # the strings of a class of characters
ATOM = re.compile(r"\\[dsw\W_]|\[\^?(?:\\.|[^\\\]^])+\]|[^\\\[\](){}|*+?.^$]")  # a character, or one of a class
EXCLUDED = re.compile(rf"(\.\*)?((?:{ATOM.pattern})+)(\$)?")
ANY = r"[\s\S]"
NO_MINIMUM = re.compile(r"\{,\d+\}", re.ASCII)


def translated(pattern: str, *, in_json: bool = False) -> str:
    """Return a regular expression of ECMAScript or Python in Rust's syntax. What Rust has not is left, for it to refuse.

    Args:
        in_json: it is for strings in JSON. llguidance takes a set of characters with all control characters for one with
            quotation marks and backslashes, too. A set without those loses NUL.

    Raises:
        ValueError: it has a NUL outside of classes, and is for strings in JSON; or a quantifier without a minimum.
    """
    parts, in_class, position = list[str](), False, 0
    start = 0  # of the class, in the parts
    for match in TOKEN.finditer(pattern):
        token, begins_class = match[0], in_class and position == 0
        if in_json and not in_class and NUL.fullmatch(token):
            raise ValueError("a NUL")
        position += 1
        if token.startswith("\\"):
            token = _escape(token, in_class, is_negated=in_class and parts[start + 1 : start + 2] == ["^"])
        elif in_class:
            if token == "]" and not begins_class:
                in_class = False
                if {*parts[start + 1 :]} in EVERYTHING:
                    parts[start:], token = [], "(?s:.)"
                elif any(part.startswith("[^") for part in parts[start + 1 :]):
                    pass  # a class in it, which has either none of these characters or all
                elif in_json and _is_misread("".join(parts[start:]) + "]"):
                    parts[start:] = ["[", *parts[start:], r"]--\x{0}"]
            elif token in "[]&~" or (token == "-" and parts[-1] == "-"):
                token = f"\\{token}"  # not a class in a class, nor an operator between two
            elif token == "^" and begins_class:
                position = 0
        elif token == "[":
            in_class, position, start = True, 0, len(parts)
        elif token == "{" and NO_MINIMUM.match(pattern, match.start()):
            raise ValueError("{,n}, which is a quantifier to some readers and a text to others; write {0,n}")
        elif token in "{}":
            token = f"\\{token}"  # not a quantifier
        elif token == "." and in_json:
            token = DOT
        elif token.startswith("(?P<") or token.startswith("(?<"):
            token = "("
        parts.append(token)
    return "".join(parts)


def _is_misread(characters: str) -> bool:
    """Return whether a class has NUL, but not both quotation marks and backslashes; if in doubt, whether it excludes."""
    try:
        found = re.compile(re.sub(r"\\x\{([0-9A-Fa-f]+)\}", lambda match: _python_escape(match[1]), characters))
    except re.error:
        return characters.startswith("[^")
    return bool(found.match("\0")) and not all(map(found.match, '"\\'))


def _python_escape(digits: str) -> str:
    return f"\\U{int(digits, 16):08x}"


def _escape(token: str, in_class: bool, *, is_negated: bool) -> str:
    kind = token[1:]
    if (name := kind.lower()) in SHORTHANDS:
        characters = (WIDE if (kind != name) != is_negated else SHORTHANDS)[name]
        return f"[^{characters}]" if kind != name else characters if in_class else f"[{characters}]"
    if kind in "/<>":
        return kind
    if kind[0] in "ux" and len(kind) > 1:
        return rf"\x{{{kind[1:].strip('{}')}}}"
    return token if kind.isascii() else kind


def between_slashes(pattern: str) -> str:
    """Return a regular expression in Rust's syntax as a terminal of Lark."""
    return "/" + pattern.replace("/", r"\x{2f}").replace("\n", r"\n").replace("\r", r"\r") + "/"


def literal(text: str) -> str:
    """Return the regular expression of a text."""
    return "".join(c if c.isalnum() or c in PLAIN else _escaped(c) for c in text)


def except_texts(texts: list[str], excluded: str = "") -> str:
    """Return the regular expression of all strings but these, without the characters `excluded`."""
    heads: dict[str, list[str]] = {}
    for text in texts:
        if text:
            heads.setdefault(text[0], []).append(text[1:])
    anything = rf"[^{_escaped(excluded)}]" if excluded else "(?s:.)"
    # Without NUL, see `translated`.
    other = rf"[^{_escaped([chr(0), *heads, *excluded])}]" if heads else anything
    parts = [*([] if "" in texts else [""]), f"{other}{anything}*"]
    parts += [literal(head) + f"(?:{except_texts(tails, excluded)})" for head, tails in heads.items()]
    return "|".join(parts)


def _escaped(characters: Iterable[str]) -> str:
    return "".join(rf"\x{{{ord(character):x}}}" for character in characters)


def without_lookaheads(pattern: str) -> list[str]:
    """Return patterns which all match where a pattern of JSON schema does, with the lookaheads at its beginning taken apart.

    A lookahead that excludes strings is held if those consist of the characters of a class, for then a string must have
    another one, and in the cases of `_excluding`.

    Raises:
        ValueError: it has other lookarounds.
    """
    rest, patterns = pattern, list[str]()
    while match := re.match(r"\^\(\?([=!])", rest):
        end = next((i for i, depth in _depths(rest[match.end() :]) if depth < 0), None)
        if end is None:
            break
        inside, rest = rest[match.end() :][:end], "^" + rest[match.end() + end + 1 :]
        if match[1] == "=":
            patterns.append(f"^(?:{inside})")
        elif only := ONLY.fullmatch(inside):
            patterns.append(f"[^{only[1]}]")
        elif (other := _excluding(inside)) is not None:
            patterns.append(other)
        else:
            raise ValueError("a lookahead that excludes strings")
    return [*patterns, *([] if rest in ("^", "^.*$") else [rest])]


def _excluding(inside: str) -> str | None:
    """Return a pattern of all that a negative lookahead leaves, in a few cases; otherwise None.

    It excludes strings that begin with some characters, or consist of them; that have or end with one; that have two.
    """
    match = EXCLUDED.fullmatch(inside)
    if match is None:
        return None
    found, ends = ATOM.findall(match[2]), bool(match[3])
    first, other = found[0], _other_than(found[0])
    if not match[1]:
        rest = f"(?:{_other_than(found[-1])}{ANY}*{f'|{found[-1]}{ANY}+' if ends else ''})?"
        for atom in reversed(found[:-1]):
            rest = f"(?:{_other_than(atom)}{ANY}*|{atom}{rest})?"
        return f"^{rest}$"
    if len(found) == 1:
        return f"^(?:{ANY}*{other})?$" if ends else f"^{other}*$"
    if len(found) == 2 and not ends and found[1] == first:
        return f"^(?:{first}?{other})*{first}?$"
    if len(found) == 2 and not ends and not any(one[0] == "[" or one[1:] in ("d", "s", "w") for one in found):
        return f"^(?:{other}|{first}+[^{first}{found[1]}])*{first}*$"
    return None


def _other_than(atom: str) -> str:
    """Return the class of all characters but a character or those of a class."""
    return f"[{atom[2:]}" if atom.startswith("[^") else f"[^{atom[1:] if atom[0] == '[' else f'{atom}]'}"


def _depths(pattern: str, marks: str = "()") -> Iterator[tuple[int, int]]:
    """Yield the position of each mark outside of classes, and the depth of parentheses after it."""
    depth, in_class = 0, False
    for match in TOKEN.finditer(pattern):
        if match[0] == "[":
            in_class = True
        elif match[0] == "]":
            in_class = False
        elif not in_class:
            depth += {"(": 1, ")": -1}.get(match[0][0], 0)
            if match[0][0] in marks:
                yield match.start(), depth


def whole(pattern: str) -> str:
    """Return the regular expression of all strings in which a pattern of JSON schema is found."""
    cuts = [-1, *(i for i, depth in _depths(pattern, "|") if depth == 0), len(pattern)]
    parts = []
    for start, end in itertools.pairwise(cuts):
        part = pattern[start + 1 : end]
        head = "" if part.startswith("^") else "(?s:.*)"
        is_anchored = part.endswith("$") and not part.endswith(r"\$")
        body = part.removeprefix("^")[: -1 if is_anchored else None]
        parts.append(f"{head}(?:{body}){'' if is_anchored else '(?s:.*)'}")
    return "|".join(parts)

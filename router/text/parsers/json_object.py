"""A JSON object that a model writes, as it arrives: what is valid is passed on as it is, and common faults are mended.

Mended are raw control characters and invalid escapes in strings, quotes in them that a letter or a sign follows, a comma
before a bracket, Python's names of constants, values that JSON has not (they become strings) or that are missing, and missing
brackets where a tag of the format says that the call has ended. So the text of an object that has ended is always JSON.
"""

import json
import re
from collections.abc import Sequence

from pdserve.router.text.parsers.output import parse_value

MAX_DEPTH = 100  # brackets within each other
MAX_WORD = 4096  # characters of a number or a constant
PIECE = 256  # characters that are read at a time, as long as they are enough
PLAIN = re.compile(r'[^"\\\x00-\x1f\ufdd0]+')
CONTROL = re.compile(r"[\x00-\x1f]+")
HEX = "[0-9a-fA-F]"
ESCAPE = re.compile(
    rf'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F]){HEX}{{4}}|u[dD][89abAB]{HEX}{{2}}\\u[dD][c-fC-F]{HEX}{{2}})'
)
HALF = re.compile(rf"\\u[dD][89a-fA-F]{HEX}{{2}}")  # of a surrogate pair, which is not a character
CUT_ESCAPE = re.compile(rf"\\(u{HEX}{{0,3}})?")
LONGEST_ESCAPE = 12
WORD = re.compile(r'[^\s,:\[\]{}"<;`\ufdd0]+')
SPACE = re.compile(r"[ \t\r\n]*")
AFTER_STRING = frozenset(" \t\r\n,:}]<;`\ufdd0")
PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}


class JsonObject:
    """The state between the pieces of one object.

    Attributes:
        is_over: it has ended: by its last bracket, a tag, or what JSON cannot go on with.
        is_whole: it has ended otherwise than by the last of these.
    """

    def __init__(self, tags: Sequence[str], hard_tags: Sequence[str] = ()) -> None:
        """`tags` end it outside of strings, and `hard_tags`, which begin with a mark of their own, also inside of them."""
        self.is_over = self.is_whole = False
        self._tags, self._hard_tags = tuple(tags), tuple(hard_tags)
        self._firsts = frozenset(tag[0] for tag in (*tags, *hard_tags))
        self._brackets: list[str] = []  # that close what is open
        self._in_string = False
        self._expects = "value"  # or item (a value or the end of the list), key, colon, next (a comma or a bracket)
        self._text, self._at, self._is_last = "", 0, False
        self._parts: list[str] = []

    @property
    def depth(self) -> int:
        """The number of open brackets."""
        return len(self._brackets)

    def read(self, text: str, *, is_last: bool) -> tuple[int, str]:
        """Read a text up to the object's next bracket.

        Args:
            text: begins with what the call before has not read.
            is_last: no more text follows.

        Returns:
            How many characters were read, and the text of the object that they give. What needs more text to be understood is
            not read.
        """
        self._text, self._at, self._is_last, self._parts = text, 0, is_last, []
        depth = self.depth
        while self._at < len(text) and not self.is_over and depth == self.depth:
            if not (self._step_in_string() if self._in_string else self._step()):
                break
        return self._at, "".join(self._parts)

    def close(self, depth: int = 0) -> str:
        """Return what is missing so that no more than `depth` brackets are open."""
        text = '"' if self._in_string else ""
        text += {"colon": ": null", "value": "null"}.get(self._expects, "")
        return text + "".join(reversed(self._brackets[depth:]))

    # ---- one token, or a part of a string: False if more text is needed ---------------------------------------------

    def _step(self) -> bool:
        character = self._text[self._at]
        if (known := self._tag(self._tags)) is not None:
            return known
        if space := SPACE.match(self._text, self._at)[0]:  # type: ignore[index]  # it may be empty
            return self._emit(len(space), space)
        if self._expects == "next":
            return self._step_after_value(character)
        if self._expects == "colon":
            return self._emit(1, ":", "value") if character == ":" else self._end(is_whole=False)
        if character == '"':
            self._in_string = True
            return self._emit(1, '"', "colon" if self._expects == "key" else "next")
        if character in "}]" and self._expects in ("key", "item"):
            return self._close_bracket(character)
        if self._expects == "key":
            return self._end(is_whole=False)
        if character in "{[" and self.depth < MAX_DEPTH:
            self._brackets.append("}" if character == "{" else "]")
            return self._emit(1, character, "key" if character == "{" else "item")
        if character in ",}":
            return self._emit(0, "null", "next")
        return self._step_word()

    def _step_word(self) -> bool:
        match = WORD.match(self._text, self._at)
        if match is None:
            return self._end(is_whole=False)
        word, is_cut = match[0], match.end() == len(self._text)
        if is_cut and not self._is_last and len(word) < MAX_WORD:
            return False
        if parse_value(word) is not None or word == "null":
            return self._emit(len(word), word, "next")
        if is_cut and self._is_last:
            return self._emit(len(word), "")
        return self._emit(len(word), PYTHON_NAMES.get(word) or json.dumps(word, ensure_ascii=False), "next")

    def _step_after_value(self, character: str) -> bool:
        if character in "}]":
            return self._close_bracket(character)
        if character != ",":
            return self._end(is_whole=character == "{")  # of the next call
        after = SPACE.match(self._text, self._at + 1).end()  # type: ignore[union-attr]  # it may be empty
        if after == len(self._text) and not self._is_last:
            return False
        in_list, follower = self._brackets[-1] == "]", self._text[after : after + 1]
        goes_on = follower and (follower not in AFTER_STRING if in_list else follower == '"')
        comma = self._text[self._at : after] if goes_on else ""
        return self._emit(after - self._at, comma, ("value" if in_list else "key") if goes_on else "next")

    def _close_bracket(self, bracket: str) -> bool:
        if bracket not in self._brackets:
            return self._end(is_whole=True)  # it is that of a list of calls
        closed = ""
        while not closed.endswith(bracket):
            closed += self._brackets.pop()
        self.is_over = self.is_whole = not self._brackets
        return self._emit(1, closed, "next")

    def _step_in_string(self) -> bool:
        if plain := PLAIN.match(self._text, self._at):
            return self._emit(len(plain[0]), plain[0])
        character = self._text[self._at]
        if character == "\\":
            return self._step_escape()
        if character == '"':
            follower = self._text[self._at + 1 : self._at + 2]
            if not (follower or self._is_last):
                return False
            self._in_string = bool(follower) and follower not in AFTER_STRING
            return self._emit(1, '\\"' if self._in_string else '"')
        if (known := self._tag(self._hard_tags)) is not None:
            return known
        raw = CONTROL.match(self._text, self._at)
        return self._emit(len(raw[0]), json.dumps(raw[0])[1:-1]) if raw else self._emit(1, character)

    def _step_escape(self) -> bool:
        if escape := ESCAPE.match(self._text, self._at):
            return self._emit(len(escape[0]), escape[0])
        rest = self._text[self._at : self._at + LONGEST_ESCAPE]
        if len(rest) < LONGEST_ESCAPE and (rest == "\\" or rest[1] == "u") and not self._is_last:
            return False
        if CUT_ESCAPE.fullmatch(rest) and self._is_last:
            return self._emit(len(rest), "")
        if half := HALF.match(rest):
            return self._emit(len(half[0]), r"\ufffd")
        return self._emit(2, "'") if rest.startswith("\\'") else self._emit(1, r"\\")

    # ---- what they are made of --------------------------------------------------------------------------------------

    def _tag(self, tags: tuple[str, ...]) -> bool | None:
        """End at a tag; return None if there is none, False if it is not known yet."""
        if self._text[self._at] not in self._firsts:
            return None
        if any(self._text.startswith(tag, self._at) for tag in tags):
            return self._end(is_whole=True)
        rest = self._text[self._at : self._at + max(map(len, tags), default=0)]
        if not any(tag.startswith(rest) for tag in tags):
            return None
        return self._emit(len(rest), "") if self._is_last else False

    def _emit(self, length: int, text: str, expects: str = "") -> bool:
        self._at += length
        self._parts.append(text)
        self._expects = expects or self._expects
        return True

    def _end(self, *, is_whole: bool) -> bool:
        self.is_over, self.is_whole = True, is_whole
        return True


def mended(text: str) -> str:
    """Return the JSON object with which a text begins, as far as it goes; an empty one if it begins otherwise."""
    value, parts, at, size = JsonObject(()), list[str](), len(text) - len(text.lstrip()), PIECE
    while text.startswith("{", at) or value.depth:
        length, part = value.read(text[at : at + size], is_last=at + size >= len(text))
        parts.append(part)
        at, size = at + length, PIECE if length else 2 * size
        if value.is_over or at == len(text):
            return "".join([*parts, value.close()])
    return "{}"

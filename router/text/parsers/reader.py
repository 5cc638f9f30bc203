"""Base of the parsers: a generator that takes what it needs from the text so far, and yields while it needs more.

So a format is written as if all of its text were there, and gives the same result however the text is cut into pieces.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import ClassVar, TypeVar

from pdserve.router.text.parsers.output import ParsedOutput

Result = TypeVar("Result")
Steps = Generator[None, None, Result]  # yields while it waits for text
PIECE = 4096  # characters of a text that are parsed at a time: consuming a part of the buffer copies the rest of it
MAX_NAME = 256  # characters of a function's name and what is around it


class Reader(ABC):
    """Parses text that arrives in pieces. `push` never raises, whatever the text is.

    Attributes:
        TAGS: the strings that delimit parts of the format. Where the tokenizer has one as a special token, only that token
            counts, and the same string as ordinary text does not.
    """

    TAGS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, marks: Mapping[str, str]) -> None:
        """`marks` maps the tags that are special tokens to what the text has in their place, see `special_marks`."""
        self._marks = marks
        self._buffer = ""  # has arrived and is not consumed
        self._has_ended = False
        self._consumed: list[str] | None = None  # since `_begin_trial`
        self._output = ParsedOutput()
        self._steps = self._parse()

    def push(self, text: str, *, is_end: bool = False) -> ParsedOutput:
        """Parse the next piece of text; at its end, also return what was held back."""
        output = ParsedOutput()
        for begin in range(0, len(text), PIECE):
            self._buffer += text[begin : begin + PIECE]
            self._advance(output)
        if is_end:
            self._has_ended = True
            self._advance(output)
        return output

    def _advance(self, output: ParsedOutput) -> None:
        """Parse what has arrived, and append what it gives."""
        next(self._steps, None)
        output.extend(self._output)
        self._output = ParsedOutput()

    @abstractmethod
    def _parse(self) -> Steps[None]:
        """Consume all text up to the end, and add to `_output`."""

    # ---- what formats are made of ---------------------------------------------------------------------------------

    def _tag(self, text: str) -> str:
        """Return the tag as it is in the text."""
        return self._marks.get(text, text)

    def _tags(self, *texts: str) -> tuple[str, ...]:
        return tuple(map(self._tag, texts))

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        if self._consumed is not None:
            self._consumed.append(taken)
        return taken

    def _unread(self, text: str) -> None:
        """Give text back that was consumed last."""
        self._buffer = text + self._buffer
        if self._consumed is not None:
            assert self._consumed[-1] == text, "text is consumed in the pieces that are given back"
            self._consumed.pop()

    def _has_text(self) -> Steps[bool]:
        """Wait for text; return False at the end."""
        while not self._buffer and not self._has_ended:
            yield
        return bool(self._buffer)

    def _skip_space(self) -> Steps[str]:
        """Consume and return white space."""
        skipped = ""
        while (yield from self._has_text()):
            length = len(self._buffer) - len(self._buffer.lstrip())
            skipped += self._take(length)
            if self._buffer:
                break
        return skipped

    def _match(self, *tags: str) -> Steps[str]:
        """Consume and return the tag with which the text goes on; empty if it does with none of them."""
        while True:
            for tag in tags:
                if self._buffer.startswith(tag):
                    return self._take(len(tag))
            if self._has_ended or not any(tag.startswith(self._buffer) for tag in tags):
                return ""
            yield

    def _copy_until(self, tags: Iterable[str], emit: Callable[[str], None], *, drops_part: bool = False) -> Steps[str]:
        """Emit the text before the first tag, as it arrives; consume and return the tag, which is empty at the end.

        With `drops_part`, a part of a tag at the end of the text is not emitted. Of tags at the same place the text must not
        go on with several.
        """
        tags = tuple(tags)
        while True:
            found = [(at, tag) for tag in tags if (at := self._buffer.find(tag)) >= 0]
            if found:
                at, tag = min(found)
                emit(self._take(at))
                return self._take(len(tag))
            keeps_all = self._has_ended and not drops_part
            held = 0 if keeps_all else max((_overlap(self._buffer, tag) for tag in tags), default=0)
            emit(self._take(len(self._buffer) - held))
            if self._has_ended:
                self._take(held)
                return ""
            yield

    def _take_until(self, *tags: str, most: int | None = MAX_NAME) -> Steps[tuple[str, str]]:
        """Consume and return the text before the first tag, and the tag; both empty if there is none in `most` characters."""
        parts: list[str] = []
        steps = self._copy_until(tags, parts.append)
        while most is None or sum(map(len, parts)) <= most:
            try:
                next(steps)
            except StopIteration as stop:
                text = "".join(parts)
                fits = stop.value and (most is None or len(text) <= most)
                return (text, stop.value) if fits else ("", "")
            yield
        return "", ""

    def _begin_trial(self) -> None:
        """Remember the text that is consumed from here on."""
        self._consumed = []

    def _commit(self) -> None:
        """Forget the remembered text: it is understood."""
        self._consumed = None

    def _rewind(self) -> None:
        """Give the remembered text back."""
        assert self._consumed is not None
        self._buffer = "".join(self._consumed) + self._buffer
        self._consumed = None


def _overlap(text: str, tag: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `tag`."""
    begin = max(0, len(text) - len(tag) + 1)
    while (begin := text.find(tag[0], begin)) >= 0:
        if tag.startswith(text[begin:]):
            return len(text) - begin
        begin += 1
    return 0

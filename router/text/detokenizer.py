"""Token ids to text while they arrive: whole characters only, and nothing past a stop string.

A token may hold part of a character, and a stop string may lie across tokens. So text is held back for two reasons:
bytes that do not make a character yet, and characters that may be the beginning of a stop string. All pieces together
equal `tokenizer.decode` of all ids at once: bytes that never become a character come out as U+FFFD, at the latest at
the end. (One exception, of tokenizers with byte fallback such as Llama 2's: when an invalid byte follows valid ones,
`decode` at once also gives up the valid characters before it, which have been sent here already.)
"""

from collections.abc import Sequence

from pdserve.router.backend import Chunk
from pdserve.router.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, and decoding begins at most 4 before it: a longer run of U+FFFD has its beginning
# decided, and only the last 8 can still change.
UNDECIDED = 8
LONG_WINDOW = 64
ALL = -1  # however many there are


class Detokenizer:
    """Decodes a window of the latest ids again for each new id, and gives out what the new id has added.

    `tokenizers.decoders.DecodeStream` does nearly this, but it cannot be flushed, raises on some sequences, and decodes
    all of a long run of invalid bytes again for each byte.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the ids last given out, as context (some decoders trim a first space), and newer
        self._context = 0  # how many of them are context only
        self._sent = 0  # characters of the window's text that are out, or ALL

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now and was not before."""
        silent, vocab_size = self._tokenizer.silent_ids, self._tokenizer.vocab_size
        new_ids = [token_id for token_id in token_ids if token_id < vocab_size and token_id not in silent]
        if not new_ids:
            return ""
        if self._sent == ALL:
            window = self._window
            self._sent = self._tokenizer.length(window[0]) if len(window) == 1 else len(self._tokenizer.decode(window))
        self._window += new_ids
        text = self._tokenizer.decode(self._window)
        whole = text.rstrip(REPLACEMENT)
        if len(whole) == len(text):
            return self._give_all(text)
        new = text[self._sent : max(len(whole), len(text) - UNDECIDED)]
        self._sent += len(new)
        self._shorten(text)
        return new

    def flush(self) -> str:
        """The rest, at the end: a beginning of a character becomes U+FFFD."""
        if len(self._window) == self._context:
            return ""
        new = self._tokenizer.decode(self._window)[self._sent :]
        self._window, self._context, self._sent = [], 0, 0
        return new

    def _give_all(self, text: str) -> str:
        new = text[self._sent :]
        if not new:  # a space that the decoder trims, say: no context for what follows
            return ""
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._sent = ALL
        return new

    def _shorten(self, text: str) -> None:
        """Drops the first half of a long window, if its end falls between characters."""
        half = len(self._window) // 2
        if len(self._window) < LONG_WINDOW:
            return
        head, tail = self._tokenizer.decode(self._window[:half]), self._tokenizer.decode(self._window[half:])
        if len(head) <= self._sent and head + tail == text:
            self._window = self._window[half:]
            self._context = 0
            self._sent -= len(head)


class StopMatcher:
    """Ends the text before the stop string that is complete first (or after it, if `include`).

    Of several that end at the same character the longest counts, so the tokens in which text comes make no difference.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What of the text so far cannot be part of a stop string any more. Sets `matched` when one is complete."""
        if not self._stops:
            return text
        text = self._held + text
        hits = [(text.find(stop) + len(stop), stop) for stop in self._stops if stop in text]
        if hits:
            end, self.matched = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            self._held = ""
            return text[:end] if self._include else text[: end - len(self.matched)]
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class TextStream:
    """The text of one choice, chunk by chunk.

    The token that ended the choice (EOS or a stop token) gives no text, unless `include_stop` asks for it. Stop strings
    are looked for in the text after the first `min_tokens` tokens only.

    Attributes:
        finish_reason: None until the end; `stop` when a stop string was found.
        starts: where in the text each token of the last chunk begins, in characters, if that was asked for.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        starts: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = StopMatcher(stops, include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._one_by_one = bool(stops) or starts
        self._tokens = 0
        self._length = 0  # of the text so far, what is held back included
        self.starts: list[int] = []
        self.finish_reason: str | None = None

    def push(self, chunk: Chunk) -> tuple[str, list[int]]:
        """The text that may go out, and the tokens of the chunk up to the stop string, if one was found."""
        parts: list[str] = []
        self.starts = []
        silent_end = chunk.finish_reason == "stop" and not self._include_stop
        speaking = len(chunk.token_ids) - 1 if silent_end else len(chunk.token_ids)
        at_once = 1 if self._one_by_one else max(1, speaking)
        for first in range(0, speaking, at_once):
            token_ids = chunk.token_ids[first : first + at_once]
            self._tokens += len(token_ids)
            self.starts.append(self._length)
            text = self._detokenizer.push(token_ids)
            self._length += len(text)
            parts.append(self._match(text))
            if self._stop.matched is not None:
                self.finish_reason = "stop"
                return "".join(parts), chunk.token_ids[: first + 1]
        if chunk.finish_reason is not None:
            self.starts += [self._length] * (len(chunk.token_ids) - speaking)
            self.finish_reason = chunk.finish_reason
            parts.append(self._finish())
        return "".join(parts), chunk.token_ids

    def _match(self, text: str) -> str:
        return text if self._tokens <= self._min_tokens else self._stop.push(text)

    def _finish(self) -> str:
        text = self._match(self._detokenizer.flush())
        if self._stop.matched is not None:  # made of bytes that only the end turned into text
            self.finish_reason = "stop"
        return text + self._stop.flush()

"""Incremental detokenization with stop strings: emits whole characters only, and nothing past a stop string.

A token may hold part of a character, and a stop string may span tokens. Text is therefore held back for two reasons: bytes
that do not form a character yet, and characters that may be the beginning of a stop string. All emitted pieces together
equal `tokenizer.decode` of all ids at once; bytes that never form a character become U+FFFD, at the end of the text at the
latest. One exception concerns tokenizers with byte fallback, such as Llama 2's: if an invalid byte follows valid ones,
`decode` of all ids also discards the valid characters before it, which have already been emitted here.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from pdserve.output import Output
from pdserve.router.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# A character has at most 4 bytes and decoding can start at most 4 bytes before it. In a longer run of U+FFFD only the last
# 8 can still change; the ones before are final.
UNDECIDED = 8
LONG_WINDOW = 64
ALL_SENT = -1


class Detokenizer:
    """Re-decodes a window of the latest ids for each new id and emits the text that the id added.

    Attributes:
        has_rest: there are ids whose text is not final; `flush` returns it.

    `tokenizers.decoders.DecodeStream` is similar, but it cannot be flushed, raises on some sequences, and decodes a long
    run of invalid bytes again from its start for each byte.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, replaced: Mapping[int, str] | None = None
    ) -> None:
        """`replaced`: special tokens that are not skipped, and the text in place of their strings, which it ends with."""
        self._replaced = replaced or {}
        skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._skipped = (skipped - self._replaced.keys() if self._replaced else skipped) | tokenizer.unused_ids
        self._vocab_size = tokenizer.vocab_size
        skips_in_decode = skip_special_tokens and not self._replaced
        self._text_length = tokenizer.text_length if skips_in_decode else None
        self._decode = partial(tokenizer.decode, skip_special_tokens=skips_in_decode)
        # Ids emitted last, as context (some decoders trim a leading space), then newer ids.
        self._window: list[int] = []
        self._context = 0  # number of ids at the start of the window that are context only
        self._sent = 0  # characters of the window's text already emitted, or ALL_SENT
        self.has_rest = False

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids and return the text that has become final."""
        if self._replaced and not self._replaced.keys().isdisjoint(token_ids):
            return "".join(self._replace(one, self._push([one])) for one in token_ids)
        return self._push(token_ids)

    def _replace(self, token_id: int, text: str) -> str:
        """Return the text that a token completed with the token's string replaced."""
        replacement = self._replaced.get(token_id)
        if replacement is None:
            return text
        return text.removesuffix(self._decode([token_id])) + replacement

    def _push(self, token_ids: Sequence[int]) -> str:
        new_ids = token_ids
        if not token_ids or max(token_ids) >= self._vocab_size or not self._skipped.isdisjoint(token_ids):
            new_ids = [one for one in token_ids if one < self._vocab_size and one not in self._skipped]
            if not new_ids:
                return ""
        if self._sent == ALL_SENT:
            window = self._window
            if len(window) == 1 and self._text_length is not None:
                self._sent = self._text_length(window[0])
            else:
                self._sent = len(self._decode(window))
        self._window += new_ids
        self.has_rest = True
        text = self._decode(self._window)
        whole = text.rstrip(REPLACEMENT)
        if len(whole) == len(text):
            new = text[self._sent :]
            if new:  # else it is for example a space that the decoder trims, and no context for the ids that follow
                self._window = self._window[self._context :]
                self._context = len(self._window)
                self._sent = ALL_SENT
                self.has_rest = False
            return new
        new = text[self._sent : max(len(whole), len(text) - UNDECIDED)]
        self._sent += len(new)
        self._shorten_window(text)
        return new

    def flush(self) -> str:
        """Return the remaining text at the end; an incomplete character becomes U+FFFD."""
        if not self.has_rest:
            return ""
        new = self._decode(self._window)[self._sent :]
        self._window, self._context, self._sent, self.has_rest = [], 0, 0, False
        return new

    def _shorten_window(self, text: str) -> None:
        """Drop the first half of a long window if it ends at a character boundary."""
        half = len(self._window) // 2
        if len(self._window) < LONG_WINDOW:
            return
        head, tail = self._decode(self._window[:half]), self._decode(self._window[half:])
        if len(head) <= self._sent and head + tail == text:
            self._window = self._window[half:]
            self._context = 0
            self._sent -= len(head)


class StopMatcher:
    """Cuts text before the first stop string to be completed, or after it if `include` is set.

    Of several stop strings that end at the same character the longest wins, so the result does not depend on how the text
    is split into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = [*zip(stops, map(_prefix_function, stops), strict=True)]
        self._lengths = [0] * len(stops)  # of the beginning of each stop string with which the text so far ends
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Add text and return the part that can no longer belong to a stop string. Sets `matched` on a complete match."""
        if not self._stops:
            return text
        hits, before = list[tuple[int, int, str]](), len(self._held)
        for number, (stop, shorter) in enumerate(self._stops):  # as Knuth, Morris and Pratt do
            length = self._lengths[number]
            for end, character in enumerate(text if length or stop[0] in text else "", before + 1):
                while length and stop[length] != character:
                    length = shorter[length]
                length += stop[length] == character
                if length == len(stop):
                    hits.append((end, -length, stop))
                    break
            self._lengths[number] = length
        text = self._held + text
        if hits:
            end, _, self.matched = min(hits)
            self._held = ""
            return text[:end] if self._include else text[: end - len(self.matched)]
        keep = max(self._lengths)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the text held back, at the end."""
        held, self._held = self._held, ""
        return held


def _prefix_function(stop: str) -> list[int]:
    """Return for each number of its first characters how many of these it also ends with, fewer than all."""
    lengths = [0, 0]
    for character in stop[1:]:
        length = lengths[-1]
        while length and stop[length] != character:
            length = lengths[length]
        lengths.append(length + (stop[length] == character))
    return lengths


class TextStream:
    """The text of one choice, chunk by chunk.

    The token that ended the choice (EOS or a stop token) produces no text unless `include_stop` is set. Stop strings are
    searched only in the text after the first `min_tokens` tokens.

    Attributes:
        finish_reason: None until the end; `stop` if a stop string was found.
        text_offsets: the character offset in the text at which each token of the last chunk begins, if `track_offsets` is
            set.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        track_offsets: bool = False,
        skip_special_tokens: bool = True,
        replaced: Mapping[int, str] | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, replaced=replaced)
        self._stop = StopMatcher(stops, include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._token_by_token = bool(stops) or track_offsets
        self._tokens = 0
        self._length = 0  # characters so far, including those held back
        self.text_offsets: list[int] = []
        self.finish_reason: str | None = None

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stop.matched

    def push(self, chunk: Output) -> tuple[str, list[int]]:
        """Return the text to emit, and the token ids of the chunk up to the end of a stop string if one was found."""
        ends_silently = chunk.finish_reason == "stop" and not self._include_stop
        num_text_tokens = len(chunk.token_ids) - 1 if ends_silently else len(chunk.token_ids)
        if not self._token_by_token:
            text = self._detokenizer.push(chunk.token_ids[:num_text_tokens])
            if chunk.finish_reason is not None:
                self.finish_reason = chunk.finish_reason
                if self._detokenizer.has_rest:
                    text += self._detokenizer.flush()
            return text, chunk.token_ids
        parts: list[str] = []
        self.text_offsets = []
        for first in range(num_text_tokens):
            self._tokens += 1
            self.text_offsets.append(self._length)
            text = self._detokenizer.push(chunk.token_ids[first : first + 1])
            self._length += len(text)
            parts.append(self._match(text))
            if self._stop.matched is not None:
                self.finish_reason = "stop"
                return "".join(parts), chunk.token_ids[: first + 1]
        if chunk.finish_reason is not None:
            self.text_offsets += [self._length] * (len(chunk.token_ids) - num_text_tokens)
            self.finish_reason = chunk.finish_reason
            parts.append(self._finish())
        return "".join(parts), chunk.token_ids

    def _match(self, text: str) -> str:
        return text if self._tokens <= self._min_tokens else self._stop.push(text)

    def _finish(self) -> str:
        text = self._match(self._detokenizer.flush())
        if self._stop.matched is not None:  # the match includes bytes that only the flush turned into text
            self.finish_reason = "stop"
        return text + self._stop.flush()

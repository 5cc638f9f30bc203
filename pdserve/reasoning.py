"""Reasoning in an output, found by token ids: limits its length, and finds the beginning of the answer after it."""

from collections.abc import Sequence

from msgspec import Struct

MAX_BUDGET = 2**31 - 1
LATEST_START = 1  # tokens before `ReasoningSpan.start`, such as a line break


class ReasoningSpan(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Delimiters of reasoning in an output, and its limits.

    Attributes:
        start: tokens that begin it; empty: the output begins inside of it.
        ends: each of these sequences of tokens ends it.
        closing: tokens that end it when the budget is used up; the last ones are one of `ends`.
        budget: most tokens of reasoning; None: unlimited.
        is_required: the output must begin with `start`, so that a grammar is known to begin after the reasoning.
    """

    start: tuple[int, ...]
    ends: tuple[tuple[int, ...], ...]
    closing: tuple[int, ...]
    budget: int | None = None
    is_required: bool = False


class ReasoningTracker:
    """Follows one output. What it says is a function of the tokens alone, on any instance.

    Attributes:
        num_tokens: tokens inside of the reasoning so far; once it has ended, including its ending.
        answer_start: position in the output of the first token after the reasoning; 0 if the output began without it, None
            while that is undecided.
    """

    def __init__(self, span: ReasoningSpan) -> None:
        self.span = span
        self.num_tokens = 0
        self.answer_start: int | None = None
        self._position = 0  # of the next output token to look at
        self._first = 0 if not span.start else None  # position of the first token of reasoning

    def follow(self, tokens: Sequence[int], num_prompt: int) -> None:
        """Take note of further tokens. `tokens` is the prompt and the output so far, which only grows."""
        while num_prompt + self._position < len(tokens) and self.answer_start is None:
            self._position += 1
            end = num_prompt + self._position
            if self._first is not None:
                self.num_tokens += 1
                if any(_ends_with(tokens, end, num_prompt + self._first, sequence) for sequence in self.span.ends):
                    self.answer_start = self._position
            elif _ends_with(tokens, end, num_prompt, self.span.start):
                self._first = self._position
            elif self._position >= len(self.span.start) + LATEST_START:
                self.answer_start = 0

    def forced_token(self, tokens: Sequence[int], num_prompt: int) -> int | None:
        """Return the only token that may come next; None if there are others. `follow` has seen all tokens."""
        if self.answer_start is not None:
            return None
        if self._first is None:
            return self.span.start[self._position] if self.span.is_required else None
        if self.span.budget is None or self.num_tokens < self.span.budget:
            return None
        closing, start, first = self.span.closing, self.span.start, num_prompt + self._first
        again = closing[: closing.index(start[0])] + start if start and start[0] in closing else ()
        sizes = (
            size
            for whole in (closing, again)
            for size in range(1, len(whole))
            if _ends_with(tokens, len(tokens), first, whole[:size])
        )
        # What had begun by itself goes on so: it may lead to a call, which the rest of the closing would replace.
        begun = max(sizes, default=0)
        return None if self.num_tokens - begun < self.span.budget else closing[begun]


def _ends_with(tokens: Sequence[int], end: int, first: int, sequence: tuple[int, ...]) -> bool:
    """Return whether the tokens [first, end) end with a sequence."""
    start = end - len(sequence)
    return tokens[end - 1] == sequence[-1] and start >= first and tuple(tokens[start:end]) == sequence

"""ReasoningTracker: where the answer begins, and the tokens that a budget forces."""

from __future__ import annotations

import pytest

from pdserve.reasoning import ReasoningSpan, ReasoningTracker

PROMPT = [9, 9, 2]
OPEN, CLOSE = 1, 2
INSIDE = ReasoningSpan(start=(), ends=((CLOSE,),), closing=(CLOSE,), budget=3)
LONG = ReasoningSpan(start=(5, 6), ends=((6, 8), (7, 8)), closing=(4, 5, 6, 8), budget=2)

# <|end|> <|start|> assistant <|channel|> is 3 4 5 6, <|message|> 8; the channels: 1 analysis, 2 commentary, 7 final; 9 is to.
HARMONY = ReasoningSpan(start=(6, 1, 8), ends=((6, 7, 8), (6, 2), (6, 1, 9)), closing=(3, 4, 5, 6, 7, 8), budget=2)


def output_of(span: ReasoningSpan, wanted: list[int]) -> list[int]:
    """Return the output of a model that wants these tokens, with those that are forced in their places."""
    tracker, tokens = ReasoningTracker(span), [*PROMPT]
    for token in wanted:
        forced = tracker.forced_token(tokens, len(PROMPT))
        tokens.append(token if forced is None else forced)
        tracker.follow(tokens, len(PROMPT))
    again = ReasoningTracker(span)
    again.follow(tokens, len(PROMPT))  # at once, as after a migration
    assert (again.num_tokens, again.answer_start) == (tracker.num_tokens, tracker.answer_start)
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize(
    ("span", "wanted", "output"),
    [
        (INSIDE, [3] * 6, [3, 3, 3, CLOSE, 3, 3]),
        (INSIDE, [3, CLOSE, 3, 3, 3], [3, CLOSE, 3, 3, 3]),
        (ReasoningSpan((), ((CLOSE,),), (CLOSE,), 0), [3, 3], [CLOSE, 3]),
        (ReasoningSpan((OPEN,), ((CLOSE,),), (CLOSE,), 1), [OPEN, 3, 3, 3], [OPEN, 3, CLOSE, 3]),
        (ReasoningSpan((OPEN,), ((CLOSE,),), (CLOSE,), 1), [3, OPEN, 3, 3, 3], [3, OPEN, 3, CLOSE, 3]),
        (ReasoningSpan((OPEN,), ((CLOSE,),), (CLOSE,), 1), [3, 3, 3, OPEN, 3, 3], [3, 3, 3, OPEN, 3, 3]),
        (ReasoningSpan((OPEN,), ((CLOSE,),), (CLOSE,), None, is_required=True), [3, 3, 3], [OPEN, 3, 3]),
        (LONG, [5, 6, 3, 3, 3, 3, 3, 3, 3], [5, 6, 3, 3, 4, 5, 6, 8, 3]),
        (LONG, [5, 6, 3, 4, 5, 6, 8, 3], [5, 6, 3, 4, 5, 6, 8, 3]),  # it had begun to close by itself
        (LONG, [5, 6, 3, 4, 3, 3, 3, 3, 3], [5, 6, 3, 4, 3, 4, 5, 6, 8]),
        (HARMONY, [6, 1, 8, 0, 3, 4, 5, 6, 1, 8, 3, 3, 3, 3, 3, 3], [6, 1, 8, 0, 3, 4, 5, 6, 1, 8, 3, 4, 5, 6, 7, 8]),
        *((HARMONY, [6, 1, 8, 0, 3, 4, 5, *call, 0], [6, 1, 8, 0, 3, 4, 5, *call, 0]) for call in ((6, 2), (6, 1, 9))),
        (LONG, [5, 6, 7, 8, 3, 3, 3], [5, 6, 7, 8, 3, 3, 3]),
    ],
)
def test_budgets(span: ReasoningSpan, wanted: list[int], output: list[int]) -> None:
    assert output_of(span, wanted) == output


@pytest.mark.parametrize(
    ("span", "output", "start"),
    [
        (INSIDE, [3, 3], None),
        (INSIDE, [3, CLOSE, 3, CLOSE], 2),
        (ReasoningSpan((OPEN,), ((CLOSE,),), (CLOSE,)), [CLOSE], None),
        (ReasoningSpan((OPEN,), ((CLOSE,),), (CLOSE,)), [3, 3], 0),
        (LONG, [5, 6, 8], None),  # the tag that begins it is not part of an end
    ],
)
def test_where_the_answer_begins(span: ReasoningSpan, output: list[int], start: int | None) -> None:
    tracker = ReasoningTracker(span)
    tracker.follow([*PROMPT, *output], len(PROMPT))
    assert tracker.answer_start == start

"""Finished answers: what is kept of them, for whom, and within which bounds."""

import pytest

from pdserve.engine.sequence import Sequence
from pdserve.keys import TOKEN_BYTES, token_array
from pdserve.request import SamplingParams, Tenant
from pdserve.speculation import answers
from pdserve.speculation.answers import LEAST, FinishedAnswers
from pdserve.speculation.matches import MAX_VOTES, Match


def sequence(owner: int, prompt: list[int], answer: list[int]) -> Sequence:
    tokens = token_array(prompt)
    seq = Sequence.new("a", tokens, len(prompt), len(prompt), SamplingParams(), b"", 16, tenant=Tenant(owner, 1.0))
    seq.output.extend(answer)
    return seq


def find(kept: FinishedAnswers, seq: Sequence) -> Match | None:
    return kept.find(seq, MAX_VOTES)


def test_an_answer_is_found_from_the_end_of_its_prompt_on() -> None:
    kept = FinishedAnswers()
    kept.add(sequence(1, [*range(100)], [*range(200, 220)]))
    kept.add(sequence(1, [*range(100)], [5] * (LEAST - 1)))
    match = find(kept, sequence(1, [1, 98, 99], [200]))
    assert match is not None and match.text[match.positions[0]] == 201
    assert find(kept, sequence(1, [1, 2, 3], [])) is None, "the rest of the prompt is not kept"
    assert find(kept, sequence(1, [], [5, 5, 5])) is None, "nor are the shortest answers"
    assert find(kept, sequence(1, [], [217, 218, 219])) is not None
    assert find(kept, sequence(2, [], [217, 218, 219])) is None, "nor is it another's"


def test_bytes_are_bounded_for_each_owner_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "OWNER_BYTES", 200 * TOKEN_BYTES)
    monkeypatch.setattr(answers, "TOTAL_BYTES", 500 * TOKEN_BYTES)
    kept = FinishedAnswers()
    for turn in range(40):
        for owner in (1, 2):
            kept.add(sequence(owner, [], [*range(1000 * turn, 1000 * turn + 30)]))
        assert kept.nbytes <= 400 * TOKEN_BYTES
    for turn in (38, 39):
        assert find(kept, sequence(1, [], [1000 * turn + i for i in range(3)])) is not None
    assert find(kept, sequence(1, [], [1000, 1001, 1002])) is None, "the oldest are gone"
    kept.add(sequence(1, [], [*range(500)]))
    assert find(kept, sequence(1, [], [497, 498, 499])) is not None, "of one that is too long, the end is kept"
    for owner in range(3, 9):
        for _ in range(9):
            kept.add(sequence(owner, [], [*range(30)]))
        assert kept.nbytes <= answers.TOTAL_BYTES
    assert find(kept, sequence(2, [], [39000, 39001, 39002])) is None, "who has had no answer for longest goes first"
    assert find(kept, sequence(8, [], [0, 1, 2])) is not None


def test_a_draft_that_follows_an_old_text_goes_on_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "OWNER_BYTES", 100 * TOKEN_BYTES)
    kept = FinishedAnswers()
    kept.add(sequence(1, [], [*range(60)]))
    match = find(kept, sequence(1, [], [3, 4, 5]))
    kept.add(sequence(1, [], [*range(100, 160)]))
    assert match is not None and match.text[match.positions[0]] == 6

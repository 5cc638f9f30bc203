"""Speculator: what it proposes of a sequence that decodes, and how often it looks."""

import random
from collections.abc import Iterator

import pytest

from pdserve.config import EngineConfig
from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import StepPlan
from pdserve.keys import token_array
from pdserve.request import SamplingParams
from pdserve.speculation.matches import Draft
from pdserve.speculation.speculator import MAX_SKIPPED, Speculator


def proposals(method: str, tokens: list[int], guess: list[int] | None = None) -> Iterator[tuple[int, list[int]]]:
    """Yield the drafts of each step of a sequence that gets these tokens one by one; with a guess, that is what is found."""
    scheduler = Scheduler(BlockPool(9, 16), max_num_seqs=4, max_num_batched_tokens=64)
    speculator = Speculator(EngineConfig(speculate=method, speculative_tokens=4), scheduler)
    if guess is not None:
        setattr(speculator, "find", lambda _: Draft(guess, 3, [1.0] * len(guess)))  # noqa: B010
    seq = Sequence.new("a", token_array([0]), 1, 1, SamplingParams(max_tokens=999), b"", 16)
    for at, token in enumerate(tokens):
        seq.output.append(token)
        seq.kv.mark_computed(len(seq) - 1 - seq.kv.num_computed)
        yield at, list(speculator.propose(StepPlan({seq: 1})).get(seq, []))


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_all_that_is_found_is_proposed(method: str) -> None:
    found = dict(proposals(method, [5, 6, 7, 8, 9, 5, 6, 7]))
    assert found.pop(7) == [8, 9, 5, 6] and not any(found.values())


def test_what_proves_right_is_proposed_and_what_proves_wrong_no_more() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8] * 6
    right = [drafts for at, drafts in proposals("auto", text) if at > 24]
    assert all(drafts for drafts in right[-8:])
    wrong = [bool(drafts) for _, drafts in proposals("auto", [*range(10, 400)], guess=[1, 1, 1, 1])]
    assert sum(wrong) < 20 and not any(wrong[200:])


@pytest.mark.parametrize("method", ["suffix", "auto"])
def test_a_prediction_comes_before_own_tokens_and_is_told_apart(method: str) -> None:
    scheduler = Scheduler(BlockPool(9, 16), max_num_seqs=4, max_num_batched_tokens=64)
    speculator = Speculator(EngineConfig(speculate=method, speculative_tokens=4), scheduler)
    answer = [*[5, 6, 7, 8] * 8, *range(50, 80)]
    seq = Sequence.new("a", token_array([0]), 1, 1, SamplingParams(max_tokens=999), b"", 16)
    seq.predict(token_array([*answer[:16], 9, *answer[17:]]))
    kinds = set()
    for at, token in enumerate(answer[:-1]):
        seq.output.append(token)
        seq.kv.mark_computed(len(seq) - 1 - seq.kv.num_computed)
        plan = StepPlan({seq: 1})
        drafts = speculator.propose(plan).get(seq, [])
        kinds |= {(bool(drafts), seq in plan.predicted)}
        if at == 15 and method == "suffix":
            assert drafts[:2] == [9, answer[17]], "the client's word counts before the repetition"
        if at > 60:
            assert [*drafts] == answer[at + 1 : at + 5], "it recovers behind what was wrong"
    assert (True, True) in kinds and (False, True) not in kinds


def test_looks_in_vain_become_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(Speculator, "find", lambda _, tokens: looks.append(len(tokens)))
    drawn = random.Random(0)
    list(proposals("auto", [drawn.randrange(10**6) for _ in range(400)]))
    assert looks[0] == 2 and looks[-1] - looks[-2] == MAX_SKIPPED
    assert len(looks) < 45

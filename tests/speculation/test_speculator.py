"""Speculator: what it proposes of a sequence that decodes, and how often it looks."""

from collections.abc import Iterable, Iterator

import pytest

from pdserve.config import EngineConfig
from pdserve.costs import Costs
from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import StepPlan
from pdserve.keys import token_array
from pdserve.request import NO_TENANT, SamplingParams, Tenant
from pdserve.speculation.matches import Draft
from pdserve.speculation.speculator import MAX_INDEXED, Speculator


def proposals(method: str, tokens: list[int], guess: list[int] | None = None) -> Iterator[tuple[int, list[int]]]:
    """Yield the drafts of each step of a sequence that gets these tokens one by one; with a guess, that is what is found."""
    scheduler = Scheduler(BlockPool(9, 16), max_num_seqs=4, max_num_batched_tokens=64)
    speculator = Speculator(EngineConfig(speculate=method, speculative_tokens=4), scheduler, lambda rows: True)
    if guess is not None:
        setattr(speculator, "find", lambda *_: Draft(guess, 3, [1.0] * len(guess)))  # noqa: B010
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
    assert not any(wrong), "what has never been right is compared, and not computed"
    mended = [drafts for at, drafts in proposals("auto", [*range(10, 100), *[1] * 40], guess=[1] * 4)]
    assert not any(mended[:90]) and all(mended[120:-1])


@pytest.mark.parametrize("method", ["suffix", "auto"])
def test_a_prediction_comes_before_own_tokens_and_is_told_apart(method: str) -> None:
    scheduler = Scheduler(BlockPool(9, 16), max_num_seqs=4, max_num_batched_tokens=64)
    speculator = Speculator(EngineConfig(speculate=method, speculative_tokens=4), scheduler, lambda rows: True)
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


def test_nothing_is_looked_for_where_no_draft_can_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(Speculator, "find", lambda _, seq, *rest: looks.append(len(seq)))
    scheduler = Scheduler(BlockPool(9, 16), max_num_seqs=4, max_num_batched_tokens=64)
    speculator = Speculator(EngineConfig(speculate="auto"), scheduler, lambda rows: True)
    seq = sampled([1, 2, 3] * 4)
    speculator.propose(StepPlan({seq: 1}))
    scheduler.costs = Costs(decode=(0.0, 0.01, 0.0))
    speculator.propose(StepPlan({seq: 1}))
    assert len(looks) == 1


def test_a_long_prompt_is_indexed_in_several_steps() -> None:
    scheduler = Scheduler(BlockPool(9, 16), max_num_seqs=4, max_num_batched_tokens=64)
    speculator = Speculator(EngineConfig(speculate="auto"), scheduler, lambda rows: True)
    seq = sampled([1, 2, 3], prompt=[*range(MAX_INDEXED), 1, 2, 3] * 2)
    found = []
    for _ in range(4):
        speculator.propose(StepPlan({seq: 1}))
        followed = speculator._followed[seq]
        found.append(followed.guess is not None and followed.guess.tokens == [4])
    assert found == [False, False, True, True]


def sampled(tokens: list[int], prompt: Iterable[int] = (0,), tenant: Tenant = NO_TENANT, root: bytes = b"") -> Sequence:
    """Return a sequence that has sampled some tokens."""
    tokens_before = token_array([*prompt])
    seq = Sequence.new(
        "a",
        tokens_before,
        len(tokens_before),
        len(tokens_before),
        SamplingParams(max_tokens=999),
        root,
        16,
        tenant=tenant,
    )
    for token in tokens:
        seq.output.append(token)
    seq.kv.mark_computed(len(seq) - 1)
    return seq


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_finished_answers_are_found_by_their_owner_alone(method: str) -> None:
    scheduler = Scheduler(BlockPool(9, 16), max_num_seqs=4, max_num_batched_tokens=64)
    speculator = Speculator(EngineConfig(speculate=method, speculative_tokens=4), scheduler, lambda rows: True)
    mine, salt = Tenant(1, 1.0), b"salt"
    answer = [*range(20, 40)]
    for tenant, root, leaves_nothing in [(mine, salt, False), (Tenant(2, 1.0), b"", True)]:
        seq = sampled(answer, tenant=tenant, root=root)
        if leaves_nothing:
            seq.leave_nothing()
        speculator.propose(StepPlan({seq: 1}))
        speculator.end(seq)
    found = {}
    for tenant, root in [
        (mine, salt),
        (mine._replace(weight=2.0), salt),
        (mine, b""),
        (Tenant(2, 1.0), salt),
        (Tenant(2, 1.0), b""),
    ]:
        seq = sampled([7, 8, 25, 26, 27], tenant=tenant, root=root)
        found[tenant, root] = speculator.propose(StepPlan({seq: 1})).get(seq)
    [kept, reweighted, *others] = found.values()
    assert kept == reweighted == ([28, 29, 30, 31] if method == "suffix" else None) and others == [None] * 3
    speculator.end(seq)
    assert seq not in speculator._followed

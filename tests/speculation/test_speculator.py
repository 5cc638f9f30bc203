"""Speculator: what it proposes of a sequence that decodes, and how often it looks."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import pytest

from pdserve.config import EngineConfig
from pdserve.costs import Costs
from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import StepPlan
from pdserve.keys import token_array
from pdserve.request import NO_TENANT, SamplingParams, Tenant
from pdserve.speculation.answers import LEAST
from pdserve.speculation.speculator import AT_ONCE, FORECAST_STEPS, SHARE, Speculator


def speculator_of(method: str, clock: Callable[[], float] = lambda: 0.0) -> Speculator:
    """Return a speculator over an empty engine. By the clock, looks take no time."""
    scheduler = Scheduler(BlockPool(9, 16), max_num_seqs=4, max_num_batched_tokens=64)
    return Speculator(EngineConfig(speculate=method, speculative_tokens=4), scheduler, lambda rows: 0.0, clock)


class Asked:
    """Asks a speculator in each step but for those in which it rests, as an engine does."""

    def __init__(self, speculator: Speculator) -> None:
        self._speculator, self._rest, self.times = speculator, 0, 0

    def __call__(self, *seqs: Sequence) -> Mapping[Sequence, list[int]]:
        self._rest -= 1
        if self._rest >= 0:
            return {}
        drafts, self.times = self._speculator.propose(StepPlan(dict.fromkeys(seqs, 1))), self.times + 1
        self._rest = self._speculator.rest
        return drafts


def proposals(method: str, tokens: list[int], text: list[int] | None = None) -> Iterator[tuple[int, list[int]]]:
    """Yield the drafts of each step of a sequence that gets these tokens one by one; it may be expected to follow a text."""
    speculator, seq = speculator_of(method), sampled([])
    if text is not None:
        setattr(speculator, "meet", lambda _, followed: followed.follow(token_array(text), 1, 3))  # noqa: B010
    ask = Asked(speculator)
    for at, token in enumerate(tokens):
        seq.output.append(token)
        seq.kv.mark_computed(len(seq) - 1 - seq.kv.num_computed)
        yield at, list(ask(seq).get(seq, []))


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_all_that_is_found_is_proposed(method: str) -> None:
    found = dict(proposals(method, [5, 6, 7, 8, 9, 5, 6, 7]))
    assert found.pop(7) == [8, 9, 5, 6] and not any(found.values())


def test_what_proves_right_is_proposed_and_what_proves_wrong_is_not_computed() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8] * 6
    drafts = dict(proposals("auto", text))
    assert not any(drafts[at] for at in range(LEAST)) and all(drafts[at] for at in range(LEAST + 3, 48))
    drawn = [*range(10, 100)] * 2
    assert not any(drafts for at, drafts in proposals("auto", drawn[:90], text=[7] * 300)), "it is compared only"
    again = [drafts for _, drafts in proposals("auto", drawn)]
    assert not any(again[:93]) and all(again[94:])


def test_short_answers_are_not_looked_at_unless_they_are_predicted() -> None:
    speculator, asked = speculator_of("auto"), Asked(speculator_of("auto"))
    for _ in range(9):
        seq = sampled([])
        for token in [1, 2, 3] * 5:
            seq.output.append(token)
            seq.kv.mark_computed(1)
            assert not asked(seq) and not speculator.propose(StepPlan({seq: 1}))
        assert seq not in speculator.followed
    assert asked.times <= 9 * 15 / LEAST + 1
    seq = Sequence.new("a", token_array([0]), 1, 1, SamplingParams(max_tokens=99), b"", 16)
    seq.prediction = token_array(range(5, 50))
    for token in (5, 6):
        seq.output.append(token)
        seq.kv.mark_computed(1)
        drafts = speculator.propose(StepPlan({seq: 1}))
    assert drafts == {seq: [7, 8, 9, 10]}


def test_an_answer_may_be_longer_than_predicted() -> None:
    speculator = speculator_of("auto")
    seq = Sequence.new("a", token_array([0]), 1, 1, SamplingParams(max_tokens=999), b"", 16)
    seq.prediction = token_array(range(5, 25))
    for token in range(5, 60):
        seq.output.append(token)
        seq.kv.mark_computed(len(seq) - 1 - seq.kv.num_computed)
        assert bool(speculator.propose(StepPlan({seq: 1}))) == (token < 24)


@pytest.mark.parametrize("method", ["suffix", "auto"])
def test_a_prediction_comes_before_own_tokens_and_is_told_apart(method: str) -> None:
    speculator = speculator_of(method)
    answer = [*[5, 6, 7, 8] * 8, *range(50, 80)]
    seq = Sequence.new("a", token_array([0]), 1, 1, SamplingParams(max_tokens=999), b"", 16)
    seq.prediction = token_array([*answer[:16], 9, *answer[17:]])
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


def test_nothing_is_looked_for_where_no_draft_can_pay() -> None:
    speculator, seq = speculator_of("auto"), sampled([1, 2, 3] * 6)
    looks = list[int]()
    setattr(speculator, "meet", lambda seq, _: looks.append(len(seq)))  # noqa: B010
    for row in (1e-4, 0.01):
        speculator._scheduler.costs = Costs(decode=(0.0, row, 0.0) if row == 0.01 else (0.01, row, 0.0))
        for _ in range(FORECAST_STEPS):
            speculator.propose(StepPlan({seq: 1}))
    assert FORECAST_STEPS <= len(looks) < 2 * FORECAST_STEPS


def test_steps_without_streams_have_no_drafts() -> None:
    speculator, seq = speculator_of("auto"), sampled([])
    prompt = Sequence.new("b", token_array(range(50)), 50, 50, SamplingParams(), b"", 16)
    for counts in ({}, {prompt: 40}, {}, {prompt: 40}, {seq: 1}, {}):
        assert speculator.propose(StepPlan(dict(counts))) == {}


def test_looks_in_vain_take_their_share_of_the_steps_in_turns() -> None:
    times = iter(i * 5e-4 for i in range(10**6))  # half a millisecond from one call to the next
    speculator = speculator_of("auto", lambda: next(times))
    seqs, looks = [sampled([1, 2, 3] * 6) for _ in range(3 * AT_ONCE)], Counter[Sequence]()
    setattr(speculator, "meet", lambda seq, _: looks.update([seq]))  # noqa: B010
    ask = Asked(speculator)
    for _ in range(4000):
        ask(*seqs)
    seconds = 4000 * speculator._scheduler.costs.step_seconds(len(seqs), sum(map(len, seqs)))
    assert 0.9 * SHARE < ask.times * 5e-4 / seconds < 1.1 * SHARE
    assert looks.total() == ask.times * AT_ONCE
    assert max(looks.values()) - min(looks.values()) <= 1, "each has its turn"


def test_what_is_drafted_is_looked_at_in_every_step() -> None:
    times = iter(i * 5e-4 for i in range(10**6))
    speculator, seq = speculator_of("auto", lambda: next(times)), sampled([])
    drafted, ask = [], Asked(speculator)
    for at in range(3000):
        seq.output.append(at % 50)
        seq.kv.mark_computed(1)
        drafted.append(bool(ask(seq)))
    assert all(drafted[-1000:])


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
    speculator = speculator_of(method)
    mine, salt = Tenant(1, 1.0), b"salt"
    answer = [*range(20, 40)]
    for tenant, root, leaves_nothing in [(mine, salt, False), (Tenant(2, 1.0), b"", True)]:
        seq = sampled(answer, tenant=tenant, root=root)
        if leaves_nothing:
            seq.leaves_nothing = True
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
    assert seq not in speculator.followed

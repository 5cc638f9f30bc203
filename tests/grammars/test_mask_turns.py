"""Turns of mask workers: tenants do not wait for each other, and slow grammars of a tenant do not hold up its quick ones."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.grammars.mask_turns import BURST_S, SHARE, Line, MaskTurns, Spending
from pdserve.request import NO_TENANT, Tenant

MALLORY, ALICE = Tenant(1), Tenant(2)


def test_a_line_gets_all_that_it_wants_and_what_is_left_stays_in_order() -> None:
    turns, line = MaskTurns(1), Line()
    for item in "abcd":
        turns.add(line, item)
    assert turns.take() == (line, ["a", "b", "c", "d"]) and turns.take() is None
    turns.add(line, "e")
    turns.end(line, ["c", "d"])
    assert turns.take() == (line, ["c", "d", "e"])
    turns.end(line, [])
    assert turns.take() is None and len(turns) == 0


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_a_tenant_need_not_wait_for_the_grammars_of_another(num_workers: int) -> None:
    turns = MaskTurns(num_workers)
    for _ in range(64):
        turns.add(Line(tenant=MALLORY), "slow")
    under_way = 0
    while turns.take() is not None:
        under_way += 1
    assert under_way == num_workers
    turns.add(line := Line(tenant=ALICE), "quick")
    assert turns.take() == (line, ["quick"])
    turns.add(other := Line(tenant=ALICE), "another")
    assert turns.take() is None, "further workers of a tenant compute only where few do"
    turns.end(line, [])
    assert turns.take() == (other, ["another"])


def test_a_tenant_whose_masks_take_much_leaves_half_of_the_workers_to_others() -> None:
    turns = MaskTurns(4, lambda tenant: tenant is MALLORY)
    for tenant in (MALLORY, ALICE):
        for _ in range(8):
            turns.add(Line(tenant=tenant), "mask")
        taken = Counter(turn[0].tenant for turn in iter(turns.take, None))
        assert taken == {tenant: 2}, "alone, or what is left"


def test_of_the_grammars_of_a_tenant_the_one_goes_first_that_has_used_least() -> None:
    turns, slow, quick = MaskTurns(1), Line(), Line()
    taken = Counter[Line]()
    for line in (slow, quick):
        turns.add(line, "mask")
    for _ in range(110):
        turn = turns.take()
        assert turn is not None
        line = turn[0]
        taken[line] += 1
        line.used_s += 0.1 if line is slow else 0.01
        turns.end(line, turn[1])
    assert taken == {slow: 10, quick: 100}


def test_a_line_saves_no_time_up_while_it_wants_nothing() -> None:
    turns, old, idle = MaskTurns(1), Line(used_s=50.0), Line()
    turns.add(old, "mask")
    turns.add(idle, "mask")
    assert idle.used_s == 50.0


def test_a_tenant_whose_masks_take_more_than_its_share_is_told_from_others_until_it_wears_off() -> None:
    spending, now = Spending(), 0.0
    while not spending.is_high(MALLORY, now):
        now += 0.1
        spending.add(MALLORY, 0.1 * 2 * SHARE, now)
        spending.add(ALICE, 0.1 * SHARE, now)
    assert now == pytest.approx(BURST_S / SHARE, abs=0.5)
    assert not spending.is_high(ALICE, now) and not spending.is_high(NO_TENANT, now)
    assert not spending.is_high(MALLORY, now + 1)


@settings(max_examples=100, deadline=None)
@given(
    costs=st.dictionaries(st.tuples(st.integers(0, 2), st.integers(0, 5)), st.floats(0.001, 1.0), min_size=1),
    num_workers=st.integers(1, 4),
    rounds=st.integers(1, 60),
)
def test_whoever_wants_a_mask_gets_one(costs: dict[tuple[int, int], float], num_workers: int, rounds: int) -> None:
    """At any time, each tenant that wants masks has a worker that computes; what is wanted is computed once, in order."""
    turns = MaskTurns(num_workers)
    lines = {key: Line(tenant=Tenant(key[0])) for key in costs}
    wanted = {line: [*range(rounds)] for line in lines.values()}
    got: dict[Line, list[int]] = {line: [] for line in lines.values()}
    for line, items in wanted.items():
        for item in items:
            turns.add(line, item)
    busy: list[tuple[Line, list[int]]] = []
    while len(turns):
        while (turn := turns.take()) is not None:
            busy.append(turn)
        computing = [line.tenant for line, _ in busy]
        assert {line.tenant for line in lines.values() if line.wanted} <= set(computing)
        assert len(busy) <= max(num_workers, len(set(computing)))
        line, items = busy.pop(0)
        got[line].append(items[0])
        line.used_s += next(cost for key, cost in costs.items() if lines[key] is line)
        turns.end(line, items[1:])
    assert got == wanted

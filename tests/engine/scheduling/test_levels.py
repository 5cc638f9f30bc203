"""Levels of tenants: which running sequence leaves for one of another tenant."""

from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.scheduling.levels import giving_way, levels_of
from pdserve.engine.sequence import Sequence
from pdserve.keys import token_array
from pdserve.request import SamplingParams, Tenant

TENANTS = [Tenant(number, weight) for number, weight in enumerate((1.0, 1.0, 2.0, 0.5))]


def running(tenant: Tenant, rank: int, has_rested: bool) -> Sequence:
    tokens = token_array([1, 2, 3])
    seq = Sequence.new(str(rank), tokens, 3, 3, SamplingParams(), b"", 4, rank=rank, tenant=tenant)
    if not has_rested:
        seq.give_way()
    return seq


@given(st.lists(st.tuples(st.sampled_from(TENANTS[:3]), st.booleans()), max_size=12))
def test_the_newest_of_the_highest_level_gives_way_to_each_that_stays_below(drawn: list[tuple[Tenant, bool]]) -> None:
    seqs = [running(tenant, rank // 2, has_rested) for rank, (tenant, has_rested) in enumerate(drawn)]
    levels, found = levels_of(seqs), giving_way(seqs, TENANTS)
    for tenant in TENANTS:
        level = levels.get(tenant, 0.0) + 1 / tenant.weight
        above = [one for one in seqs if one.may_give_way and levels[one.tenant] > level]
        victim = found.get(tenant)
        assert (victim is None) == (not above)
        if victim is not None:
            assert (levels[victim.tenant], victim.rank) == max((levels[one.tenant], one.rank) for one in above)
            assert victim is [one for one in above if (one.tenant, one.rank) == (victim.tenant, victim.rank)][-1]

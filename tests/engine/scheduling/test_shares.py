"""Shares of tenants: latency beside the load of another, tokens by weight, and nothing that goes to and fro."""

import math
import sys
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.costs import Costs
from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.scheduling.budget import CREDIT_S, Credit, StepBudget, split, step_shares
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import TURN, Sequence
from pdserve.keys import token_array
from pdserve.request import SamplingParams, Tenant

LIGHT, HEAVY = Tenant(1), Tenant(2)
COSTS = Costs(prefill=(0.002, 1e-4, 0.0), decode=(0.001, 1.5e-4, 0.0))  # of the demo model: 64 rows take ten times one
DEMANDS = st.dictionaries(
    st.integers(0, 5).flatmap(lambda i: st.builds(Tenant, st.just(i), st.floats(0.01, 100))),
    st.floats(0, 10, allow_subnormal=False),
    max_size=6,
)


@given(total=st.floats(0, 20), demands=DEMANDS)
def test_split_is_weighted_max_min_fair(total: float, demands: dict[Tenant, float]) -> None:
    granted = split(total, demands)
    assert granted.keys() == demands.keys()
    assert all(-1e-9 <= granted[tenant] <= demands[tenant] for tenant in demands)
    assert math.isclose(sum(granted.values()), min(total, sum(demands.values())), abs_tol=1e-6)
    weights = sum(tenant.weight for tenant in demands)
    for tenant in demands:
        assert granted[tenant] >= min(demands[tenant], total * tenant.weight / weights) - 1e-6


@given(base=st.floats(0, 1, allow_subnormal=False), demands=DEMANDS)
def test_no_tenant_is_slowed_down_beyond_its_share(base: float, demands: dict[Tenant, float]) -> None:
    shares = step_shares(base, demands)
    weights = sum(tenant.weight for tenant in demands)
    step = base + sum(shares.get(tenant, demands[tenant]) for tenant in demands)
    for tenant, seconds in demands.items():
        is_whole = shares.get(tenant, seconds) >= seconds - 1e-9
        assert step <= (base + seconds) * weights / tenant.weight + 1e-6 or not is_whole or not base + seconds
    if shares:
        assert any(shares.get(tenant, math.inf) >= demands[tenant] - 1e-9 for tenant in demands), (
            "the one for which it would be too long"
        )


SEQUENCES = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=12)


@given(
    demands=st.dictionaries(st.builds(Tenant, st.integers(0, 5), st.floats(0.01, 100)), SEQUENCES, max_size=5),
    creditors=st.sets(st.integers(0, 5)),
    base=st.sampled_from([0.0, 0.001, 0.1]),
)
def test_shares_are_those_of_all_work_though_not_all_is_looked_at(
    demands: dict[Tenant, list[tuple[int, int]]], creditors: set[int], base: float
) -> None:
    seqs, seconds = dict[Tenant, list[Sequence]](), dict[Tenant, float]()
    budget = StepBudget(COSTS, 2048, base=base)
    for tenant, lengths in demands.items():
        seqs[tenant] = [sequence(length, min(computed, length - 1), tenant) for length, computed in lengths]
        left, seconds[tenant] = max(1, int(2048 * tenant.weight / sum(one.weight for one in demands))), 0.0
        for seq in seqs[tenant]:
            chunk = min(seq.kv.num_uncomputed, left)
            left, seconds[tenant] = left - chunk, seconds[tenant] + (budget.seconds(seq, chunk) if chunk else 0.0)
    owed = [tenant for tenant in demands if tenant.id in creditors]
    budget.share(seqs, {}, owed, 1)
    assert budget.shares == pytest.approx(step_shares(base, seconds, owed))


def sequence(length: int, computed: int, tenant: Tenant) -> Sequence:
    """Return a sequence of which some tokens are computed, as if they had blocks."""
    ids = token_array([7] * length)
    return Sequence.new(
        "", ids, length, length, SamplingParams(max_tokens=9), b"", 16, num_computed=computed, tenant=tenant
    )


class Instance:
    """A scheduler on a virtual clock, whose steps take the time that the costs forecast."""

    def __init__(
        self, costs: Costs = COSTS, max_num_seqs: int = 64, num_blocks: int = 10_000, budget: int = 2048
    ) -> None:
        self.sched = Scheduler(BlockPool(num_blocks, 16), max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
        self.sched.costs = costs
        self.time = self.longest_step = 0.0
        self.ends: dict[Sequence, float] = {}
        self.tokens = Counter[Tenant]()
        self.computed = Counter[Tenant]()
        self.paused: list[Sequence] = []
        self._arrivals = 0

    def add(self, tenant: Tenant, prompt: int, tokens: int) -> Sequence:
        self._arrivals += 1
        ids = token_array([self._arrivals, *[7] * (prompt - 1)])
        sampling = SamplingParams(max_tokens=tokens)
        seq = Sequence.new(
            str(self._arrivals), ids, prompt, prompt, sampling, b"", 16, rank=self._arrivals, tenant=tenant
        )
        self.sched.add(seq)
        return seq

    def step(self) -> None:
        output = self.sched.schedule()
        self.paused += output.paused
        decoding = [seq for seq in output.plan.counts if seq.kv.is_decoding]
        seconds = self.sched.costs.step_seconds(len(decoding), sum(map(len, decoding)))
        for seq, count in output.plan.counts.items():
            seconds += (seq not in decoding) * (
                self.sched.costs.prefill[1] * count + self.sched.costs.prefill[0] * (not decoding)
            )
        self.time += seconds
        self.longest_step = max(self.longest_step, seconds)
        for seq, count in output.plan.counts.items():
            self.computed[seq.tenant] += count
            seq.kv.mark_computed(count)
            seq.kv.register_full_blocks(self.sched.pool)
            if not seq.kv.num_uncomputed:
                seq.output.append(8)
                self.tokens[seq.tenant] += 1
                if seq.output.finish_reason():
                    self.sched.remove(seq)
                    self.ends[seq] = self.time

    def run(self, until: float, refill: Callable[[], None] = lambda: None) -> None:
        while self.time < until:
            refill()
            if not any(True for _ in self.sched.sequences()):
                self.time = until
                return
            self.step()


def light_latencies(instance: Instance, refill: Callable[[], None], prompt: int = 20) -> list[float]:
    """Return the seconds that 20 requests of the light tenant take, which come every quarter of a second."""
    latencies = []
    for i in range(20):
        instance.run(i * 0.25, refill)
        began, seq = instance.time, instance.add(LIGHT, prompt, 16)
        while seq not in instance.ends:
            refill()
            instance.step()
        latencies.append(instance.ends[seq] - began)
    return latencies


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_long_prompts_share_the_tokens_of_steps_by_weight(weight: float) -> None:
    """Also with short prompts of the one that has more running sequences, which are computed within its share."""
    instance, other = Instance(budget=64), Tenant(2, weight)
    instance.add(LIGHT, 3000, 4)
    instance.add(other, 3000, 4)
    shorts = list[Sequence]()
    for step in range(20):
        shorts += [instance.add(other, 4, 1)] * (step > 2)
        instance.step()
    assert instance.computed[other] == pytest.approx(weight * instance.computed[LIGHT], abs=20)
    assert instance.computed.total() == 20 * 64
    assert set(shorts) <= set(instance.ends)


@pytest.mark.parametrize("lacking", [{"num_blocks": 200}, {"max_num_seqs": 1}])
def test_tokens_are_not_kept_for_prompts_that_lack_blocks_or_a_slot(lacking: Any) -> None:
    instance = Instance(budget=64, **lacking)
    instance.add(LIGHT, 3000, 4)
    instance.step()
    instance.add(HEAVY, 3000, 4)
    instance.step()
    assert instance.computed[LIGHT] == 128


@pytest.mark.parametrize("prompt", [20, 700])
@pytest.mark.parametrize("load", ["choices", "prompts"])
def test_latency_beside_the_load_of_another(load: str, prompt: int) -> None:
    """Little longer than alone, since it uses less than its share. At worst twice as long, and a step, in which it waits."""
    alone = max(light_latencies(Instance(), lambda: None, prompt))
    instance = Instance()
    running: list[Sequence] = []

    def refill() -> None:
        running[:] = [seq for seq in running if seq not in instance.ends]
        while len(running) < 96:
            running.append(instance.add(HEAVY, 30, 900) if load == "choices" else instance.add(HEAVY, 4000, 2))

    for _ in range(50):
        refill()
        instance.step()
    beside = light_latencies(instance, refill, prompt)
    assert max(beside) <= 2 * alone + 2 * instance.longest_step
    if load == "choices":
        assert median(beside) <= 1.4 * alone, "it uses less than its share"
    assert instance.computed[HEAVY] > instance.computed[LIGHT]


def test_a_stream_that_never_ends_makes_up_for_its_credit_only() -> None:
    """It runs almost as fast as alone first, and then at half the speed, so that the other keeps its share."""
    alone, instance = Instance(), Instance()
    alone.add(HEAVY, 30, 3000)
    for one in (alone, instance):
        for _ in range(96):
            one.add(HEAVY, 30, 3000)
    instance.run(2.0)
    instance.add(LIGHT, 20, 10_000)
    shares = []
    for _ in range(6):
        before, began = instance.tokens.copy(), instance.time
        instance.run(instance.time + 0.5)
        grown = {tenant: instance.tokens[tenant] - before[tenant] for tenant in (LIGHT, HEAVY)}
        shares.append((grown[LIGHT] / (instance.time - began) * sum(COSTS.decode[:2]), grown[HEAVY]))
    alone.run(1.0)
    assert shares[0][0] > 0.75 and 0.45 < shares[-1][0] < 0.75, "relative to its speed alone"
    assert shares[-1][1] > 0.4 * alone.tokens[HEAVY] * 0.5 > shares[0][1]


@settings(max_examples=25, deadline=None)
@given(
    base=st.sampled_from([0.0, 0.001, 0.01]),
    row=st.sampled_from([1e-5, 1e-4, 0.01]),
    context=st.sampled_from([0.0, 1e-6]),
    tenants=st.lists(
        st.tuples(st.sampled_from([0.01, 1.0, 3.0]), st.integers(1, 6), st.integers(1, 60)), min_size=2, max_size=4
    ),
    arrivals=st.lists(st.integers(0, 50), min_size=4, max_size=4),
)
def test_every_running_sequence_advances_within_a_turn_of_each_other(
    base: float, row: float, context: float, tenants: list[tuple[float, int, int]], arrivals: list[int]
) -> None:
    """However many tenants have credit. Others wait for a slot, or for time that those of their own tenant leave."""
    instance = Instance(Costs(prefill=(base, row, context), decode=(base, row, context)))
    advanced: dict[Sequence, int] = {}
    for step in range(450):
        for i, (weight, count, prompt) in enumerate(tenants):
            if step == arrivals[i]:
                for _ in range(count):
                    advanced[instance.add(Tenant(i, weight), prompt, 10_000)] = step
        before = {seq: len(seq) + seq.kv.num_computed for seq in advanced}
        instance.step()
        for seq in advanced:
            if len(seq) + seq.kv.num_computed > before[seq] or seq not in instance.sched.running:
                advanced[seq] = step
            assert step - advanced[seq] <= TURN * sum(count for _, count, _ in tenants), "it starves"


def test_credit_is_what_a_tenant_has_not_used() -> None:
    credit, both = Credit(), {LIGHT, HEAVY}
    assert credit.creditors(both) == both
    while not credit.is_settled({HEAVY}):
        credit.spend(0.001, {HEAVY: 0.009})  # alone, this is more than its share
    assert credit.creditors(both) == {LIGHT}
    seconds = 0.0
    while LIGHT in credit.creditors(both):
        credit.spend(0.001, {LIGHT: 0.001})
        seconds += 0.002
    assert seconds == pytest.approx(2 * CREDIT_S, rel=0.01), "half of what it gets is its own"
    credit.spend(0.001, {HEAVY: 0.009})
    assert LIGHT in credit.creditors(both), "the step was not for it"


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_tokens_follow_the_weights(weight: float) -> None:
    heavier = Tenant(3, weight)
    instance = Instance()
    for _ in range(96):
        instance.add(HEAVY, 30, 3000)
    for _ in range(100):
        instance.step()
    for _ in range(96):
        instance.add(heavier, 30, 3000)
    before = instance.tokens[HEAVY]
    for _ in range(500):
        instance.step()
    assert instance.tokens[heavier] / (instance.tokens[HEAVY] - before) == pytest.approx(weight, rel=0.1)
    assert len(instance.sched.running) == 64
    assert len(instance.paused) == len({*instance.paused}), "a slot goes once, and not to and fro"


def test_a_tenant_alone_is_scheduled_as_if_there_were_none() -> None:
    instance, others = Instance(), Instance()
    for _ in range(96):
        instance.add(HEAVY, 30, 40)
        others.add(Tenant(), 30, 40)
    while len(instance.ends) < 96:
        instance.step()
        others.step()
    assert [*instance.ends.values()] == [*others.ends.values()] and not instance.paused


def test_a_schedule_does_not_depend_on_addresses() -> None:
    """More sequences wait than there are slots, and which of them count for their tenant's share is always the same."""
    kept = list[object]()

    def ends(between: int) -> list[float]:
        instance = Instance(max_num_seqs=4)
        for i in range(30):
            for tenant in (HEAVY, LIGHT):
                kept.append(instance.add(tenant, 10 + 97 * i % 400, 12))
                kept.extend(instance.add(Tenant(3), 1, 1) for _ in range((7 * i + between) % 5 * between))
        for seq in [seq for seq in instance.sched.sequences() if seq.tenant == Tenant(3)]:
            instance.sched.remove(seq)
        while len(instance.ends) < 60:
            instance.step()
        return [*instance.ends.values()]

    assert len({tuple(ends(between)) for between in range(5)}) == 1


def test_a_full_pool_makes_room_for_a_tenant_with_less() -> None:
    """96 sequences grow until the pool is full; another tenant's is not the one that is preempted, though it is newer."""
    instance = Instance(num_blocks=200)
    for _ in range(96):
        instance.add(HEAVY, 30, 900)
    for _ in range(200):
        instance.step()
    assert instance.sched.pool.num_free < 10
    for _ in range(5):
        seq, steps = instance.add(LIGHT, 100, 40), 0
        while seq not in instance.ends:
            instance.step()
            steps += 1
        assert steps <= 60 and not seq.kv.num_preemptions
    instance.sched.pool.check_integrity()


def test_a_sequence_preempted_for_another_tenant_rests() -> None:
    instance = Instance(num_blocks=6)
    instance.add(LIGHT, 20, 40)
    instance.add(HEAVY, 20, 40)
    newest = instance.add(HEAVY, 20, 40)
    while not newest.kv.num_preemptions:
        assert newest.may_give_way
        instance.step()
    assert newest.tenant == HEAVY and not newest.may_give_way, "it gets 32 tokens before it makes room again"


def test_a_sequence_gets_32_tokens_between_two_times_that_it_gives_way() -> None:
    instance, lengths, gaps = Instance(max_num_seqs=16), dict[Sequence, int](), list[int]()

    def record() -> None:
        while instance.paused:
            seq = instance.paused.pop()
            gaps.extend([len(seq) - lengths[seq]] if seq in lengths else [])
            lengths[seq] = len(seq)

    for _ in range(24):
        instance.add(HEAVY, 40, 2000)
    for _ in range(50):
        for _ in range(8):
            instance.add(LIGHT, 40, 16)
        instance.run(instance.time + 0.1, record)
    assert len(gaps) > 100 and min(gaps) >= 32


def test_an_unreserved_hand_over_gets_room() -> None:
    """It waits outside of the queues: its KV comes from the store."""
    instance = Instance(num_blocks=200)
    for _ in range(96):
        instance.add(HEAVY, 30, 900)
    for _ in range(200):
        instance.step()
    seq = instance.add(LIGHT, 300, 20)
    instance.sched.remove(seq)
    for _ in range(40):
        instance.sched.unreserved = seq
        if instance.sched.reserve(seq, 0, 301, respect_queue=True):
            instance.sched.unreserved = None
            return
        instance.step()
    raise AssertionError("no room was made for it")


@pytest.mark.parametrize("creditors", [set[Tenant](), {LIGHT}])
def test_a_tenant_whose_work_takes_no_time_is_not_limited(creditors: set[Tenant]) -> None:
    """A fit may find that prompts cost nothing beside the step itself. Nor do all wait for it."""
    assert step_shares(0.0, {LIGHT: 0.0, HEAVY: 1.0}, creditors) == {}
    assert step_shares(0.1, {LIGHT: 0.0, HEAVY: 1.0}, creditors).keys() == {HEAVY}


def test_sequences_that_a_step_leaves_out_cost_it_little() -> None:
    """All of a tenant's are looked at while its share lets few of them advance: that is the other tenant's time."""
    instance = Instance()
    for _ in range(96):
        instance.add(HEAVY, 40, 900)
    for _ in range(40):
        instance.step()
    instance.add(LIGHT, 40, 100)
    for _ in range(5):
        instance.step()
    num_calls = 0

    def count_call(frame: Any, event: str, arg: Any) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count_call)
    try:
        output = instance.sched.schedule()
    finally:
        sys.setprofile(None)
    assert len(output.plan.counts) < 20
    assert num_calls < 8 * 97, "it was 22 of each once"

"""Sequences whose masks are late: no step has them, they keep their blocks and lend their slots, and the others go on."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.keys import token_array
from pdserve.request import NO_TENANT, SamplingParams, Tenant
from tests.examples import examples

BLOCK = 4


class Instance:
    """A scheduler whose steps append a token to each sequence that is computed."""

    def __init__(self, max_num_seqs: int = 4, num_blocks: int = 400) -> None:
        self.sched = Scheduler(BlockPool(num_blocks, BLOCK), max_num_seqs=max_num_seqs, max_num_batched_tokens=64)
        self.late: set[Sequence] = set()
        self.seqs: list[Sequence] = []

    def add(self, length: int = 6, max_tokens: int = 1000, tenant: Tenant = NO_TENANT) -> Sequence:
        rank = len(self.seqs)
        ids, sampling = token_array([rank, *[7] * (length - 1)]), SamplingParams(max_tokens=max_tokens)
        seq = Sequence.new(str(rank), ids, length, length, sampling, b"", BLOCK, rank=rank, tenant=tenant)
        self.sched.add(seq)
        self.seqs.append(seq)
        return seq

    def step(self) -> set[Sequence]:
        """Run a step, and return the sequences that got tokens."""
        output = self.sched.schedule(late=self.late)
        assert not self.late & output.plan.counts.keys()
        assert len(output.plan.counts) <= self.sched.max_num_seqs
        assert self.late or output.plan.counts or output.preempted or not self.seqs
        sampled = set()
        for seq, count in output.plan.counts.items():
            seq.kv.mark_computed(count)
            seq.kv.register_full_blocks(self.sched.pool)
            if not seq.kv.num_uncomputed:
                seq.output.append(7)
                sampled.add(seq)
                if seq.output.finish_reason():
                    self.sched.remove(seq)
                    self.seqs.remove(seq)
        return sampled


def test_a_late_sequence_is_left_out_and_keeps_its_blocks() -> None:
    instance = Instance()
    slow, plain = instance.add(), instance.add()
    assert instance.step() == {slow, plain}
    instance.late, blocks = {slow}, list(slow.kv.block_ids)
    assert [instance.step() for _ in range(50)] == [{plain}] * 50
    assert list(slow.kv.block_ids) == blocks and slow in instance.sched.running
    instance.late = set()
    assert instance.step() == {slow, plain}


def test_where_all_are_late_nothing_is_preempted() -> None:
    instance = Instance(num_blocks=8)
    seqs = {instance.add() for _ in range(3)}
    assert instance.step() == seqs
    instance.late = seqs
    assert [instance.step() for _ in range(3)] == [set()] * 3
    assert instance.sched.num_preemptions == 0
    instance.late = set()
    assert instance.step() == seqs


def test_late_sequences_lend_their_slots() -> None:
    instance = Instance(max_num_seqs=4)
    slow = {instance.add() for _ in range(4)}
    instance.step()
    instance.late, plain = slow, {instance.add(max_tokens=20) for _ in range(4)}
    assert [instance.step() for _ in range(20)] == [plain] * 20
    instance.late = set()
    assert instance.step() == slow


def test_slots_are_lent_only_to_those_that_could_use_them() -> None:
    instance = Instance(max_num_seqs=4)
    first, second, *plain = (instance.add() for _ in range(4))
    instance.step()
    instance.late = {first, second}
    new = instance.add(max_tokens=3)
    assert instance.step() == {*plain, new} and first in instance.sched.running and second in instance.sched.loaded
    instance.late = set()
    assert instance.step() == {*plain, new, first}
    assert instance.step() == {*plain, new, first}
    assert instance.step() == {*plain, first, second}


def test_blocks_of_late_sequences_go_to_those_that_run() -> None:
    instance = Instance(max_num_seqs=2, num_blocks=12)  # for 48 tokens
    slow = [instance.add(length=14) for _ in range(2)]
    instance.step()
    instance.late = set(slow)
    plain = instance.add(length=12, max_tokens=28)
    assert [instance.step() for _ in range(28)] == [{plain}] * 28
    assert instance.sched.num_preemptions == 2 and instance.sched.waiting == slow


def test_a_late_sequence_that_was_preempted_does_not_hold_up_prompts() -> None:
    instance = Instance(max_num_seqs=2, num_blocks=12)
    slow = [instance.add(length=14) for _ in range(2)]
    instance.step()
    instance.late = set(slow)
    instance.add(length=12, max_tokens=28)
    for _ in range(28):
        instance.step()
    assert instance.sched.waiting == slow
    new = instance.add(length=4, max_tokens=3)
    assert [instance.step() for _ in range(3)] == [{new}] * 3


@settings(max_examples=examples(2), deadline=None)
@given(data=st.data(), max_num_seqs=st.integers(1, 5), num_blocks=st.integers(12, 60), tenants=st.integers(1, 3))
def test_all_end_whoever_is_late(data: st.DataObject, max_num_seqs: int, num_blocks: int, tenants: int) -> None:
    """No step has a late sequence, one has some other if any can run, and no block leaks."""
    instance = Instance(max_num_seqs, num_blocks)
    for step in range(40):
        for length in data.draw(st.lists(st.integers(2, 20), max_size=2)) if step < 20 else ():
            tenant = Tenant(data.draw(st.integers(1, tenants)))
            instance.add(length, data.draw(st.integers(1, 12)), tenant)
        share = data.draw(st.sampled_from([0, 1, 2]))
        instance.late = {
            seq for i, seq in enumerate(instance.seqs) if (i + step) % 3 < share and len(seq) > seq.kv.num_initial
        }
        instance.step()
    instance.late = set()
    for _ in range(2000):
        if not instance.seqs:
            break
        instance.step()
    assert not instance.seqs and not [*instance.sched.sequences()]
    assert instance.sched.pool.num_held == instance.sched.pool.num_promised == 0
    instance.sched.pool.check_integrity()

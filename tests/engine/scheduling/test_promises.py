"""Blocks that are promised to prompts whose KV comes bit by bit: every prompt gets all of its blocks in the end."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.keys import token_array
from pdserve.request import SamplingParams
from tests.examples import examples

BLOCK = 4


@dataclass(eq=False)
class Prompt:
    """A prompt of some blocks and an answer of some tokens. Its KV is announced by blocks; if `here`, it is computed here."""

    blocks: int
    answer: int
    here: bool
    announced: int = 0
    seq: Sequence = field(init=False)

    def make_sequence(self, number: int) -> None:
        tokens = token_array([1000 + number] * self.blocks * BLOCK)
        sampling = SamplingParams(max_tokens=self.answer, ignore_eos=True)
        self.seq = Sequence.new(str(number), tokens, len(tokens), len(tokens), sampling, b"root", BLOCK, rank=number)


class Decode:
    """A scheduler, and the prompts that wait for KV or blocks, with the calls of the decode role."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK)
        self.sched = Scheduler(self.pool, max_num_seqs=8, max_num_batched_tokens=16)
        self.loading: list[Prompt] = []
        self.num_finished = 0

    def submit(self, prompt: Prompt) -> None:
        if prompt.here:
            self.sched.add(prompt.seq)
        else:
            self.loading.append(prompt)

    def reserve(self) -> None:
        for prompt in self.loading:
            if prompt.seq.kv.block_ids:
                prompt.seq.kv.take_promised(self.pool, stop=prompt.announced)
        for prompt in sorted(self.loading, key=lambda one: one.seq.rank):
            tokens, now = prompt.seq.kv.num_initial + 1, prompt.announced
            waits = now and not prompt.seq.kv.block_ids
            if waits and not self.sched.reserve(prompt.seq, 0, tokens, respect_queue=True, num_now=now):
                break
        for prompt in self.loading[:]:
            if prompt.announced == prompt.blocks <= len(prompt.seq.kv.block_ids):
                self.loading.remove(prompt)
                prompt.seq.kv.mark_loaded(prompt.seq.kv.num_initial)
                prompt.seq.output.append(7)
                self.sched.add(prompt.seq)

    def step(self) -> None:
        self.reserve()
        for prompt in self.loading:
            held = len(prompt.seq.kv.block_ids)
            assert held <= prompt.announced or not held, "it holds blocks for KV that nobody has announced"
        for seq, count in self.sched.schedule().plan.counts.items():
            seq.kv.mark_computed(count)
            if seq.kv.num_uncomputed == 0:
                seq.output.append(7)
                if seq.output.finish_reason():
                    self.sched.remove(seq)
                    self.num_finished += 1
        self.pool.check_integrity()


def test_a_prompt_takes_blocks_as_it_is_computed() -> None:
    """The others are promised to it: another prompt begins only if the pool has room for both."""
    decode, prompts = Decode(16), [Prompt(blocks, 2, here=True) for blocks in (12, 5)]
    for number, prompt in enumerate(prompts):
        prompt.make_sequence(number)
        decode.submit(prompt)
    for held, promised in ((4, 8), (8, 4), (12, 0)):
        decode.step()
        assert len(prompts[0].seq.kv.block_ids) == held and decode.pool.num_promised == promised
        assert not prompts[1].seq.kv.block_ids


@settings(max_examples=examples(2), deadline=None)
@given(data=st.data(), num_blocks=st.integers(3, 9), count=st.integers(1, 6))
def test_every_prompt_ends_in_whatever_order_kv_comes(data: st.DataObject, num_blocks: int, count: int) -> None:
    decode = Decode(num_blocks)
    prompts = []
    for number in range(count):
        blocks = num_blocks - data.draw(st.integers(1, num_blocks - 1), label="blocks less than the pool")
        most = (num_blocks - blocks) * BLOCK
        prompt = Prompt(
            blocks, data.draw(st.integers(2, most), label="answer"), data.draw(st.integers(0, 3), label="here") == 3
        )
        prompt.make_sequence(number)
        prompts.append(prompt)
        decode.submit(prompt)
    unannounced = [prompt for prompt in prompts if not prompt.here]
    while unannounced:
        prompt = data.draw(st.sampled_from(unannounced), label="announce")
        prompt.announced += data.draw(st.integers(1, min(3, prompt.blocks - prompt.announced)), label="blocks more")
        if prompt.announced == prompt.blocks:
            unannounced.remove(prompt)
        for _ in range(data.draw(st.integers(1, 3), label="steps")):
            decode.step()
    for _ in range(60 * count):
        decode.step()
    assert decode.num_finished == count, "some prompts wait for each other"
    assert decode.pool.num_held == decode.pool.num_promised == 0

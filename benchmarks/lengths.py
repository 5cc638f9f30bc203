"""Requests of given lengths on the scheduler, with a model that answers every step at once."""

from collections.abc import Iterable, Iterator

from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.keys import token_array
from pdserve.request import SamplingParams


def sequence(number: int, num_prompt: int, num_output: int, block_size: int) -> Sequence:
    """Return a sequence with a unique first token, so that no prefix is found in the cache."""
    tokens = token_array([number + 1, *([0] * (num_prompt - 1))])
    sampling, root = SamplingParams(max_tokens=num_output, ignore_eos=True), number.to_bytes(16, "little")
    return Sequence.new(str(number), tokens, num_prompt, num_prompt, sampling, root, block_size)


def answer(scheduler: Scheduler, seqs: Iterable[Sequence]) -> Iterator[Sequence]:
    """Append a token to each sequence that has KV for all others; remove and yield those that are complete."""
    for seq in seqs:
        if seq.kv.num_uncomputed == 0:
            seq.output.append(0)
            if seq.output.finish_reason():
                scheduler.remove(seq)
                yield seq

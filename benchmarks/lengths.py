"""Requests of given lengths: on the scheduler, with a model that answers every step at once, and with contiguous memory."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence as EngineSequence
from pdserve.keys import token_array
from pdserve.request import SamplingParams


@dataclass(frozen=True)
class Request:
    input: int
    output: int
    at: float = 0.0

    @property
    def final(self) -> int:
        """Tokens with KV when it ends: the last one is never computed."""
        return self.input + self.output - 1


# Slots that engines without paging reserve for a request, given the longest one that is allowed.
RESERVATIONS: dict[str, Callable[[Request, int], int]] = {
    "max": lambda request, longest: longest,
    "power of two": lambda request, longest: 1 << (request.final - 1).bit_length(),
    "oracle": lambda request, longest: request.final,
}


def sequence(number: int, num_prompt: int, num_output: int, block_size: int) -> EngineSequence:
    """Return a sequence with a unique first token, so that no prefix is found in the cache."""
    tokens = token_array([number + 1, *([0] * (num_prompt - 1))])
    sampling, root = SamplingParams(max_tokens=num_output, ignore_eos=True), number.to_bytes(16, "little")
    return EngineSequence.new(str(number), tokens, num_prompt, num_prompt, sampling, root, block_size)


def answer(scheduler: Scheduler, seqs: Iterable[EngineSequence]) -> Iterator[EngineSequence]:
    """Append a token to each sequence that has KV for all others; remove and yield those that are complete."""
    for seq in seqs:
        if seq.kv.num_uncomputed == 0:
            seq.output.append(0)
            if seq.output.finish_reason():
                scheduler.remove(seq)
                yield seq


class Contiguous:
    """Serves first come, first served, as long as reservations fit, with a scheduler of single steps, as Orca's.

    Attributes:
        waiting: numbers of the requests without memory.
        computed: tokens with KV of the others, by number.
        reserved: slots that these hold.
    """

    def __init__(
        self, requests: Sequence[Request], sizes: Sequence[int], slots: int, step_tokens: int, choices: int = 1
    ) -> None:
        self._requests, self._sizes, self._slots = requests, sizes, slots
        self._step_tokens, self._choices = step_tokens, choices
        self.waiting, self.computed, self.reserved = deque[int](), dict[int, int](), 0

    def step(self) -> list[tuple[int, int]]:
        """Admit requests and compute a step; return the tokens that it computes of each sequence, and those before."""
        while self.waiting and self.reserved + self._sizes[self.waiting[0]] <= self._slots:
            self.reserved += self._sizes[self.waiting[0]]
            self.computed[self.waiting.popleft()] = 0
        budget, work = self._step_tokens, list[tuple[int, int]]()
        # Decoding requests come first.
        for i in sorted(self.computed, key=lambda i: self.computed[i] < self._requests[i].input):
            missing = self._requests[i].input - self.computed[i]
            count, times = min(max(1, missing), budget), 1 if missing > 0 else self._choices
            if count:
                work += [(count, self.computed[i])] * times
                budget -= count * times
                self.computed[i] += count
        return work

    def end(self) -> list[int]:
        """Give back the memory of the requests that are complete, and return their numbers."""
        ended = [i for i, tokens in self.computed.items() if tokens >= self._requests[i].final]
        for i in ended:
            del self.computed[i]
            self.reserved -= self._sizes[i]
        return ended

"""State of one sequence in the engine: its tokens, its KV progress, and the blocks that hold the KV. Plain data."""

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from typing import Any, Protocol

from pdserve.errors import RequestError
from pdserve.keys import KeyChain
from pdserve.request import SamplingParams, TokenLogprobs


class Constraint(Protocol):
    """Restricts the next token of a sequence. Implemented by `GrammarConstraint` in `engine/grammar.py`."""

    failure: RequestError | None

    @property
    def is_ready(self) -> bool: ...

    def fill_bitmask(self, output: list[int], mask_SW: Any, row: int) -> None: ...


@dataclass(frozen=True)
class SwappedKV:
    """Copy in host memory of a preempted sequence's KV.

    Attributes:
        first_block: index in the sequence of the first block that was copied.
        num_tokens: leading tokens of the sequence that have KV.
        host_blocks: block ids in the host pool, of the sequence's blocks from `first_block` on.
    """

    first_block: int
    num_tokens: int
    host_blocks: list[int]


@dataclass(eq=False)
class Sequence:
    """A prompt and its continuation.

    Attributes:
        tokens: prompt, then output.
        num_prompt: number of prompt tokens.
        num_initial: number of tokens at creation: the prompt, and the output that another instance had generated.
        block_ids: one per block of tokens. The first `num_dropped` entries are void.
        num_dropped: leading blocks released because they lie outside the attention window of every later token.
        num_computed: leading tokens whose KV is in `block_ids`.
        num_registered: leading blocks that are registered in the pool by key.
        keys: content keys of the full blocks of `tokens`, derived on demand.
        stop_token_ids: tokens that end generation (EOS included, unless it is ignored).
        swapped: the copy in host memory of the KV that a preemption took away, if any.
        needs_refetch: set on preemption if the KV may be in the store; once the sequence has blocks again, its owner
            looks there before anything is recomputed.
        rank: scheduling order, lowest first.
        publishes_kv: its KV goes to the store as it is computed; the scheduler may pause it while the store is behind.
        cacheable: its KV is exactly what this pool would compute, so its blocks may be registered for prefix hits.
        constraint: grammar of its output, if any.
        last_logprobs: of the last token, if the request asked for logprobs.
        num_local_hit: tokens whose KV came from this pool at first admission.
        num_loaded: tokens whose KV came from the KV store at first admission.
        admitted: whether it has been in the running batch.
    """

    request_id: str
    tokens: list[int]
    num_prompt: int
    num_initial: int
    sampling: SamplingParams
    root: bytes
    block_size: int
    stop_token_ids: frozenset[int] = frozenset()
    block_ids: list[int] = field(default_factory=list)
    num_dropped: int = 0
    num_computed: int = 0
    keys: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    num_local_hit: int = 0
    num_loaded: int = 0
    num_preemptions: int = 0
    swapped: SwappedKV | None = None
    needs_refetch: bool = False
    rank: int = 0
    last_logprobs: TokenLogprobs | None = None
    constraint: Constraint | None = None
    cacheable: bool = True
    stores_kv: bool = False
    admitted: bool = False

    def __post_init__(self) -> None:
        self._chain = KeyChain(self.root)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def held_blocks(self) -> list[int]:
        """Ids of the blocks to which the sequence holds a reference."""
        return self.block_ids[self.num_dropped :]

    def blocks(self, first: int, stop: int) -> list[int]:
        """Return the ids of its blocks [first, stop). None of them may have been dropped."""
        assert first >= self.num_dropped, f"block {first} of {self.request_id} was dropped"
        return self.block_ids[first:stop]

    @property
    def num_uncomputed(self) -> int:
        """Tokens without KV: 1 while decoding, more while prefilling or after a preemption."""
        return len(self.tokens) - self.num_computed

    def full_keys(self) -> list[bytes]:
        """Return the keys of all full blocks of `tokens`."""
        first = (len(self.keys) + 1) * self.block_size
        if first <= len(self.tokens):
            self.keys += self.prefix_keys(range(first, len(self.tokens) + 1, self.block_size))
        return self.keys

    def initial_keys(self) -> list[bytes]:
        """Return the keys of all blocks of the initial tokens, a partial last block included."""
        full, rest = divmod(self.num_initial, self.block_size)
        return self.full_keys()[:full] + self.prefix_keys([self.num_initial] if rest else [])

    def prefix_keys(self, ends: SequenceABC[int]) -> list[bytes]:
        """Return the key of the first n tokens for each n of `ends`, which must ascend."""
        return self._chain.keys(self.tokens, ends)

    def finish_reason(self) -> str | None:
        """Return `stop` after a stop token, `length` after max_tokens, else None."""
        if self.num_output == 0:
            return None
        if self.tokens[-1] in self.stop_token_ids and self.num_output >= self.sampling.min_tokens:
            return "stop"
        return "length" if self.num_output >= self.sampling.max_tokens else None

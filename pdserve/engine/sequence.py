"""One sequence in the engine: its tokens, how many of them have KV, and the blocks that hold it. Plain data."""

from collections.abc import Sequence as Ends
from dataclasses import dataclass, field
from typing import Any, Protocol

from pdserve.errors import RequestError
from pdserve.keys import KeyChain
from pdserve.request import SamplingParams, TokenLogprobs


class Constraint(Protocol):
    """What its next token may be: `engine/grammar.py`."""

    failure: RequestError | None

    @property
    def ready(self) -> bool: ...

    def allow(self, output: list[int], mask_SW: Any, row: int) -> None: ...


@dataclass(frozen=True)
class Swapped:
    """KV of a sequence's first `tokens` tokens in host memory: its blocks from `first` on are in these places there."""

    first: int
    tokens: int
    places: list[int]


@dataclass(eq=False)
class Sequence:
    """A prompt being continued.

    Attributes:
        tokens: prompt, then output.
        num_prompt: how many of them are the prompt.
        num_given: how many of them were there at the start: the prompt, and what another instance had generated.
        block_ids: one for each block of tokens. Those of the first `num_dropped` mean nothing any more.
        num_dropped: leading blocks that were given back, because no token to come sees them.
        num_computed: how many leading tokens have their KV in `block_ids`.
        keys: content keys of the full blocks of `tokens`, as far as they have been derived.
        stop_token_ids: generation ends with one of these (EOS included, unless it is ignored).
        swapped: what was copied to host memory when it lost its blocks.
        refetch: its KV may be in the store; once it has blocks again, its owner looks there before anything is computed.
        rank: lower for those that go first.
        exported: its KV is stored as it is computed; it may be held back while the store cannot keep up.
        exact: its KV is what this pool computes itself, so its blocks are worth finding by their keys.
        constraint: a grammar that its output follows, if any.
        last_logprobs: of the last token, if the request asks for them.
        num_local_hit, num_loaded: tokens whose KV came from this pool, or from the KV store, at first admission.
    """

    request_id: str
    tokens: list[int]
    num_prompt: int
    num_given: int
    sampling: SamplingParams
    root: bytes
    block_size: int
    stop_token_ids: frozenset[int] = frozenset()
    block_ids: list[int] = field(default_factory=list)
    num_dropped: int = 0
    num_computed: int = 0
    keys: list[bytes] = field(default_factory=list)
    num_registered: int = 0  # leading blocks that the pool knows by key
    num_local_hit: int = 0
    num_loaded: int = 0
    num_preemptions: int = 0
    swapped: Swapped | None = None
    refetch: bool = False
    rank: int = 0
    last_logprobs: TokenLogprobs | None = None
    constraint: Constraint | None = None
    exact: bool = True
    exported: bool = False
    admitted: bool = False  # it has been in the running batch

    def __post_init__(self) -> None:
        self._chain = KeyChain(self.root)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def held(self) -> list[int]:
        """The blocks that it has."""
        return self.block_ids[self.num_dropped :]

    def blocks(self, first: int, stop: int) -> list[int]:
        """Block ids of its blocks from `first` to before `stop`, none of which was given back."""
        assert first >= self.num_dropped, f"block {first} of {self.request_id} was given back"
        return self.block_ids[first:stop]

    @property
    def num_missing(self) -> int:
        """Tokens without KV: 1 while decoding, more while prefilling or after a preemption."""
        return len(self.tokens) - self.num_computed

    def full_keys(self) -> list[bytes]:
        """Keys of all full blocks of `tokens`."""
        first = (len(self.keys) + 1) * self.block_size
        if first <= len(self.tokens):
            self.keys += self.keys_at(range(first, len(self.tokens) + 1, self.block_size))
        return self.keys

    def given_keys(self) -> list[bytes]:
        """Keys of all blocks of the given tokens, a partial last one included."""
        full, rest = divmod(self.num_given, self.block_size)
        return self.full_keys()[:full] + self.keys_at([self.num_given] if rest else [])

    def keys_at(self, ends: Ends[int]) -> list[bytes]:
        """Keys of the first n tokens, for each n of `ends`, which ascend."""
        return self._chain.keys(self.tokens, ends)

    def finish_reason(self) -> str | None:
        """`stop` after a stop token, `length` after max_tokens, else None."""
        if self.num_output == 0:
            return None
        if self.tokens[-1] in self.stop_token_ids and self.num_output >= self.sampling.min_tokens:
            return "stop"
        return "length" if self.num_output >= self.sampling.max_tokens else None

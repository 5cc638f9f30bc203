"""State of one sequence in the engine: its tokens, its KV progress, and the blocks that hold the KV. Plain data.

Only the methods of `Sequence` change this state; other modules call them and read the attributes.
"""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeAlias

from pdserve.beam_search import BeamSearch, Candidate
from pdserve.engine.memory.block_pool import BlockPool
from pdserve.errors import RequestError
from pdserve.keys import KeyChain, Tokens
from pdserve.logits_processors import LogitsProcessor
from pdserve.pooling import Pooling
from pdserve.reasoning import ReasoningTracker
from pdserve.request import NO_TENANT, SamplingParams, Tenant, TokenLogprobs

MIN_TOKENS_BETWEEN = 32  # that a sequence gets before it gives way to other tenants again
TURN = 16  # tokens that a sequence gets in a row where a step is too short for all of its tenant


BlockTable: TypeAlias = "array[int]"  # int64: a step copies it into its input, which takes a list fifteen times as long


def block_table(ids: Iterable[int] = ()) -> BlockTable:
    return array("q", ids)


class Constraint(Protocol):
    """Restricts the next token of a sequence. Implemented by `GrammarConstraint` in `engine/grammar.py`."""

    @property
    def failure(self) -> RequestError | None: ...

    @property
    def is_ready(self) -> bool: ...

    def mask_row(self, output: list[int], mask_W: Any) -> Any: ...


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
class BeamGroup:
    """The sequences of one beam search, which advance together.

    Attributes:
        root: the sequence that computes the prompt.
        beams: in the order of the search's branches.
    """

    search: BeamSearch
    root: "Sequence"
    beams: "list[Sequence]"

    @property
    def is_ready(self) -> bool:
        """True if the candidates of every beam are known, and its KV is here."""
        return all(seq.candidates is not None and seq.num_uncomputed == 0 for seq in self.beams)


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
        rank: scheduling order within its tenant, lowest first.
        tenant: whose request it is.
        gave_way_at: its length when it last gave way to another tenant; None if it never has.
        last_turn: the last step that computed it, among those that were too short for all sequences of its tenant.
        stores_kv: its role stores its KV as it is computed; the scheduler pauses it while the store is behind.
        cacheable: its KV is exactly what this pool would compute, so its blocks may be registered for prefix hits.
        constraint: grammar of its output, if any.
        prompt_scores: log probabilities of tokens of the prompt, by position, if the request asked for them.
        num_local_hit: tokens whose KV came from this pool at first admission.
        num_loaded: tokens whose KV came from the KV store at first admission.
        num_unneeded: leading tokens to which no later one attended at first admission, so that their KV came from nowhere.
        num_shared: leading tokens whose KV it took over from another sequence of its request.
        siblings: sequences of the same request that wait for this one's prompt, to share its KV.
        leader: the sequence for whose prompt this one waits.
        group: of its beam search, if it is one.
        candidates: most likely next tokens of a beam, with their log probabilities.
        processors: plug-ins that change its logits.
        plugin_failure: why its output cannot be continued, if a plug-in has failed.
        pooling: how its embedding is made, if that is what the request asks for.
        pooled: sum of the hidden states that count, so far.
        embedded: float32 numbers, once its tokens are computed.
        admitted: whether it has been in the running batch.
        chain: computes its keys; None for one of its own.
    """

    request_id: str
    tokens: Tokens
    num_prompt: int
    num_initial: int
    sampling: SamplingParams
    root: bytes
    block_size: int
    stop_token_ids: frozenset[int] = frozenset()
    block_ids: BlockTable = field(default_factory=block_table)
    num_dropped: int = 0
    num_computed: int = 0
    keys: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    num_local_hit: int = 0
    num_loaded: int = 0
    num_unneeded: int = 0
    num_preemptions: int = 0
    swapped: SwappedKV | None = None
    needs_refetch: bool = False
    rank: int = 0
    tenant: Tenant = NO_TENANT
    gave_way_at: int | None = None
    last_turn: int = 0
    prompt_scores: dict[int, TokenLogprobs] = field(default_factory=dict)
    constraint: Constraint | None = None
    cacheable: bool = True
    stores_kv: bool = False
    num_shared: int = 0
    siblings: list["Sequence"] = field(default_factory=list)
    leader: "Sequence | None" = None
    group: BeamGroup | None = None
    candidates: list[Candidate] | None = None
    processors: list[LogitsProcessor] = field(default_factory=list)
    plugin_failure: RequestError | None = None
    pooling: Pooling | None = None
    pooled: Any = None
    embedded: bytes = b""
    admitted: bool = False
    chain: KeyChain | None = None

    def __post_init__(self) -> None:
        self._chain = self.chain or KeyChain(self.root)
        span = self.sampling.reasoning
        self._reasoning = ReasoningTracker(span) if span is not None else None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def held_blocks(self) -> list[int]:
        """Ids of the blocks to which the sequence holds a reference."""
        return self.block_ids[self.num_dropped :].tolist()

    def blocks(self, first: int, stop: int) -> list[int]:
        """Return the ids of its blocks [first, stop). None of them may have been dropped."""
        assert first >= self.num_dropped, f"block {first} of {self.request_id} was dropped"
        return self.block_ids[first:stop].tolist()

    @property
    def num_uncomputed(self) -> int:
        """Tokens without KV: 1 while decoding, more while prefilling or after a preemption."""
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """True if at most its last token lacks KV. A beam that waits for others lacks none."""
        return len(self.tokens) - self.num_computed <= 1

    @property
    def takes_drafts(self) -> bool:
        """True if a step may compute drafts behind its last token: it has sampled here, and needs nothing but logits."""
        return self.is_decoding and len(self.tokens) > self.num_initial and self.needs_only_logits

    @property
    def may_give_way(self) -> bool:
        """True if its slot may go to another tenant. Beams keep theirs, since a search advances with all of them only."""
        has_rested = self.gave_way_at is None or len(self) >= self.gave_way_at + MIN_TOKENS_BETWEEN
        return has_rested and self.group is None

    @property
    def turn(self) -> tuple[bool, int]:
        """Its place among the sequences of a tenant for which a step is too short: those amid a turn go on."""
        is_amid = self.num_computed % TURN != 0
        return not is_amid, -self.last_turn if is_amid else self.last_turn

    @property
    def num_usable_hits(self) -> int:
        """Leading full blocks that need not be computed. The last token always is, because its logits are needed."""
        return 0 if self.scores_prompt or self.pools_all else (len(self.tokens) - 1) // self.block_size

    @property
    def scores_prompt(self) -> bool:
        """True if the logits of every token of the prompt are needed, and are not complete. Its KV must be computed here."""
        is_asked = self.sampling.prompt_logprobs is not None and self.num_initial == self.num_prompt
        return is_asked and len(self.prompt_scores) < self.num_prompt - 1

    @property
    def pools_all(self) -> bool:
        """True if hidden states of other tokens than the last one are needed, so that its KV must be computed here."""
        return self.pooling is not None and self.pooling.mode != "last"

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
        if self.ends_with(self.tokens[-1], self.num_output):
            return "stop"
        return "length" if self.num_output >= self.sampling.max_tokens else None

    def ends_with(self, token: int, num_output: int) -> bool:
        """Return whether a token ends the sequence, if it is number `num_output` of its output tokens (from 1)."""
        return token in self.stop_token_ids and num_output >= self.sampling.min_tokens

    @cached_property
    def needs_only_logits(self) -> bool:
        """See `SamplingParams`. Asked in every step, where steps are launched ahead."""
        return self.sampling.needs_only_logits

    @property
    def awaits_last_token(self) -> bool:
        """True if the next token ends it, whatever it is."""
        return self.num_output + 1 >= self.sampling.max_tokens

    @property
    def answer_start(self) -> int | None:
        """Position in the output of the first token after its reasoning, where its grammar begins; None inside of that."""
        if self._reasoning is None:
            return 0
        self._reasoning.follow(self.tokens, self.num_prompt)
        return self._reasoning.answer_start

    @property
    def forced_token(self) -> int | None:
        """The only token that may come next, because it begins or closes the reasoning; None if others may."""
        if self._reasoning is None or self.answer_start is not None:
            return None
        return self._reasoning.forced_token(self.tokens, self.num_prompt)

    # ---- changes of state ---------------------------------------------------------------------------------------

    def append(self, token: int) -> None:
        """Append a token, sampled here or by the instance that computed the prompt."""
        self.tokens.append(token)

    def extend(self, tokens: list[int]) -> None:
        """Append several tokens."""
        self.tokens.extend(tokens)

    def search(self, search: BeamSearch) -> None:
        """Become the first beam of a search."""
        self.group = BeamGroup(search, self, [self])

    def record_candidates(self, candidates: list[Candidate]) -> None:
        """Set the most likely next tokens of a beam."""
        self.candidates = candidates

    def extend_beam(self, token: int) -> None:
        """Append a token that the beam search has chosen."""
        self.tokens.append(token)
        self.candidates = None

    def process(self, processors: list[LogitsProcessor]) -> None:
        """Have plug-ins change its logits."""
        self.processors = processors

    def fail(self, failure: RequestError) -> None:
        """Record that its output cannot be continued."""
        self.plugin_failure = failure

    def embed(self, pooling: Pooling) -> None:
        """Become a sequence whose embedding is wanted."""
        self.pooling = pooling

    def pool_hidden(self, hidden: Any) -> None:
        """Add a hidden state that counts for the embedding."""
        self.pooled = hidden if self.pooled is None else self.pooled + hidden

    def record_embedding(self, embedding: bytes) -> None:
        """Set the embedding."""
        self.embedded, self.pooled = embedding, None

    def record_prompt_score(self, position: int, logprobs: TokenLogprobs) -> None:
        """Set the log probabilities of the prompt's token at a position."""
        self.prompt_scores[position] = logprobs

    def mark_for_storing(self) -> None:
        """Record that its role stores its KV as it is computed, so that the scheduler may pause it."""
        self.stores_kv = True

    def forbid_caching(self) -> None:
        """Keep its blocks from being registered for prefix hits."""
        self.cacheable = False

    def sibling(self, request_id: str, sampling: SamplingParams, constraint: Constraint | None) -> "Sequence":
        """Return another sequence of the same tokens, which has no KV yet."""
        assert not self.block_ids and not self.admitted
        return replace(
            self,
            request_id=request_id,
            sampling=sampling,
            constraint=constraint,
            tokens=self.tokens[:],
            keys=[],
            block_ids=block_table(),
            siblings=[],
            chain=self._chain.copy(),
        )

    def lead(self, siblings: list["Sequence"]) -> None:
        """Let sequences of the same tokens wait for this one's prompt."""
        self.siblings = siblings
        for one in siblings:
            one.leader = self

    def take_siblings(self) -> list["Sequence"]:
        """Return the sequences that wait for this one's prompt, and let them wait no longer."""
        siblings, self.siblings = self.siblings, []
        for one in siblings:
            one.leader = None
        return siblings

    def leave(self) -> None:
        """Wait no longer for another sequence's prompt."""
        if self.leader is not None:
            self.leader.siblings.remove(self)
            self.leader = None

    def share(self, other: "Sequence", pool: BlockPool) -> None:
        """Take over the KV that another sequence of the same tokens has. Later writes are copy-on-write."""
        assert not self.block_ids and len(self) == len(other)
        self.block_ids = other.block_ids[: pool.blocks_for(other.num_computed)]
        self.num_dropped, self.num_computed = min(other.num_dropped, len(self.block_ids)), other.num_computed
        pool.hold(self.held_blocks)
        self.num_registered = min(other.num_registered, len(self.block_ids))
        self.keys, self._chain = other.keys[:], other._chain.copy()
        self.cacheable, self.prompt_scores = other.cacheable, other.prompt_scores
        self.num_shared, self.num_unneeded = other.num_computed, min(other.num_unneeded, other.num_computed)
        self.num_local_hit = other.num_computed - self.num_unneeded

    def fork(self, pool: BlockPool, request_id: str, sampling: SamplingParams) -> "Sequence":
        """Return a copy that shares all KV computed so far."""
        block_ids = self.block_ids[: pool.blocks_for(self.num_computed)]
        pool.hold(block_ids[self.num_dropped :])
        return replace(
            self,
            request_id=request_id,
            sampling=sampling,
            tokens=self.tokens[:],
            keys=[*self.keys],
            block_ids=block_ids,
            swapped=None,
            siblings=[],
            candidates=None,
            chain=self._chain.copy(),
        )

    def take_blocks(self, first: int, hits: list[int], fresh: list[int]) -> None:
        """Take over references to its first blocks.

        Args:
            first: index of the first block; the ones before it count as dropped.
            hits: blocks from `first` on that hold the KV of its tokens.
            fresh: blocks without KV.
        """
        assert not self.block_ids
        self.block_ids = block_table([0] * first + hits + fresh)
        self.num_dropped, self.num_registered = first, first + len(hits)
        self.num_computed = self.num_registered * self.block_size
        if not self.admitted:
            self.num_local_hit, self.num_unneeded = len(hits) * self.block_size, first * self.block_size

    def blocks_needed(self, pool: BlockPool) -> int:
        """Return how many new blocks it needs to compute all its tokens, the copy of a shared block included."""
        is_copied = self._block_to_copy(pool) is not None
        return max(0, pool.blocks_for(len(self)) - len(self.block_ids)) + is_copied

    def copy_on_write(self, pool: BlockPool) -> tuple[int, int] | None:
        """Replace the block that the next token is written to if others read it or may find it by its key.

        Returns:
            (source, target): the block whose content must be copied, and its replacement. None if nothing was replaced.
        """
        index = self._block_to_copy(pool)
        if index is None:
            return None
        self.num_registered = min(self.num_registered, index)
        source, (target,) = self.block_ids[index], pool.allocate(1)
        pool.release([source])
        self.block_ids[index] = target
        return source, target

    def grow(self, pool: BlockPool, further: int = 0) -> None:
        """Allocate the blocks that all its tokens need, and `further` tokens after them."""
        self.block_ids.extend(pool.allocate(max(0, pool.blocks_for(len(self) + further) - len(self.block_ids))))

    def drop_blocks(self, pool: BlockPool, stop: int) -> None:
        """Release its blocks before index `stop`, to which no later token attends."""
        if stop > self.num_dropped:
            pool.release(self.blocks(self.num_dropped, stop))
            self.num_dropped = stop

    def release_blocks(self, pool: BlockPool) -> None:
        """Release all its blocks."""
        pool.release(self.held_blocks)
        self.block_ids = block_table()
        self.num_computed = self.num_registered = self.num_dropped = 0

    def give_up_blocks(self, pool: BlockPool) -> None:
        """Release all its blocks before its first admission: it is computed from its first token on."""
        self.release_blocks(pool)
        self.num_local_hit = self.num_unneeded = 0

    def admit(self) -> None:
        """Record that it has joined the running batch."""
        self.admitted = True

    def give_way(self) -> None:
        """Record that another tenant gets its slot."""
        self.gave_way_at = len(self)

    def take_turn(self, step: int) -> None:
        """Record that a step computes it."""
        self.last_turn = step

    def mark_computed(self, num_tokens: int) -> None:
        """Record that `num_tokens` more tokens have KV."""
        self.num_computed += num_tokens

    def mark_loaded(self, num_tokens: int) -> None:
        """Record that its first `num_tokens` tokens have KV, found in the pool or loaded from the store."""
        self.num_computed = num_tokens
        if not self.admitted:
            self.num_loaded = max(0, num_tokens - self.num_unneeded - self.num_local_hit)
        self.admitted = True

    def reopen_prompt(self) -> None:
        """Give up the KV of the last initial token, which has no successor yet: its logits are needed."""
        assert self.num_computed == self.num_initial == len(self.tokens)
        self.num_computed -= 1
        self.num_loaded = max(0, self.num_loaded - 1)

    def register_full_blocks(self, pool: BlockPool) -> None:
        """Make its full blocks that have KV findable by key."""
        full = self.num_computed // self.block_size
        if full > self.num_registered and self.cacheable:
            keys = self.full_keys()
            for i in range(self.num_registered, full):
                tokens = self.tokens[i * self.block_size : (i + 1) * self.block_size]
                pool.register(self.block_ids[i], keys[i], keys[i - 1] if i else None, tokens)
            self.num_registered = full

    def preempt(self, pool: BlockPool, swapped: SwappedKV | None, *, is_stored: bool) -> None:
        """Release all its blocks, so that others can run.

        Args:
            swapped: copy of its KV in host memory, if any.
            is_stored: its KV may be in the store.
        """
        self.swapped = swapped
        if swapped is None:
            self.pooled = None  # its tokens are computed again
        self.needs_refetch = is_stored and swapped is None
        self.release_blocks(pool)
        self.num_preemptions += 1

    def restore_swapped(self) -> SwappedKV:
        """Record that the KV in host memory has been copied back to its blocks. Returns what may be released there."""
        swapped = self.discard_swapped()
        assert swapped is not None
        self.num_computed = max(self.num_computed, swapped.num_tokens)
        return swapped

    def discard_swapped(self) -> SwappedKV | None:
        """Forget the KV in host memory, and return what may be released there."""
        swapped, self.swapped = self.swapped, None
        return swapped

    def take_refetch(self) -> bool:
        """Return whether the store should be asked for its KV, once after each preemption."""
        needs_refetch, self.needs_refetch = self.needs_refetch, False
        return needs_refetch

    def _block_to_copy(self, pool: BlockPool) -> int | None:
        """Return the index of the block that the next token is written to if others read it or may find it, else None."""
        index = self.num_computed // self.block_size
        if index < self.num_registered:  # of a reopened prompt
            return index
        return index if index < len(self.block_ids) and pool.is_shared(self.block_ids[index]) else None

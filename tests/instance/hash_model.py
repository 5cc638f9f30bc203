"""A model whose KV and tokens are hashes, for tests of all that surrounds a model.

The KV of a token is a hash of it and of all tokens before it, and so are the state behind it and what follows. A step that
reads a row of KV, or a state, that is not that of those tokens raises `WrongRow`, and the answer to any request is known
without an instance (`answer`).
"""

import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from pdserve.beam_search import BeamSearch, Candidate
from pdserve.engine.checkpoint import Checkpoint
from pdserve.engine.memory.blocks import BlockPairs
from pdserve.engine.memory.groups import GAP, BlockTable
from pdserve.engine.memory.kv_memory import KVMemory, page_numbers
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import StepOutcome, StepPlan
from pdserve.engine.step_pipeline import StepPipeline
from pdserve.kernels import reference
from pdserve.keys import Layout
from pdserve.kv_spec import KVGroup, KVSpec
from pdserve.request import SamplingParams

VOCAB = 40
HASH_BYTES = 8  # half of them are the token's K, the others its V


class WrongRow(Exception):
    """A step read or wrote KV, or a state, that is not that of its tokens."""


@dataclass(frozen=True)
class Variant:
    """Salt of a request, and its adapter with the token from which it applies: besides tokens, KV depends on these."""

    salt: str = ""
    adapter: bytes = b""
    start: int = 0


BASE = Variant()


def spec_of(windows: tuple[int | None, ...], state_numbers: int = 0) -> KVSpec:
    """Return the spec of a model with a layer of each window and, if a state has numbers, a recurrent layer."""
    groups = tuple(KVGroup((at,), 1, HASH_BYTES // 2, window=window) for at, window in enumerate(windows))
    states = {(len(windows), "recurrence"): state_numbers} if state_numbers else {}
    return KVSpec(groups, states=states, num_without=bool(state_numbers))


def layout_of(spec: KVSpec, block_size: int) -> Layout:
    return spec.layout(model_fingerprint="hashes", block_size=block_size, dtype="uint8", itemsize=1)


@lru_cache(1 << 18)
def _follow(digest: bytes, token: int) -> bytes:
    return _digest(digest + token.to_bytes(4, "little"))


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=HASH_BYTES).digest()


def rows_of(tokens: list[int], of: Variant = BASE) -> list[bytes]:
    """Return the KV of each token."""
    rows, digest = [], _digest(of.salt.encode())
    for at, token in enumerate(tokens):
        digest = _digest(digest + of.adapter) if at == of.start and of.adapter else digest
        digest = _follow(digest, token)
        rows.append(digest)
    return rows


def next_token(row: bytes, seed: int, at: int) -> int:
    """Return output token number `at` of a request with this seed, behind the token with this KV."""
    return blake2b(row + seed.to_bytes(8, "little") + at.to_bytes(4, "little"), digest_size=1).digest()[0] % VOCAB


def candidates(row: bytes, count: int) -> list[Candidate]:
    """Return the most likely tokens behind the token with this KV."""
    rng = random.Random(row)
    ids = rng.sample(range(VOCAB), count)
    return [*zip(ids, sorted((-5 * rng.random() for _ in ids), reverse=True), strict=True)]


def answer(
    prompt: list[int], sampling: SamplingParams, seed: int, eos: frozenset[int], of: Variant = BASE
) -> list[int]:
    """Return the right output of a request."""
    tokens, stops = [*prompt], frozenset[int]() if sampling.ignore_eos else eos
    while (count := len(tokens) - len(prompt)) < sampling.max_tokens:
        tokens.append(next_token(rows_of(tokens, of)[-1], seed, count))
        if tokens[-1] in stops and count + 1 >= sampling.min_tokens:
            break
    return tokens[len(prompt) :]


def beam_answers(
    prompt: list[int], sampling: SamplingParams, eos: frozenset[int], of: Variant = BASE
) -> list[list[int]]:
    """Return the right answers of a beam search."""
    stops = frozenset[int]() if sampling.ignore_eos else eos
    how = sampling.max_tokens, sampling.length_penalty, sampling.early_stopping
    search, beams = BeamSearch(sampling.beam_width, stops, *how), [prompt]
    while True:
        found = [candidates(rows_of(beam, of)[-1], search.num_candidates) for beam in beams]
        branches = search.step(found)
        if search.is_over:
            return [[*one.token_ids] for one in search.hypotheses(sampling.num_answers)]
        beams = [[*beams[branch.parent], branch.token] for branch in branches]


class HashMemory(KVMemory):
    """The pool's memory, which checks that no step swaps in both directions."""

    def swap(self, swap_out: BlockPairs, swap_in: BlockPairs) -> float:
        assert not (swap_out and swap_in), "a step swaps in both directions"
        super().swap(swap_out, swap_in)
        return 0.0


@dataclass
class LaunchedTokens:
    """The tokens that a step samples, as the device knows them (-1: it cannot tell), and as they are."""

    tokens: list[int] = field(default_factory=list)
    decided: list[int] = field(default_factory=list)
    undecided: list[int] = field(default_factory=list)

    def read(self) -> list[int]:
        return self.decided


class HashRunner:
    """Stands in for the model runner. Its attributes are those of `ModelRunner`.

    Args:
        spec: of its layers.
        num_pages, num_host_pages: of the pool, and of the memory to which it is swapped.
        step_seconds: that the steps of the warm-up seem to take.
        undecided: steps are launched ahead, and for this share of tokens the device cannot tell them.

    Attributes:
        is_warm: the warm-up is over, whose sequences have no tokens of anyone.
        num_accepted: drafts that were right.
        variant_of: returns what the KV of a request depends on, by its id.
        pipeline: launches steps ahead, if that is wanted.
    """

    graphs: ClassVar[None] = None
    numerics, kernel = "", reference

    def __init__(
        self,
        spec: KVSpec,
        block_size: int,
        num_pages: int,
        num_host_pages: int,
        eos: frozenset[int],
        step_seconds: float,
        undecided: float | None = None,
    ) -> None:
        layout = layout_of(spec, block_size)
        self.window, self.num_accepted, self.is_warm = spec.window, 0, False
        self.variant_of: Callable[[str], Variant] = lambda request_id: BASE
        model, device = torch.nn.Module(), torch.device("cpu")
        self.checkpoint = Checkpoint(model, layout, spec, 1 << 20, VOCAB, eos, device, torch.uint8)
        shape = page_numbers(layout)
        pool, host = (torch.zeros((count, shape), dtype=torch.uint8) for count in (num_pages, num_host_pages))
        self.kv = HashMemory(pool, host, reference, layout, spec)
        self._windows = spec.windows
        self._layers = sorted(layer for group in spec.groups for layer in group.layers)
        self._block_size = block_size
        self._time, self._step_seconds = 0.0, step_seconds
        self._undecided, self._random = undecided or 0.0, random.Random(0)
        self.pipeline = None if undecided is None else StepPipeline(self)

    def clock(self) -> float:
        self._time += self._step_seconds
        return self._time

    def step(self, plan: StepPlan) -> StepOutcome:
        """Read what each sequence attends to, write what it computes, and return what follows."""
        if not (plan.counts and self.is_warm):
            return {}
        rows = {
            seq: rows_of([*seq.output.tokens, *plan.drafts.get(seq, ())], self.variant_of(seq.request_id))
            for seq in plan.counts
        }
        stops = {seq: seq.kv.num_computed + plan.num_tokens(seq) for seq in plan.counts}
        for seq in plan.counts:
            assert plan.counts[seq] >= 1 and seq.kv.num_computed + plan.counts[seq] <= len(seq)
            self._check(seq, rows[seq], seq.kv.num_computed)
        for layer in self._layers:
            for seq, stop in stops.items():
                places = self._places(seq, self.kv.group_of[layer], seq.kv.num_computed, stop)
                self.kv.caches[layer].numpy()[places] = _as_kv(rows[seq][seq.kv.num_computed : stop])
            if plan.on_layer is not None:
                plan.on_layer(layer)
        for seq in plan.counts:
            self._write_states(seq, rows[seq], seq.kv.num_computed, seq.kv.num_computed + plan.counts[seq])
        for seq in plan.counts:  # again, since two sequences may have written to one block
            self._check(seq, rows[seq], seq.kv.num_computed + plan.counts[seq])
        sampled, needed = list[tuple[Sequence, int, None]](), plan.rows()
        for seq, source, ahead in zip(needed.sampled, self._sources(plan), needed.ahead, strict=True):
            row = rows[source][len(seq) + ahead - 1]
            if seq.group is not None:
                seq.group.record_candidates(seq, candidates(row, seq.group.search.num_candidates))
            else:
                sampled.append((seq, next_token(row, seq.sampling.seed, seq.output.num_generated + ahead), None))
        outcome = plan.outcome(sampled)
        for seq in plan.drafts:
            first, accepted = seq.kv.num_computed + 1, max(0, len(outcome[seq].tokens) - 1)
            self._write_states(seq, rows[seq], first, first + accepted)
            self.num_accepted += accepted
        return outcome

    def launch(self, seqs: list[Sequence], last: "LaunchedTokens | None", rows: SequenceABC[int]) -> "LaunchedTokens":
        """Compute a token of each sequence, of the first ones that which `last` samples in these rows."""
        launched = LaunchedTokens()
        if not self.is_warm:
            return launched
        for i, seq in enumerate(seqs):
            fed = [] if last is None or i >= len(rows) else [max(0, last.tokens[rows[i]])]
            right, at = (
                rows_of([*seq.output.tokens, *fed], self.variant_of(seq.request_id)),
                seq.kv.num_computed + len(fed),
            )
            self._check(seq, right, at)
            for layer in self._layers:
                places = self._places(seq, self.kv.group_of[layer], at, at + 1)
                self.kv.caches[layer].numpy()[places] = _as_kv(right[at : at + 1])
            launched.decided.append(next_token(right[at], seq.sampling.seed, seq.output.num_generated + len(fed)))
            if self._random.random() < self._undecided:
                launched.undecided.append(i)
            launched.tokens.append(-1 if i in launched.undecided else launched.decided[i])
        return launched

    def _sources(self, plan: StepPlan) -> list[Sequence]:
        """Return the sequence that has computed the prompt of each one that is sampled."""
        needed = plan.rows()
        owners = {one: seq for seq in plan.counts for one in (seq, *seq.siblings)}
        return [owners[seq] for seq in needed.sampled]

    def _check(self, seq: Sequence, rows: list[bytes], stop: int) -> None:
        """Raise WrongRow if the token behind the first `stop` attends to other KV than that of the tokens before it."""
        for layer in self._layers:
            at = self.kv.group_of[layer]
            window = self._windows[at]
            first = 0 if window is None else max(0, stop + 1 - window)
            found = self.kv.caches[layer].numpy()[self._places(seq, at, first, stop)]
            wrong = np.flatnonzero((found != _as_kv(rows[first:stop])).any(axis=(1, 2)))
            if len(wrong):
                raise WrongRow(f"{seq.request_id}: the KV of token {first + wrong[0]} of {len(seq)} in layer {layer}")
        if self.kv.states is not None and stop:
            found = self._states()[self._state_row(seq, (stop - 1) // self._block_size)]
            if found.tobytes() != rows[stop - 1]:
                raise WrongRow(f"{seq.request_id}: the state behind token {stop - 1} of {len(seq)}")

    def _write_states(self, seq: Sequence, rows: list[bytes], first: int, stop: int) -> None:
        """Write the states behind new tokens where `kernels/states.cpp` does: to blocks that end there, and to the last."""
        if self.kv.states is None:
            return
        table, size = seq.kv.tails[-1].ids, self._block_size
        for at in range(first, stop):
            ends = (at + 1) % size == 0 and table[at // size] != GAP
            if ends or at == stop - 1:
                self._states()[self._state_row(seq, at // size)] = np.frombuffer(rows[at], np.uint8)

    def _state_row(self, seq: Sequence, block: int) -> int:
        """Return the row with the state of a block or, if it has none, of the next one that has."""
        table = seq.kv.tails[-1].ids
        return next(one for one in table[block:] if one != GAP) - self.kv.groups[-1].first_id

    def _states(self) -> npt.NDArray[np.uint8]:
        """Return what a state has of its layer, [states, 8]."""
        assert self.kv.states is not None
        [offset] = self.kv.states.offsets.values()
        return self.kv.states.rows_NX.numpy()[:, offset : offset + HASH_BYTES // 4].view(np.uint8)

    def _places(self, seq: Sequence, at: int, first: int, stop: int) -> Any:
        """Return the index of the rows [first, stop) of a sequence in the cache of a group's layer."""
        table: BlockTable = seq.kv.tails[at - 1].ids if at else seq.kv.block_ids
        dropped = seq.kv.tails[at - 1].num_dropped if at else seq.kv.num_dropped
        if first < stop and first // self._block_size < dropped:
            raise WrongRow(f"{seq.request_id}: token {first} of {len(seq)} was dropped in group {at}")
        positions = np.arange(first, stop)
        blocks = np.array(table, np.int64)[positions // self._block_size] - self.kv.groups[at].first_id
        return blocks, slice(None), 0, positions % self._block_size


def _as_kv(rows: list[bytes]) -> npt.NDArray[np.uint8]:
    """Return KV as K and V, [T, 2, 4]."""
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 2, HASH_BYTES // 2)

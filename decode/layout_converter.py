"""Loads KV that instances with another block size, dtype, numerics class or number of ranks have stored, into this pool.

    KV store ─► a second connector, attached to staging rows in the source layout ─► copied into blocks of the pool

The source is the layout of the instance that stored the KV, the target that of this pool. Block keys depend on the tokens
alone, not on the block size (`keys.py`), so the source's keys follow from the prompt. Only the requested target blocks are
written, and in them only the prompt's tokens. A target block of which a token did not arrive is reported with the outcome of
the source block that failed. torch rounds to the pool's dtype.

Where the source is divided among ranks, each of which stores its heads, a block is loaded from those that have heads of this
pool. If this instance has ranks, too, each of them loads what its pool needs.
"""

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby
from typing import Final, Protocol

import torch

from pdserve.config import DTYPES
from pdserve.decode.target_blocks import InPlace, Staged, TargetBlocks
from pdserve.engine.memory.kv_memory import group_views, section_views
from pdserve.engine.sequence import Sequence as TokenSequence
from pdserve.errors import SetupError
from pdserve.keys import Layout, block_ends
from pdserve.kv_transfer.cancellation import Cancellation, submit
from pdserve.kv_transfer.connector import (
    PROBE_KEY,
    Connector,
    OperationFuture,
    Outcome,
    PoolMemory,
    Result,
    Stats,
    first_failure,
    request_cancel,
)
from pdserve.kv_transfer.grouped import when_all
from pdserve.kv_transfer.guarded import guard
from pdserve.kv_transfer.registry import connect
from pdserve.kv_transfer.staging import Copies, host_rows
from pdserve.kv_transfer.tickets import tickets_of_rank
from pdserve.proto import pdserve_pb2 as pb

log = logging.getLogger(__name__)

STAGING_BYTES: Final = 64 << 20  # for each source layout
ATTACH_RETRY_S: Final = 5.0


class Loader(Protocol):
    """Loads KV of one source layout: `SourceLoader`, or several of them on different ranks."""

    def load(self, keys: list[bytes], tokens: range, blocks: list[int], tickets: list[bytes]) -> Future[Result]: ...
    def release(self, keys: Sequence[bytes], tickets: Sequence[bytes]) -> None: ...
    def stats(self) -> Stats: ...
    def probe(self) -> None: ...
    def close(self) -> None: ...


class LayoutConverter:
    """Loads KV of all other layouts into one pool. Each source layout gets a loader when a request first needs it.

    Args:
        pool: contiguous pages [num_pages, …]; blocks, if the layers are one group.
        target: layout of the pool's blocks.
        url: URL of the instance's connector; None disables conversion.
        on_all_ranks: makes a loader for the pools of all ranks from that for this pool; None if there is one rank.
        copies: makes what copies the blocks of a group, by its index, to a pool on a GPU; see `target_blocks.py`.

    Attributes:
        loaders: by the namespace of the source layout of a group.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        target: Layout,
        url: str | None,
        on_all_ranks: Callable[["SourceLoader", Layout], Loader] | None = None,
        copies: Callable[[int], Copies] | None = None,
    ) -> None:
        self._views = [] if url is None else group_views(pool, target)  # pools of simulated instances have no bytes
        self._target = target
        self._url = url
        self._on_all_ranks = on_all_ranks
        self._copies = copies
        self.loaders: dict[bytes, Loader] = {}

    def open_prompt(self, seq: TokenSequence, message: pb.Layout) -> "ConvertedPrompt":
        """Return access to a sequence's prompt as an instance with the layout of `message` stores it.

        Raises:
            ValueError: the layout is not convertible to the pool's, or conversion is disabled.
        """
        source = Layout.from_message(message)
        if self._url is None:
            flags = "--convert-kv or --allow-inexact"
            raise ValueError(f"the KV is in another layout, and this instance was started without {flags}")
        is_known = source.dtype in (*DTYPES, self._target.dtype)  # of KV in 8 bits, tokens are copied with their scales
        is_known = is_known and getattr(torch, source.dtype).itemsize == source.itemsize
        is_valid = is_known and source.block_size >= 1 and source.is_divisible
        if not source.is_convertible_to(self._target) or not is_valid:
            raise ValueError("the KV is of another model, and cannot be converted")
        loaders = [self._loader(source, at) for at in range(len(self._views))]
        return ConvertedPrompt(loaders, seq, self._target, source, [len(view_NX) for view_NX in self._views])

    def _loader(self, source: Layout, at: int) -> Loader:
        namespace = source.groups[at].namespace
        if namespace not in self.loaders:
            assert self._url is not None
            loader: Loader
            loader = own = SourceLoader(self._views[at], self._target, source, self._url, at, self._copies)
            if self._on_all_ranks is not None:
                loader = self._on_all_ranks(own, source)
            self.loaders[namespace] = loader
        return self.loaders[namespace]

    def stats(self) -> Stats:
        """Return the summed statistics of all loaders, of which there are some."""
        return reduce(Stats.plus, (loader.stats() for loader in self.loaders.values()))

    def probe(self) -> None:
        """Ask the stores that are out whether they answer again, as `Transfers.probe`."""
        for loader in self.loaders.values():
            loader.probe()

    def close(self) -> None:
        for loader in self.loaders.values():
            loader.close()


class ConvertedPrompt:
    """One prompt as another instance stores it. Has the connector methods that a load needs.

    Args:
        loaders: of each group of layers.
        sizes: blocks of each group in the pool.

    Attributes:
        exact: the values are, bit for bit, those that this instance would compute.
    """

    def __init__(
        self, loaders: list[Loader], seq: TokenSequence, target: Layout, source: Layout, sizes: list[int]
    ) -> None:
        self._loaders = loaders
        self._first_ids = [sum(sizes[:at]) for at in range(len(sizes))]
        self._windows = [group.window for group in target.groups]
        self._target_block_size = target.block_size
        self._source_block_size = source.block_size
        self._num_tokens = seq.kv.num_initial
        self._block_index = {key: index for index, key in enumerate(seq.kv.initial_keys)}
        self._source_keys = seq.kv.prefix_keys(block_ends(seq.kv.num_initial, source.block_size, partial=True))
        self.exact = source.is_exact_for(target)

    def num_complete_blocks(self, num_source_blocks: int) -> int:
        """Return the number of leading target blocks that the given number of leading source blocks covers."""
        tokens = num_source_blocks * self._source_block_size
        return len(self._block_index) if tokens >= self._num_tokens else tokens // self._target_block_size

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        """Load target blocks, as `Connector.load`. Of each group, `keys` are target keys of consecutive blocks."""
        groups = [bisect_right(self._first_ids, block) - 1 for block in block_ids]
        loads, begin = list[Future[Result]](), 0
        for at, of_group in groupby(groups):
            stop = begin + len([*of_group])
            loads.append(self._load(at, keys[begin:stop], block_ids[begin:stop], tickets))
            begin = stop
        return loads[0] if len(loads) == 1 else when_all(loads, _one_after_another, _cancelling(loads))

    def _load(
        self, at: int, keys: Sequence[bytes], block_ids: Sequence[int], tickets: Sequence[bytes]
    ) -> Future[Result]:
        start = self._block_index[keys[0]] * self._target_block_size
        stop = min(start + len(keys) * self._target_block_size, self._num_tokens)
        if at:  # what the last token does not reach is not in the store
            start = max(start, self._num_tokens - self._windows[at])
            first_id = self._first_ids[at]
            block_ids = [block - first_id for block in block_ids]
        first, last = start // self._source_block_size, -(-stop // self._source_block_size)
        return self._loaders[at].load(self._source_keys[first:last], range(start, stop), list(block_ids), list(tickets))

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None:
        """End the leases of all of the prompt's source blocks."""
        for loader in self._loaders:
            loader.release(self._source_keys, tickets)


def _one_after_another(results: list[Result]) -> Result:
    seconds = max((one.seconds for one in results), default=0.0)
    return Result([outcome for one in results for outcome in one.outcomes], seconds)


def _cancelling(loads: Sequence[Future[Result]]) -> OperationFuture[Result]:
    def cancel() -> None:
        for load in loads:
            request_cancel(load)

    return OperationFuture(cancel)


@dataclass(frozen=True)
class _Slice:
    """Heads of the pool that one rank of the source has.

    Attributes:
        rows: staging rows, [rows, numbers of a block].
        sections: views of the rows, see `section_views`.
        source_heads, target_heads: the same heads, in a staging row and in a block of the pool.
    """

    layout: Layout
    rows: torch.Tensor
    sections: list[torch.Tensor]
    source_heads: slice
    target_heads: slice

    @classmethod
    def of(cls, layout: Layout, num_slices: int, source_heads: slice, target_heads: slice) -> "_Slice":
        num_rows = max(1, STAGING_BYTES // num_slices // layout.block_bytes)
        rows = torch.zeros((num_rows, layout.block_numbers), dtype=getattr(torch, layout.dtype))
        return cls(layout, rows, section_views(rows, layout), source_heads, target_heads)


def _slices(source: Layout, target: Layout) -> Iterator[_Slice]:
    """Yield the slices that together have all heads of the target, each once."""
    if source.ranks == target.ranks == 1:  # all heads, of which sections may have different numbers
        yield _Slice.of(source, 1, slice(None), slice(None))
        return
    heads, num_slices = target.heads, min(source.ranks, len(target.heads))
    start = heads.start
    for layout in (replace(source, rank=rank) for rank in range(source.ranks)):
        stop = min(heads.stop, layout.heads.stop)
        if layout.heads.start <= start < stop:
            source_heads, target_heads = (
                slice(start - first, stop - first) for first in (layout.heads.start, heads.start)
            )
            yield _Slice.of(layout, num_slices, source_heads, target_heads)
            start = stop


def _load_nothing(connector: Connector) -> None:
    """Ask for a block that no store has."""
    connector.load([PROBE_KEY], [0]).result()


class SourceLoader:
    """Loads KV of one source layout. A thread of its own executes everything in order, attaching included.

    Args:
        pool: blocks of one group.
        at: the group's index.
        copies: see `LayoutConverter`.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        target: Layout,
        source: Layout,
        url: str,
        at: int = 0,
        copies: Callable[[int], Copies] | None = None,
    ) -> None:
        self.at, self._num_groups = at, len(source.groups)
        source, target = source.groups[at], target.groups[at]
        self._blocks: TargetBlocks = InPlace(pool, target) if copies is None else Staged(pool, target, copies(at))
        self._target = target
        self._source = source
        self._url = url
        self._slices = list(_slices(source, target))
        self._num_rows = min(len(one.rows) for one in self._slices)
        self._connectors: list[Connector] = []  # one per slice; empty until they are attached
        self._next_attach_at = 0.0
        self._skipped = Stats()  # failures of blocks that were never requested from the connector
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-converter")

    def load(self, keys: list[bytes], tokens: range, blocks: list[int], tickets: list[bytes]) -> Future[Result]:
        """Load tokens into blocks of the pool.

        Args:
            keys: source keys of the blocks that contain the tokens, in order.
            tokens: positions in the prompt, from the first token on that is needed of the first target block.
            blocks: ids of the target blocks.
        """
        queued_at, mark = time.perf_counter(), self._blocks.mark()

        def run(cancellation: Cancellation) -> Result:
            self._blocks.begin(mark)
            try:
                outcomes = self._load_all(keys, tokens, blocks, tickets, cancellation)
            finally:
                self._blocks.flush()
            return Result(self._target_outcomes(outcomes, tokens, len(blocks)), time.perf_counter() - queued_at)

        return submit(self._thread, run)

    def release(self, keys: Sequence[bytes], tickets: Sequence[bytes]) -> None:
        self._thread.submit(self._release, keys, tickets)

    def stats(self) -> Stats:
        return reduce(Stats.plus, (connector.stats() for connector in self._connectors), self._skipped)

    def probe(self) -> None:
        for connector in self._connectors:
            if connector.stats().any_out:
                self._thread.submit(_load_nothing, connector)

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        for connector in self._connectors:
            connector.close()

    def _release(self, keys: Sequence[bytes], tickets: Sequence[bytes]) -> None:
        for connector, one in zip(self._connectors, self._slices, strict=False):
            connector.release(keys, tickets=self._tickets(tickets, one))

    def _tickets(self, tickets: Sequence[bytes], one: _Slice) -> list[bytes]:
        of_rank = tickets_of_rank(tickets, one.layout.rank, one.layout.ranks)
        return tickets_of_rank(of_rank, self.at, self._num_groups)

    def _post(self, work: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # closed
            self._thread.submit(work)

    @torch.inference_mode()
    def _load_all(
        self, keys: list[bytes], tokens: range, blocks: list[int], tickets: list[bytes], cancellation: Cancellation
    ) -> list[Outcome]:
        """Load and copy all source blocks, as many at a time as there are staging rows. Return one outcome for each."""
        first, outcomes = tokens.start // self._source.block_size, list[Outcome]()
        connectors = self._attached_connectors()
        while len(outcomes) < len(keys):
            batch = keys[len(outcomes) : len(outcomes) + self._num_rows]
            if cancellation.requested:
                return outcomes + [Outcome.CANCELLED] * (len(keys) - len(outcomes))
            # Once the store is unavailable, do not request later blocks: they would be useless after the gap.
            if not connectors or outcomes[-1:] == [Outcome.UNAVAILABLE]:
                self._skipped.count_failures("load", Outcome.UNAVAILABLE, len(batch))
                outcomes += [Outcome.UNAVAILABLE] * len(batch)
                continue
            loads = [
                connector.load(batch, range(len(batch)), tickets=self._tickets(tickets, one))
                for connector, one in zip(connectors, self._slices, strict=True)
            ]
            results = [cancellation.wait(load).outcomes for load in loads]
            loaded = [first_failure(parts) for parts in zip(*results, strict=True)]
            for row, outcome in enumerate(loaded):
                if outcome is Outcome.OK:
                    self._copy(row, first + len(outcomes) + row, tokens, blocks)
            outcomes += loaded
        return outcomes

    def _copy(self, row: int, index: int, tokens: range, blocks: list[int]) -> None:
        """Copy the tokens of source block `index`, staged in `row`, to the target blocks."""
        source_size, target_size = self._source.block_size, self._target.block_size
        start, stop = max(index * source_size, tokens.start), min((index + 1) * source_size, tokens.stop)
        for target_index in range(start // target_size, -(-stop // target_size)):
            begin, end = max(start, target_index * target_size), min(stop, (target_index + 1) * target_size)
            block = blocks[target_index - tokens.start // target_size]
            target_row = self._blocks.row(block)
            source_tokens = slice(begin - index * source_size, end - index * source_size)
            target_tokens = slice(begin - target_index * target_size, end - target_index * target_size)
            for one in self._slices:
                for target, source in zip(self._blocks.sections, one.sections, strict=True):
                    rows = source[row, :, :, one.source_heads, source_tokens]
                    target[target_row, :, :, one.target_heads, target_tokens].copy_(rows)

    def _target_outcomes(self, source_outcomes: list[Outcome], tokens: range, num_blocks: int) -> list[Outcome]:
        """Return one outcome per target block: the first failure among the source blocks that contain its tokens, or OK."""
        source_size, target_size = self._source.block_size, self._target.block_size
        first, outcomes = tokens.start // source_size, []
        for index in range(tokens.start // target_size, tokens.start // target_size + num_blocks):
            begin, end = max(tokens.start, index * target_size), min((index + 1) * target_size, tokens.stop)
            parts = source_outcomes[begin // source_size - first : -(-end // source_size) - first]
            outcomes.append(first_failure(parts))
        return outcomes

    def _attached_connectors(self) -> list[Connector]:
        """Return the connectors, attaching them first if needed; none if that failed within the last `ATTACH_RETRY_S`."""
        if not self._connectors and time.monotonic() >= self._next_attach_at:
            connectors: list[Connector] = []
            try:
                for one in self._slices:
                    connectors.append(connect(self._url))
                    connectors[-1].attach(PoolMemory(host_rows(one.rows), one.layout))
                self._connectors = [guard(connector, self._post) for connector in connectors]
                log.info("converting KV from blocks of %d tokens in %s", self._source.block_size, self._source.dtype)
            except SetupError as error:
                for connector in connectors:
                    connector.close()
                self._next_attach_at = time.monotonic() + ATTACH_RETRY_S
                log.warning("KV of another layout cannot be loaded and is computed instead: %s", error)
        return self._connectors

"""KV that instances of other block sizes or dtypes have stored: loaded into rows of our own, and copied into the pool.

    store ─► the same connector once more, attached to a few rows in the writer's layout ─► the pool's blocks

Keys stand for numbers of tokens, whatever the blocks (`keys.py`), so the writer's follow from the prompt. Only the blocks
that a load was asked for are written, and of them only the prompt's tokens; a block in which one token did not arrive is
reported like any other that did not. Rounding to the pool's dtype is torch's.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import reduce
from typing import Final

import torch

from pdserve.config import DTYPES
from pdserve.engine.sequence import Sequence as TokenSequence
from pdserve.errors import SetupError
from pdserve.keys import Layout, block_ends
from pdserve.kv_transfer.connector import Connector, Outcome, PoolMemory, Result, Stats
from pdserve.kv_transfer.registry import connect
from pdserve.kv_transfer.staging import host_rows
from pdserve.proto import pdserve_pb2 as pb

log = logging.getLogger(__name__)

ROWS_BYTES: Final = 64 << 20  # for each layout that is converted from
ATTACH_EVERY_S: Final = 5.0


class LayoutConverter:
    """All of one instance, made when a request first needs them.

    Args:
        pool: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], in which `own` describes a block.
        url: of the instance's connector; None where nothing is to be converted.
    """

    def __init__(self, pool: torch.Tensor, own: Layout, url: str | None) -> None:
        self._pool = pool
        self._own = own
        self._url = url
        self._of_writer: dict[bytes, _Converter] = {}

    def prompt(self, seq: TokenSequence, message: pb.Layout) -> "ConvertedPrompt":
        """What an instance of that layout stores of a sequence's given tokens.

        Raises:
            ValueError: it cannot be converted, or is not to be.
        """
        writer = Layout.like(message)
        if self._url is None:
            raise ValueError("the KV is in another layout, and this instance was started without --convert-kv")
        known = writer.dtype in DTYPES and getattr(torch, writer.dtype).itemsize == writer.itemsize
        if not writer.converts_to(self._own) or not known or writer.block_size < 1:
            raise ValueError("the KV is of another model, and cannot be converted")
        converter = self._of_writer.get(writer.namespace)
        if converter is None:
            converter = self._of_writer[writer.namespace] = _Converter(self._pool, self._own, writer, self._url)
        return ConvertedPrompt(converter, seq, self._own, writer)

    def stats(self) -> Stats | None:
        """Of all together; None as long as there is none."""
        each = [converter.stats() for converter in self._of_writer.values()]
        return reduce(Stats.plus, each) if each else None

    def close(self) -> None:
        for converter in self._of_writer.values():
            converter.close()


class ConvertedPrompt:
    """One prompt as another instance stores it, with the calls of a connector that a load needs.

    Attributes:
        exact: the numbers are the writer's own, bit for bit.
    """

    def __init__(self, converter: "_Converter", seq: TokenSequence, own: Layout, writer: Layout) -> None:
        self._converter = converter
        self._block_size = own.block_size
        self._writer_block_size = writer.block_size
        self._num_tokens = seq.num_given
        self._number = {key: number for number, key in enumerate(seq.given_keys())}
        self._keys = seq.keys_at(block_ends(seq.num_given, writer.block_size, partial=True))
        self.exact = writer.dtype == own.dtype

    def covered(self, num_blocks: int) -> int:
        """How many of our leading blocks are whole once so many of the writer's are."""
        tokens = num_blocks * self._writer_block_size
        return len(self._number) if tokens >= self._num_tokens else tokens // self._block_size

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        """As a connector's: our keys, which follow each other, and our blocks."""
        start = self._number[keys[0]] * self._block_size
        tokens = range(start, min(start + len(keys) * self._block_size, self._num_tokens))
        first, stop = tokens.start // self._writer_block_size, -(-tokens.stop // self._writer_block_size)
        return self._converter.load(self._keys[first:stop], tokens, list(block_ids), list(tickets))

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None:
        self._converter.release(self._keys, tickets)


class _Converter:
    """From one layout. Everything happens on a thread of its own, one load after the other, the attaching as well."""

    def __init__(self, pool: torch.Tensor, own: Layout, writer: Layout, url: str) -> None:
        self._pool = pool
        self._own = own
        self._writer = writer
        self._url = url
        shape = (writer.num_layers, 2, writer.num_kv_heads, writer.block_size, writer.head_dim)
        count = max(1, ROWS_BYTES // writer.block_bytes)
        self._rows = torch.zeros((count, *shape), dtype=getattr(torch, writer.dtype))
        self._connector: Connector | None = None
        self._attach_at = 0.0
        self._left_out = Stats()  # blocks that were not even asked for
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-converter")

    def load(self, keys: list[bytes], tokens: range, blocks: list[int], tickets: list[bytes]) -> Future[Result]:
        """Brings these tokens into our blocks.

        Args:
            keys: of the writer's blocks in which the tokens are, in order.
            tokens: begin with the first block's.
        """
        asked = time.perf_counter()

        def run() -> Result:
            arrived = self._load_all(keys, tokens, blocks, tickets)
            return Result(self._outcomes(arrived, tokens, len(blocks)), time.perf_counter() - asked)

        return self._thread.submit(run)

    def release(self, keys: Sequence[bytes], tickets: Sequence[bytes]) -> None:
        self._thread.submit(self._with_connector, lambda connector: connector.release(keys, tickets=tickets))

    def stats(self) -> Stats:
        return self._left_out if self._connector is None else self._connector.stats().plus(self._left_out)

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._with_connector(lambda connector: connector.close())

    def _with_connector(self, call: Callable[[Connector], None]) -> None:
        if self._connector is not None:
            call(self._connector)

    @torch.inference_mode()
    def _load_all(self, keys: list[bytes], tokens: range, blocks: list[int], tickets: list[bytes]) -> list[Outcome]:
        """One outcome for each of the writer's blocks."""
        first, outcomes = tokens.start // self._writer.block_size, list[Outcome]()
        connector = self._attached()
        while len(outcomes) < len(keys):
            some = keys[len(outcomes) : len(outcomes) + len(self._rows)]
            if connector is None or outcomes[-1:] == [Outcome.UNAVAILABLE]:  # what comes behind is of no use then
                self._left_out.fail("load", Outcome.UNAVAILABLE, len(some))
                outcomes += [Outcome.UNAVAILABLE] * len(some)
                continue
            result = connector.load(some, range(len(some)), tickets=tickets).result()
            for row, outcome in enumerate(result.outcomes):
                if outcome is Outcome.OK:
                    self._copy(row, first + len(outcomes) + row, tokens, blocks)
            outcomes += result.outcomes
        return outcomes

    def _copy(self, row: int, number: int, tokens: range, blocks: list[int]) -> None:
        """What the writer's block of this number, now in `row`, has of the tokens."""
        theirs, ours = self._writer.block_size, self._own.block_size
        start, stop = max(number * theirs, tokens.start), min((number + 1) * theirs, tokens.stop)
        for own in range(start // ours, -(-stop // ours)):
            begin, end = max(start, own * ours), min(stop, (own + 1) * ours)
            source = self._rows[row, :, :, :, begin - number * theirs : end - number * theirs]
            block = self._pool[blocks[own - tokens.start // ours]]
            block[:, :, :, begin - own * ours : end - own * ours].copy_(source)

    def _outcomes(self, arrived: list[Outcome], tokens: range, count: int) -> list[Outcome]:
        """Of our blocks: the first trouble of those in which their tokens are."""
        theirs, ours = self._writer.block_size, self._own.block_size
        first, outcomes = tokens.start // theirs, []
        for begin in range(tokens.start, tokens.start + count * ours, ours):
            end = min(begin + ours, tokens.stop)
            parts = arrived[begin // theirs - first : -(-end // theirs) - first]
            outcomes.append(next((one for one in parts if one is not Outcome.OK), Outcome.OK))
        return outcomes

    def _attached(self) -> Connector | None:
        if self._connector is None and time.monotonic() >= self._attach_at:
            connector = connect(self._url)
            try:
                connector.attach(PoolMemory(host_rows(self._rows), self._writer))
                self._connector = connector
                log.info("converts KV from blocks of %d tokens in %s", self._writer.block_size, self._writer.dtype)
            except SetupError as error:
                connector.close()
                self._attach_at = time.monotonic() + ATTACH_EVERY_S
                log.warning("KV of another layout cannot be loaded and is computed: %s", error)
        return self._connector

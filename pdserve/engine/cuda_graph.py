"""Decode steps as CUDA graphs: a replay launches a step's kernels without its Python.

A graph is used only after one of its replays gave the model's logits, within a tolerance.
Shape legend: see kernels/batch.py; V vocabulary.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch

from pdserve.engine.step_graph import Model
from pdserve.kernels.batch import PagedBatch

log = logging.getLogger(__name__)

MAX_PADDED_ROWS = 512  # larger steps are bound by their products, not by launches
MIN_PADDED_TOKENS = 1024
REPLAY_TOLERANCE = 0.01  # relative: cuBLAS may choose another kernel while it records

Record = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]


class PaddedGraphs:
    """CUDA graphs of one model's decode steps, each for a padded number of sequences and a limit of their lengths.

    A step is copied into the tensors of the smallest graph that holds it. What is left of these are sequences of one token,
    which read the first token of block 0 and whose KV is written nowhere; their logits are dropped. Kernels plan for the
    graph's limits (`PagedBatch.kv_lens`), and read the real lengths on the device.

    Args:
        model: computes the logits [S, V] of ids [1, S], positions [1, S] and a batch of one new token each.
        max_tokens: of the longest sequence.
        record: see `record_cuda_graph`.

    Attributes:
        num_replayed: number of steps whose logits came from a replay.
    """

    def __init__(self, model: Model, max_tokens: int, record: Record | None = None) -> None:
        self._model = model
        self.max_tokens = max_tokens
        self._record = record or record_cuda_graph
        self._graphs: dict[tuple[int, int], _PaddedGraph] = {}
        self._enabled = True
        self.num_replayed = 0

    @property
    def sizes(self) -> set[tuple[int, int]]:
        """Numbers of sequences and limits of lengths that are recorded."""
        return {*self._graphs}

    def logits(self, ids_1S: torch.Tensor, positions_1S: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """Return the logits [S, V] of one decode step. The next call may overwrite them."""
        count = ids_1S.shape[1]
        if not self._enabled or count > MAX_PADDED_ROWS:
            return self._model(ids_1S, positions_1S, batch)
        key = padded_rows(count), padded_tokens(max(batch.kv_lens), self.max_tokens)
        if key in self._graphs:
            self.num_replayed += 1
            return self._graphs[key].replay(ids_1S, positions_1S, batch)[:count]
        graph = _PaddedGraph(*key, batch)
        graph.fill(ids_1S, positions_1S, batch)
        expected_SV = graph.run(self._model).clone()
        try:
            graph.record(self._model, self._record)
        except RuntimeError as error:  # of CUDA: the model reads values of tensors, for example
            self._disable(str(error).splitlines()[0])
            return expected_SV[:count]
        got_SV = graph.replay(ids_1S, positions_1S, batch)
        if (got_SV.float() - expected_SV.float()).norm() > REPLAY_TOLERANCE * expected_SV.float().norm():
            self._disable("a replayed step gives other logits than the model")
        else:
            self._graphs[key] = graph
        return expected_SV[:count]

    def _disable(self, reason: str) -> None:
        log.warning("decode steps are slower, since each runs the model's Python: %s", reason)
        self._enabled = False
        self._graphs.clear()


class _PaddedGraph:
    """A graph for up to `rows` sequences of up to `tokens` tokens, and the tensors from which it reads."""

    def __init__(self, rows: int, tokens: int, like: PagedBatch) -> None:
        indices: dict[str, Any] = {"dtype": like.slots_T.dtype, "device": like.slots_T.device}
        self._ids_1S = torch.zeros((1, rows), **indices)
        self._positions_1S = torch.zeros((1, rows), **indices)
        self._batch = PagedBatch(
            caches=like.caches,
            slots_T=torch.full((rows,), -1, **indices),
            tables_SM=torch.zeros((rows, -(-tokens // like.block_size)), **indices),
            query_lens=[1] * rows,
            kv_lens=[tokens] * rows,
            kv_lens_S=torch.ones(rows, **indices),
            kernel=like.kernel,
            known_starts=torch.arange(rows + 1, **indices),
        )
        self._replay: Callable[[], None] = lambda: None
        self._logits_SV: torch.Tensor | None = None

    def run(self, model: Model) -> torch.Tensor:
        return model(self._ids_1S, self._positions_1S, self._batch)

    def record(self, model: Model, record: Record) -> None:
        device = self._ids_1S.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self._replay, self._logits_SV = record(partial(self.run, model))

    def replay(self, ids_1S: torch.Tensor, positions_1S: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """Return the logits of all rows, those of another step first."""
        self.fill(ids_1S, positions_1S, batch)
        self._replay()
        assert self._logits_SV is not None
        return self._logits_SV

    def fill(self, ids_1S: torch.Tensor, positions_1S: torch.Tensor, batch: PagedBatch) -> None:
        """Copy a step into the tensors; rows behind it become padding."""
        count, blocks = ids_1S.shape[1], min(batch.tables_SM.shape[1], self._batch.tables_SM.shape[1])
        self._ids_1S[:, :count] = ids_1S
        self._positions_1S[:, :count] = positions_1S
        self._batch.slots_T[:count] = batch.slots_T
        self._batch.kv_lens_S[:count] = batch.kv_lens_S
        self._batch.tables_SM[:count, :blocks] = batch.tables_SM[:, :blocks]
        if count < self._ids_1S.shape[1]:
            self._batch.slots_T[count:] = -1
            self._batch.kv_lens_S[count:] = 1


def padded_rows(count: int) -> int:
    """Return the number of sequences of the graph for `count`: 1, 2, 4, then multiples of 8, 16 and 32."""
    step = 1 if count <= 2 else 4 if count <= 4 else 8 if count <= 64 else 16 if count <= 256 else 32
    return -(-count // step) * step


def padded_tokens(longest: int, max_tokens: int) -> int:
    """Return the limit of lengths of the graph for a step: kernels divide the KV of long sequences into more parts."""
    limit = MIN_PADDED_TOKENS
    while limit < longest:
        limit *= 4
    return max(longest, min(limit, max_tokens))


def padded_sizes(max_rows: int, max_tokens: int) -> list[tuple[int, int]]:
    """Return (sequences, limit of lengths) of all graphs for up to `max_rows` sequences, the largest first."""
    rows = {padded_rows(count) for count in range(1, min(max_rows, MAX_PADDED_ROWS) + 1)}
    limits = [padded_tokens(1, max_tokens)]
    while limits[-1] < max_tokens:
        limits.append(padded_tokens(limits[-1] + 1, max_tokens))
    return sorted(((count, limit) for count in rows for limit in limits), reverse=True)


def record_cuda_graph(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Record what `run` launches. Return a function that launches it again, and the tensor that gets its result.

    `run` must have been called before: compilation cannot be recorded. All graphs share one pool of memory, since no two of
    them run at a time and no result outlives the next replay.
    """
    graph = torch.cuda.CUDAGraph()
    # Threads that move KV go on meanwhile, and may wait for the device.
    with torch.cuda.graph(graph, pool=_graph_pool(), capture_error_mode="thread_local"):
        result = run()
    return graph.replay, result


@cache
def _graph_pool() -> Any:
    return torch.cuda.graph_pool_handle()

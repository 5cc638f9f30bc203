"""Decode steps as CUDA graphs: a replay launches a step's kernels without its Python.

A graph is used only after one of its replays gave the model's logits, within a tolerance.
Shape legend: see kernels/batch.py; V vocabulary.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pdserve.engine.step_graph import Graphs, Model
from pdserve.kernels.batch import PagedBatch

log = logging.getLogger(__name__)

MAX_PADDED_ROWS = 512  # larger steps are bound by their products, not by launches
MIN_PADDED_TOKENS = 1024
REPLAY_TOLERANCE = 0.01  # relative: cuBLAS may choose another kernel while it records

Record = Callable[[Callable[[], torch.Tensor]], Callable[[], object]]


class PaddedGraphs(Graphs):
    """CUDA graphs of one model's decode steps, each for a padded number of sequences and a limit of their lengths.

    A step is copied into the tensors of the smallest graph that holds it. What is left of these are sequences of one token,
    which read the first token of block 0 and whose KV is written nowhere; their logits are dropped. Kernels plan for the
    graph's limits (`PagedBatch.kv_lens`), and read the real lengths on the device.

    Sizes are padded to a few, of which the first step records each: none takes longer for good (`extra_seconds`).

    Args:
        max_tokens: of the longest sequence.
        record: see `CudaRecorder`.
    """

    def __init__(self, model: Model, max_tokens: int, record: Record | None = None) -> None:
        super().__init__(model)
        self.max_tokens = max_tokens
        self._record = record or CudaRecorder()
        self._graphs: dict[tuple[int, int], _PaddedGraph] = {}
        self._logits_SV: torch.Tensor | None = None  # of the graph that was replayed last
        self._records = True

    def end_recording(self) -> None:
        """Record no further sizes: that would hold up streams, and take memory of which none was left for it."""
        self._records = False

    @property
    def sizes(self) -> set[tuple[int, int]]:
        """Numbers of sequences and limits of lengths that are recorded."""
        return {*self._graphs}

    def logits(self, ids_1S: torch.Tensor, positions_1S: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        count = ids_1S.shape[1]
        if not self._enabled or count > MAX_PADDED_ROWS:
            return self._model(ids_1S, positions_1S, batch)
        key = padded_rows(count), padded_tokens(max(batch.kv_lens), self.max_tokens)
        if key in self._graphs:
            self.num_replayed += 1
            return self._graphs[key].replay(ids_1S, positions_1S, batch)[:count]
        if not self._records:  # with --speculate, more rows than sequences
            return self._model(ids_1S, positions_1S, batch)
        graph = _PaddedGraph(*key, batch)
        graph.fill(ids_1S, positions_1S, batch)
        with WaitDetector(ids_1S.device.type) as detector:
            expected_SV = graph.run(self._model).clone()
        if detector.operator is not None:
            self._disable(f"the model waits for the GPU in {detector.operator}")
            return expected_SV[:count]
        try:
            graph.record(self._model, self._record, self._buffer(expected_SV))
        except RuntimeError as error:  # of CUDA
            self._disable(str(error).splitlines()[0])
            return expected_SV[:count]
        got_SV = graph.replay(ids_1S, positions_1S, batch)
        if (got_SV.float() - expected_SV.float()).norm() > REPLAY_TOLERANCE * expected_SV.float().norm():
            self._disable("a replayed step gives other logits than the model")
        else:
            self._graphs[key] = graph
        return expected_SV[:count]

    def _buffer(self, like_SV: torch.Tensor) -> torch.Tensor:
        """Return the buffer of the logits of graphs of this many sequences.

        The largest graphs are recorded first, and the others use the beginning of the same buffer.
        """
        if self._logits_SV is None or len(self._logits_SV) < len(like_SV):
            self._logits_SV = torch.empty_like(like_SV)
        return self._logits_SV[: len(like_SV)]


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
            starts=torch.arange(rows + 1, **indices),
            kernel=like.kernel,
            group_of=like.group_of,
        )
        if like.tails:
            self._batch = replace(self._batch, tails=tuple(self._in_group() for _ in like.tails))
        self._replay: Callable[[], object] = lambda: None
        self._logits_SV: torch.Tensor | None = None

    def _in_group(self) -> PagedBatch:
        """Return the batch with slots and tables of its own."""
        slots_T, tables_SM = self._batch.slots_T.clone(), self._batch.tables_SM.clone()
        return replace(self._batch, slots_T=slots_T, tables_SM=tables_SM)

    def run(self, model: Model) -> torch.Tensor:
        return model(self._ids_1S, self._positions_1S, self._batch)

    def record(self, model: Model, record: Record, logits_SV: torch.Tensor) -> None:
        """Record a step that leaves its logits in `logits_SV`."""
        device = self._ids_1S.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self._replay = record(lambda: logits_SV.copy_(self.run(model)))
        self._logits_SV = logits_SV

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
        for own, other in zip((self._batch, *self._batch.tails), (batch, *batch.tails), strict=True):
            own.slots_T[:count] = other.slots_T
            own.kv_lens_S[:count] = other.kv_lens_S
            own.tables_SM[:count, :blocks] = other.tables_SM[:, :blocks]
            if count < self._ids_1S.shape[1]:
                own.slots_T[count:] = -1
                own.kv_lens_S[count:] = 1


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


class CudaRecorder:
    """Records what a function launches, on a stream and in a pool of memory of its own, and returns what launches it again.

    All graphs of a recorder share its pool: no two of them run at a time, and no temporary tensor outlives its replay. They
    must be dropped together: torch gives up a pool with its last graph, and a workspace of cuBLAS with any graph that
    uses it.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], object]:
        """Record `run`, which must have been called before: compilation cannot be recorded.

        Raises:
            RuntimeError: something in it cannot be recorded. Torch is as it was before.
        """
        model_stream = torch.cuda.current_stream()
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            self._stream.wait_stream(model_stream)
            with torch.cuda.stream(self._stream):
                run()  # libraries allocate a workspace for each stream, which must not lie in the pool
        graph = torch.cuda.CUDAGraph()
        try:
            # Threads that move KV go on meanwhile, and may wait for the device.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                run()
        except RuntimeError:
            # If a recording cannot be ended, torch leaves its stream the current one, and its pool open.
            torch.cuda.set_stream(model_stream)
            _end_allocation(model_stream.device_index, self._pool)
            raise
        return graph.replay


def _end_allocation(device: int, pool: Any) -> None:
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError as error:  # it was ended
        log.debug("recording: %s", error)


class WaitDetector(TorchDispatchMode):
    """Detects operators that wait for a kind of device, which cannot be recorded. The values of CPU tensors can be read.

    Attributes:
        operator: name of the first one.
    """

    WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::item", "aten::masked_select")

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.operator: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs, outputs = (
            {x.device.type for x in tree_leaves(tree) if isinstance(x, torch.Tensor)} for tree in (args, result)
        )
        reads = func._schema.name in self.WAITING or (self._device != "cpu" and "cpu" in outputs)
        if reads and self._device in inputs:
            self.operator = self.operator or func._schema.name
        return result

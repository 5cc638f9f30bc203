"""Recorded decode steps on CPUs: a replay runs a step's kernels and torch operators without its Python.

The model's Python takes a fifth of a decode step of one sequence. A graph is recorded from a step of a given number of
sequences with one new token each. It keeps all tensors of that step alive, so that addresses stay valid; a replay copies
the inputs of another step (tokens, positions, slots, block tables) into the recorded input tensors and repeats the calls.

Correctness:
    - Values that Python read from tensors are recorded. If a replay reads a different value, the step runs eagerly.
    - A graph is used only after one of its replays equalled the model's logits bit for bit.
    - A step that may have to be computed twice gets the states of its sequences back, which it changes in place.

These graphs work with the CPU kernels only, which read nothing of a batch but its tensors.
Shape legend: see kernels/batch.py; V vocabulary.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pdserve.kernels import native
from pdserve.kernels.batch import PagedBatch
from pdserve.kernels.states import DraftedRows, written_rows

log = logging.getLogger(__name__)

MAX_BYTES = 256 << 20  # of all graphs; the least recently used one is evicted first
RECORD_AT_STEP = 4  # the step of a batch size that is recorded
_HOST_READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)  # read values without an operator

Model = Callable[[torch.Tensor, torch.Tensor, PagedBatch], torch.Tensor]


class Graphs(ABC):
    """Recorded decode steps of one model.

    Args:
        model: computes the logits [S, V] of ids [1, S], positions [1, S] and a batch of one new token each.

    Attributes:
        num_replayed: number of steps whose logits came from a replay.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._graphs: dict[Any, Any] = {}
        self._enabled = True
        self.num_replayed = 0

    def extra_seconds(self, size: int) -> float:
        """Return the seconds that a step of `size` sequences loses because it is not replayed; 0 if no step ever is."""
        return 0.0

    @abstractmethod
    def logits(self, ids_1S: torch.Tensor, positions_1S: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """Return the logits [S, V] of one decode step. The next call may overwrite them."""

    def _disable(self, reason: str) -> None:
        log.warning("decode steps are slower, since each runs the model's Python: %s", reason)
        self._enabled = False
        self._graphs.clear()


class ReplayMismatch(Exception):
    """A replay read a different host value than the recording, or produced a result of another shape."""


class StepGraphs(Graphs):
    """Graphs of one model, by batch size, least recently used first.

    Args:
        max_blocks_per_seq: width of the recorded block tables.
    """

    def __init__(self, model: Model, max_blocks_per_seq: int) -> None:
        super().__init__(model)
        self._max_blocks_per_seq = max_blocks_per_seq
        self._graphs: dict[int, StepGraph] = {}
        self._num_steps: Counter[int] = Counter()  # by batch size, before recording
        self._saved_seconds = 0.0  # of this thread, by the last replay that was compared with the model

    @property
    def verified(self) -> set[int]:
        """Batch sizes that can be replayed."""
        return {size for size, graph in self._graphs.items() if graph.verified}

    def extra_seconds(self, size: int) -> float:
        is_replayed = not self._enabled or (size in self._graphs and self._graphs[size].verified)
        return 0.0 if is_replayed else self._saved_seconds

    @property
    def nbytes(self) -> int:
        return sum(graph.nbytes for graph in self._graphs.values())

    def logits(self, ids_1S: torch.Tensor, positions_1S: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        size = ids_1S.shape[1]
        graph = self._graphs.pop(size, None)
        if graph is not None:
            self._graphs[size] = graph
            return self._replay(graph, ids_1S, positions_1S, batch)
        self._num_steps[size] += 1
        if not self._enabled or self._num_steps[size] != RECORD_AT_STEP:
            return self._model(ids_1S, positions_1S, batch)
        graph = self._graphs[size] = StepGraph(self._model, ids_1S, positions_1S, batch, self._max_blocks_per_seq)
        if graph.unsupported_reason is not None:
            self._disable(graph.unsupported_reason)
        self._evict()
        return graph.logits_SV

    def _replay(
        self, graph: "StepGraph", ids_1S: torch.Tensor, positions_1S: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        rows, before = list[int](), None
        if batch.states is not None and (graph.reads_values or not graph.verified):
            rows = written_rows(batch)
            before = batch.states.rows_NX[rows]
        started = time.thread_time()
        try:
            logits_SV = graph.replay(ids_1S, positions_1S, batch)
        except ReplayMismatch:
            _restore(batch, rows, before)
            return self._model(ids_1S, positions_1S, batch)
        if graph.verified:
            self.num_replayed += 1
            return logits_SV
        _restore(batch, rows, before)
        replayed = time.thread_time()
        expected_SV = self._model(ids_1S, positions_1S, batch)
        graph.verified = torch.equal(logits_SV, expected_SV)
        self._saved_seconds = max(0.0, (time.thread_time() - replayed) - (replayed - started))
        if not graph.verified:
            self._disable("a replayed step gives other logits than the model")
        return expected_SV

    def _evict(self) -> None:
        while self.nbytes > MAX_BYTES:
            size = next(iter(self._graphs))
            del self._graphs[size]
            self._num_steps[size] = 0


def _restore(batch: PagedBatch, rows: list[int], before: torch.Tensor | None) -> None:
    """Take back what a replay has done to states, and what it has told of them: the step is computed again."""
    if batch.drafted is not None:
        batch.drafted.runs.clear()
    if batch.states is not None and before is not None:
        batch.states.rows_NX[rows] = before


class StepGraph:
    """One recorded step. The constructor runs the model and records it.

    Attributes:
        logits_SV: logits of the last step that was recorded or replayed.
        unsupported_reason: why the step cannot be replayed, if so.
        reads_values: a replay may turn out to read other values than the recorded step.
        verified: whether a replay equalled the model.
        nbytes: memory that the graph keeps alive.
    """

    def __init__(
        self,
        model: Model,
        ids_1S: torch.Tensor,
        positions_1S: torch.Tensor,
        batch: PagedBatch,
        max_blocks_per_seq: int,
    ) -> None:
        self._ids_1S, self._positions_1S = ids_1S.clone(), positions_1S.clone()
        self._batch = _own_copy(batch, max_blocks_per_seq)
        if batch.tails:
            tails = tuple(_own_copy(one, max_blocks_per_seq) for one in batch.tails)
            self._batch = replace(self._batch, tails=tails, drafted=DraftedRows(ids_1S.shape[1]))
        self._copy_inputs(ids_1S, positions_1S, batch)
        recorder, detector = _OperatorRecorder(), _HostReadDetector()
        with detector, recorder, native.record_calls(recorder.calls.append):
            self.logits_SV = model(self._ids_1S, self._positions_1S, self._batch)
        self._calls = recorder.calls
        self._keep_alive = recorder.results  # the recorded kernel calls hold only addresses
        self.nbytes = sum(recorder.storage_bytes.values())
        self.unsupported_reason = detector.unsupported_reason
        self.reads_values = recorder.reads_values
        self.verified = False
        if batch.drafted is not None:
            self._pass_runs(batch.drafted)

    def replay(self, ids_1S: torch.Tensor, positions_1S: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """Return the logits [S, V] of another step of the same batch size.

        Raises:
            ReplayMismatch: the model would take another path; KV of some layers may have been written.
        """
        self._copy_inputs(ids_1S, positions_1S, batch)
        for call in self._calls:
            call()
        if batch.drafted is not None:
            self._pass_runs(batch.drafted)
        return self.logits_SV

    def _pass_runs(self, drafted: DraftedRows) -> None:
        """Pass on what recurrent layers have read."""
        if self._batch.drafted is not None:
            drafted.runs[:] = self._batch.drafted.runs

    def _copy_inputs(self, ids_1S: torch.Tensor, positions_1S: torch.Tensor, batch: PagedBatch) -> None:
        self._ids_1S.copy_(ids_1S)
        self._positions_1S.copy_(positions_1S)
        for own, other in zip((self._batch, *self._batch.tails), (batch, *batch.tails), strict=True):
            own.slots_T.copy_(other.slots_T)
            own.kv_lens_S.copy_(other.kv_lens_S)
            own.starts.copy_(other.starts)
            own.tables_SM[:, : other.tables_SM.shape[1]] = other.tables_SM


def _own_copy(batch: PagedBatch, max_blocks_per_seq: int) -> PagedBatch:
    """Return a batch with input tensors of its own, whose tables have room for any sequence."""
    tables_SM = torch.zeros((len(batch.tables_SM), max_blocks_per_seq), dtype=torch.long)
    own = {name: getattr(batch, name).clone() for name in ("slots_T", "kv_lens_S", "starts")}
    return replace(batch, **own, tables_SM=tables_SM)


class _HostReadDetector(TorchFunctionMode):
    """Detects reads of tensor values by Python that call no operator, and hence cannot be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.unsupported_reason: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOST_READS:
            self.unsupported_reason = f"the model calls {func.__name__} of a tensor"
        return func(*args, **(kwargs or {}))


class _OperatorRecorder(TorchDispatchMode):
    """Records every torch operator as a call that repeats it into the same result tensors.

    Attributes:
        calls: replayable calls, in order.
        results: all results, to be kept alive.
        storage_bytes: size of each storage that an operator has allocated, by identity.
        reads_values: whether a call checks a value or a shape.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], Any]] = []
        self.results: list[Any] = []
        self.storage_bytes: dict[int, int] = {}
        self.reads_values = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would import its compiler to have it skip this class."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.results.append(result)
        outputs, inputs = _tensors(result), {_storage_id(x) for x in _tensors((args, kwargs))}
        # Views of the inputs need no replay.
        allocated = {_storage_id(x): x for x in outputs} if not inputs >= {_storage_id(x) for x in outputs} else {}
        if func._schema.is_mutable:
            self.calls.append(partial(func, *args, **kwargs))
        elif not outputs:
            self.reads_values = True
            self.calls.append(partial(_check_host_value, func, args, kwargs, result))
        elif allocated and not func._schema.name.startswith(("aten::empty", "aten::new_empty")):
            self.reads_values |= torch.Tag.dynamic_output_shape in func.tags
            self.calls.append(_replayable_call(func, args, kwargs, outputs))
        self.storage_bytes |= {
            storage: x.untyped_storage().nbytes() for storage, x in allocated.items() if x.layout == torch.strided
        }
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage_id(x: torch.Tensor) -> int:
    """Return an identity that a tensor shares with its views."""
    return x.untyped_storage()._cdata if x.layout == torch.strided else id(x)


def _replayable_call(func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> Callable[[], Any]:
    """Return a call that repeats the operator and leaves its results in `outputs`."""
    out = getattr(func.overloadpacket, "out", None) if torch.Tag.pointwise in func.tags else None
    if out is not None and [a.type for a in out._schema.arguments[:-1]] == [a.type for a in func._schema.arguments]:
        return partial(out, *args, **kwargs, out=outputs[0])
    return partial(_call_and_copy, func, args, kwargs, outputs)


def _call_and_copy(func: Any, args: Any, kwargs: Any, outputs: Iterable[torch.Tensor]) -> None:
    for output, result in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
        if output.shape != result.shape:
            raise ReplayMismatch
        output.copy_(result)


def _check_host_value(func: Any, args: Any, kwargs: Any, recorded: Any) -> None:
    if func(*args, **kwargs) != recorded:
        raise ReplayMismatch

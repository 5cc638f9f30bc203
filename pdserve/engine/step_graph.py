"""Decode steps played from a tape: the kernels and torch's operators that a model called, with their arguments, and none of
its Python, which takes a fifth of a step of one sequence.

A tape is made from a step of so many sequences with one new token each. It keeps all of that step's tensors, so that they
stay where they are; a later step's tokens, positions and blocks are put in the place of the first's. What Python was told of
their values is on it too: a step in which it would be told something else is computed by the model. Before a tape is trusted,
its logits of another step were the model's, to the last bit. For the CPU kernels, which read nothing of a batch but its
tensors.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pdserve.kernels import cpu
from pdserve.kernels.batch import PagedBatch

log = logging.getLogger(__name__)

MOST_BYTES = 256 << 20  # of all tapes; the one used longest ago goes first
PATIENCE = 4  # steps of one size before a tape is made of it
_UNSEEN = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)  # tell values without an operator

Model = Callable[[torch.Tensor, torch.Tensor, PagedBatch], torch.Tensor]


class ReplayMismatch(Exception):
    """The model was told something else when the tape was made."""


class StepGraphs:
    """Tapes of one model, by the number of sequences.

    Args:
        model: logits [S, V] of ids [1, S], positions [1, S] and a batch of one new token each.
        most_blocks: of a sequence.

    Attributes:
        num_replayed: steps that were played.
    """

    def __init__(self, model: Model, most_blocks: int) -> None:
        self._model = model
        self._most_blocks = most_blocks
        self._graphs: dict[int, StepGraph] = {}  # the one used last comes last
        self._steps: Counter[int] = Counter()
        self._usable = True
        self.num_replayed = 0

    @property
    def verified(self) -> set[int]:
        """Sizes of steps that can be played."""
        return {size for size, graph in self._graphs.items() if graph.verified}

    @property
    def nbytes(self) -> int:
        return sum(graph.nbytes for graph in self._graphs.values())

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """Of one step, [S, V]; they are overwritten by the next."""
        size = ids.shape[1]
        graph = self._graphs.pop(size, None)
        if graph is not None:
            self._graphs[size] = graph
            return self._replay(graph, ids, positions, batch)
        self._steps[size] += 1
        if not self._usable or self._steps[size] != PATIENCE:
            return self._model(ids, positions, batch)
        graph = self._graphs[size] = StepGraph(self._model, ids, positions, batch, self._most_blocks)
        if graph.refusal is not None:
            self._give_up(graph.refusal)
        self._make_room()
        return graph.logits

    def _replay(
        self, graph: "StepGraph", ids: torch.Tensor, positions: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        try:
            logits = graph.replay(ids, positions, batch)
        except ReplayMismatch:
            return self._model(ids, positions, batch)
        if graph.verified:
            self.num_replayed += 1
            return logits
        expected = self._model(ids, positions, batch)
        graph.verified = torch.equal(logits, expected)
        if not graph.verified:
            self._give_up("a step played gives other logits than the model")
        return expected

    def _give_up(self, why: str) -> None:
        log.warning("decode steps take longer, as each runs the model's Python: %s", why)
        self._usable = False
        self._graphs.clear()

    def _make_room(self) -> None:
        while self.nbytes > MOST_BYTES:
            size = next(iter(self._graphs))
            del self._graphs[size]
            self._steps[size] = 0


class StepGraph:
    """One step, made by running the model.

    Attributes:
        logits: [S, V], of the step that was made or played last.
        refusal: why it cannot be played, if so.
        trusted: it was compared with the model.
    """

    def __init__(
        self, model: Model, ids: torch.Tensor, positions: torch.Tensor, batch: PagedBatch, most_blocks: int
    ) -> None:
        self._ids, self._positions = ids.clone(), positions.clone()
        tables_SM = torch.zeros((len(batch.tables_SM), most_blocks), dtype=torch.long)
        self._batch = replace(
            batch, slots_T=batch.slots_T.clone(), kv_lens_S=batch.kv_lens_S.clone(), tables_SM=tables_SM
        )
        assert self._batch.starts.numel()  # computed now: it is the same for all steps
        self._put(ids, positions, batch)
        recorder, watcher = _Recorder(), _Watcher()
        with watcher, recorder, cpu.noted(recorder.calls.append):
            self.logits = model(self._ids, self._positions, self._batch)
        self._calls = recorder.calls
        self._kept = recorder.kept  # kernels have been given their addresses
        self.nbytes = sum(recorder.sizes.values())
        self.refusal = watcher.refusal
        self.verified = False

    def replay(self, ids: torch.Tensor, positions: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """Logits of another step of as many sequences.

        Raises:
            Differs: the model would not do the same; KV of some layers may have been written.
        """
        self._put(ids, positions, batch)
        for call in self._calls:
            call()
        return self.logits

    def _put(self, ids: torch.Tensor, positions: torch.Tensor, batch: PagedBatch) -> None:
        self._ids.copy_(ids)
        self._positions.copy_(positions)
        self._batch.slots_T.copy_(batch.slots_T)
        self._batch.kv_lens_S.copy_(batch.kv_lens_S)
        self._batch.tables_SM[:, : batch.tables_SM.shape[1]] = batch.tables_SM


class _Watcher(TorchFunctionMode):
    """Sees how Python looks at numbers when no operator is called for it."""

    def __init__(self) -> None:
        super().__init__()
        self.refusal: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _UNSEEN:
            self.refusal = f"the model calls {func.__name__} of a tensor"
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Sees torch's operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], Any]] = []
        self.kept: list[Any] = []
        self.sizes: dict[int, int] = {}  # of the memory that operators have returned, by its address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.kept.append(result)
        results, given = _tensors(result), {_memory(x) for x in _tensors((args, kwargs))}
        new = {_memory(x): x for x in results} if not given >= {_memory(x) for x in results} else {}
        if func._schema.is_mutable:
            self.calls.append(partial(func, *args, **kwargs))
        elif not results:
            self.calls.append(partial(_tell, func, args, kwargs, result))
        elif new and not func._schema.name.startswith(("aten::empty", "aten::new_empty")):
            self.calls.append(_again(func, args, kwargs, results))
        self.sizes |= {at: x.untyped_storage().nbytes() for at, x in new.items() if x.layout == torch.strided}
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _memory(x: torch.Tensor) -> int:
    """What tells two tensors in one piece of memory, that is views, from others."""
    return x.untyped_storage()._cdata if x.layout == torch.strided else id(x)


def _again(func: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> Callable[[], Any]:
    """Calls the operator once more; its results come where those of the first time lie."""
    out = getattr(func.overloadpacket, "out", None) if torch.Tag.pointwise in func.tags else None
    if out is not None and [a.type for a in out._schema.arguments[:-1]] == [a.type for a in func._schema.arguments]:
        return partial(out, *args, **kwargs, out=results[0])
    return partial(_copied, func, args, kwargs, results)


def _copied(func: Any, args: Any, kwargs: Any, results: Iterable[torch.Tensor]) -> None:
    for x, new in zip(results, _tensors(func(*args, **kwargs)), strict=True):
        if x.shape != new.shape:
            raise ReplayMismatch
        x.copy_(new)


def _tell(func: Any, args: Any, kwargs: Any, told: Any) -> None:
    if func(*args, **kwargs) != told:
        raise ReplayMismatch

"""Model runner: runs the model over the batch of one step. What the batch is made of is here, its KV in `memory/`.

Shape legend: see kernels/batch.py; V vocabulary, A rows of sequences whose token the step before samples.
"""

import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceABC
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from operator import add
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pdserve.config import EngineConfig
from pdserve.engine.architectures.attention_sinks import has_sinks
from pdserve.engine.checkpoint import Checkpoint
from pdserve.engine.cpu_fusion.experts import inexact_products
from pdserve.engine.cpu_fusion.row_products import RowProducts
from pdserve.engine.cpu_fusion.tolerance import FUSED_DTYPES
from pdserve.engine.kv_probe import UnsupportedAttention
from pdserve.engine.memory.allocation import allocate, zeroed_blocks
from pdserve.engine.memory.groups import GAP, BlockTable
from pdserve.engine.memory.kv_memory import KVMemory
from pdserve.engine.memory.sequence_kv import block_table
from pdserve.engine.numerics import numerics_class
from pdserve.engine.sampler import SampledTokens, next_tokens
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import StepOutcome, StepPlan, StepRows
from pdserve.engine.step_graph import Graphs, StepGraphs
from pdserve.engine.step_pipeline import StepPipeline
from pdserve.errors import SetupError
from pdserve.kernels.attention import KernelUnavailable, is_batch_invariant, select_kernel
from pdserve.kernels.batch import Kernel, KVFormat, PagedBatch
from pdserve.kernels.memory import keep_freed_memory
from pdserve.kernels.states import keep_accepted, with_drafts
from pdserve.plugins import extension

log = logging.getLogger(__name__)

TokenIds = npt.NDArray[np.uint32]
Arrays: TypeAlias = "SequenceABC[npt.NDArray[np.integer[Any]]]"
MAX_STATE_ERROR = 1e-3  # of the largest logit, in float32, where products are torch's
LACKS = {  # what is said of a kernel without a capability that a model needs
    "latent": "latent rows of all heads are too wide for it; use --device cpu, or --kernel reference, which is slow",
    "sinks": "it knows no attention sinks; use --kernel auto",
    "states": "it computes no states of recurrent layers; use --device cpu with --kernel cpu",
}
ALIGNMENT = 4  # elements of a packed array: kernels read 16 bytes at a time


@dataclass(frozen=True)
class StepInputs:
    """Input of one step, on the device.

    Attributes:
        ids_1T, positions_1T: the new tokens and their positions.
        logit_rows: indices of the tokens whose logits are needed; one even if none is.
        is_decode_step: whether each sequence has one new token, whose logits are needed, in the order of the sequences.
    """

    ids_1T: torch.Tensor
    positions_1T: torch.Tensor
    batch: PagedBatch
    logit_rows: torch.Tensor
    is_decode_step: bool


class ModelRunner:
    """Runs one model over batches of sequences.

    Attributes:
        kv: the KV of the sequences.
        clock: seconds by which steps are measured in the warm-up. On CPUs these are seconds of this thread's CPU time: the
            instances of a machine often start together, and wall-clock time would make each of them appear slow for good.
        numerics: see `numerics.py`.
        pipeline: launches steps ahead; None if that is not wanted.
        graphs: recorded decode steps; None runs the model's Python in every step.
        window: attention window in tokens, the token itself included, that holds for every layer; None if some layer
            attends to all tokens.
    """

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig) -> None:
        self.checkpoint = checkpoint
        self.device = checkpoint.device
        self.clock = time.thread_time if self.device.type == "cpu" else time.monotonic
        self.block_size = config.block_size
        self.kernel = _select_kernel(checkpoint, config)
        ranks = checkpoint.layout.ranks
        self.pipeline = StepPipeline(self) if _is_pipelined(config, checkpoint) else None
        self.graphs: Graphs | None = None
        self._row_functions = _row_functions(checkpoint, self.kernel)
        self._drafted: PagedBatch | None = None  # of a step whose drafts are not accepted yet, if there are states
        self.kv = self._new_pool(0)
        self.window = checkpoint.spec.window
        self._try_model()
        is_invariant = is_batch_invariant(config.batch_invariant, self.device) and self._is_exact()
        self.numerics = numerics_class(self.kernel, self.device, checkpoint.dtype, is_invariant, ranks)
        step_bytes = extension("gpu").step_bytes(self, config) if self.device.type == "cuda" else 0
        self.kv = allocate(checkpoint, config, self.kernel, step_bytes)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.graphs = self.new_graphs()

    def new_graphs(self) -> Graphs | None:
        """Return what records decode steps; None where they are not recorded."""
        max_tokens = min(self.kv.num_blocks * self.block_size, self.checkpoint.context_length)
        if self.kernel.CAPABILITIES.records_steps and self.checkpoint.layout.ranks == 1:
            return StepGraphs(self.compute_logits, -(-max_tokens // self.block_size))
        if self.device.type == "cuda":
            graphs: Graphs = extension("gpu").graphs(self, max_tokens)
            return graphs
        return None

    def _try_model(self) -> None:
        """Run two tokens through the model; if it has states, also one by one.

        Raises:
            SetupError: it needs attention that the kernels do not support, or states that are not known.
        """
        name = type(self.checkpoint.model).__name__
        with self.scratch_sequence() as last_logits:
            try:
                logits_1V = last_logits(0, 2)
            except UnsupportedAttention as error:
                raise SetupError(f"architecture {name} is not supported: {error}") from error
            if self.kv.states is None:
                return
            _, last_1V = last_logits(0, 1), last_logits(1, 1)
            if (last_1V - logits_1V).abs().max() > MAX_STATE_ERROR * logits_1V.abs().max():
                raise SetupError(
                    f"architecture {name} is not supported: some of its layers keep states of another kind"
                )

    @contextmanager
    def scratch_sequence(self) -> Iterator[Callable[[int, int], torch.Tensor]]:
        """Yield what computes tokens [first, first + count) of two in a small pool, and returns the last logits."""
        blocks, num_groups = block_table(range(-(-2 // self.block_size))), len(self.kv.groups)
        with self.scratch_pool(len(blocks) * num_groups), torch.inference_mode():
            groups = [*enumerate(self.kv.groups)][1:]  # each with pages of its own
            pages = {at: [page + at * len(blocks) for page in blocks] for at in range(num_groups)}
            tails = [
                [block_table(group.first_id + page * group.per_page for page in pages[at])] for at, group in groups
            ]

            def last_logits(first: int, count: int) -> torch.Tensor:
                ids_T = np.zeros(count, np.uint32)
                return self.forward(self.step_inputs(ids_T, [count], [first], [blocks], [count - 1], tails)).float()

            yield last_logits

    def _is_exact(self) -> bool:
        """Return whether the model's products, of which a step has run, give a row the same bits in any batch.

        If it has no other products than those of packed layers, further steps run without the context that looks for them.
        """
        if not isinstance(products := self._row_functions, RowProducts):
            return True
        if not products.is_used:
            self._row_functions = nullcontext()
        if inexact := products.inexact | inexact_products(self.checkpoint.model):
            log.warning(
                "16-bit results may depend on the batch, so they are of a class of their own: %s calls torch's %s",
                type(self.checkpoint.model).__name__,
                ", ".join(sorted(inexact)),
            )
        return not inexact

    @contextmanager
    def scratch_pool(self, num_blocks: int) -> Iterator[torch.Tensor]:
        """Let steps use another pool meanwhile, which is yielded: a small one, before there is another or in its stead."""
        kv, self.kv = self.kv, self._new_pool(num_blocks)
        try:
            yield self.kv.pool_NX
        finally:
            self.kv = kv

    def _new_pool(self, num_blocks: int) -> KVMemory:
        blocks_NX = zeroed_blocks(self.checkpoint, num_blocks, self.device)
        return KVMemory(blocks_NX, blocks_NX[:0], self.kernel, self.checkpoint.layout, self.checkpoint.spec)

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepOutcome:
        """Compute what a step plans.

        Returns:
            With tokens for each sequence whose KV is complete afterwards, and for those that share its prompt. Beams get
            candidates instead.
        """
        if not plan.counts:
            return {}
        rows = plan.rows()
        logits_SV = self._logits(plan, rows)
        for feature, seq in rows.completed:
            feature.complete(seq, self._head)
        start = len(rows.last)
        for feature, seq, part in rows.read:
            feature.take_logits(seq, logits_SV[start : start + len(part)])
            start += len(part)
        is_shared = len(rows.sampled) > len(rows.last)
        sampled_from = rows.sampled_from if is_shared else slice(len(rows.last))
        outcome = plan.outcome(next_tokens(logits_SV[sampled_from], rows.sampled, rows.ahead, plan.drafts))
        if self._drafted is not None:
            batch, self._drafted = self._drafted, None
            keep_accepted(batch, plan.by_row({seq: len(outcome[seq].tokens) - 1 for seq in plan.drafts}))
        return outcome

    @property
    def _head(self) -> torch.nn.Module:
        model: Any = self.checkpoint.model
        head: torch.nn.Module = model.get_output_embeddings()
        return head

    def _logits(self, plan: StepPlan, rows: StepRows) -> torch.Tensor:
        """Return the logits of the last tokens, then those that features read, which get the hidden states that they read."""
        logit_rows = [*rows.last]
        for _, _, part in rows.read:
            logit_rows += part
        inputs = self.inputs(plan, logit_rows)
        if not rows.hidden:
            return self.forward(inputs)
        hidden_rows = [row for *_, part in rows.hidden for row in part]
        logits_SV, hidden_RH = self._forward_with_hidden(inputs, logit_rows, hidden_rows)
        start = 0
        for feature, seq, part in rows.hidden:
            feature.take_hidden(seq, hidden_RH[start : start + len(part)])
            start += len(part)
        return logits_SV

    @torch.inference_mode()
    def launch(
        self, seqs: list[Sequence], last: SampledTokens | None = None, rows: SequenceABC[int] = ()
    ) -> SampledTokens:
        """Launch a step that computes one token of each sequence, and return the tokens that follow, for which nothing waits.

        Args:
            seqs: the settings of their sampling need only logits. The first len(rows) of them compute the token that `last`
                samples, in these rows, the others their last token.
        """
        ahead = len(rows)
        ids_T = np.array([*rows, *(seq.output.tokens[-1] for seq in seqs[ahead:])], dtype=np.uint32)
        first = [seq.kv.num_computed + (i < ahead) for i, seq in enumerate(seqs)]
        inputs = self.step_inputs(
            ids_T,
            [1] * len(seqs),
            first,
            [seq.kv.block_ids for seq in seqs],
            [*range(len(seqs))],
            self._tail_tables(seqs) if len(self.kv.groups) > 1 else (),
        )
        if last is not None and ahead:
            last.keep_logits()
            rows_A = inputs.ids_1T[0, :ahead]
            rows_A.copy_(last.tokens_S.clamp(min=0).index_select(0, rows_A))
        return SampledTokens(self.forward(inputs), seqs, [int(i < ahead) for i in range(len(seqs))])

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Return the logits [S, V] of the tokens at `logit_rows`; one row if that is empty, which models do not accept."""
        if self.graphs is not None and inputs.is_decode_step:
            return self.graphs.logits(inputs.ids_1T, inputs.positions_1T, inputs.batch)
        return self.compute_logits(inputs.ids_1T, inputs.positions_1T, inputs.batch, inputs.logit_rows)

    def _forward_with_hidden(
        self, inputs: StepInputs, logit_rows: list[int], hidden_rows: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of `logit_rows`, and the hidden states of `hidden_rows`, float32 on the CPU.

        The hidden states are the input of the model's last layer, which then only gets the rows whose logits are wanted.
        """
        hidden: list[torch.Tensor] = []
        kept = logit_rows or [0]  # the other ranks compute the logits of one row at least, too

        def capture(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            hidden.append(args[0][0, len(kept) : len(rows)].float())
            return (args[0][:, : len(kept)], *args[1:])

        rows = torch.tensor([*kept, *hidden_rows], dtype=torch.long, device=self.device)
        hook = self._head.register_forward_pre_hook(capture)
        try:
            logits_SV = self.compute_logits(inputs.ids_1T, inputs.positions_1T, inputs.batch, rows)
        finally:
            hook.remove()
        return logits_SV[: len(logit_rows)], hidden[0].cpu()

    def compute_logits(
        self, ids_1T: torch.Tensor, positions_1T: torch.Tensor, batch: PagedBatch, keep: torch.Tensor | int = 0
    ) -> torch.Tensor:
        """Run the model and return the logits of the rows to keep, by default all."""
        num_logits = len(keep) if isinstance(keep, torch.Tensor) else ids_1T.shape[1]
        with self._row_functions:
            # `paged` reaches `paged_model.attention_forward` in every layer: transformers passes unknown arguments on.
            output = self.checkpoint.model(
                input_ids=ids_1T, position_ids=positions_1T, logits_to_keep=keep, use_cache=False, paged=batch
            )
        logits_SV: torch.Tensor = output.logits[0, :num_logits]
        return logits_SV

    def inputs(self, plan: StepPlan, logit_rows: list[int]) -> StepInputs:
        """Return the inputs of a planned step, see `step_inputs`. A draft is a row with its sequence's blocks.

        All rows write their KV before any attends, so that each finds that of the drafts before it.
        """
        first, counts, new, tables, of_rows = [], [], [], [], list[Sequence]()
        for seq, count in plan.counts.items():
            start, drafts = seq.kv.num_computed, plan.drafts.get(seq)
            new.append(np.frombuffer(seq.output.tokens, np.uint32)[start : start + count])
            for rows, before in plan.work(seq) if drafts else [(count, start)]:
                counts.append(rows)
                first.append(before)
                tables.append(seq.kv.block_ids)
                of_rows.append(seq)
            if drafts:
                new.append(np.array(drafts, np.uint32))
        tails = self._tail_tables(of_rows) if len(self.kv.groups) > 1 else ()
        inputs = self.step_inputs(np.concatenate(new), counts, first, tables, logit_rows, tails)
        if plan.drafts and self.kv.states is not None:
            drafts = plan.by_row({seq: len(tokens) for seq, tokens in plan.drafts.items()})
            self._drafted = with_drafts(inputs.batch, drafts)
            inputs = replace(inputs, batch=self._drafted)
        if plan.on_layer is not None:
            return replace(inputs, batch=replace(inputs.batch, on_layer=plan.on_layer))
        return inputs

    def _tail_tables(self, seqs: list[Sequence]) -> list[list[BlockTable]]:
        """Return the block tables of each further group; none of dummies, which have blocks of the first group only."""
        if not seqs[0].kv.tails:
            return []
        return [[seq.kv.tails[at].ids for seq in seqs] for at in range(len(self.kv.groups) - 1)]

    def step_inputs(
        self,
        ids_T: TokenIds,
        counts: list[int],
        first: list[int],
        tables: list[BlockTable],
        logit_rows: list[int],
        tails: SequenceABC[list[BlockTable]] = (),
    ) -> StepInputs:
        """Return what the model needs to compute new tokens, moved to the device in one copy.

        Args:
            ids_T: the new tokens of all sequences.
            counts, first, tables: of each sequence the number of new tokens, the position of the first, and the block ids.
            logit_rows: rows of the tokens whose logits are needed.
            tails: the block ids of each sequence in each further group of layers. Without, what is written does not matter.
        """
        kv_lens = [*map(add, first, counts)]
        starts = np.cumsum([0, *counts])
        rows_T = np.repeat(np.arange(len(counts)), counts)
        positions_T = np.arange(len(ids_T)) + np.subtract(first, starts[:-1])[rows_T]
        slots_and_tables = list[npt.NDArray[np.int64]]()
        for at, group in enumerate(self.kv.groups):
            of_group = tails[at - 1] if at and tails else tables
            tables_SM = np.zeros((len(counts), max(map(len, of_group))), dtype=np.int64)
            for row, table in enumerate(of_group):
                tables_SM[row, : len(table)] = table
            if at and tails:
                tables_SM = np.maximum(tables_SM - group.first_id, GAP if group.is_states else 0)
            elif at:
                tables_SM %= len(self.kv.views[at])
            blocks_T = tables_SM[rows_T, positions_T // self.block_size]
            slots_and_tables += [blocks_T * self.block_size + positions_T % self.block_size, tables_SM]
        rows = np.array(logit_rows or [0])
        arrays = (ids_T[None].astype(np.int64), positions_T[None], np.array(kv_lens), starts, rows, *slots_and_tables)
        ids_1T, positions_1T, kv_lens_S, starts_on_device, rows_on_device, slots, tables_on_device, *more = packed_copy(
            arrays, self.device
        )
        batch = PagedBatch(
            caches=self.kv.caches,
            slots_T=slots,
            tables_SM=tables_on_device,
            query_lens=counts,
            kv_lens=kv_lens,
            kv_lens_S=kv_lens_S,
            starts=starts_on_device,
            kernel=self.kernel,
        )
        if more:
            pairs = zip(more[::2], more[1::2], strict=True)
            others = tuple(replace(batch, slots_T=slots, tables_SM=tables) for slots, tables in pairs)
            batch = replace(batch, tails=others, group_of=self.kv.group_of, states=self.kv.states)
        # In this order, too: rows of scored prompts come behind those of all sequences.
        is_decode_step = len(counts) == len(ids_T) and logit_rows == [*range(len(ids_T))]
        return StepInputs(ids_1T, positions_1T, batch, rows_on_device, is_decode_step)


def packed_copy(arrays: Arrays, device: torch.device) -> list[torch.Tensor]:
    """Return integer arrays on a device, as int64 on a CPU, where they may share memory, and as int32 elsewhere.

    On a GPU, one copy from pinned memory moves them, and nothing waits for it: torch's allocator of pinned memory reuses a
    buffer once the copies out of it have ended.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array).to(torch.long) for array in arrays]
    return unpack(pack(arrays, pinned=device.type == "cuda").to(device, non_blocking=True), arrays)


def pack(arrays: Arrays, *, pinned: bool) -> torch.Tensor:
    """Return arrays one after the other, int32 in host memory, each from a multiple of ALIGNMENT on."""
    staging = torch.zeros(sum(map(_padded, arrays)), dtype=torch.int32, pin_memory=pinned)
    host, begin = staging.numpy(), 0
    for array in arrays:
        host[begin : begin + array.size] = array.reshape(-1)
        begin += _padded(array)
    return staging


def unpack(packed: torch.Tensor, like: Arrays) -> list[torch.Tensor]:
    """Return views of what `pack` made of these arrays."""
    parts = packed.split([_padded(array) for array in like])
    return [part[: array.size].view(array.shape) for part, array in zip(parts, like, strict=True)]


def _padded(array: npt.NDArray[np.integer[Any]]) -> int:
    return -(-array.size // ALIGNMENT) * ALIGNMENT


def _select_kernel(checkpoint: Checkpoint, config: EngineConfig) -> Kernel:
    """Return the attention kernel.

    Raises:
        SetupError: it is not available, or does not support the model.
    """
    sections = checkpoint.layout.sections
    try:
        batch_invariant = config.batch_invariant if checkpoint.dtype in FUSED_DTYPES else "off"
        sizes = frozenset(section.head_dim for section in sections)
        sinks = has_sinks(checkpoint.model)
        kv = KVFormat(checkpoint.dtype, sizes, config.block_size, sinks)
        kernel = select_kernel(config.kernel, checkpoint.device, batch_invariant, kv)
    except KernelUnavailable as error:
        raise SetupError(str(error)) from error
    if checkpoint.kv_dtype == torch.int8 and not kernel.CAPABILITIES.byte_kv:
        raise SetupError(f"--kv-cache-dtype int8: not with the kernel {kernel.NAME}; use --device cpu, or auto")
    needs = {
        "latent": any(section.latent for section in sections),
        "sinks": sinks,
        "states": bool(checkpoint.spec.states),
    }
    for capability in (name for name, is_needed in needs.items() if is_needed):
        if not getattr(kernel.CAPABILITIES, capability):
            problem = f"{type(checkpoint.model).__name__} is not supported by the kernel {kernel.NAME}"
            raise SetupError(f"architecture {problem}: {LACKS[capability]}")
    return kernel


def _is_pipelined(config: EngineConfig, checkpoint: Checkpoint) -> bool:
    """Return whether steps are to be launched ahead.

    Raises:
        SetupError: the ranks of an instance, or its model, cannot do that.
    """
    if config.async_scheduling == "auto":
        return checkpoint.device.type == "cuda" and config.tensor_parallel_size == 1 and not checkpoint.spec.states
    if config.async_scheduling == "on" and checkpoint.spec.states:
        message = "not with recurrent layers, whose states cannot be taken back; use auto or off"
        raise SetupError(f"--async-scheduling on: {message}")
    if config.async_scheduling == "on" and config.tensor_parallel_size > 1:
        raise SetupError("--async-scheduling on is not supported with --tensor-parallel-size; use auto or off")
    return config.async_scheduling == "on"


def _row_functions(checkpoint: Checkpoint, kernel: Kernel) -> AbstractContextManager[Any]:
    """Return the context in which the model runs, so that it rounds a row as in any other batch."""
    if kernel.CAPABILITIES.exact_rows == "functions":
        functions: AbstractContextManager[Any] = extension("gpu").row_functions()
        return functions
    pads = kernel.CAPABILITIES.exact_rows == "products" and checkpoint.dtype in FUSED_DTYPES
    return RowProducts() if pads else nullcontext()

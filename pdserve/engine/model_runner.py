"""Model runner: owns the pool's memory and runs the model over one step's batch. The only tensors of the engine live here.

Shape legend: see kernels/batch.py; V vocabulary, A rows for which logprobs are requested, C blocks to copy.
"""

import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from pdserve.config import EngineConfig, parse_size
from pdserve.engine.checkpoint import Checkpoint
from pdserve.engine.checkpoint_loader import cpu_memory_available
from pdserve.engine.cpu_fusion.prepack import largest_min_rows
from pdserve.engine.cpu_fusion.row_products import RowProducts, needs_row_products
from pdserve.engine.cpu_fusion.tolerance import FUSED_DTYPES
from pdserve.engine.numerics import numerics_class
from pdserve.engine.paged_model import UnsupportedAttention
from pdserve.engine.sampler import (
    SampledTokens,
    model_logprobs,
    pooled_part,
    record_candidates,
    record_embedding,
    record_logprobs,
    sample,
    score,
)
from pdserve.engine.sequence import Sequence
from pdserve.engine.step_graph import PaddedGraphs, StepGraphs, padded_sizes
from pdserve.engine.step_pipeline import StepPipeline
from pdserve.errors import SetupError
from pdserve.kernels import cpu
from pdserve.kernels.attention import KernelUnavailable, is_batch_invariant, select_kernel
from pdserve.kernels.batch import Kernel, KVFormat, PagedBatch
from pdserve.kernels.gpu import memory as gpu_memory
from pdserve.kernels.gpu.copies import PoolCopies
from pdserve.kernels.memory import huge_pages, keep_freed_memory
from pdserve.kernels.packed import packed_copy
from pdserve.keys import token_array
from pdserve.request import MAX_LOGPROBS, SamplingParams

_GREEDY = SamplingParams(temperature=0)
_LARGEST_SAMPLING = SamplingParams(  # without top_k, which lets the sampler sort less
    top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS
)
SCORED_ROWS = 256  # logits of prompts that are scored at a time: log_softmax in float32 takes several copies of them
LATENT_KERNELS = ("cpu", "reference")
CPU_MEMORY_FRACTION = 0.25  # of free memory, the default pool size: leaves room for a second instance and a desktop


TokenIds = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class StepInputs:
    """Input of one step, on the device.

    Attributes:
        ids_1T, positions_1T: the new tokens and their positions.
        logit_rows: indices of the tokens whose logits are needed; one even if none is.
        is_decode_step: whether each sequence has one new token, whose logits are needed.
    """

    ids_1T: torch.Tensor
    positions_1T: torch.Tensor
    batch: PagedBatch
    logit_rows: torch.Tensor
    is_decode_step: bool


class ModelRunner:
    """Runs one model over batches of sequences whose KV lives in the pool [N, L, 2, G, B, D]; [N, L, 1, 1, B, D] of latents.

    Attributes:
        num_blocks: blocks in the pool, set once the memory has been measured.
        num_host_blocks: blocks in host memory, for swapping.
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
        try:
            batch_invariant = config.batch_invariant if checkpoint.dtype in FUSED_DTYPES else "off"
            kv = KVFormat(checkpoint.dtype, checkpoint.layout.head_dim, config.block_size)
            self.kernel = select_kernel(config.kernel, self.device, batch_invariant, kv)
        except KernelUnavailable as error:
            raise SetupError(str(error)) from error
        if checkpoint.layout.latent and self.kernel.NAME not in LATENT_KERNELS:
            raise SetupError(
                f"architecture {type(checkpoint.model).__name__} is not supported by the kernel {self.kernel.NAME}: "
                "latent rows of all heads are too wide for it; use --device cpu, or --kernel reference, which is slow"
            )
        is_invariant = is_batch_invariant(config.batch_invariant, self.device)
        ranks = checkpoint.layout.ranks
        self.numerics = numerics_class(self.kernel, self.device, checkpoint.dtype, is_invariant, ranks)
        self.pipeline = StepPipeline(self) if _is_pipelined(config, self.device) else None
        self.graphs: StepGraphs | PaddedGraphs | None = None
        self._min_rows = largest_min_rows(checkpoint.model)
        self._row_functions = _row_functions(checkpoint.model, self.kernel)
        self.window = self._check_architecture()
        step_bytes = self._profile_memory(config) if self.device.type == "cuda" else 0
        self.num_blocks = _num_blocks(checkpoint, config, step_bytes)
        if checkpoint.group is not None:
            (self.num_blocks,) = checkpoint.group.minimum([self.num_blocks])
        self.pool_NL2GBD = self._new_pool(self.num_blocks)
        self.num_host_blocks = _num_host_blocks(checkpoint, config)
        self._host_NL2GBD = self._new_pool(self.num_host_blocks, torch.device("cpu"))
        if self.device.type == "cuda":
            _pin(self._host_NL2GBD)
        if self.device.type == "cpu":
            keep_freed_memory()
        if self.kernel is cpu and ranks == 1:
            max_blocks_per_seq = min(self.num_blocks, -(-checkpoint.context_length // self.block_size))
            self.graphs = StepGraphs(self._compute_logits, max_blocks_per_seq)
        elif self._records_cuda_graphs:
            max_tokens = min(self.num_blocks * self.block_size, checkpoint.context_length)
            self.graphs = PaddedGraphs(self._compute_logits, max_tokens)

    def _new_pool(self, num_blocks: int, device: torch.device | None = None) -> torch.Tensor:
        layout = self.checkpoint.layout
        shape = (num_blocks, *layout.block_shape)
        pool_NL2GBD = torch.empty(shape, dtype=self.checkpoint.dtype, device=device or self.device)
        huge_pages(pool_NL2GBD)
        return pool_NL2GBD.zero_()

    @torch.inference_mode()
    def compile_copies(self) -> None:
        """Copy a block in every way that the kernel offers, which compiles it. For an unused pool."""
        first_C = torch.zeros(1, dtype=torch.long, device=self.device)
        block_C = torch.empty_like(self.pool_NL2GBD[:1])
        self.kernel.gather_blocks(self.pool_NL2GBD, first_C, block_C)
        self.kernel.scatter_blocks(self.pool_NL2GBD, first_C, block_C)
        self.kernel.copy_blocks(self.pool_NL2GBD, first_C, first_C + 1)

    def pool_copies(self) -> PoolCopies:
        """Return what copies blocks between the pool and host memory, beside the steps."""
        return PoolCopies(self.pool_NL2GBD, self.kernel)

    @torch.inference_mode()
    def clear_tail(self, block: int, used: int) -> None:
        """Zero a partial block behind its first `used` tokens, so that no other sequence's KV leaves the instance."""
        self.pool_NL2GBD[block, ..., used:, :] = 0

    @torch.inference_mode()
    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks within the pool, as if one (source, target) pair after the other."""
        batch: list[tuple[int, int]] = []
        for source, target in pairs:
            if any(target in pair for pair in batch) or any(source == written for _, written in batch):
                self._copy_batch(batch)
                batch = []
            batch.append((source, target))
        self._copy_batch(batch)

    @torch.inference_mode()
    def swap(self, swap_out: list[tuple[int, int]], swap_in: list[tuple[int, int]]) -> float:
        """Copy blocks to host memory, then others back. Each pair is (block, host block).

        Returns:
            The seconds that the copies took.
        """
        if not swap_out and not swap_in:
            return 0.0
        started = time.monotonic()
        for block, host_block in swap_out:
            self._host_NL2GBD[host_block].copy_(self.pool_NL2GBD[block], non_blocking=True)
        for block, host_block in swap_in:
            self.pool_NL2GBD[block].copy_(self._host_NL2GBD[host_block], non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.monotonic() - started

    def _copy_batch(self, batch: list[tuple[int, int]]) -> None:
        if batch:
            sources_C, targets_C = torch.tensor(batch, device=self.device).T.contiguous()
            self.kernel.copy_blocks(self.pool_NL2GBD, sources_C, targets_C)

    @torch.inference_mode()
    def step(self, num_scheduled_tokens: dict[Sequence, int]) -> dict[Sequence, int]:
        """Compute the scheduled number of further tokens of each sequence.

        Returns:
            The next token of each sequence whose KV is complete afterwards, and of those that share its prompt. Beams get
            candidates instead.
        """
        if not num_scheduled_tokens:
            return {}
        complete: list[Sequence] = []
        last_rows: list[int] = []  # of the complete sequences
        pooled_rows: list[tuple[Sequence, int]] = []  # rows whose hidden states count for embeddings
        row_of: list[int] = []  # index in `last_rows` of each complete sequence and of those that share its prompt
        scored: list[tuple[Sequence, int]] = []  # and position, of tokens of prompts whose logprobs are due
        scored_rows: list[int] = []  # of the tokens before these
        end = 0
        for seq, count in num_scheduled_tokens.items():
            if seq.scores_prompt:
                due = range(seq.num_computed + 1, min(seq.num_computed + count + 1, seq.num_prompt))
                scored += [(seq, position) for position in due]
                scored_rows += range(end, end + len(due))
            if seq.pooling is not None:
                pooled_rows += [(seq, row) for row in pooled_part(seq, count, range(end, end + count))]
            elif count == seq.num_uncomputed:
                row_of += [len(last_rows)] * (1 + len(seq.siblings))
                complete += [seq, *seq.siblings]
                last_rows.append(end + count - 1)
            end += count
        logit_rows = last_rows + scored_rows
        if pooled_rows:  # as many as `_forward_and_pool` has the last layer compute, since ranks gather its results
            logit_rows = logit_rows + [0] * (self._min_rows - len(logit_rows))
        inputs = self.inputs(num_scheduled_tokens, logit_rows)
        logits_SV = self._forward_and_pool(inputs, logit_rows, pooled_rows) if pooled_rows else self.forward(inputs)
        model: Any = self.checkpoint.model
        for seq, count in num_scheduled_tokens.items():
            if seq.pooling is not None and count == seq.num_uncomputed:
                record_embedding(seq, model.get_output_embeddings())
        if scored:
            for start in range(0, len(scored), SCORED_ROWS):
                part = scored[start : start + SCORED_ROWS]
                score(logits_SV[len(last_rows) + start :][: len(part)], part)
        logits_SV = logits_SV[: len(last_rows)]
        if not complete:
            return {}
        if len(row_of) > len(last_rows):
            logits_SV = logits_SV[row_of]
        if any(seq.group is not None for seq in complete):
            beams = [i for i, seq in enumerate(complete) if seq.group is not None]
            record_candidates(logits_SV[beams], [complete[i] for i in beams])
            others = [i for i, seq in enumerate(complete) if seq.group is None]
            logits_SV, complete = logits_SV[others], [complete[i] for i in others]
        if not complete:
            return {}
        logprob_rows = [i for i, seq in enumerate(complete) if seq.sampling.logprobs is not None]
        # Before the sampler changes the logits.
        logprobs_AV = model_logprobs(logits_SV, logprob_rows) if logprob_rows else None
        sampled = sample(logits_SV, complete)
        if logprobs_AV is not None:
            record_logprobs(logprobs_AV, [complete[i] for i in logprob_rows], [sampled[i] for i in logprob_rows])
        return dict(zip(complete, sampled, strict=True))

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
        ids_T = np.array([*rows, *(seq.tokens[-1] for seq in seqs[ahead:])], dtype=np.uint32)
        first = [seq.num_computed + (i < ahead) for i, seq in enumerate(seqs)]
        inputs = self.step_inputs(ids_T, [1] * len(seqs), first, [seq.block_ids for seq in seqs], [*range(len(seqs))])
        if last is not None and ahead:
            last.keep_logits()
            rows_A = inputs.ids_1T[0, :ahead]
            rows_A.copy_(last.tokens_S.clamp(min=0).index_select(0, rows_A))
        return SampledTokens(self.forward(inputs), seqs, ahead)

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Return the logits [S, V] of the tokens at `logit_rows`; one row if that is empty, which models do not accept."""
        if self.graphs is not None and inputs.is_decode_step:
            return self.graphs.logits(inputs.ids_1T, inputs.positions_1T, inputs.batch)
        return self._compute_logits(inputs.ids_1T, inputs.positions_1T, inputs.batch, inputs.logit_rows)

    def _forward_and_pool(
        self, inputs: StepInputs, logit_rows: list[int], pooled_rows: list[tuple[Sequence, int]]
    ) -> torch.Tensor:
        """Return the logits of `logit_rows`, and add the hidden states of `pooled_rows` to their sequences.

        The hidden states are the input of the model's last layer, which then only gets the rows whose logits are wanted.
        """
        hidden: list[torch.Tensor] = []

        def capture(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            num_logits = max(len(logit_rows), self._min_rows)
            hidden.append(args[0][0, len(logit_rows) : len(rows)].float())
            return (args[0][:, :num_logits], *args[1:])

        rows = torch.tensor([*logit_rows, *(row for _, row in pooled_rows)], dtype=torch.long, device=self.device)
        model: Any = self.checkpoint.model
        hook = model.get_output_embeddings().register_forward_pre_hook(capture)
        try:
            logits_SV = self._compute_logits(inputs.ids_1T, inputs.positions_1T, inputs.batch, rows)
        finally:
            hook.remove()
        for (seq, _), row_H in zip(pooled_rows, hidden[0].cpu(), strict=True):
            seq.pool_hidden(row_H)
        return logits_SV[: len(logit_rows)]

    def _compute_logits(
        self, ids_1T: torch.Tensor, positions_1T: torch.Tensor, batch: PagedBatch, keep: torch.Tensor | int = 0
    ) -> torch.Tensor:
        """Run the model and return the logits of the rows to keep, by default all."""
        num_logits = len(keep) if isinstance(keep, torch.Tensor) else ids_1T.shape[1]
        if ids_1T.shape[1] < self._min_rows:  # the token twice here costs less than a second row in each layer
            ids_1T, positions_1T = (x.expand(-1, self._min_rows) for x in (ids_1T, positions_1T))
        with self._row_functions:
            # `paged` reaches `paged_model.attention_forward` in every layer: transformers passes unknown arguments on.
            output = self.checkpoint.model(
                input_ids=ids_1T, position_ids=positions_1T, logits_to_keep=keep, use_cache=False, paged=batch
            )
        logits_SV: torch.Tensor = output.logits[0, :num_logits]
        return logits_SV

    def inputs(self, num_scheduled_tokens: Mapping[Sequence, int], logit_rows: list[int]) -> StepInputs:
        """Return what the model needs to compute the scheduled tokens, moved to the device in one copy.

        Args:
            logit_rows: tokens whose logits are needed, as indices in the flattened batch.
        """
        seqs, counts = list(num_scheduled_tokens), list(num_scheduled_tokens.values())
        first = [seq.num_computed for seq in seqs]
        new = [
            np.frombuffer(seq.tokens, np.uint32)[begin : begin + count]
            for seq, begin, count in zip(seqs, first, counts, strict=True)
        ]
        return self.step_inputs(np.concatenate(new), counts, first, [seq.block_ids for seq in seqs], logit_rows)

    def step_inputs(
        self, ids_T: TokenIds, counts: list[int], first: list[int], tables: list[list[int]], logit_rows: list[int]
    ) -> StepInputs:
        """Return the same, given the new tokens of all sequences, and of each their number, the position of the first, and
        the block table."""
        kv_lens = [begin + count for begin, count in zip(first, counts, strict=True)]
        starts = np.cumsum([0, *counts])
        rows_T = np.repeat(np.arange(len(counts)), counts)
        positions_T = np.arange(len(ids_T)) + np.subtract(first, starts[:-1])[rows_T]
        tables_SM = np.zeros((len(counts), max(map(len, tables))), dtype=np.int64)
        for row, table in enumerate(tables):
            tables_SM[row, : len(table)] = table
        slots_T = tables_SM[rows_T, positions_T // self.block_size] * self.block_size + positions_T % self.block_size
        rows = np.array(logit_rows or [0])
        arrays = (ids_T[None].astype(np.int64), positions_T[None], slots_T, np.array(kv_lens), starts, rows, tables_SM)
        ids_1T, positions_1T, slots, kv_lens_S, starts_on_device, rows_on_device, tables_on_device = packed_copy(
            arrays, self.device
        )
        batch = PagedBatch(
            pool_NL2GBD=self.pool_NL2GBD,
            slots_T=slots,
            tables_SM=tables_on_device,
            query_lens=counts,
            kv_lens=kv_lens,
            kv_lens_S=kv_lens_S,
            kernel=self.kernel,
            known_starts=starts_on_device,
        )
        is_decode_step = len(logit_rows) == len(counts) == len(ids_T)  # every position is sampled
        return StepInputs(ids_1T, positions_1T, batch, rows_on_device, is_decode_step)

    @torch.inference_mode()
    def _check_architecture(self) -> int | None:
        """Run two tokens through the model in a minimal pool, and check that every layer wrote KV for them.

        Returns:
            The longest attention window, if all layers have one.

        Raises:
            SetupError: a layer keeps state outside of the KV, or needs attention that the kernels do not support.
        """
        blocks = list(range(-(-2 // self.block_size)))
        self.pool_NL2GBD = self._new_pool(len(blocks)).fill_(float("nan"))
        probe = Sequence("probe", token_array([0, 0]), 2, 2, _GREEDY, b"", self.block_size, block_ids=blocks)
        architecture = type(self.checkpoint.model).__name__
        layer_windows: list[int | None] = []

        def attend(*args: Any) -> torch.Tensor:
            layer_windows.append(args[4])
            return self.kernel.attend(*args)

        spy = cast(Kernel, SimpleNamespace(write_kv=self.kernel.write_kv, attend=attend))
        inputs = self.inputs({probe: 2}, [1])
        try:
            self.forward(replace(inputs, batch=replace(inputs.batch, kernel=spy)))
        except (UnsupportedAttention, TypeError) as error:
            if isinstance(error, TypeError) and "paged" not in str(error):
                raise  # a defect, not a model that rejects the `paged` argument
            raise SetupError(f"architecture {architecture} is not supported: {error}") from error
        if self.pool_NL2GBD[..., :2, :].isnan().any():
            raise SetupError(
                f"architecture {architecture} is not supported: not all of its layers use the attention interface"
            )
        windows = [window for window in layer_windows if window is not None]
        return max(windows) if len(windows) == len(layer_windows) else None

    def _profile_memory(self, config: EngineConfig) -> int:
        """Return the bytes of the GPU's memory that a step takes at most, in addition to weights and pool, and all graphs."""
        with gpu_memory.PeakMeter(self.device) as meter:
            self.run_largest_steps(config)
        return meter.peak + (self.graph_bytes(config) if self._records_cuda_graphs else 0)

    @property
    def _records_cuda_graphs(self) -> bool:
        is_capturable = self.device.type == "cuda" and getattr(self.kernel, "is_capturable", False)
        return is_capturable and self.checkpoint.layout.ranks == 1

    @torch.inference_mode()
    def graph_bytes(self, config: EngineConfig) -> int:
        """Return the bytes that the graphs of decode steps will take, by those of the two largest.

        The first takes the memory of its tensors, which all share, and each takes some for what it launches.
        """
        longest, taken = self.checkpoint.context_length, []
        sizes = padded_sizes(min(config.max_num_seqs, config.max_num_batched_tokens), longest)
        graphs = PaddedGraphs(self._compute_logits, longest)
        pool, self.pool_NL2GBD = self.pool_NL2GBD, self._new_pool(1)
        for rows, limit in sizes[:2]:
            table = [0] * -(-limit // self.block_size)
            before = gpu_memory.free_bytes(self.device)
            inputs = self.step_inputs(
                np.zeros(rows, np.uint32), [1] * rows, [limit - 1] * rows, [table] * rows, [*range(rows)]
            )
            graphs.logits(inputs.ids_1T, inputs.positions_1T, inputs.batch)
            taken.append(max(0, before - gpu_memory.free_bytes(self.device)))
        self.pool_NL2GBD = pool
        return taken[0] + taken[-1] * (len(sizes) - 1)

    @torch.inference_mode()
    def run_largest_steps(self, config: EngineConfig) -> None:
        """Run the steps that take the most memory: as many tokens as fit, of as many prompts as possible, and of as few.

        Their sampling uses every feature that takes memory, and all logits are kept, for the log probabilities of prompts.
        """
        limit, longest = config.max_num_batched_tokens, self.checkpoint.context_length
        for num_seqs in sorted({-(-limit // longest), min(config.max_num_seqs, limit)}):
            num_seqs = min(num_seqs, config.max_num_seqs)
            count = min(-(-limit // num_seqs), longest)
            counts = [min(count, max(1, limit - i * count)) for i in range(num_seqs)]
            blocks = list(range(-(-count // self.block_size)))  # shared: what is written there does not matter
            pool, self.pool_NL2GBD = self.pool_NL2GBD, self._new_pool(len(blocks))
            self.step({_largest_probe(each, self.block_size, blocks): each for each in counts})
            self.pool_NL2GBD = pool


def _largest_probe(count: int, block_size: int, blocks: list[int]) -> Sequence:
    """Return a prompt of `count` tokens whose sampling uses every feature that takes memory."""
    tokens = token_array([0] * count)
    return Sequence("probe", tokens, count, count, _LARGEST_SAMPLING, b"", block_size, block_ids=blocks)


def _is_pipelined(config: EngineConfig, device: torch.device) -> bool:
    """Return whether steps are to be launched ahead.

    Raises:
        SetupError: the ranks of an instance cannot do that.
    """
    if config.async_scheduling == "auto":
        return device.type == "cuda" and config.tensor_parallel_size == 1
    if config.async_scheduling == "on" and config.tensor_parallel_size > 1:
        raise SetupError("--async-scheduling on is not supported with --tensor-parallel-size; use auto or off")
    return config.async_scheduling == "on"


def _row_functions(model: torch.nn.Module, kernel: Kernel) -> AbstractContextManager[Any]:
    """Return the context in which the model runs, so that it rounds a row as in any other batch."""
    if kernel.NAME == "triton-invariant":
        from pdserve.kernels.gpu.row_functions import RowFunctions

        return RowFunctions()
    return RowProducts() if needs_row_products(model) else nullcontext()


def _num_blocks(checkpoint: Checkpoint, config: EngineConfig, step_bytes: int) -> int:
    """Return the size of the pool: as configured, or as the memory allows beside that of a step.

    Raises:
        SetupError: fewer than 2 blocks fit.
    """
    if config.num_blocks is not None:
        count = config.num_blocks
    else:
        useful = config.max_num_seqs * -(-checkpoint.context_length // config.block_size)
        count = min(_pool_bytes(checkpoint, config, step_bytes) // checkpoint.layout.block_bytes, useful)
    if count < 2:
        where = ""
        if checkpoint.device.type == "cuda":
            memory = gpu_memory.describe(checkpoint.device, config.gpu_memory_utilization)
            where = f" ({memory}; a step takes {step_bytes / 2**30:.1f} GiB)"
        raise SetupError(
            f"no room for KV: a block takes {checkpoint.layout.block_bytes} bytes and {count} would fit{where}; "
            "raise --kv-cache-memory or --num-blocks, or lower --max-num-batched-tokens"
        )
    return count


def _num_host_blocks(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """Return how many blocks fit into the swap space.

    Raises:
        SetupError: not one block fits, or the swap space exceeds the free memory.
    """
    size, block_bytes = int(config.swap_space * 2**30) // checkpoint.layout.ranks, checkpoint.layout.block_bytes
    if 0 < size < block_bytes:
        raise SetupError(f"--swap-space {config.swap_space} GiB is less than one block of {block_bytes} bytes")
    if size > (free := cpu_memory_available()):
        raise SetupError(f"--swap-space {config.swap_space} GiB is more than the {free / 2**30:.1f} GiB that are free")
    return size // block_bytes


def _pool_bytes(checkpoint: Checkpoint, config: EngineConfig, step_bytes: int) -> int:
    if config.kv_cache_memory is not None:
        return parse_size(config.kv_cache_memory)
    if checkpoint.device.type == "cpu":
        return int(cpu_memory_available() * CPU_MEMORY_FRACTION) // checkpoint.layout.ranks
    return gpu_memory.free_for_pool(checkpoint.device, step_bytes, config.gpu_memory_utilization)


def _pin(host_NL2GBD: torch.Tensor) -> None:
    try:
        gpu_memory.pin(host_NL2GBD)
    except MemoryError as error:
        raise SetupError(f"--swap-space: {error}") from error

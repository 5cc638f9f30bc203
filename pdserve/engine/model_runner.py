"""Holds the pool's memory and runs the model over one step's batch. The only part of the engine that owns tensors."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch

from pdserve.config import EngineConfig, parse_size
from pdserve.engine.checkpoint import Checkpoint, cpu_memory_available
from pdserve.engine.paged_model import UnsupportedAttention
from pdserve.engine.sampler import model_logprobs, sample, tell_logprobs
from pdserve.engine.sequence import Sequence
from pdserve.engine.step_graph import StepGraphs
from pdserve.errors import SetupError
from pdserve.kernels import cpu
from pdserve.kernels.attention import KernelUnavailable, choose
from pdserve.kernels.batch import Kernel, PagedBatch
from pdserve.kernels.cpu import huge_pages, keep_freed_memory
from pdserve.request import SamplingParams

_GREEDY = SamplingParams(temperature=0)
CPU_SHARE = 0.25  # of the free memory, when nothing else is asked for: two instances and a desktop fit beside it


class ModelRunner:
    """`num_blocks` and the pool [N, L, 2, G, B, D] are set once the memory has been measured.

    Attributes:
        tapes: of decode steps, if they are played; None makes the model compute all.
        window: a token sees so many at most, itself included, in every layer; None if some layer sees all.
    """

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig) -> None:
        self.checkpoint = checkpoint
        self.device = checkpoint.device
        self.block_size = config.block_size
        try:
            self.kernel = choose(config.kernel, self.device)
        except KernelUnavailable as error:
            raise SetupError(str(error)) from error
        self.graphs: StepGraphs | None = None
        self.window = self._check_architecture()
        if self.device.type == "cuda":
            self._profile(config)
        self.num_blocks = _num_blocks(checkpoint, config)
        self.pool_NL2GBD = self._new_pool(self.num_blocks)
        self.num_places = _num_places(checkpoint, config)
        self._host_NL2GBD = self._new_pool(self.num_places, torch.device("cpu"))
        if self.num_places and self.device.type == "cuda":
            self._host_NL2GBD = self._host_NL2GBD.pin_memory()
        if self.device.type == "cpu":
            keep_freed_memory()
        if self.kernel is cpu:
            self.graphs = StepGraphs(self._model, min(self.num_blocks, -(-checkpoint.context // self.block_size)))

    def _new_pool(self, num_blocks: int, device: torch.device | None = None) -> torch.Tensor:
        layout = self.checkpoint.layout
        shape = (num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        pool_NL2GBD = torch.empty(shape, dtype=self.checkpoint.dtype, device=device or self.device)
        huge_pages(pool_NL2GBD)
        return pool_NL2GBD.zero_()

    @torch.inference_mode()
    def clear_tail(self, block: int, used: int) -> None:
        """Zeroes a partial block behind its first `used` tokens: what leaves the instance holds nobody else's KV."""
        self.pool_NL2GBD[block, ..., used:, :] = 0

    @torch.inference_mode()
    def copy(self, blocks: list[tuple[int, int]]) -> None:
        """Copies whole blocks, (from, to), one after the other as far as it matters."""
        batch: list[tuple[int, int]] = []
        for source, target in blocks:
            if any(target in pair for pair in batch) or any(source == to for _, to in batch):
                self._copy(batch)
                batch = []
            batch.append((source, target))
        self._copy(batch)

    @torch.inference_mode()
    def swap(self, out: list[tuple[int, int]], back: list[tuple[int, int]]) -> float:
        """Copies blocks to places in host memory, then others back from there. Each pair is (block, place).

        Returns:
            Seconds that it took.
        """
        if not out and not back:
            return 0.0
        started = time.monotonic()
        for block, place in out:
            self._host_NL2GBD[place].copy_(self.pool_NL2GBD[block], non_blocking=True)
        for block, place in back:
            self.pool_NL2GBD[block].copy_(self._host_NL2GBD[place], non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.monotonic() - started

    def _copy(self, batch: list[tuple[int, int]]) -> None:
        if batch:
            sources_C, targets_C = torch.tensor(batch, device=self.device).T.contiguous()
            self.kernel.copy_blocks(self.pool_NL2GBD, sources_C, targets_C)

    @torch.inference_mode()
    def step(self, tokens: dict[Sequence, int]) -> dict[Sequence, int]:
        """Computes `tokens[seq]` more tokens of each sequence; the next token of those that have all their KV then."""
        if not tokens:
            return {}
        seqs = list(tokens)
        ids: list[int] = []
        positions: list[int] = []
        for seq, count in tokens.items():
            ids += seq.tokens[seq.num_computed : seq.num_computed + count]
            positions += range(seq.num_computed, seq.num_computed + count)
        complete = [seq for seq in seqs if tokens[seq] == seq.num_missing]
        ends = dict(zip(seqs, torch.tensor(list(tokens.values())).cumsum(0).tolist(), strict=True))
        last = torch.tensor([ends[seq] - 1 for seq in complete], dtype=torch.long, device=self.device)
        batch = self._batch(seqs, list(tokens.values()), positions)
        logits_SV = self.forward(ids, positions, batch, last)
        if not complete:
            return {}
        asking = [i for i, seq in enumerate(complete) if seq.sampling.logprobs is not None]
        logprobs_AV = model_logprobs(logits_SV, asking)  # before the sampler changes the logits
        sampled = sample(logits_SV, complete)
        tell_logprobs(logprobs_AV, [complete[i] for i in asking], [sampled[i] for i in asking])
        return dict(zip(complete, sampled, strict=True))

    def forward(self, ids: list[int], positions: list[int], batch: PagedBatch, last: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] of the tokens at `last`. At least one row is computed: models take no empty selection."""
        ids_1T, positions_1T = (torch.tensor([values], device=self.device) for values in (ids, positions))
        if self.graphs is not None and len(last) == len(ids):
            return self.graphs.logits(ids_1T, positions_1T, batch)
        keep = last if len(last) else torch.zeros(1, dtype=torch.long, device=self.device)
        return self._model(ids_1T, positions_1T, batch, keep)

    def _model(
        self, ids_1T: torch.Tensor, positions_1T: torch.Tensor, batch: PagedBatch, keep: torch.Tensor | int = 0
    ) -> torch.Tensor:
        """Logits of the tokens to keep, by default of all."""
        output = self.checkpoint.model(
            input_ids=ids_1T, position_ids=positions_1T, logits_to_keep=keep, use_cache=False, paged=batch
        )
        logits_SV: torch.Tensor = output.logits[0]
        return logits_SV

    def _batch(self, seqs: list[Sequence], counts: list[int], positions: list[int]) -> PagedBatch:
        kv_lens = [seq.num_computed + count for seq, count in zip(seqs, counts, strict=True)]
        tables = torch.zeros((len(seqs), max(len(seq.block_ids) for seq in seqs)), dtype=torch.long)
        for row, seq in enumerate(seqs):
            tables[row, : len(seq.block_ids)] = torch.tensor(seq.block_ids)
        owners = torch.repeat_interleave(torch.arange(len(seqs)), torch.tensor(counts))
        at = torch.tensor(positions)
        slots = tables[owners, at // self.block_size] * self.block_size + at % self.block_size
        return PagedBatch(
            pool_NL2GBD=self.pool_NL2GBD,
            slots_T=slots.to(self.device),
            tables_SM=tables.to(self.device),
            query_lens=counts,
            kv_lens=kv_lens,
            kv_lens_S=torch.tensor(kv_lens, device=self.device),
            kernel=self.kernel,
        )

    @torch.inference_mode()
    def _check_architecture(self) -> int | None:
        """Runs two tokens through the model with a pool of as few blocks, and sees that every layer attended to them.

        Returns:
            The longest window, if all layers have one.

        Raises:
            SetupError: a layer keeps state elsewhere than in KV, or asks for attention that the kernels do not do.
        """
        blocks = list(range(-(-2 // self.block_size)))
        self.pool_NL2GBD = self._new_pool(len(blocks)).fill_(float("nan"))
        probe = Sequence("probe", [0, 0], 2, 2, _GREEDY, b"", self.block_size, block_ids=blocks)
        kind = type(self.checkpoint.model).__name__
        windows: list[int | None] = []

        def attend(*call: Any) -> torch.Tensor:
            windows.append(call[4])
            return self.kernel.attend(*call)

        watched = cast(Kernel, SimpleNamespace(write_kv=self.kernel.write_kv, attend=attend))
        batch = replace(self._batch([probe], [2], [0, 1]), kernel=watched)
        try:
            self.forward(probe.tokens, [0, 1], batch, torch.tensor([1], device=self.device))
        except (UnsupportedAttention, TypeError) as error:
            if isinstance(error, TypeError) and "paged" not in str(error):
                raise  # not the model's refusal of our argument, but a defect
            raise SetupError(f"architecture {kind} is not supported: {error}") from error
        if self.pool_NL2GBD[..., :2, :].isnan().any():
            raise SetupError(f"architecture {kind} is not supported: not all of its layers use the attention interface")
        given = [window for window in windows if window is not None]
        return max(given) if len(given) == len(windows) else None

    @torch.inference_mode()
    def _profile(self, config: EngineConfig) -> None:
        """Runs the largest step once, so that the memory left afterwards is what the pool may take."""
        count = min(config.max_num_batched_tokens, self.checkpoint.context)
        blocks = -(-count // self.block_size)
        self.pool_NL2GBD = self._new_pool(blocks)
        probe = Sequence(
            "probe", [0] * count, count, count, _GREEDY, b"", self.block_size, block_ids=list(range(blocks))
        )
        self.step({probe: count})
        del self.pool_NL2GBD


def _num_blocks(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """How many blocks the pool gets: what was asked for, or what the measured memory allows."""
    if config.num_blocks is not None:
        count = config.num_blocks
    else:
        useful = config.max_num_seqs * -(-checkpoint.context // config.block_size)
        count = min(_pool_bytes(checkpoint, config) // checkpoint.layout.block_bytes, useful)
    if count < 2:
        raise SetupError(
            f"no room for KV: a block takes {checkpoint.layout.block_bytes} bytes and {count} would fit; "
            "give --kv-cache-memory or --num-blocks, or a smaller --max-num-batched-tokens"
        )
    return count


def _num_places(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """How many blocks fit into the swap space."""
    size, block_bytes = int(config.swap_space * 2**30), checkpoint.layout.block_bytes
    if 0 < size < block_bytes:
        raise SetupError(f"--swap-space {config.swap_space} GiB is less than one block of {block_bytes} bytes")
    if size > (free := cpu_memory_available()):
        raise SetupError(f"--swap-space {config.swap_space} GiB is more than the {free / 2**30:.1f} GiB that are free")
    return size // block_bytes


def _pool_bytes(checkpoint: Checkpoint, config: EngineConfig) -> int:
    if config.kv_cache_memory is not None:
        return parse_size(config.kv_cache_memory)
    if checkpoint.device.type == "cpu":
        return int(cpu_memory_available() * CPU_SHARE)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(checkpoint.device)
    peak = torch.cuda.max_memory_allocated(checkpoint.device) - torch.cuda.memory_allocated(checkpoint.device)
    return int(free - total * (1 - config.gpu_memory_utilization) - peak)

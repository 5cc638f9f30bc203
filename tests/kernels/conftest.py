"""Fixtures for kernel tests: pools in which every slot that no sequence has written is NaN."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.config import EngineConfig
from pdserve.costs import Costs
from pdserve.engine.engine import Engine
from pdserve.kernels import cpu, native, reference
from pdserve.kernels.batch import Kernel, PagedBatch, Scores, layer_caches
from pdserve.request import Request, SamplingParams

LAYERS, LAYER = 3, 1


@dataclass(frozen=True)
class Case:
    """Inputs of one attention call. `expected` is the result of the reference kernel in float32."""

    batch: PagedBatch
    q_THD: torch.Tensor
    k_TGD: torch.Tensor
    v_TGD: torch.Tensor
    sinks_H: torch.Tensor | None = None

    def with_sinks(self) -> "Case":
        """The same with attention sinks of 1 to 3 logits, which take a visible part of the weight."""
        sinks = torch.linspace(1, 3, self.q_THD.shape[1], dtype=torch.float32, device=self.q_THD.device)
        return replace(self, sinks_H=sinks)

    @property
    def cache_N2GBD(self) -> torch.Tensor:
        return self.batch.caches[LAYER]

    def expected(self, scale: float, window: int | None, softcap: float | None) -> torch.Tensor:
        cache_N2GBD = self.cache_N2GBD.float()
        reference.write_kv(cache_N2GBD, self.k_TGD.float(), self.v_TGD.float(), self.batch.slots_T)
        return reference.attend(
            self.q_THD.float(), cache_N2GBD, self.batch, Scores(scale, window, softcap, self.sinks_H)
        )

    def attend_spans(
        self, spans: list[tuple[int, int]], scale: float, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """The tokens [first, end) of the only sequence for each span, as a batch of so many sequences."""
        ends = [end for _, end in spans]
        batch = replace(
            self.batch,
            query_lens=[end - first for first, end in spans],
            kv_lens=ends,
            kv_lens_S=torch.tensor(ends, device=self.q_THD.device),
            starts=torch.tensor([0, *accumulate(end - first for first, end in spans)], device=self.q_THD.device),
            tables_SM=self.batch.tables_SM.expand(len(spans), -1),
        )
        q_THD = torch.cat([self.q_THD[first:end] for first, end in spans])
        return batch.kernel.attend(q_THD, self.cache_N2GBD, batch, Scores(scale, window, softcap, self.sinks_H))

    def poison_out_of_window(self, window: int | None) -> None:
        """Overwrite KV outside of every new token's window with NaN, as if the blocks had been reused."""
        batch, size = self.batch, self.batch.block_size
        for row, (new, kv) in enumerate(zip(batch.query_lens, batch.kv_lens, strict=True)):
            at = torch.arange(max(0, kv - new + 1 - (window or kv)), device=batch.tables_SM.device)
            for cache_N2GBD in batch.caches:
                cache_N2GBD[batch.tables_SM[row, at // size], :, :, at % size] = float("nan")


MakeCase = Callable[..., Case]


@pytest.fixture
def make_case() -> MakeCase:
    """Return a factory: make_case(dtype, H, G, D, B, [(new tokens, KV tokens), …], kernel, device) → Case."""

    def make(
        dtype: torch.dtype,
        heads: int,
        kv_heads: int,
        size: int,
        block_size: int,
        lengths: list[tuple[int, int]],
        kernel: Kernel,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> Case:
        random = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random).to(dtype)

        counts = [-(-kv // block_size) for _, kv in lengths]
        blocks = torch.randperm(sum(counts) + 2, generator=random)
        shape = (len(blocks), LAYERS, 2, kv_heads, block_size, size)
        pool = torch.full(shape, float("nan"), dtype=dtype)
        tables = torch.zeros((len(lengths), max(counts)), dtype=torch.long)
        slots = []
        taken = 0
        for row, ((new, kv), count) in enumerate(zip(lengths, counts, strict=True)):
            tables[row, :count] = blocks[taken : taken + count]
            taken += count
            at = torch.arange(kv)
            of_tokens = tables[row, at // block_size]
            old = at[: kv - new]
            pool[of_tokens[old], LAYER, :, :, old % block_size] = normal(len(old), 2, kv_heads, size)
            slots.append((of_tokens * block_size + at % block_size)[kv - new :])
        total = sum(new for new, _ in lengths)
        batch = PagedBatch(
            caches=layer_caches(pool.to(device)),
            slots_T=torch.cat(slots).to(device),
            tables_SM=tables.to(device),
            query_lens=[new for new, _ in lengths],
            kv_lens=[kv for _, kv in lengths],
            kv_lens_S=torch.tensor([kv for _, kv in lengths], device=device),
            starts=torch.tensor([0, *accumulate(new for new, _ in lengths)], device=device),
            kernel=kernel,
        )
        # Heads first in memory, as transformers passes them.
        q, k, v = (normal(count, total, size).to(device).transpose(0, 1) for count in (heads, kv_heads, kv_heads))
        return Case(batch, q, k, v)

    return make


@pytest.fixture
def unbuilt_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Simulate a process that has not loaded the native library; returns its empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "library", native.library.__wrapped__)
    return tmp_path


@pytest.fixture
def cpu_kernel() -> Kernel:
    """The compiled kernel; skips the test where there is no compiler."""
    if not (native.compiler() or native.is_available()):
        pytest.skip("no C++ compiler")
    native.library()
    return cpu


def continue_greedily(engine: Engine, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    greedy = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    seqs = [engine.new_sequence(str(i), Request(prompt=prompt, sampling=greedy)) for i, prompt in enumerate(prompts)]
    for seq in seqs:
        engine.add(seq)
    while engine.has_work:
        for seq in engine.step().sampled:
            if seq.output.finish_reason():
                engine.remove(seq)
    return [seq.output.tokens[seq.output.num_prompt :].tolist() for seq in seqs]


@pytest.fixture
def equals_generate(checkpoint: Callable[..., Path], generate: Callable[..., list[list[int]]]) -> Callable[..., Engine]:
    """Return a check of the whole engine, with a cold and a warm prefix cache.

    equals_generate(architecture, prompts, new_tokens, **settings) → the engine.
    """

    def check(architecture: str, prompts: list[list[int]], new_tokens: int, **settings: Any) -> Engine:
        path = checkpoint(architecture)
        expected = generate(path, prompts, new_tokens)
        engine = Engine(EngineConfig(model=str(path), **settings))
        assert continue_greedily(engine, prompts, new_tokens) == expected
        assert continue_greedily(engine, prompts, new_tokens) == expected, "with a warm prefix cache"
        return engine

    return check


@pytest.fixture
def equals_generate_while_preempting(
    checkpoint: Callable[..., Path], generate: Callable[..., list[list[int]]]
) -> Callable[..., None]:
    """Return the same check in a pool too small for all prompts: by recomputing or, with swap_space, by swapping."""

    def check(prompts: list[list[int]], new_tokens: int, swap_space: float, **settings: Any) -> None:
        path = checkpoint("llama")
        expected = generate(path, prompts, new_tokens)
        engine = Engine(EngineConfig(model=str(path), swap_space=swap_space, **settings))
        engine.scheduler.costs = Costs(
            prefill=(1, 1, 0), swap=(0, 0)
        )  # swapping is free, so it is chosen if there is room
        for _ in range(2):
            before, swapped = engine.scheduler.num_preemptions, engine.scheduler.swap_space.num_swaps
            assert continue_greedily(engine, prompts, new_tokens) == expected
            assert engine.scheduler.num_preemptions > before
            assert (engine.scheduler.swap_space.num_swaps > swapped) == (swap_space > 0)

    return check

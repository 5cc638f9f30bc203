"""Step graphs: a replay gives the logits of the model bit for bit; otherwise the step runs eagerly."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pdserve.config import EngineConfig
from pdserve.engine import step_graph
from pdserve.engine.checkpoint_loader import load
from pdserve.engine.engine import Engine
from pdserve.engine.gpu import cuda_graph
from pdserve.engine.gpu.cuda_graph import PaddedGraphs, padded_rows, padded_tokens
from pdserve.engine.gpu.step_memory import graph_bytes
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.step import StepPlan
from pdserve.engine.step_graph import RECORD_AT_STEP, StepGraphs
from pdserve.engine.warm_up import compile_kernels, dummy_sequence
from pdserve.kernels import cpu, native, reference
from pdserve.kernels.batch import Capabilities, Kernel, PagedBatch, layer_caches
from pdserve.kernels.gpu import memory
from pdserve.request import Request, SamplingParams

if not native.is_available():
    pytest.skip("no C++ kernels", allow_module_level=True)

ARCHITECTURES = ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gemma4", "qwen3_moe", "gpt_oss"]


def decode_logits(engine: Engine, counts: list[int]) -> list[torch.Tensor]:
    """Return the logits of all steps of sequences that end one after the other."""
    logits: list[torch.Tensor] = []
    assert isinstance(engine.runner, ModelRunner)
    forward = engine.runner.forward

    def record(*args: Any) -> torch.Tensor:
        logits.append(forward(*args).clone())
        return logits[-1]

    setattr(engine.runner, "forward", record)  # noqa: B010 - mypy takes no assignment to a method
    seqs = [
        engine.new_sequence(
            str(i),
            Request(
                prompt=list(range(7 + 5 * i)), sampling=SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
            ),
        )
        for i, count in enumerate(counts)
    ]
    for seq in seqs:
        engine.add(seq)
    while engine.has_work:
        for seq in engine.step().sampled:
            if seq.output.finish_reason() is not None:
                engine.remove(seq)
    return logits


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        ("llama", "float32"),
        *((name, "bfloat16") for name in ARCHITECTURES),
        *(pytest.param(name, "float32", marks=pytest.mark.slow) for name in ARCHITECTURES[1:]),
    ],
)
def test_replayed_steps_have_the_logits_of_eager_ones(
    architecture: str, dtype: str, checkpoint: Callable[..., Path]
) -> None:
    def engine() -> Engine:
        return Engine(
            EngineConfig(model=str(checkpoint(architecture)), dtype=dtype, kernel="cpu", num_blocks=40, speculate="off")
        )

    counts = [3 * RECORD_AT_STEP, 6 * RECORD_AT_STEP, 9 * RECORD_AT_STEP]
    eager, replaying = engine(), engine()
    assert isinstance(eager.runner.graphs, StepGraphs) and isinstance(replaying.runner.graphs, StepGraphs)
    eager.runner.graphs = None
    for expected, logits in zip(decode_logits(eager, counts), decode_logits(replaying, counts), strict=True):
        assert torch.equal(expected, logits)
    assert replaying.runner.graphs.verified == {1, 2, 3}
    assert replaying.runner.graphs.num_replayed > 4 * RECORD_AT_STEP, "all but the first few of each size"


@pytest.fixture
def batch() -> PagedBatch:
    zeros, caches = torch.zeros(1, dtype=torch.long), layer_caches(torch.zeros(1, 1, 2, 1, 16, 8))
    return PagedBatch(caches, zeros, zeros[None], [1], [1], zeros + 1, torch.arange(2), cpu)


class Model:
    """Stands in for a model: counts its calls and returns compute(ids, positions)."""

    def __init__(self, compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self.compute = compute
        self.calls = 0

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        self.calls += 1
        return self.compute(ids, positions)


def run(model: Model, graphs: StepGraphs, batch: PagedBatch, steps: int = 40) -> int:
    """Run steps at ascending positions, compare each with the model, and return how many ran eagerly."""
    model.calls = 0
    for step in range(steps):
        ids, positions = torch.tensor([[step % 7]]), torch.tensor([[step]])
        assert torch.equal(graphs.logits(ids, positions, batch), model.compute(ids, positions)), step
    return model.calls


WEIGHT = torch.randn(7, 5)


def plain(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    rows: torch.Tensor = WEIGHT[ids[0]] + positions[0, :, None]
    best, places = rows.topk(3)
    total = torch.zeros(1, 5).scatter_add_(1, places, best.exp_())
    halves = torch.empty_like(total).copy_(total).split(2, dim=1)
    return torch.cat([half.cos() for half in halves], dim=1)


def branching(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return plain(ids, positions) if positions.max() < 20 else -plain(ids, positions)


def reading(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return plain(ids, positions) * positions.max().item()


def selecting(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return torch.arange(9)[torch.arange(9) > ids[0, 0]].sum()[None, None]


def listing(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return plain(ids, positions) * (1 + int(positions.tolist()[0][0]) // 20)


def converting(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return plain(ids, positions) * (1 + int(positions.numpy()[0, 0]) // 20)


@pytest.mark.parametrize(
    ("compute", "num_eager"),
    [
        (plain, RECORD_AT_STEP + 1),
        (branching, RECORD_AT_STEP + 1 + 20),
        (reading, 40),
        (selecting, 36),  # the other steps select another number of elements
        (listing, 40),
        (converting, 40),
    ],
)
def test_host_reads_force_eager_steps(compute: Any, num_eager: int, batch: PagedBatch) -> None:
    model = Model(compute)
    graphs = StepGraphs(model, max_blocks_per_seq=4)
    assert run(model, graphs, batch) == num_eager
    assert graphs.num_replayed == 40 - num_eager


def test_changed_model_is_detected(batch: PagedBatch, caplog: pytest.LogCaptureFixture) -> None:
    model = Model(lambda ids, positions: plain(ids, positions) * min(model.calls, RECORD_AT_STEP + 1))
    graphs = StepGraphs(model, max_blocks_per_seq=4)
    with caplog.at_level(logging.WARNING):
        assert run(model, graphs, batch) == 40
    assert sum("other logits" in record.message for record in caplog.records) == 1


def test_graphs_are_evicted_beyond_the_memory_limit(batch: PagedBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(lambda ids, positions: (ids * WEIGHT[0, 0] + positions)[0][:, None])
    graphs = StepGraphs(model, max_blocks_per_seq=4)

    def step(size: int) -> None:
        zeros = torch.zeros(size, dtype=torch.long)
        rows = PagedBatch(
            batch.caches, zeros, zeros[:, None], [1] * size, [1] * size, zeros + 1, torch.arange(size + 1), cpu
        )
        ids, positions = torch.arange(size)[None], torch.full((1, size), 3)
        assert torch.equal(graphs.logits(ids, positions, rows), model.compute(ids, positions))

    for size in (8, 9, 10):
        for _ in range(RECORD_AT_STEP + 2):
            step(size)
    assert graphs.verified == {8, 9, 10}
    monkeypatch.setattr(step_graph, "MAX_BYTES", graphs.nbytes)
    step(8)
    for _ in range(RECORD_AT_STEP + 2):
        step(11)
    assert graphs.verified == {8, 11}, "the most recently used"
    assert graphs.nbytes <= step_graph.MAX_BYTES


def record_by_running(run: Callable[[], torch.Tensor]) -> Callable[[], object]:
    """Stand in for CUDA: a replay runs the recorded function on the same tensors, into the same result."""
    run()
    return run


@pytest.mark.parametrize("architecture", ["qwen3", "mistral"])
def test_padded_steps_have_the_logits_of_unpadded_ones(
    architecture: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences end one after the other, and outgrow a limit of lengths."""
    monkeypatch.setattr(cuda_graph, "MIN_PADDED_TOKENS", 8)
    path = str(checkpoint(architecture, dtype="float32"))
    counts = [4, 6, 9, 12, 40]
    config = EngineConfig(model=path, kernel="reference", num_blocks=60, block_size=4, device="cpu", speculate="off")
    plain, padded = Engine(config), Engine(config)
    assert isinstance(padded.runner, ModelRunner) and padded.runner.graphs is None
    graphs = PaddedGraphs(padded.runner.compute_logits, 200, record_by_running)
    padded.runner.kernel = padding_kernel(padded.runner.kernel)
    padded.runner.graphs = graphs
    for got, expected in zip(decode_logits(padded, counts), decode_logits(plain, counts), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert {rows for rows, _ in graphs.sizes} == {1, 2, 4, 8} and len({tokens for _, tokens in graphs.sizes}) > 1
    assert graphs.num_replayed > 20
    assert isinstance(plain.runner, ModelRunner)
    torch.testing.assert_close(padded.runner.kv.pool_NX, plain.runner.kv.pool_NX, rtol=1e-4, atol=1e-4)


def padding_kernel(kernel: Kernel) -> Kernel:
    """Return a kernel that takes padded steps, as those of GPUs do."""

    def skip_padding(cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        kernel.write_kv(cache, k[slots >= 0], v[slots >= 0], slots[slots >= 0])  # as the Triton kernel does

    return cast(
        Kernel,
        SimpleNamespace(
            NAME="double",
            CAPABILITIES=Capabilities(),
            write_kv=skip_padding,
            attend=attend_by_device_lengths,
        ),
    )


def test_all_graphs_are_recorded_before_an_instance_is_ready(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no step of a request records one, whatever the number of sequences and their lengths."""
    monkeypatch.setattr(cuda_graph, "MIN_PADDED_TOKENS", 8)
    path = str(checkpoint("qwen3", dtype="float32"))
    config = EngineConfig(model=path, kernel="reference", num_blocks=60, block_size=4, device="cpu", speculate="off")
    engine = Engine(replace(config, max_num_seqs=5, max_model_len=100))
    assert isinstance(engine.runner, ModelRunner)
    graphs = PaddedGraphs(engine.runner.compute_logits, 200, record_by_running)
    engine.runner.kernel = padding_kernel(engine.runner.kernel)
    engine.runner.graphs = graphs
    compile_kernels(engine)
    recorded = graphs.sizes
    assert recorded == {(rows, limit) for rows in (1, 2, 4, 8) for limit in (8, 32, 128)}
    assert recorded < {*cuda_graph.padded_sizes(5, 200)}, "longer ones than --max-model-len are not"
    decode_logits(engine, [70, 99 - 70, 5, 12, 40])
    assert graphs.sizes == recorded and graphs.num_replayed > 20
    rows = {dummy_sequence(engine, 1, 5): 1 for _ in range(9)}  # more than sequences, as drafts may make
    assert len(engine.runner.step(StepPlan(rows))) == 9 and graphs.sizes == recorded


def test_memory_of_graphs_is_measured_by_the_two_largest(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a fake GPU, where the first graph takes 50 MB and each one after it 2 MB."""
    path = str(checkpoint("qwen3", dtype="float32"))
    config = EngineConfig(model=path, kernel="reference", num_blocks=8, device="cpu", max_num_seqs=5)
    runner = ModelRunner(load(config), config)
    runner.kernel = padding_kernel(runner.kernel)
    reserved = [100, 150, 150, 152]
    monkeypatch.setattr(memory, "reserved_bytes", lambda device: reserved.pop(0) * 10**6)
    monkeypatch.setattr(cuda_graph, "CudaRecorder", lambda: record_by_running)
    pool = runner.kv.pool_NX
    sizes = cuda_graph.padded_sizes(5, runner.checkpoint.context_length)
    expected = (50 + 2 * (len(sizes) - 1)) * 10**6 + memory.GRAPH_BYTES * len(sizes)
    assert graph_bytes(runner, config) == expected
    assert len(sizes) > 2 and not reserved and runner.kv.pool_NX is pool


def attend_by_device_lengths(
    q_THD: torch.Tensor, cache_N2GBD: torch.Tensor, batch: PagedBatch, *options: Any
) -> torch.Tensor:
    """The reference kernel with the lengths on the device: those on the host are limits."""
    real = batch.kv_lens_S.tolist()
    assert len(real) == len(batch.kv_lens) and all(a <= b for a, b in zip(real, batch.kv_lens, strict=True))
    return reference.attend(q_THD, cache_N2GBD, replace(batch, kv_lens=real), *options)


def test_a_step_that_cannot_be_recorded_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(run: Callable[[], torch.Tensor]) -> Callable[[], object]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    def wrong(run: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return lambda: run().add_(1)

    pool = torch.zeros(2, 1, 2, 1, 4, 8)
    one = torch.ones(1, dtype=torch.long)
    batch = PagedBatch(layer_caches(pool), one, one[None], [1], [2], 2 * one, torch.arange(2), cpu)
    for record, reason in ((refuse, "not permitted"), (wrong, "other logits")):
        calls: list[int] = []

        def model(ids: torch.Tensor, positions: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
            calls.append(ids.shape[1])  # noqa: B023
            return ids[0, :, None].float()

        graphs = PaddedGraphs(model, 100, record)
        for _ in range(3):
            assert graphs.logits(one[None], one[None], batch).tolist() == [[1.0]]
        assert not graphs.sizes and len(calls) >= 3 and reason in caplog.text


def test_a_model_that_reads_values_is_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    """Its recording would fail, after which torch's allocator is not what it was."""

    def model(ids: torch.Tensor, positions: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        return ids[0, :, None].float() * (2 if positions.max().item() > 5 else 1)

    def never(run: Callable[[], torch.Tensor]) -> Callable[[], object]:
        raise AssertionError("was recorded")

    one = torch.ones(1, dtype=torch.long)
    batch = PagedBatch(
        layer_caches(torch.zeros(2, 1, 2, 1, 4, 8)), one, one[None], [1], [2], 2 * one, torch.arange(2), cpu
    )
    graphs = PaddedGraphs(model, 100, never)
    assert [graphs.logits(one[None], place * one[None], batch).item() for place in (1, 9)] == [1, 2]
    assert not graphs.sizes and "waits for the GPU in aten::_local_scalar_dense" in caplog.text
    with cuda_graph.WaitDetector("cuda") as detector:
        assert torch.ones(()).item() == 1
    assert detector.operator is None, "what the CPU has can be read"


@pytest.mark.parametrize(
    ("count", "rows"), [(1, 1), (2, 2), (3, 4), (5, 8), (33, 40), (64, 64), (65, 80), (250, 256), (257, 288)]
)
def test_padded_rows(count: int, rows: int) -> None:
    assert padded_rows(count) == rows


def test_padded_tokens() -> None:
    lengths = [padded_tokens(longest, 10_000) for longest in (1, 1024, 1025, 4097, 10_000)]
    assert lengths == [1024, 1024, 4096, 10_000, 10_000]
    assert padded_tokens(300, 200) == 300

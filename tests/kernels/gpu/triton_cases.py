"""Cases of test_triton_kernels.py, run in a new process. Shapes are small: the interpreter is 200 times slower than torch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from pdserve.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.memory.kv_memory import section_views
from pdserve.engine.warm_up import compile_kernels
from pdserve.kernels import reference
from pdserve.kernels.attention import select_kernel
from pdserve.kernels.batch import Kernel, Scores
from pdserve.kernels.gpu import launch, triton_kernels
from pdserve.kernels.gpu.matmul import linear
from pdserve.kernels.gpu.row_functions import RowFunctions
from pdserve.request import Request, SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}

DECODE = [(1, 1), (1, 17), (1, 70)]
MIXED = [(1, 33), (9, 9), (5, 40), (1, 8)]
LONG = [(1, 600), (1, 20)]  # long enough to be split
TILES = [(150, 170)]  # more rows than one tile


INVARIANT = select_kernel("triton", DEVICE, batch_invariant="on")
CUDA = DEVICE.type == "cuda"


def slow(*cases: tuple[Any, ...]) -> Iterator[Any]:
    """Yield cases that repeat features of others: they run with `-m slow`, and while the kernels change."""
    return (pytest.param(*case, marks=pytest.mark.slow) for case in cases)


@pytest.fixture
def exact_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `tl.dot` of the interpreter round once: NumPy's rounds a row by its place in the tile, which tensor cores do not.

    Equal bits of rows then prove what our code decides (the order of tiles and splits, and the masks), but nothing about
    the order within an instruction of a GPU.
    """
    if CUDA:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: object, a: Any, b: Any, d: Any, *precision: object) -> object:
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
        return TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(params=["off", "on"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return select_kernel("triton", DEVICE, batch_invariant=request.param)


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "size", "block_size", "lengths", "window", "softcap", "sinks"),
    [
        (torch.float32, 4, 1, 80, 16, MIXED, None, 20.0, False),
        (torch.float32, 8, 1, 256, 16, DECODE, None, None, False),
        (torch.float32, 40, 1, 32, 16, LONG, None, None, True),  # more heads of one token than a tile has rows
        (torch.float32, 4, 2, 32, 16, TILES, 30, 20.0, True),
        (torch.float16, 8, 2, 64, 16, MIXED, None, None, False),
        (torch.bfloat16, 4, 2, 64, 16, LONG, 550, 20.0, False),
        *slow(
            (torch.float32, 4, 4, 32, 16, MIXED, None, None, False),
            (torch.float32, 8, 2, 64, 8, MIXED, 20, None, False),
            (torch.float32, 8, 4, 128, 32, DECODE, 16, 30.0, False),
            (torch.float32, 4, 2, 32, 16, LONG, None, None, False),
            (torch.float32, 4, 2, 32, 16, LONG, 550, 20.0, False),
            (torch.float32, 4, 2, 32, 16, TILES, None, None, False),
            (torch.bfloat16, 8, 4, 128, 16, MIXED, None, None, False),
        ),
    ],
)
def test_attention(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    size: int,
    block_size: int,
    lengths: list[tuple[int, int]],
    window: int | None,
    softcap: float | None,
    sinks: bool,
    make_case: Callable[..., Any],
    kernel: Kernel,
) -> None:
    case = make_case(dtype, heads, kv_heads, size, block_size, lengths, kernel, DEVICE)
    case = case.with_sinks() if sinks else case
    expected = case.expected(size**-0.5, window, softcap)
    kernel.write_kv(case.cache_N2GBD, case.k_TGD, case.v_TGD, case.batch.slots_T)
    case.poison_out_of_window(window)
    got = kernel.attend(case.q_THD, case.cache_N2GBD, case.batch, Scores(size**-0.5, window, softcap, case.sinks_H))
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.usefixtures("exact_dot")
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "size", "window", "softcap", "sinks"),
    [
        (torch.float16, 2, 1, 64, 150, 20.0, True),
        *slow(
            (torch.bfloat16, 6, 2, 32, None, None, False),
            (torch.float16, 3, 1, 20, 200, None, False),
            (torch.float16, 1, 1, 256, None, None, False),
        ),
    ],
)
def test_a_row_depends_on_its_own_history_only(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    size: int,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    make_case: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit the same in one prefill, in chunks, in decode alone and beside others."""
    monkeypatch.setattr(triton_kernels, "INVARIANT_SPLIT_TOKENS", 128)
    monkeypatch.setattr(triton_kernels, "MIN_SPLIT_TOKENS", 64)  # without invariance, a lone row would be split by it
    tokens = 300
    case = make_case(dtype, heads, kv_heads, size, 16, [(tokens, tokens)], INVARIANT, DEVICE)
    case = case.with_sinks() if sinks else case
    case.q_THD.mul_(2)  # so that the maximum of a row changes often, yet many tokens count
    INVARIANT.write_kv(case.cache_N2GBD, case.k_TGD, case.v_TGD, case.batch.slots_T)

    def attend(*spans: tuple[int, int]) -> torch.Tensor:
        rows_THD: torch.Tensor = case.attend_spans(list(spans), size**-0.5, window, softcap)
        return rows_THD

    whole = attend((0, tokens))
    for first, end in ((0, 77), (77, 140), (140, 142), (142, tokens)):
        assert torch.equal(attend((first, end)), whole[first:end]), "a chunk"
    rows = [0, 63, 64, 127, 128, 200, tokens - 1]
    assert torch.equal(attend(*[(row, row + 1) for row in rows]), whole[rows]), "decode, in a batch"
    assert torch.equal(attend((5, 90), (tokens - 1, tokens), (90, 100))[85], whole[-1]), "decode beside prefill"
    assert all(torch.equal(attend((row, row + 1))[0], whole[row]) for row in rows), "decode, alone"


@pytest.mark.usefixtures("exact_dot")
@pytest.mark.parametrize("dtype", [*slow((torch.bfloat16,)), torch.float16])
@pytest.mark.parametrize(("features", "outputs"), [*slow((64, 40)), (200, 130), *([(4096, 8200)] if CUDA else [])])
def test_linear(dtype: torch.dtype, features: int, outputs: int) -> None:
    """A row of a product is the same alone, in a batch of any size, and anywhere in it."""
    random = torch.Generator().manual_seed(1)
    x_RK, weight_NK, bias_N = (
        torch.randn(*shape, generator=random).to(dtype).to(DEVICE)
        for shape in ((150, features), (outputs, features), (outputs,))
    )
    whole_RN = linear(x_RK, weight_NK, bias_N)
    expected = F.linear(x_RK.double(), weight_NK.double(), bias_N.double())
    torch.testing.assert_close(
        whole_RN.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * features**0.5
    )
    assert torch.equal(linear(x_RK, weight_NK), linear(x_RK, weight_NK, torch.zeros_like(bias_N)))
    for rows in ([0], [149], [70, 3], list(range(5, 80)), list(range(149, 0, -1))):
        assert torch.equal(linear(x_RK[rows], weight_NK, bias_N), whole_RN[rows])
    assert torch.equal(linear(x_RK.view(3, 50, -1), weight_NK, bias_N).view(150, -1), whole_RN)


def test_means_and_sums_of_rows() -> None:
    x = torch.randn(3, 50, 1500, device=DEVICE)
    with RowFunctions():
        mean, total = x.mean(-1, keepdim=True), x.bfloat16().sum(dim=-1, keepdim=True)
        assert all(torch.equal(x[1, i : i + 1].mean(-1, keepdim=True), mean[1, i : i + 1]) for i in range(0, 50, 7))
        assert torch.equal(x.mean(0), x.sum(0) / 3), "other dimensions are left to torch"
    torch.testing.assert_close(mean, x.double().mean(-1, keepdim=True).float())
    assert total.dtype == torch.bfloat16
    torch.testing.assert_close(total, x.bfloat16().sum(-1, keepdim=True), rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("exact_dot")
@pytest.mark.parametrize(
    "architecture",
    ["gemma2", "llama", "qwen3_moe"] if CUDA else [pytest.param("gemma2", marks=pytest.mark.slow)],
)
def test_kv_depends_on_its_own_history_only(architecture: str, checkpoint: Callable[..., Path]) -> None:
    """The whole engine: prompts alone, in chunks beside others, and what decode has generated as a prompt."""
    path = str(checkpoint(architecture, dtype="bfloat16"))
    prompts = [list(range(3, 20)), [5, 4, 3]]
    together = generate(path, prompts, 3, max_num_batched_tokens=6)
    for prompt, (tokens, kv) in zip(prompts, together, strict=True):
        ((again, kv_alone),) = generate(path, [prompt], 3)
        assert again == tokens and torch.equal(kv_alone, kv), "alone"
        ((_, kv_prefilled),) = generate(path, [tokens[:-1]], 1)
        assert torch.equal(kv_prefilled, kv), "by prefill"


@pytest.mark.slow
@pytest.mark.skipif(CUDA, reason="looks into the interpreter; test_on_gpu.py has the same for GPUs")
@pytest.mark.parametrize("batch_invariant", ["off", "on"])
@pytest.mark.parametrize("architecture", ["gemma2"])  # layers with and without a window, and soft caps
def test_nothing_is_compiled_after_the_warm_up(
    architecture: str, batch_invariant: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton compiles a kernel for each specialization of its arguments. The interpreter has none, so they are computed."""
    monkeypatch.setattr(triton_kernels, "MIN_SPLIT_TOKENS", 64)
    monkeypatch.setattr(triton_kernels, "INVARIANT_SPLIT_TOKENS", 32)
    path = str(checkpoint(architecture, dtype="bfloat16"))
    settings: dict[str, Any] = {"num_blocks": 20, "block_size": 8, "max_num_seqs": 3, "max_num_batched_tokens": 40}
    engine = Engine(EngineConfig(model=path, kernel="triton", batch_invariant=batch_invariant, **settings))
    with compiled_kernels() as warm:
        compile_kernels(engine)
    assert {name for name, *_ in warm} >= {"_attend", "_combine", "_write_kv", "_copy"}
    with compiled_kernels() as used:
        random = np.random.default_rng(5)
        for number, length in enumerate([1, 16, 31, 128, 3, 70]):
            sampling = SamplingParams(max_tokens=2 + number % 3, temperature=0, ignore_eos=True)
            seq = engine.new_sequence(
                str(number), Request(prompt=random.integers(3, 200, length).tolist(), sampling=sampling)
            )
            engine.add(seq)
            for _ in range(number % 3):
                step(engine)
            if seq.kv.num_computed and number % 2:
                engine.fork(seq, f"{number}, again", sampling)
        while engine.has_work:
            step(engine)
    assert used and used <= warm, used - warm


def step(engine: Engine) -> None:
    for seq in engine.step().sampled:
        if seq.output.finish_reason():
            engine.remove(seq)


@contextmanager
def compiled_kernels() -> Iterator[set[tuple[object, ...]]]:
    """Collect what Triton would compile: kernel, specialization of each argument, and constants."""
    from triton.backends.compiler import BaseBackend
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import native_specialize_impl

    found: set[tuple[object, ...]] = set()
    run = InterpretedFunction.run

    def record(self: Any, *arguments: Any, **options: Any) -> Any:
        constant = self.kwargs.get("do_not_specialize") or ()
        specializations = [
            native_specialize_impl(BaseBackend, argument, False, name not in constant, True)
            for name, argument in zip(self.arg_names, arguments, strict=False)
        ]
        constants = sorted((name, value) for name, value in options.items() if name not in ("grid", "warmup"))
        found.add((self.fn.__name__, *specializations, *constants))
        return run(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", record)
        yield found


def generate(
    path: str, prompts: list[list[int]], new_tokens: int, **settings: Any
) -> list[tuple[list[int], torch.Tensor]]:
    """Return the tokens of each prompt and its continuation, and their KV, of all tokens but the last."""
    config = EngineConfig(model=path, kernel="triton", batch_invariant="on", num_blocks=20, block_size=4, **settings)
    engine = Engine(config)
    assert "-triton-invariant-" in engine.layout.numerics
    greedy = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    seqs = [engine.new_sequence(str(i), Request(prompt=prompt, sampling=greedy)) for i, prompt in enumerate(prompts)]
    for seq in seqs:
        engine.add(seq)
    kv: dict[str, torch.Tensor] = {}
    while engine.has_work:
        for seq in engine.step().sampled:
            if seq.output.finish_reason():
                pool_NLPGBD = section_views(engine.runner.kv.views[0], engine.layout.groups[0])[0]
                blocks = pool_NLPGBD[seq.kv.block_ids].movedim(4, 1).flatten(0, 1)
                kv[seq.request_id] = blocks[: seq.kv.num_computed].clone()
                engine.remove(seq)
    return [(seq.output.tokens.tolist(), kv[seq.request_id]) for seq in seqs]


def test_write_kv(make_case: Callable[..., Any], kernel: Kernel) -> None:
    case = make_case(torch.bfloat16, 4, 2, 80, 8, MIXED, kernel, DEVICE)
    expected = torch.stack(list(case.batch.caches), 1)
    reference.write_kv(expected[:, 1], case.k_TGD, case.v_TGD, case.batch.slots_T)
    kernel.write_kv(case.cache_N2GBD, case.k_TGD, case.v_TGD, case.batch.slots_T)
    assert torch.equal(torch.stack(list(case.batch.caches), 1).view(torch.int16), expected.view(torch.int16))


def test_partial_results_of_many_sequences(make_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The places of partial results are counted over all sequences before, some at a time."""
    monkeypatch.setattr(triton_kernels, "SLOT_SEQS", 2)
    monkeypatch.setattr(triton_kernels, "MIN_SPLIT_TOKENS", 64)
    monkeypatch.setattr(launch, "INTERPRETER_PROCESSORS", 40)
    launch.processors.cache_clear()
    lengths = [(1, kv) for kv in (300, 5, 200, 130, 1, 290)]
    for kernel in (INVARIANT, select_kernel("triton", DEVICE, batch_invariant="off")):
        monkeypatch.setattr(triton_kernels, "INVARIANT_SPLIT_TOKENS", 128)
        case = make_case(torch.float32, 4, 2, 32, 16, lengths, kernel, DEVICE)
        expected = case.expected(0.2, None, None)
        kernel.write_kv(case.cache_N2GBD, case.k_TGD, case.v_TGD, case.batch.slots_T)
        got = kernel.attend(case.q_THD, case.cache_N2GBD, case.batch, Scores(0.2))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    launch.processors.cache_clear()


@pytest.mark.parametrize("window", [None, 150])
def test_a_plan_for_limits_serves_shorter_sequences(
    window: int | None, make_case: Callable[..., Any], kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs plan for the longest sequence. Behind a window, a shorter one may attend to more splits than that."""
    monkeypatch.setattr(triton_kernels, "MIN_SPLIT_TOKENS", 64)
    monkeypatch.setattr(triton_kernels, "INVARIANT_SPLIT_TOKENS", 64)
    monkeypatch.setattr(launch, "INTERPRETER_PROCESSORS", 40)
    launch.processors.cache_clear()
    case = make_case(torch.float32, 4, 2, 32, 16, [(1, kv) for kv in (300, 270, 230, 160, 20)], kernel, DEVICE)
    expected = case.expected(0.2, window, None)
    kernel.write_kv(case.cache_N2GBD, case.k_TGD, case.v_TGD, case.batch.slots_T)
    case.poison_out_of_window(window)
    batch = replace(case.batch, kv_lens=[300] * 5)
    splits = [one.splits for one in triton_kernels._plan(batch, window, 2, kernel is INVARIANT, DEVICE)]
    torch.testing.assert_close(
        kernel.attend(case.q_THD, case.cache_N2GBD, batch, Scores(0.2, window)), expected, rtol=1e-5, atol=1e-5
    )
    launch.processors.cache_clear()
    assert splits[0] > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_copies(dtype: torch.dtype, kernel: Kernel) -> None:
    pool = torch.randn(7, 2, 2, 2, 8, 20, device=DEVICE).to(dtype)
    sources, targets = torch.tensor([5, 0, 0], device=DEVICE), torch.tensor([1, 6, 2], device=DEVICE)
    copied = pool.clone()
    kernel.copy_blocks(copied, sources, targets)
    reference.copy_blocks(pool, sources, targets)
    assert torch.equal(copied, pool)
    out = torch.empty_like(pool[:3])
    kernel.gather_blocks(pool, sources, out)
    assert torch.equal(out, pool[sources])
    kernel.scatter_blocks(pool, targets, -out)
    assert torch.equal(pool[targets], -out)


@pytest.mark.parametrize("swap_space", [*slow((0,)), 0.001])
def test_equals_generate_while_preempting(
    swap_space: float, equals_generate_while_preempting: Callable[..., None]
) -> None:
    """The whole engine, in a pool too small for two sequences."""
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4]]
    settings = {"kernel": "triton", "num_blocks": 6, "block_size": 4, "max_num_batched_tokens": 8}
    equals_generate_while_preempting(prompts, 6, swap_space, **settings)


def test_programs_start_for_the_sequences_of_their_phase(make_case: Callable[..., Any]) -> None:
    """As many as the longest prompt has tiles would start for each decoding sequence at the front, and end at once."""
    batch = make_case(torch.float32, 4, 2, 32, 16, [*[(1, 20)] * 6, (9, 30), (1, 8), (5, 5)], INVARIANT, DEVICE).batch
    plan = triton_kernels._plan(batch, None, 2, False, DEVICE)
    assert {launch.decode: launch.seqs for launch in plan} == {False: range(6, 9), True: range(8)}

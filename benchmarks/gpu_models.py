"""Parts of `scripts/gpu` about whole models: that tokens are right, and how fast steps are beside roofline and transformers.

Models are random and made on the GPU; nothing is written to disk but the small ones of `identity`. With --dry-run, tiny ones.
"""

import gc
import importlib.util
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import checkpoints
import gpu_part
import torch
import transformers
from checkpoints import Shape
from gpu_part import DEVICE, DRY, Result

from pdserve.config import EngineConfig
from pdserve.engine import paged_model
from pdserve.engine.checkpoint import Checkpoint
from pdserve.engine.engine import Engine
from pdserve.engine.gpu import back_end
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.sampler import sample
from pdserve.engine.sequence import Sequence
from pdserve.errors import SetupError
from pdserve.keys import token_array
from pdserve.kv_spec import KVSpec
from pdserve.request import Request, SamplingParams

ROOT = Path(__file__).parent.parent
CHUNK = 8192  # tokens of a prefill step


def make_model(shape: Shape, attention: str) -> Any:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(
            checkpoints.config_of(shape), dtype=checkpoints.torch_dtype(shape.dtype), attn_implementation=attention
        )
    return model.eval().requires_grad_(False)


def make_engine(shape: Shape, num_blocks: int | None, **settings: Any) -> Engine:
    """Return an engine over a random model."""
    paged_model.register()
    dtype = checkpoints.torch_dtype(shape.dtype)
    model = make_model(shape, paged_model.NAME)
    if not DRY:  # Triton's interpreter takes long; the suite runs fused models
        back_end.fuse(model)
    spec = KVSpec.uniform(shape.layers, shape.kv_heads, shape.head_dim)
    layout = spec.layout(
        model_fingerprint="random", block_size=EngineConfig.block_size, dtype=shape.dtype, itemsize=dtype.itemsize
    )
    checkpoint = Checkpoint(model, layout, spec, shape.context, shape.vocabulary, frozenset(), DEVICE, dtype)
    defaults: dict[str, Any] = {"kernel": "reference" if DRY else "auto", "num_blocks": num_blocks}
    return Engine(EngineConfig(**{**defaults, "max_num_batched_tokens": CHUNK, **settings}), checkpoint)


def run(engine: Engine, prompts: list[list[int]], count: int, **sampling: Any) -> tuple[list[list[int]], list[float]]:
    """Return the tokens of each answer, and the seconds from each step's end to the next.

    Steps that are launched ahead overlap: nothing here waits for the device between them.
    """
    params = SamplingParams(**{"temperature": 0, **sampling, "max_tokens": count, "ignore_eos": True})
    seqs = [engine.new_sequence(str(i), Request(prompt=prompt, sampling=params)) for i, prompt in enumerate(prompts)]
    for seq in seqs:
        engine.add(seq)
    steps, ended = list[float](), gpu_part.now()
    while engine.has_work:
        sampled = engine.step().sampled
        started, ended = ended, time.perf_counter()
        steps.append(ended - started)
        for seq in sampled:
            if seq.output.finish_reason() is not None:
                engine.remove(seq)
    steps[-1] += gpu_part.now() - ended
    return [seq.output.tokens[seq.output.num_prompt :].tolist() for seq in seqs], steps


def prompts_of(count: int, length: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Return random prompts. None is the beginning of one of another length, count or seed, which would be a prefix hit."""
    drawn = random.Random(f"{count} {length} {seed}")
    return [[drawn.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


def smoke() -> Result:
    """Steps replayed from graphs against eager ones: the same tokens; then the tests that only a GPU can run."""
    shape = checkpoints.TINY if DRY else checkpoints.QWEN3_0_6B
    engine = make_engine(Shape(**{**vars(shape), "dtype": "float32"}), 2000, max_num_seqs=16)
    assert isinstance(engine.runner, ModelRunner)
    prompts = prompts_of(5, 40, shape.vocabulary)
    replayed, _ = run(engine, prompts, 6 if DRY else 30)
    graphs, engine.runner.graphs = engine.runner.graphs, None
    eager, _ = run(engine, prompts, 6 if DRY else 30)
    row: Result = {"replayed": 0 if graphs is None else graphs.num_replayed, "differ": replayed != eager}
    wrong = replayed != eager
    if not DRY:
        row["default_stream"] = torch.cuda.current_stream() == torch.cuda.default_stream()
        wrong |= not (row["replayed"] and row["default_stream"])
        del engine, graphs
        free()
        row["reserved_mib"] = torch.cuda.memory_reserved() >> 20
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        done = subprocess.run([*command, str(ROOT / "tests/kernels/gpu/test_on_gpu.py")], cwd=ROOT, check=False)
        row["tests"] = done.returncode
        wrong |= done.returncode != 0
    return {"rows": [gpu_part.keep(row)], "failed": int(wrong)}


def identity() -> Result:
    """Greedy tokens in float32 beside those of transformers' generate, over the architectures of the tests."""
    spec = importlib.util.spec_from_file_location("conftest", ROOT / "tests" / "conftest.py")
    assert spec is not None and spec.loader is not None
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    lengths, count = ([5], 3) if DRY else ([1, 15, 16, 17, 33, 300, 700], 40)
    rows = list[Result]()
    for name, (config, extra) in conftest.ARCHITECTURES.items():
        if DRY and rows and name not in ("deepseek_v2", "phi3"):  # one of each way through the code
            continue
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, config)(**{**conftest.SHAPE, **extra}), dtype=torch.float32
        )
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            settings: dict[str, Any] = {"device": DEVICE.type, "num_blocks": 200, "max_num_batched_tokens": 64}
            try:
                engine = Engine(EngineConfig(model=folder, dtype="float32", kernel="triton", **settings))
            except SetupError:  # latent rows
                engine = Engine(EngineConfig(model=folder, dtype="float32", kernel="reference", **settings))
        fitting = [length for length in lengths if length + count <= engine.max_model_len]
        prompts = [prompts_of(1, length, 256, seed=length)[0] for length in fitting]
        got, _ = run(engine, prompts, count)
        model = model.to(DEVICE).eval()
        wrong = []
        for prompt, tokens in zip(prompts, got, strict=True):
            ids = torch.tensor([prompt], device=DEVICE)
            fixed: dict[str, Any] = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
            mask = torch.ones_like(ids)  # else it is guessed by the padding token, which is a token of the prompts
            out = model.generate(ids, attention_mask=mask, eos_token_id=None, pad_token_id=0, **fixed)
            expected = out[0, len(prompt) :].tolist()
            same = next((i for i, pair in enumerate(zip(tokens, expected, strict=True)) if len({*pair}) > 1), count)
            wrong += [(len(prompt), same)] if same < count else []
        assert isinstance(engine.runner, ModelRunner)
        graphs = engine.runner.graphs
        row: Result = {"architecture": name, "kernel": engine.runner.kernel.NAME, "differ (prompt, token)": wrong}
        row["replayed"] = None if graphs is None else graphs.num_replayed
        rows.append(gpu_part.keep(row))
    return {"rows": rows, "failed": sum(bool(row["differ (prompt, token)"]) for row in rows)}


def graphs() -> Result:
    """Tokens and times of decode steps: eager, replayed, and launched before the tokens of the last one are read."""
    shape = checkpoints.TINY if DRY else checkpoints.QWEN3_0_6B
    rows: list[Result] = []
    for dtype in ("float32",) if DRY else ("float32", "bfloat16"):
        batches = (2,) if DRY else (1, 3, 8, 32, 100, 256)
        sized = Shape(**{**vars(shape), "dtype": dtype})
        for setting in ("off",) if DRY else ("off", "on"):
            engine = make_engine(sized, 256 * 20, max_num_seqs=256, batch_invariant=setting, async_scheduling="on")
            assert isinstance(engine.runner, ModelRunner)
            recorded, pipeline = engine.runner.graphs, engine.runner.pipeline
            for batch in batches:
                prompts = prompts_of(batch, 20, shape.vocabulary, seed=batch)
                row: Result = {"dtype": dtype, "invariant": setting, "batch": batch, "recorded": recorded is not None}
                tokens = {}
                ways = {"eager": (None, None), "replayed": (recorded, None), "ahead": (recorded, pipeline)}
                for name, (engine.runner.graphs, engine.runner.pipeline) in ways.items():
                    run(engine, prompts, 8)
                    tokens[name], steps = run(engine, prompts, 4 if DRY else 64)
                    row[f"{name}_ms"] = round(statistics.median(steps[2:]) * 1e3, 3)
                assert recorded is None or DRY or recorded.num_replayed, "no step was replayed"
                differ = sum(a != b or b != c for a, b, c in zip(*tokens.values(), strict=True))
                # In 16 bits, a padded product may round otherwise, unless rows do not depend on the batch.
                must = dtype == "float32" or setting == "on"
                rows.append(gpu_part.keep(row | {"differ": differ, "wrong": bool(differ) and must}))
            del engine
            free()
    return {"rows": rows, "failed": sum(row["wrong"] for row in rows)}


def sampler() -> Result:
    """Time of sampling by settings, and whether seeded tokens are those of the reference."""
    rows, vocabulary = 8 if DRY else 256, 3000 if DRY else 151_936
    logits = (torch.randn(rows, vocabulary, device=DEVICE) * 2.5).to(torch.bfloat16)
    results: list[Result] = []
    choices: list[dict[str, Any]] = [
        {"temperature": 0},
        {},
        {"top_k": 50},
        {"top_p": 0.95},
        {"min_p": 0.05},
        {"top_k": 20, "top_p": 0.9},
    ]
    for settings in choices:
        seqs = [
            Sequence.new(
                str(i), token_array([0]), 1, 1, SamplingParams(**{"temperature": 1.0, "seed": i, **settings}), b"", 16
            )
            for i in range(rows)
        ]
        took = gpu_part.seconds(lambda seqs=seqs: sample(logits.clone(), seqs))  # type: ignore[misc]
        got, expected = sample(logits.clone(), seqs), sample(logits.float().cpu(), seqs)
        differ = sum(a != b for a, b in zip(got, expected, strict=True))
        results.append({"settings": str(settings), "ms": round(took * 1e3, 3), "differ": differ})
    return {"rows": results, "failed": sum(row["differ"] > 0 for row in results)}


def throughput(shape: Shape, *, peer: bool = True, **settings: Any) -> Result:
    """Decode by batch size and prefill by length, as shares of the roofline; transformers beside it."""
    roofline = gpu_part.rates()
    print(roofline)
    batches, lengths, prompt, count = (
        ((2,), (40,), 10, 4) if DRY else ((1, 32, 256), (1024, 4096, 16_384, 32_768), 128, 64)
    )
    rows: list[Result] = []
    blocks = max(max(batches) * (prompt + count + 16), 2 * max(lengths) + 16) // 16 + 1
    engine = make_engine(shape, blocks, max_num_seqs=max(batches), **settings)
    assert isinstance(engine.runner, ModelRunner)
    name = f"pdserve, {engine.runner.kernel.NAME}"
    for batch in batches:
        run(engine, prompts_of(batch, prompt, shape.vocabulary, seed=1), 6)
        _, steps = run(engine, prompts_of(batch, prompt, shape.vocabulary, seed=2), count)
        decode = [seconds for seconds in steps[-(count - 1) :]]
        row = _decode_row(name, shape, roofline, batch, prompt + count // 2, statistics.median(decode))
        rows.append(gpu_part.keep(row))
    sampled = prompts_of(batches[-1], prompt, shape.vocabulary, seed=2)
    run(engine, sampled, 3, temperature=1.0)
    _, steps = run(engine, sampled, count, temperature=1.0)
    row = _decode_row(name, shape, roofline, batches[-1], prompt + count // 2, statistics.median(steps[-(count - 1) :]))
    rows.append(gpu_part.keep({**row, "task": f"{row['task']}, temperature 1"}))
    for length in lengths:
        run(engine, prompts_of(1, length, shape.vocabulary, seed=3), 1)
        _, steps = run(engine, prompts_of(1, length, shape.vocabulary, seed=4), 1)
        rows.append(gpu_part.keep(_prefill_row(name, shape, roofline, length, sum(steps))))
    graphs = engine.runner.graphs
    assert DRY or (graphs is not None and graphs.num_replayed), "no step was replayed"
    if not DRY and max(lengths) >= 32_000:
        mixed = [*prompts_of(1, 32_000, shape.vocabulary, seed=5), *prompts_of(31, 1000, shape.vocabulary, seed=6)]
        _, steps = run(engine, mixed, 32)
        task = {"engine": name, "task": "decode of 31 x 1k and 1 x 32k"}
        rows.append(gpu_part.keep({**task, "ms": round(statistics.median(steps[-30:]) * 1e3, 3)}))
    profile = None if DRY else _profile(engine, shape, prompt)
    del graphs
    if peer:
        del engine
        free()
        rows += _transformers(shape, roofline, batches[:2], prompt, count)
    return {"roofline": roofline, "rows": rows, "profile": profile}


def _decode_row(
    engine: str, shape: Shape, roofline: dict[str, float], batch: int, context: int, seconds: float
) -> Result:
    nbytes = shape.weight_bytes + batch * context * shape.kv_bytes_per_token
    least = max(nbytes / roofline["copy"], shape.flops(batch, batch * context, batch) / roofline["flops"])
    row: Result = {"engine": engine, "task": f"decode at batch {batch}", "ms": round(seconds * 1e3, 3)}
    return row | {"tokens_per_s": round(batch / seconds, 1), "share": round(least / seconds, 3)}


def _prefill_row(engine: str, shape: Shape, roofline: dict[str, float], length: int, seconds: float) -> Result:
    flops = shape.flops(length, length * (length + 1) // 2, 1)
    least = max(shape.weight_bytes / roofline["copy"], flops / roofline["flops"])
    row: Result = {"engine": engine, "task": f"prefill of {length}", "ms": round(seconds * 1e3, 3)}
    return row | {"tokens_per_s": round(length / seconds, 1), "share": round(least / seconds, 3)}


@torch.inference_mode()
def _transformers(
    shape: Shape, roofline: dict[str, float], batches: tuple[int, ...], prompt: int, count: int
) -> list[Result]:
    """`generate` over a static batch of equal lengths, with torch's attention."""
    model, rows = make_model(shape, "sdpa"), []

    def seconds(ids: torch.Tensor, new: int) -> float:
        started = gpu_part.now()
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        model.generate(ids, max_new_tokens=new, min_new_tokens=new, **options)
        return gpu_part.now() - started

    for batch in batches:
        ids = torch.tensor(prompts_of(batch, prompt, shape.vocabulary), device=DEVICE)
        seconds(ids, 2)
        took = (seconds(ids, count) - seconds(ids, 1)) / (count - 1)
        row = _decode_row("transformers", shape, roofline, batch, prompt + count // 2, max(took, 1e-9))
        rows.append(gpu_part.keep(row))
    for length in (20,) if DRY else (1024, 4096):
        ids = torch.tensor(prompts_of(1, length, shape.vocabulary), device=DEVICE)
        seconds(ids, 1)
        rows.append(gpu_part.keep(_prefill_row("transformers", shape, roofline, length, seconds(ids, 1))))
    return rows


def _profile(engine: Engine, shape: Shape, prompt: int) -> dict[str, str]:
    """Profile: the time of eager decode steps and of a prefill, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    assert isinstance(engine.runner, ModelRunner)
    engine.runner.graphs = None
    tables = {}
    for name, length, count in (("decode", prompt, 6), ("prefill", 4096, 1)):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            run(engine, prompts_of(1, length, shape.vocabulary, seed=9), count)
        averages = profiled.key_averages()
        tables[name] = averages.table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=60)
    return tables


def free() -> None:
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    small, large = (checkpoints.TINY, checkpoints.TINY) if DRY else (checkpoints.QWEN3_0_6B, checkpoints.QWEN3_8B)
    gpu_part.main(
        {
            "smoke": smoke,
            "identity": identity,
            "graphs": graphs,
            "sampler": sampler,
            "0.6b": lambda: throughput(small),
            "8b": lambda: throughput(large),
            "8b-invariant": lambda: throughput(large, peer=False, batch_invariant="off" if DRY else "on"),
        }
    )

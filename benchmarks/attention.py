"""Decode attention kernels compared with the memory roofline: `python benchmarks/attention.py`.

One row is one batch and one context length; every sequence has one new token. Each kernel attends over a pool of several
layers, a different layer on each call, so that the second-level cache never holds the next data. The roofline is the time
to read the bytes of K and V at the rate at which all threads read a large buffer in the same run. Calls of all kernels
alternate; the best of each counts, since slower ones measure other load on the machine.

What does paging cost (the PagedAttention paper's figure 18a)? "contiguous" is the last of the kernels over a pool in which
each sequence has a single block, and "torch" is `scaled_dot_product_attention` over the same memory.

Predicted before the first measurement, for 2 cores with AVX-512 and bfloat16: the compiled kernel needs some 40 cycles per
token and key/value head (512 bytes), 30 GB/s per core, and is therefore memory-bound: 70 to 90 % of the roofline from 1k
tokens on, less than 50 % at 160 tokens of one sequence, where starting the threads costs as much as reading. The reference
first copies K and V (read, write, read again) and so stays below 30 %.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import checkpoints
import report
import torch
from torch.nn.functional import scaled_dot_product_attention

from pdserve.cli.flags import command_from_config
from pdserve.config import flag
from pdserve.errors import SetupError
from pdserve.kernels import memory
from pdserve.kernels.attention import KernelUnavailable, select_kernel
from pdserve.kernels.batch import Kernel, PagedBatch, Scores, layer_caches

SHAPE = checkpoints.QWEN3_0_6B
POOL_BYTES = 1 << 28  # lower bound, over all layers: more than a second-level cache
LAYERS = 28
BLOCK = 16


@dataclass(frozen=True, kw_only=True)
class Settings(report.EngineSettings):
    batches: str = flag("sequences, comma separated", "1,8,32")
    contexts: str = flag("KV tokens of each sequence, comma separated", "160,1024,4096")
    kernels: str = flag("kernels to compare, comma separated; also triton-invariant", "reference,cpu")
    dtype: str = flag("of queries and KV: bfloat16, float16, float32", "bfloat16")
    seconds: float = flag("for each row, over all kernels", 3.0)


QUICK = {"batches": "1,2", "contexts": "160", "seconds": 0.05}


def benchmark(settings: Settings) -> None:
    """Measure decode attention: each kernel beside the minimal time of reading the KV."""
    settings = settings.sized(QUICK).threaded()
    device = torch.device(settings.device)
    try:
        kernels = {name: _kernel(name, device) for name in settings.kernels.split(",")}
    except KernelUnavailable as error:
        raise SetupError(str(error)) from error
    read = _read_rate(device, settings.quick)
    rows = []
    for batch in _numbers(settings.batches):
        for context in _numbers(settings.contexts):
            rows += _measure(batch, context, kernels, settings, device)
            read = max(read, _read_rate(device, settings.quick))
    for row in rows:
        row["roofline_us"] = round(row["kv_bytes"] / read * 1e6, 1)
        row["ratio"] = round(row["roofline_us"] / row["us"], 4)
    _print(rows, read)
    print(report.write("attention", settings, {"read_gb_per_s": round(read / 1e9, 1), "rows": rows}))


def _kernel(name: str, device: torch.device) -> Kernel:
    batch_invariant = "on" if name.endswith("-invariant") else "off"
    return select_kernel(name.removesuffix("-invariant"), device, batch_invariant)


@torch.inference_mode()
def _measure(
    sequences: int, context: int, kernels: dict[str, Kernel], settings: Settings, device: torch.device
) -> list[dict[str, Any]]:
    dtype = checkpoints.torch_dtype(settings.dtype)
    heads, kv_heads, size = SHAPE.heads, SHAPE.kv_heads, SHAPE.head_dim
    per_sequence = -(-context // BLOCK)
    kv_bytes = sequences * context * kv_heads * size * 2 * dtype.itemsize
    layers = min(LAYERS, -(-POOL_BYTES // kv_bytes))
    blocks = sequences * per_sequence
    pool, whole = (
        torch.empty((count, layers, 2, kv_heads, length, size), dtype=dtype, device=device)
        for count, length in ((blocks, BLOCK), (sequences, per_sequence * BLOCK))
    )
    for one in (pool, whole):
        memory.huge_pages(one)
        for block in one:
            block.normal_()
    q_THD = torch.randn(sequences, heads, size, device=device).to(dtype)
    scattered = torch.randperm(blocks, device=device).view(sequences, per_sequence)

    def call(kernel: Kernel, pool: torch.Tensor, tables: torch.Tensor) -> Callable[[int], object]:
        batch = PagedBatch(
            caches=layer_caches(pool),
            slots_T=tables[:, -1] * pool.shape[4],
            tables_SM=tables,
            query_lens=[1] * sequences,
            kv_lens=[context] * sequences,
            kv_lens_S=torch.full((sequences,), context, device=device),
            starts=torch.arange(sequences + 1, device=device),
            kernel=kernel,
        )
        return lambda layer: kernel.attend(q_THD, batch.caches[layer], batch, Scores(size**-0.5))

    def torch_call(layer: int) -> torch.Tensor:
        k, v = whole[:, layer, :, :, :context].unbind(1)
        return scaled_dot_product_attention(q_THD[:, :, None], k, v, scale=size**-0.5, enable_gqa=True)

    calls = {name: call(kernel, pool, scattered) for name, kernel in kernels.items()}
    rows = torch.arange(sequences, device=device)[:, None]
    calls |= {"contiguous": call(list(kernels.values())[-1], whole, rows), "torch": torch_call}
    best = dict.fromkeys(calls, float("inf"))
    stop = report.now() + settings.seconds
    while report.now() < stop or float("inf") in best.values():
        for name, run in calls.items():
            for layer in range(layers):
                started = report.now()
                run(layer)
                best[name] = min(best[name], report.now() - started)
    head = {"sequences": sequences, "context": context, "kv_bytes": kv_bytes}
    return [head | {"kernel": name, "us": round(seconds * 1e6, 1)} for name, seconds in best.items()]


def _read_rate(device: torch.device, quick: bool) -> float:
    buffer = torch.empty(1 << 18 if quick else 1 << 27, device=device)
    memory.huge_pages(buffer)  # as for the pool
    buffer.fill_(1)
    seconds = []
    for _ in range(5):
        started = report.now()
        buffer.sum()
        seconds.append(report.now() - started)
    return buffer.nbytes / min(seconds)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise SetupError(f"{text!r} is not a list of numbers") from None


def _print(rows: list[dict[str, Any]], read: float) -> None:
    shown = [
        {name: row[name] for name in ("sequences", "context", "kernel")}
        | {"us per layer": f"{row['us']:.0f}", "GB/s": f"{row['kv_bytes'] / row['us'] / 1e3:.1f}"}
        | {"roofline us": f"{row['roofline_us']:.0f}", "ratio": f"{row['ratio']:.0%}"}
        for row in rows
    ]
    report.show(shown, f"roofline: reads {read / 1e9:.1f} GB/s")


if __name__ == "__main__":
    report.main(command_from_config(Settings, benchmark))

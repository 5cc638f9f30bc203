"""Parts of `scripts/gpu` about kernels: what the device does, whether attention is right, and how fast it is.

With --dry-run, tiny shapes in Triton's interpreter.
"""

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import gpu_part
import torch
from gpu_part import DEVICE, DRY, Result, Skip

from pdserve.kernels import reference
from pdserve.kernels.attention import KernelUnavailable, select_kernel
from pdserve.kernels.batch import Kernel, KVFormat, PagedBatch, Scores, layer_caches

ROOT = Path(__file__).parent.parent
BLOCK, LAYERS, LAYER = 16, 2, 1
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
WORKERS = 12  # processes that check attention
CHECK_S = 330.0  # time limit of each
LENGTHS = {  # (new tokens, tokens with KV) of each sequence
    "decode": [(1, 1), (1, 17), (1, 700)],
    "split": [(1, 6000), (1, 20)],
    "prefill": [(150, 150), (33, 33)],
    "chunk": [(150, 1170), (1, 40), (70, 71)],
}


def rates() -> Result:
    """The roofline, host transfers, and what a launch costs."""
    nbytes = 1 << 12 if DRY else 1 << 28
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    pageable = torch.empty(nbytes, dtype=torch.uint8)
    result = dict(gpu_part.rates())
    result["to_device_pageable"] = nbytes / gpu_part.seconds(lambda: on_device.copy_(pageable))
    small = torch.zeros(1, device=DEVICE)
    if not DRY:
        pinned = pageable.pin_memory()
        result["to_device"] = nbytes / gpu_part.seconds(lambda: on_device.copy_(pinned, non_blocking=True))
        result["to_host"] = nbytes / gpu_part.seconds(lambda: pinned.copy_(on_device, non_blocking=True))
        graph = torch.cuda.CUDAGraph()
        small.add_(1)
        with torch.cuda.graph(graph):
            for _ in range(1000):
                small.add_(1)
        result["replayed_launch_s"] = gpu_part.seconds(graph.replay) / 1000
    started = gpu_part.now()
    for _ in range(10 if DRY else 10_000):
        small.add_(1)
    result["launch_s"] = (gpu_part.now() - started) / (10 if DRY else 10_000)
    started = gpu_part.now()
    for _ in range(10 if DRY else 1000):
        small.item()
    result["sync_s"] = (gpu_part.now() - started) / (10 if DRY else 1000)
    return result


def attention() -> Result:
    """Every kernel against the reference in float32, over poisoned pools. Processes divide the variants."""
    if DRY:
        rows = _check(0, 1)
    else:
        commands = [[sys.executable, __file__, "check", str(i)] for i in range(WORKERS)]
        children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        answers = [child.communicate()[0].strip().splitlines() for child in children]
        rows = [
            row for lines in answers for row in (json.loads(lines[-1]) if lines else [{"wrong": True, "error": "died"}])
        ]
    wrong = [row for row in rows if row["wrong"]]
    right = [row for row in rows if not row["wrong"]]
    worst = {dtype: max(r["error"] for r in right if r["dtype"] == dtype) for dtype in {r["dtype"] for r in right}}
    left = sum(1 for _ in _variants()) - len({row.get("variant") for row in rows})
    print(f"{len(rows)} checks, {len(wrong)} wrong, {left} variants left, largest relative errors {worst}")
    return {"checks": len(rows), "left": left, "worst": worst, "rows": wrong or rows[:1], "failed": len(wrong)}


def _check(worker: int, workers: int) -> list[Result]:
    """Return a row for each kernel and variant of one worker, as far as the time allows."""
    rows: list[Result] = []
    stop = time.monotonic() + CHECK_S
    for number, variant in enumerate(_variants()):
        if number % workers != worker or time.monotonic() > stop:
            continue
        dtype, size, (heads, kv_heads), (window, softcap), (name, lengths) = variant
        scale = size**-0.5
        batch, q, k, v = _case(dtype, heads, kv_heads, size, lengths)
        cache = batch.caches[LAYER].float()
        reference.write_kv(cache, k.float(), v.float(), batch.slots_T)
        expected = reference.attend(q.float(), cache, batch, Scores(scale, window, softcap))
        for kernel in _kernels(dtype, size)[0]:
            row: Result = {"variant": number, "kernel": kernel.NAME, "dtype": str(dtype), "size": size}
            row |= {"heads": (heads, kv_heads), "window": window, "softcap": softcap, "lengths": name}
            try:
                kernel.write_kv(batch.caches[LAYER], k, v, batch.slots_T)
                got = kernel.attend(q, batch.caches[LAYER], batch, Scores(scale, window, softcap)).float()
                error = float((got - expected).norm() / expected.norm())
                rows.append(row | {"error": error, "wrong": not error <= TOLERANCE[dtype]})
            except Exception as failure:  # noqa: BLE001 - any failure of a compiler is a result
                rows.append(row | {"error": f"{type(failure).__name__}: {failure}"[:200], "wrong": True})
    return rows


def _variants() -> Iterator[Any]:
    bf16, options = torch.bfloat16, [(None, None), (100, None), (None, 30.0), (550, 20.0)]
    if DRY:
        yield from itertools.product([torch.float32], [16], [(2, 1)], options[-1:], [("chunk", [(3, 20), (1, 4)])])
        return
    yield from itertools.product(TOLERANCE, [64, 80, 128, 256], [(8, 8), (8, 2), (14, 2)], options, LENGTHS.items())
    yield from itertools.product([bf16], [96, 112, 512], [(16, 1), (32, 8)], options, LENGTHS.items())


def _kernels(dtype: torch.dtype, size: int) -> tuple[list[Kernel], str]:
    """Return the kernels, and why flash is not among them."""
    kernels = [select_kernel("triton", DEVICE, setting) for setting in ("off", "on")]
    try:
        return [*kernels, select_kernel("flash", DEVICE, "off", KVFormat(dtype, frozenset({size}), BLOCK))], ""
    except KernelUnavailable as error:
        return kernels, str(error)


def _case(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int, lengths: list[tuple[int, int]], poison: bool = True
) -> tuple[PagedBatch, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a batch over a pool in random order, and the new q, k and v. Slots that no token has are NaN."""
    counts = [-(-kv // BLOCK) for _, kv in lengths]
    blocks = torch.randperm(sum(counts) + 2, device=DEVICE)
    shape = (len(blocks), LAYERS, 2, kv_heads, BLOCK, size)
    pool = (
        torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
        if poison
        else torch.randn(shape, dtype=dtype, device=DEVICE)
    )
    tables = torch.zeros((len(lengths), max(counts)), dtype=torch.int32, device=DEVICE)
    slots, taken = [], 0
    for row, ((new, kv), count) in enumerate(zip(lengths, counts, strict=True)):
        tables[row, :count] = blocks[taken : taken + count]
        taken += count
        at = torch.arange(kv, device=DEVICE)
        of_tokens = tables[row, at // BLOCK].long()
        old = at[: kv - new]
        pool[of_tokens[old], LAYER, :, :, old % BLOCK] = torch.randn(
            len(old), 2, kv_heads, size, device=DEVICE, dtype=dtype
        )
        slots.append((of_tokens * BLOCK + at % BLOCK)[kv - new :])
    total = sum(new for new, _ in lengths)
    q, k, v = (torch.randn(total, n, size, device=DEVICE, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    batch = PagedBatch(
        caches=layer_caches(pool),
        slots_T=torch.cat(slots).int(),
        tables_SM=tables,
        query_lens=[new for new, _ in lengths],
        kv_lens=[kv for _, kv in lengths],
        kv_lens_S=torch.tensor([kv for _, kv in lengths], device=DEVICE, dtype=torch.int32),
        starts=torch.tensor([0, *accumulate(new for new, _ in lengths)], device=DEVICE, dtype=torch.int32),
        kernel=reference,
    )
    return batch, q, k, v


def rows() -> Result:
    """The cases of tests/kernels/gpu that are the interpreter's without a GPU."""
    if DRY:
        raise Skip("the suite runs them on the CPU")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "-m",
        "slow or not slow",
    ]
    names = ("triton", "elementwise")
    children = [
        subprocess.Popen([*command, f"tests/kernels/gpu/{name}_cases.py"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for name in names
    ]
    outputs = [child.communicate()[0] for child in children]
    print(*(output[-6000:] for output in outputs), sep="\n")
    codes = {name: child.returncode for name, child in zip(names, children, strict=True)}
    return {"rows": [codes], "failed": sum(code != 0 for code in codes.values())}


def attention_rates() -> Result:
    """Decode as a share of reading the KV once, prefill as a share of the matrix rate, by back end."""
    roofline = gpu_part.rates()
    dtype, size, heads, kv_heads = (torch.float32, 16, 2, 1) if DRY else (torch.bfloat16, 128, 32, 8)
    decode = [(1, 20)] if DRY else [(1, 4096), (8, 1024), (32, 4096), (256, 1024), (1, 32_768)]
    prefill = [(20, 0)] if DRY else [(1024, 0), (8192, 0), (32_768, 0), (2048, 16_384)]
    cases = [("decode", [(1, context)] * count) for count, context in decode]
    cases += [("prefill", [(new, new + before)]) for new, before in prefill]
    rows = []
    for phase, lengths in cases:
        batch, q, _, _ = _case(dtype, heads, kv_heads, size, lengths, poison=False)
        kv_bytes = sum(kv for _, kv in lengths) * kv_heads * size * 2 * dtype.itemsize
        pairs = sum(new * (kv - new) + new * (new + 1) // 2 for new, kv in lengths)
        least = max(kv_bytes / roofline["copy"], 4 * heads * size * pairs / roofline["flops"])
        outputs = {}
        kernels, without = _kernels(dtype, size)
        for kernel in kernels:
            attend = partial(kernel.attend, q, batch.caches[LAYER], batch, Scores(size**-0.5))
            outputs[kernel.NAME] = attend().float()
            took = gpu_part.seconds(attend)
            head: Result = {"phase": phase, "sequences": len(lengths), "new": lengths[0][0], "kv": lengths[0][1]}
            rows.append(head | {"kernel": kernel.NAME, "us": round(took * 1e6, 1), "share": round(least / took, 3)})
        first = next(iter(outputs.values()))
        for row in rows[-len(outputs) :]:
            row["differs"] = float((outputs[row["kernel"]] - first).norm() / first.norm())
    if without:
        print(f"skipped: {without}")
    wrong = sum(not row["differs"] < 0.02 for row in rows)
    return {"roofline": roofline, "rows": rows, "skipped": without, "failed": wrong}


if __name__ == "__main__":
    if sys.argv[1] == "check":
        print(json.dumps(_check(int(sys.argv[2]), WORKERS)))
        raise SystemExit
    gpu_part.main({"rates": rates, "attention": attention, "rows": rows, "attention-rates": attention_rates})

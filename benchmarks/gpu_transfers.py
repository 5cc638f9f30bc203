"""Parts of `scripts/gpu` about KV that moves: the pools of two processes on one GPU, staging, swap, hand-over, and 1P+1D.

With --dry-run, tiny pools on the CPU.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import checkpoints
import gpu_part
import torch
from gpu_part import DEVICE, DRY, Result

from pdserve.errors import SetupError
from pdserve.kernels import reference
from pdserve.kernels.attention import select_kernel
from pdserve.kernels.gpu.copies import PoolCopies
from pdserve.keys import Layout
from pdserve.kv_transfer.connector import Connector, Outcome
from pdserve.kv_transfer.connectors.shm.connector import unlink
from pdserve.kv_transfer.registry import connect
from pdserve.kv_transfer.staging import StagedConnector, attach_pool

SHAPE = checkpoints.TINY if DRY else checkpoints.QWEN3_0_6B
BLOCK = 16
LEASE_S = 300.0


def memory() -> Result:
    """Two processes that build their pools at the same time, with 0.45 of the memory each."""
    command = [sys.executable, __file__, "instance", ""]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(1 if DRY else 2)]
    outputs = [child.communicate()[0].strip().splitlines() for child in children]
    rows = [json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {"blocks": 0} for lines in outputs]
    total = sum(row["blocks"] for row in rows)
    wrong = [row for row in rows if not row["blocks"] or row["blocks"] < total / 4]
    return {"rows": rows, "failed": len(wrong) or sum(child.returncode != 0 for child in children)}


def instance() -> None:
    """One of the processes of `memory`: prints its pool and what it holds."""
    import gpu_models

    engine = gpu_models.make_engine(SHAPE, None, gpu_memory_utilization=0.45)
    gpu_models.run(engine, gpu_models.prompts_of(4, 50, SHAPE.vocabulary), 5)
    free, total = torch.cuda.mem_get_info() if DEVICE.type == "cuda" else (0, 0)
    time.sleep(0 if DRY else 5)  # both at once
    print(json.dumps({"blocks": engine.pool.num_blocks, "free": free, "total": total}))


def make_pool(num_blocks: int) -> tuple[torch.Tensor, Layout]:
    dtype = checkpoints.torch_dtype(SHAPE.dtype)
    shape = (num_blocks, SHAPE.layers, 2, SHAPE.kv_heads, BLOCK, SHAPE.head_dim)
    layout = Layout(
        model_fingerprint="random",
        num_layers=SHAPE.layers,
        num_kv_heads=SHAPE.kv_heads,
        head_dim=SHAPE.head_dim,
        block_size=BLOCK,
        dtype=SHAPE.dtype,
        itemsize=dtype.itemsize,
    )
    return torch.zeros(shape, dtype=dtype, device=DEVICE), layout


def staged(url: str, pool: torch.Tensor, layout: Layout) -> Connector:
    copies, connector = PoolCopies(pool, reference if DRY else select_kernel("triton", DEVICE, "off")), connect(url)
    if DRY and not connector.in_place:
        return StagedConnector(connector, copies, layout, len(pool))
    return attach_pool(connector, pool, layout, lambda: copies)


def staging() -> Result:
    """Stores right behind the writes of a busy stream, and loads into blocks whose old writes are still queued."""
    num_blocks, rounds = (12, 3) if DRY else (256, 150)
    pool, layout = make_pool(num_blocks)
    size = layout.block_bytes
    connector = staged(f"memory://stress?size={4 * num_blocks * size}", pool, layout)
    busy = torch.randn(64 if DRY else 4096, 64 if DRY else 4096, device=DEVICE)
    chosen = random.Random(0)
    wrong = {"stored": 0, "loaded": 0, "missing": 0}
    half = num_blocks // 2
    for turn in range(rounds):
        blocks = chosen.sample(range(half), chosen.randint(1, half))
        targets = chosen.sample(range(half, num_blocks), len(blocks))
        keys = [f"{turn}-{block}".encode().ljust(16, b"\0") for block in blocks]
        for _ in range(chosen.randint(0, 8)):
            busy = busy @ busy * 1e-3  # what the writes must wait for
        for block in blocks:
            pool[block] = (turn * 7 + block) % 97
        stored = connector.store(keys, blocks, lease_s=LEASE_S)
        wrong["stored"] += sum(outcome is not Outcome.OK for outcome in stored.result().outcomes)
        for block in blocks:
            pool[block] = -1  # the next owner's writes must not reach the store
        for _ in range(chosen.randint(0, 8)):
            busy = busy @ busy * 1e-3
        pool[targets] = -2  # late writes of the targets' old owner must not outlive the load
        result = connector.load(keys, targets).result()
        wrong["missing"] += sum(outcome is not Outcome.OK for outcome in result.outcomes)
        connector.release(keys)
        for block, target in zip(blocks, targets, strict=True):
            wrong["loaded"] += int(not bool((pool[target] == (turn * 7 + block) % 97).all()))
    connector.close()
    return {"rows": [{"rounds": rounds, **wrong}], "failed": sum(wrong.values())}


def swap() -> Result:
    """All blocks to host memory and back, in another order."""
    import gpu_models

    blocks = 8 if DRY else 512
    nbytes = make_pool(1)[1].block_bytes * blocks
    engine = gpu_models.make_engine(SHAPE, blocks, swap_space=nbytes * 1.01 / 2**30)
    runner: Any = engine.runner
    runner.kv.pool_NX.copy_(torch.randn_like(runner.kv.pool_NX))
    before = runner.kv.pool_NX.clone()
    out = [(i, (i * 5 + 1) % blocks) for i in range(blocks)]
    if len({host for _, host in out}) < blocks:
        out = [(i, i) for i in range(blocks)]
    out_s = runner.kv.swap(out, [])
    runner.kv.pool_NX.zero_()
    in_s = runner.kv.swap([], out)
    wrong = int((runner.kv.pool_NX != before).flatten(1).any(1).sum())
    row = {"blocks": blocks, "out_gb_per_s": nbytes / out_s / 1e9, "in_gb_per_s": nbytes / in_s / 1e9, "wrong": wrong}
    return {"rows": [row], "failed": wrong}


def handover() -> Result:
    """Blocks from one process's pool to another's: by connector, and by a CUDA IPC handle."""
    rows: list[Result] = []
    blocks = 6 if DRY else 512
    size = make_pool(1)[1].block_bytes * blocks
    url = f"shm://gpu-session-{time.time_ns()}?size={5 * size // 2 + (1 << 20)}"
    try:
        rows.append(gpu_part.keep({"by": "shm"} | _between_processes(url, blocks)))
    finally:
        unlink(url)
    rows.append(gpu_part.keep({"by": "CUDA IPC"} | (_by_ipc(blocks) if not DRY else {"skipped": "no GPU"})))
    rows.append(gpu_part.keep({"by": "nixl"} | _between_processes("nixl://", blocks)))
    return {"rows": rows, "failed": sum(row.get("wrong", 0) for row in rows)}


def _between_processes(url: str, blocks: int) -> Result:
    """Store here and load there. The other process answers with what it found."""
    pool, layout = make_pool(blocks)
    pool.copy_(torch.arange(blocks, device=DEVICE).view(-1, 1, 1, 1, 1, 1).expand_as(pool) % 97)
    try:
        connector = staged(url, pool, layout)
    except SetupError as error:
        return {"skipped": str(error)}
    turns: list[dict[str, Any]] = []
    for turn in range(2):  # the first touches pages and opens links
        keys = [bytes([turn]) + i.to_bytes(15, "little") for i in range(blocks)]
        started = time.perf_counter()
        result = connector.store(keys, list(range(blocks)), lease_s=LEASE_S).result()
        assert all(outcome is Outcome.OK for outcome in result.outcomes), "the store is too small"
        store_s = time.perf_counter() - started
        turns.append({"keys": [key.hex() for key in keys], "ticket": result.ticket.hex()})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "order.json")
        file.write_text(json.dumps({"url": url, "turns": turns}))
        done = subprocess.run(
            [sys.executable, __file__, "receiver", str(file)], capture_output=True, text=True, check=False
        )
    connector.close()
    if done.returncode:
        return {"wrong": 1, "error": done.stderr[-500:]}
    gigabytes = blocks * layout.block_bytes / 1e9
    return {"store_gb_per_s": gigabytes / store_s, **json.loads(done.stdout.strip().splitlines()[-1])}


def receiver() -> None:
    """The other process of `handover`."""
    order = json.loads(Path(sys.argv[2]).read_text())
    blocks = list(range(len(order["turns"][0]["keys"])))
    pool, layout = make_pool(len(blocks))
    connector = staged(order["url"], pool, layout)
    for turn in order["turns"]:
        started = time.perf_counter()
        keys, ticket = [bytes.fromhex(key) for key in turn["keys"]], bytes.fromhex(turn["ticket"])
        result = connector.load(keys, blocks, tickets=[ticket]).result()
        seconds = time.perf_counter() - started
    expected = torch.arange(len(blocks), device=DEVICE).view(-1, 1, 1, 1, 1, 1) % 97
    wrong = int((pool != expected).flatten(1).any(1).sum())
    wrong += sum(outcome is not Outcome.OK for outcome in result.outcomes)
    connector.close()
    print(json.dumps({"load_gb_per_s": len(blocks) * layout.block_bytes / seconds / 1e9, "wrong": wrong}))


def _by_ipc(blocks: int) -> Result:
    import torch.multiprocessing as multiprocessing

    pool, layout = make_pool(blocks)
    pool.fill_(3)
    torch.cuda.synchronize()
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    child = context.Process(target=_copy_from, args=(pool, answers))
    child.start()
    child.join(120)
    if child.exitcode != 0 or answers.empty():
        return {"skipped": f"the other process ended with {child.exitcode}"}
    seconds, right = answers.get()
    return {"gb_per_s": blocks * layout.block_bytes / seconds / 1e9, "wrong": int(not right)}


def _copy_from(pool: torch.Tensor, answers: Any) -> None:
    own = torch.zeros_like(pool)
    seconds = gpu_part.seconds(lambda: own.copy_(pool))
    answers.put((seconds, bool((own == 3).all())))


def pd() -> Result:
    """Bursts of long prompts beside decoding streams: 1P+1D and colocated, each on this one GPU."""
    import asyncio
    from dataclasses import replace

    import pd as benchmark

    from pdserve.cli.deployment import free_port
    from pdserve.config import UpConfig

    shape = checkpoints.TINY if DRY else checkpoints.QWEN3_0_6B
    settings = benchmark.Settings(
        requests=160,
        concurrency=48,
        mix="long-prompts",
        prompt_tokens=3000,
        output_tokens=128,
        itl_targets="30",
        ttft_target_ms=2000,
    )
    common = UpConfig(
        model="", device="cuda", dtype="bfloat16", max_num_seqs=64, kv_cache_memory="24GiB", max_num_batched_tokens=2048
    )
    if DRY:
        settings = replace(settings, requests=12, concurrency=4, prompt_tokens=300, output_tokens=16)
        common = replace(common, device="cpu", dtype="float32", kv_cache_memory="64MiB")
    arrangements = benchmark._disaggregated(common, settings, [30.0]) | benchmark._colocated(common, settings, [30.0])
    del arrangements["1P+1D, fixed"]  # there is not the time for all
    first = ("1P+1D, ITL 30 ms", "2 both", "1 both")
    arrangements = {
        name: arrangements[name] for name in (*first, *(name for name in arrangements if name not in first))
    }
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = checkpoints.make(shape, folder)
        for name, config in arrangements.items():
            with ExitStack() as own:
                deployed = benchmark.Ours(replace(config, model=str(model), port=free_port()), own)
                deployed.wait_ready()
                warm_up = replace(settings, requests=min(24, settings.requests))
                asyncio.run(benchmark._round(deployed, warm_up, shape.vocabulary, "warm-up"))
                rounds = [asyncio.run(benchmark._round(deployed, settings, shape.vocabulary, "round"))]
                rows.append(gpu_part.keep(benchmark._row(name, rounds)))
    disaggregated = min(row["itl_ms_p99"] for row in rows if "P+" in row["deployment"])
    colocated = min(row["itl_ms_p99"] for row in rows if "both" in row["deployment"])
    return {"rows": rows, "itl_p99_ratio": disaggregated / colocated}


if __name__ == "__main__":
    helpers: dict[str, Callable[[], None]] = {"instance": instance, "receiver": receiver}
    if sys.argv[1] in helpers:
        helpers[sys.argv[1]]()
    else:
        parts = {"memory": memory, "staging": staging, "swap": swap, "handover": handover, "pd": pd}
        gpu_part.main(parts)

"""The engine alone, in process, compared with the machine's roofline: `python benchmarks/engine.py`.

Three tasks on a randomly initialised checkpoint: many short prompts at once (offline), one long prompt (prefill), one
sequence continued (decode). The roofline is measured in the same run: the memory bandwidth of all threads bounds decoding,
the rate of a matrix product bounds prefill; the slower of the two counts for each step.
"""

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import checkpoints
import peer_process
import report
import torch
import transformers
from checkpoints import Shape
from msgspec import structs
from peer_process import Peer
from rich.console import Console

from pdserve.cli.flags import command_from_config
from pdserve.config import EngineConfig, flag
from pdserve.engine.cpu_fusion.tolerance import FUSED_DTYPES
from pdserve.engine.engine import Engine
from pdserve.engine.model_runner import ModelRunner
from pdserve.errors import SetupError
from pdserve.kernels import linear, native
from pdserve.request import Request, SamplingParams

Run = Callable[[list[list[int]], int], "Timing"]


@dataclass(frozen=True, kw_only=True)
class Settings(peer_process.Settings):
    requests: int = flag("prompts of the offline task", 32)
    prompt_tokens: int = flag("length of the prompts of the offline and decode tasks", 128)
    output_tokens: int = flag("tokens generated for each of them", 64)
    prefill_tokens: int = flag("length of the prompt of the prefill task", 1024)
    repeat: int = flag("rounds; all tasks of all engines take turns in each", 3)
    shape: str = flag("of Qwen3: 0.6b, 8b", "0.6b")
    dtype: str = flag("of weights and KV: bfloat16, float32", "bfloat16")
    device: str = flag("cpu or cuda", "cpu")
    kernel: str = flag("attention kernel of ours", EngineConfig.kernel)
    batch_invariant: str = flag("of ours: auto, on, off", EngineConfig.batch_invariant)
    quantization: str = flag("none, int8, int4, of the layers; peers: openvino, llama_cpp", EngineConfig.quantization)
    temperature: float = flag("of our requests; 0 is greedy", 0.0)
    top_p: float = flag("of our requests", 1.0)
    threads: int | None = flag("CPU threads; default: all cores", None)
    max_num_batched_tokens: int = flag("tokens in one step at most", EngineConfig.max_num_batched_tokens)


SHAPES = {"0.6b": checkpoints.QWEN3_0_6B, "8b": checkpoints.QWEN3_8B}
QUICK = {"requests": 4, "prompt_tokens": 16, "output_tokens": 8, "prefill_tokens": 64, "repeat": 1}
ROOFLINE_BYTES = 1 << 30  # more than any cache
ROOFLINE_PIECE = 1 << 26  # bytes per read: short reads, some of which no other process disturbs
PAUSE_S = 2  # between runs: threads of the engine before may wait for work without sleeping
BITS_READ = {"int8": (8.5, 8.5), "int4": (4.5, 8.5)}  # of a weight of the layers, and of the head, scales included
ROOFLINE_SIDE = {"cpu": 1024, "cuda": 8192}  # of the square matrices


@dataclass(frozen=True)
class Task:
    """A workload. `decode_only` excludes the first step, the prefill, from the time."""

    name: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    decode_only: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that the rate counts: prompt tokens if only one token is generated, else output tokens."""
        if self.output_tokens == 1:
            return self.requests * self.prompt_tokens
        return self.requests * (self.output_tokens - self.decode_only)

    @property
    def context(self) -> int:
        """Tokens of a sequence at the end."""
        return self.prompt_tokens + self.output_tokens

    @property
    def blocks(self) -> int:
        """KV blocks that it needs at the end."""
        return self.requests * -(-self.context // EngineConfig.block_size)

    def prompts(self, vocabulary: int, turn: int) -> list[list[int]]:
        """Different for every task and turn, so that no prefix cache helps."""
        drawn = random.Random(f"{self.name} {turn}")
        return [[drawn.randrange(vocabulary) for _ in range(self.prompt_tokens)] for _ in range(self.requests)]


@dataclass
class Timing:
    """Seconds of one run, from its start to the end of each step.

    Attributes:
        steps: wall time; each step adds one token to every sequence; a chunk of a longer prefill adds none.
        cpu: the same in CPU seconds, summed over all threads.
        first: index of the step that produced the first token of the last sequence.
        forward: wall time inside the model, for each step; empty if not measured.
        prefix_hits: prompt tokens found in the prefix cache; None if unknown.
    """

    steps: list[float]
    cpu: list[float]
    first: int
    forward: list[float]
    prefix_hits: int | None = None

    def seconds(self, task: Task) -> float:
        return self.steps[-1] - (self.steps[self.first] if task.decode_only else 0.0)

    def cpu_seconds(self, task: Task) -> float:
        return self.cpu[-1] - (self.cpu[self.first] if task.decode_only else 0.0)

    def outside(self, task: Task) -> float | None:
        """The share of the time that was not spent inside the model."""
        if not self.forward:
            return None
        forward = sum(self.forward[self.first + 1 :] if task.decode_only else self.forward)
        return 1 - forward / self.seconds(task)


@dataclass(frozen=True)
class Roofline:
    """Peak rates of this machine, in bytes and operations per second."""

    read: float
    flops: float

    def seconds(self, shape: Shape, task: Task, quantization: str) -> float:
        """The least time that the task can take, each step bound by memory or by arithmetic."""
        layer_bits, head_bits = BITS_READ.get(quantization, (shape.bits,) * 2)
        weight_bytes = (shape.weights * layer_bits + shape.vocabulary * shape.hidden * head_bits) / 8
        n, p = task.requests, task.prompt_tokens
        total = 0.0
        if not task.decode_only:
            total += self._step(shape, weight_bytes, new=n * p, seen=n * p * (p + 1) // 2, cached=0, logits=n)
        for output in range(1, task.output_tokens):
            total += self._step(shape, weight_bytes, new=n, seen=n * (p + output), cached=n * (p + output), logits=n)
        return total

    def _step(self, shape: Shape, weight_bytes: float, *, new: int, seen: int, cached: int, logits: int) -> float:
        bytes_read = weight_bytes + cached * shape.kv_bytes_per_token
        return max(bytes_read / self.read, shape.flops(new, seen, logits) / self.flops)

    def better(self, other: "Roofline") -> "Roofline":
        return Roofline(max(self.read, other.read), max(self.flops, other.flops))


def measure_roofline(dtype: torch.dtype, device: str, nbytes: int, side: int) -> Roofline:
    """Return the best of many tries at reading part of a large buffer, and at multiplying two matrices.

    The matrix product is tried with torch and with the kernel of our linear layers.
    """
    pieces = torch.split(torch.ones(nbytes // 4, device=device), ROOFLINE_PIECE // 4)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    read = min(_timed(piece.sum) / piece.nbytes for piece in pieces * 3)
    products: list[Callable[[], Any]] = [lambda: left @ right]
    if device == "cpu" and dtype in FUSED_DTYPES and native.is_available():
        packed = linear.pack(right)
        products.append(lambda: linear.linear(left, packed))
    product = min(_timed(multiply) for multiply in products * 50)
    return Roofline(1 / read, 2 * side**3 / product)


class OurEngine:
    """Runs prompts through `Engine`, timing every step and the model within it."""

    def __init__(self, path: Path, settings: Settings, blocks: int) -> None:
        config = EngineConfig(
            model=str(path),
            dtype=settings.dtype,
            device=settings.device,
            kernel=settings.kernel,
            batch_invariant=settings.batch_invariant,
            quantization=settings.quantization,
            num_blocks=blocks,
            max_num_seqs=settings.requests,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            speculate="off",  # random weights answer in loops, which any draft guesses
        )
        self._engine = Engine(config)
        self._sampling = SamplingParams(temperature=settings.temperature, top_p=settings.top_p, ignore_eos=True)
        self._forward = 0.0
        runner = self._engine.runner
        assert isinstance(runner, ModelRunner)
        forward = runner.forward

        def timed(*args: Any) -> torch.Tensor:
            started = report.now()
            logits = forward(*args)
            self._forward += report.now() - started
            return logits

        setattr(runner, "forward", timed)  # noqa: B010 - mypy takes no assignment to a method
        gc.freeze()  # as instances do once they are loaded

    def run(self, prompts: list[list[int]], output_tokens: int) -> Timing:
        sampling = structs.replace(self._sampling, max_tokens=output_tokens)
        waiting = {
            self._engine.new_sequence(str(i), Request(prompt=prompt, sampling=sampling))
            for i, prompt in enumerate(prompts)
        }
        for seq in waiting:
            self._engine.add(seq)
        timing, hits = Timing([], [], 0, []), self._engine.scheduler.prefix_hits
        started, cpu = report.now(), time.process_time()
        while self._engine.has_work:
            self._forward = 0.0
            result = self._engine.step()
            timing.steps.append(report.now() - started)
            timing.cpu.append(time.process_time() - cpu)
            timing.forward.append(self._forward)
            if waiting & {*result.sampled}:
                waiting -= {*result.sampled}
                timing.first = len(timing.steps) - 1
            for seq in result.sampled:
                if seq.output.finish_reason() is not None:
                    self._engine.remove(seq)
        timing.prefix_hits = self._engine.scheduler.prefix_hits - hits
        return timing


def benchmark(settings: Settings) -> None:
    """Measure the engine: offline throughput, prefill, decode, each beside its roofline."""
    settings.named()
    if settings.shape not in SHAPES:
        raise SetupError(f"--shape {settings.shape} is not known; there is: {', '.join(SHAPES)}")
    shape = checkpoints.TINY if settings.quick else SHAPES[settings.shape]
    shape = replace(shape, dtype=settings.dtype)
    settings = settings.sized(QUICK)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    settings = replace(settings, threads=torch.get_num_threads())
    transformers.logging.set_verbosity_error()
    tasks = [
        Task("offline", settings.requests, settings.prompt_tokens, settings.output_tokens),
        Task("prefill", 1, settings.prefill_tokens, 1),
        Task("decode", 1, settings.prompt_tokens, settings.output_tokens, decode_only=True),
    ]
    timings, roofline = _measure(settings, shape, tasks)
    rows = _rows(shape, tasks, timings, roofline, settings.quantization)
    content = {
        "model": asdict(shape),
        "roofline": {"read_gb_per_s": round(roofline.read / 1e9, 1), "gflops": round(roofline.flops / 1e9, 1)},
        "rows": rows,
    }
    _print(rows, roofline)
    print(report.write("engine", replace(settings, peers_folder=""), content))


def _measure(
    settings: Settings, shape: Shape, tasks: list[Task]
) -> tuple[dict[tuple[str, str], list[Timing]], Roofline]:
    """Return timings by engine and task. Engines and tasks alternate, so that other load affects all alike."""
    timings: dict[tuple[str, str], list[Timing]] = {}
    roofline = Roofline(0, 0)
    with contextlib.ExitStack() as stack:
        status = stack.enter_context(Console(stderr=True).status("…"))
        status.update("writing the checkpoint")
        path = stack.enter_context(peer_process.checkpoint(shape, settings.peers_folder))
        status.update("loading it")
        runs: dict[str, Run] = {"pdserve": OurEngine(path, settings, max(task.blocks for task in tasks)).run}
        for name in settings.named():
            status.update(f"{name}: converting the checkpoint, and loading it")
            runs[name] = _run_of_peer(name, path, settings, max(task.context for task in tasks), stack)
        for name, run in runs.items():
            for task in tasks:
                status.update(f"{name}, {task.name}: warming up")
                run(task.prompts(shape.vocabulary, turn=0), min(2, task.output_tokens))
        for turn in range(1, settings.repeat + 1):
            status.update(f"round {turn}, roofline")
            side = ROOFLINE_SIDE[settings.device.partition(":")[0]]
            size, side = (ROOFLINE_PIECE, 256) if settings.quick else (ROOFLINE_BYTES, side)
            dtype = checkpoints.torch_dtype(settings.dtype)
            roofline = roofline.better(measure_roofline(dtype, settings.device, size, side))
            for task in tasks:
                for name, run in runs.items():
                    status.update(f"round {turn}, {name}, {task.name}")
                    time.sleep(PAUSE_S)
                    timing = run(task.prompts(shape.vocabulary, turn), task.output_tokens)
                    timings.setdefault((name, task.name), []).append(timing)
    return timings, roofline


def _run_of_peer(name: str, path: Path, settings: Settings, context: int, stack: contextlib.ExitStack) -> Run:
    assert settings.threads is not None
    folder, quantization = settings.peers_folder, settings.quantization
    peer_process.convert(name, folder, path, quantization)
    peer = Peer(name, folder, path, settings.threads, settings.dtype, settings.device, context, quantization)
    stack.callback(peer.close)
    return lambda prompts, output_tokens: Timing(**peer.run(prompts, output_tokens), forward=[])


def _rows(
    shape: Shape,
    tasks: list[Task],
    timings: dict[tuple[str, str], list[Timing]],
    roofline: Roofline,
    quantization: str,
) -> list[dict[str, Any]]:
    rows = []
    for (engine, name), several in timings.items():
        task = next(task for task in tasks if task.name == name)
        rates = [task.tokens / timing.seconds(task) for timing in several]
        cpu_rates = [task.tokens / timing.cpu_seconds(task) for timing in several]
        bound = task.tokens / roofline.seconds(shape, task, quantization)
        outside = [share for timing in several if (share := timing.outside(task)) is not None]
        rows.append(
            {
                "engine": engine,
                "task": name,
                "tokens": task.tokens,
                "tokens_per_s": round(statistics.median(rates), 2),
                "tokens_per_s_best": round(max(rates), 2),
                "tokens_per_cpu_s": round(statistics.median(cpu_rates), 2),
                "roofline_tokens_per_s": round(bound, 2),
                "ratio": float(f"{statistics.median(rates) / bound:.4g}"),
                "seconds": [round(timing.seconds(task), 4) for timing in several],
                "cpu_seconds": [round(timing.cpu_seconds(task), 4) for timing in several],
                "outside_model": round(statistics.median(outside), 5) if outside else None,
                "prefix_hits": [timing.prefix_hits for timing in several],
            }
        )
    return rows


def _print(rows: list[dict[str, Any]], roofline: Roofline) -> None:
    columns = {"tok/s": "tokens_per_s", "best": "tokens_per_s_best", "roofline": "roofline_tokens_per_s"}
    shown = [
        {"task": row["task"], "engine": row["engine"]}
        | {column: f"{row[name]:.1f}" for column, name in columns.items()}
        | {"ratio": f"{row['ratio']:.1%}", "tok/CPU s": f"{row['tokens_per_cpu_s']:.1f}"}
        | {"outside model": "" if row["outside_model"] is None else f"{row['outside_model']:.2%}"}
        for row in sorted(rows, key=lambda row: [r["task"] for r in rows].index(row["task"]))
    ]
    title = f"roofline: reads {roofline.read / 1e9:.1f} GB/s, matrix product {roofline.flops / 1e9:.0f} GFLOP/s"
    report.show(shown, title)


def _timed(work: Callable[[], Any]) -> float:
    started = report.now()
    work()
    return report.now() - started


if __name__ == "__main__":
    report.main(command_from_config(Settings, benchmark))

"""Steps with low-rank adapters against steps of the base alone, in process: `python benchmarks/adapters.py`.

*loaded*: adapters are there, and no sequence has one. *one*, *all*: each sequence has an adapter, the same or one of all in
turn. Modes take turns in each round. Times are those of the base, so 1.25 takes a quarter longer. *roofline* is the bytes of
base and adapters by those of the base. *bookkeeping*: its share of the CPU seconds of the steps of *loaded*.

Cold starts: first tokens of prompts whose adapter has no slot, and of the same ones with it, in turns, while others decode.
"""

import json
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import checkpoints
import report
import torch
import transformers
from safetensors.torch import load_file, save_file

from pdserve.adapters.checkpoint import CONFIG, PREFIX, WEIGHTS
from pdserve.cli.flags import command_from_config
from pdserve.config import EngineConfig, flag
from pdserve.engine.engine import Engine
from pdserve.engine.step import StepPlan
from pdserve.request import Request, SamplingParams

MODES = ("base", "loaded", "one", "all")


@dataclass(frozen=True, kw_only=True)
class Settings(report.EngineSettings):
    shape: str = flag("of the model: 0.6B or 8B, as Qwen3", "0.6B")
    layers: int = flag("of that shape", 8)
    dtype: str = flag("of weights and KV: bfloat16, float32", "bfloat16")
    adapters: int = flag("how many there are", 8)
    rank: int = flag("of each, on all linear layers", 16)
    streams: str = flag("sequences that decode at once", "1,8,32")
    prompt: int = flag("tokens of a prompt that is computed alone", 512)
    tokens: int = flag("of each answer", 32)
    repeat: int = flag("rounds; all modes take turns in each", 7)
    many: int = flag("adapters of cold starts", 200)
    slots: int = flag("adapters in one step of cold starts; half of them are in use", 8)
    starts: int = flag("cold and as many warm starts", 200)


QUICK = {"layers": 1, "adapters": 2, "streams": "2", "prompt": 32, "tokens": 4, "repeat": 1}
QUICK |= {"many": 6, "slots": 2, "starts": 4}
SHAPES = {"0.6B": checkpoints.QWEN3_0_6B, "8B": checkpoints.QWEN3_8B}


def make_adapter(path: Path, base: Path, rank: int, seed: int) -> Path:
    """Write a random adapter for all linear layers of a checkpoint."""
    torch.manual_seed(seed)
    tensors = {}
    for key, weight in load_file(base / "model.safetensors").items():
        if weight.dim() == 2 and "proj" in key:
            name = PREFIX + key.removesuffix(".weight")
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, weight.shape[1], dtype=weight.dtype)
            tensors[f"{name}.lora_B.weight"] = torch.randn(weight.shape[0], rank, dtype=weight.dtype) / 1000
    path.mkdir()
    (path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    save_file(tensors, path / WEIGHTS)
    return path


class Modes:
    """Engines with and without adapters over one model."""

    def __init__(self, path: Path, names: dict[str, Path], settings: Settings, most: int) -> None:
        blocks = most * (-(-(16 + settings.tokens) // 16) + 1) + settings.prompt // 8
        config = EngineConfig(
            model=str(path), dtype=settings.dtype, num_blocks=blocks, max_num_batched_tokens=max(512, settings.prompt)
        )
        modules = ",".join(f"{name}={folder}" for name, folder in names.items())
        loaded = replace(config, lora_modules=modules, max_loras=len(names), max_lora_rank=max(16, settings.rank))
        with_adapters = Engine(loaded)
        self._engines = {mode: with_adapters for mode in MODES} | {"base": Engine(config, runner=with_adapters.runner)}
        assert with_adapters.adapters is not None
        self._digests = [one.digest for one in with_adapters.adapters.listing()]
        self.booked, self.spent = (
            0.0,
            0.0,
        )  # CPU seconds of bookkeeping, and of all, of steps without adapters on such an engine
        self._begin_step: Any = with_adapters.adapters.begin_step
        with_adapters.adapters.begin_step = self._begin  # type: ignore[method-assign]

    def _begin(self, plan: StepPlan) -> None:
        started = time.thread_time()
        self._begin_step(plan)
        self.booked += time.thread_time() - started

    def run(self, mode: str, streams: int, prompt: int, tokens: int) -> float:
        """Return the seconds of the steps: of the prompts if they get one token, else of those behind the first tokens."""
        engine, digests = self._engines[mode], {"one": self._digests[:1], "all": self._digests}.get(mode, [b""])
        for i in range(streams):
            ids = [(7 * i + 3 * at) % 250 for at in range(prompt)]
            sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
            salt = str(time.perf_counter())
            seq = engine.new_sequence(
                str(i), Request(prompt=ids, sampling=sampling, salt=salt, adapter=digests[i % len(digests)])
            )
            if seq.adapter is not None:
                assert engine.adapters is not None and engine.adapters.acquire(seq)
            engine.add(seq)
        waiting, started = streams if tokens > 1 else 0, report.now()
        booked, spent = self.booked, time.process_time()
        while engine.has_work:
            result = engine.step()
            for seq in result.sampled:
                waiting -= seq.output.num_generated == 1
                if seq.output.finish_reason() is not None:
                    engine.remove(seq)
            if waiting > 0:
                started = report.now()
        seconds = report.now() - started
        self.spent += time.process_time() - spent if mode == "loaded" else 0
        self.booked = self.booked if mode == "loaded" else booked
        if engine.adapters is not None:
            engine.adapters.begin_step(StepPlan())  # so that the layers, which the engines share, add nothing
        return seconds


def cold_starts(path: Path, adapter: Path, settings: Settings) -> dict[str, float]:
    """Return how long first tokens take, in ms, of adapters with and without a slot: one adapter with other alphas."""
    names = {f"m{i}": path.parent / f"m{i}" for i in range(settings.many)}
    for alpha, folder in enumerate(names.values(), 1):
        folder.mkdir()
        (folder / WEIGHTS).symlink_to(adapter / WEIGHTS)
        of = {"peft_type": "LORA", "r": settings.rank, "lora_alpha": alpha}
        (folder / CONFIG).write_text(json.dumps(of))
    modules = ",".join(f"{name}={folder}" for name, folder in names.items())
    busy, most = settings.slots // 2, 64 + 4 * settings.starts  # tokens of a sequence that decodes until the end
    blocks = busy * (most // 16 + 2) + settings.prompt // 4
    config = EngineConfig(model=str(path), dtype=settings.dtype, num_blocks=blocks, lora_modules=modules)
    engine = Engine(replace(config, max_loras=settings.slots, max_lora_rank=max(16, settings.rank)))
    adapters, now = engine.adapters, report.now
    assert adapters is not None
    digests, found = [one.digest for one in adapters.listing()], dict[str, list[float]]()

    def start(digest: bytes, prompt: int, tokens: int) -> tuple[Any, float]:
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        request = Request(
            prompt=[7 * i % 250 for i in range(prompt)], sampling=sampling, salt=str(now()), adapter=digest
        )
        seq = engine.new_sequence(str(now()), request)
        started = now()
        assert adapters.acquire(seq)
        seconds = now() - started
        engine.add(seq)
        while not seq.output.num_generated:
            engine.step()
        return seq, seconds

    for digest in digests[:busy]:
        start(digest, 16, most)
    for i in range(settings.starts):
        for kind in ("cold", "warm"):
            started = now()
            seq, load = start(digests[busy + i % (settings.many - busy)], settings.prompt, 2)
            found.setdefault(kind, []).append(1e3 * (now() - started))
            found.setdefault(f"{kind} load", []).append(1e3 * load)
            engine.remove(seq)
    row = {f"{kind} {p}": _percentile(found[kind], p) for kind in ("warm", "cold") for p in (50, 99)}
    row["load"] = statistics.median(found["cold load"])
    return row | {"cold 99 by warm 99 + load": row["cold 99"] / (row["warm 99"] + row["load"])}


def _percentile(values: list[float], percent: int) -> float:
    return sorted(values)[(len(values) - 1) * percent // 100]


def benchmark(settings: Settings) -> None:
    """Measure steps of prompts and of decoding sequences, with and without adapters."""
    settings = settings.sized(QUICK).threaded()
    transformers.logging.set_verbosity_error()
    shape = replace(SHAPES[settings.shape], layers=settings.layers, vocabulary=checkpoints.BYTE_VOCABULARY)
    batches = [int(one) for one in settings.streams.split(",")]
    tasks = {"prefill": (1, settings.prompt, 1)} | {f"decode, {n} at once": (n, 16, settings.tokens) for n in batches}
    found: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoints.make(shape, Path(folder) / "model")
        names = {
            f"a{i}": make_adapter(Path(folder) / f"a{i}", path, settings.rank, i) for i in range(settings.adapters)
        }
        modes = Modes(path, names, settings, max(batches))
        adapter_bytes = next(iter(names.values())).joinpath(WEIGHTS).stat().st_size
        base_bytes = (path / "model.safetensors").stat().st_size
        for turn in range(settings.repeat + 1):  # the first one warms up
            for task, sizes in tasks.items():
                for mode in MODES[turn % len(MODES) :] + MODES[: turn % len(MODES)]:
                    seconds = modes.run(mode, *sizes)
                    if turn:
                        found.setdefault((task, mode), []).append(seconds)
        cold = cold_starts(path, names["a0"], settings)
    rows: list[dict[str, Any]] = []
    for task, (streams, _, _) in tasks.items():
        base, row = found[task, "base"], {"task": task, "base ms": 1e3 * statistics.median(found[task, "base"])}
        for mode in MODES[1:]:
            ratios = [one / other for one, other in zip(found[task, mode], base, strict=True)]
            row |= {mode: statistics.median(ratios), f"{mode}, all rounds": [report.rounded(one, 3) for one in ratios]}
        rows.append(row | {"roofline": 1 + min(streams, settings.adapters) * adapter_bytes / base_bytes})
    report.show([{name: value for name, value in row.items() if "rounds" not in name} for row in rows])
    content = {"rows": rows, "bookkeeping": modes.booked / modes.spent, "cold starts, ms": cold}
    report.show([{"bookkeeping": content["bookkeeping"], **cold}])
    print(report.write("adapters", settings, content))


if __name__ == "__main__":
    report.main(command_from_config(Settings, benchmark))

"""The engine beside transformers under requests of mixed lengths, also with three answers: `python benchmarks/mixed.py`.

That is where continuous batching and paging gain: transformers computes a batch until its longest answer ends, and pads
prompts to the longest. Both are in this process and take turns, with the same weights, requests and answers' lengths; only
tokens that were asked for count. Lengths are log-normal around `--prompt-tokens` and `--output-tokens`.
"""

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import checkpoints
import peer_process
import report
import torch
import transformers
from rich.console import Console

from pdserve.cli.flags import command_from_config
from pdserve.config import EngineConfig, flag
from pdserve.engine.engine import Engine
from pdserve.request import Request, SamplingParams

SMALL = replace(checkpoints.TINY, layers=8, hidden=512, heads=8, kv_heads=4, head_dim=64, intermediate=1536)
SHAPES = {"small": SMALL, "0.6b": checkpoints.QWEN3_0_6B}
SPREAD = 1.0  # standard deviation of the logarithm of a length
LONGEST = 6  # times the mean


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    shape: str = flag("small, or 0.6b", "0.6b", choices=tuple(SHAPES))
    requests: int = flag("all there at once", 32, least=1)
    batch: int = flag("answers in a batch of transformers, and sequences at once of ours", 16, least=3)
    prompt_tokens: int = flag("in the mean", 96, least=8)
    output_tokens: int = flag("in the mean", 48, least=8)
    answers: str = flag("to each prompt, sampled if there are several", "1,3")
    repeat: int = flag("rounds", 3, least=1)
    threads: int | None = flag("CPU threads; default: all cores", None)


QUICK = {"requests": 4, "batch": 6, "prompt_tokens": 12, "output_tokens": 8, "repeat": 1}
Load = list[tuple[list[int], int]]  # prompt, and tokens of each of its answers


def draw(settings: Settings, vocabulary: int, turn: int) -> Load:
    """Return requests, new ones for each turn, so that no prefix cache helps."""
    drawn = random.Random(turn)

    def length(mean: int) -> int:
        return min(LONGEST * mean, max(1, round(drawn.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD))))

    return [
        ([drawn.randrange(vocabulary) for _ in range(length(settings.prompt_tokens))], length(settings.output_tokens))
        for _ in range(settings.requests)
    ]


def ours(engine: Engine, load: Load, answers: int) -> None:
    """Answer all requests with our engine."""
    for number, (prompt, tokens) in enumerate(load):
        temperature = 0.0 if answers == 1 else 1.0
        sampling = SamplingParams(max_tokens=tokens, temperature=temperature, seed=0, ignore_eos=True)
        first = engine.new_sequence(str(number), Request(prompt=prompt, sampling=sampling))
        first.lead(engine.new_siblings(first, [(f"{number}-{one}", one) for one in range(1, answers)]))
        engine.add(first)
    while engine.has_work:
        for seq in engine.step().sampled:
            if seq.output.finish_reason() is not None:
                engine.remove(seq)


@torch.inference_mode()
def theirs(model: Any, load: Load, answers: int, batch: int) -> None:
    """Answer all requests with `generate`, in batches in order of arrival, each until its longest answer ends."""
    for start in range(0, len(load), batch // answers):
        part = load[start : start + batch // answers]
        longest = max(len(prompt) for prompt, _ in part)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in part])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in part])
        tokens = max(tokens for _, tokens in part)
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=answers > 1,
            num_return_sequences=answers,
            pad_token_id=0,
        )


def measure(work: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds and the CPU seconds of some work."""
    started, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - cpu


def run(settings: Settings) -> None:
    """Measure both in turns."""
    shape = checkpoints.TINY if settings.quick else SHAPES[settings.shape]
    settings = settings.sized(QUICK)
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    transformers.logging.set_verbosity_error()
    rows = list[dict[str, Any]]()
    with peer_process.checkpoint(shape, "") as path, Console(stderr=True).status("loading") as status:
        config = EngineConfig(
            model=str(path), dtype=shape.dtype, device="cpu", max_num_seqs=settings.batch, num_blocks=4096
        )
        engine = Engine(config)
        dtype = checkpoints.torch_dtype(shape.dtype)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        for answers in map(int, settings.answers.split(",")):
            times: dict[str, list[tuple[float, float, int]]] = {"pdserve": [], "transformers": []}
            for turn in range(settings.repeat + 1):
                load = draw(settings, shape.vocabulary, 100 * answers + turn)
                load = load if turn else load[:2]  # warms up
                tokens = answers * sum(tokens for _, tokens in load)
                status.update(f"{answers} answers, round {turn}")
                works: dict[str, Callable[[], None]] = {
                    "pdserve": partial(ours, engine, load, answers),
                    "transformers": partial(theirs, model, load, answers, settings.batch),
                }
                for name, work in works.items():
                    times[name].append((*measure(work), tokens))
            rates = {
                name: [statistics.median(one[2] / one[kind] for one in several[1:]) for kind in (0, 1)]
                for name, several in times.items()
            }
            base = rates["transformers"]
            rows += [
                {
                    "answers": answers,
                    "engine": name,
                    "tokens_per_s": round(rate[0], 1),
                    "tokens_per_cpu_s": round(rate[1], 1),
                }
                | {"beside": round(rate[0] / base[0], 2), "beside_in_cpu": round(rate[1] / base[1], 2)}
                for name, rate in rates.items()
            ]
    report.show(rows)
    print(report.write("mixed", settings, {"model": asdict(shape), "rows": rows}))


if __name__ == "__main__":
    report.main(command_from_config(Settings, run))

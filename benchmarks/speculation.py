"""Speculation without a model against none, in process: `python benchmarks/speculation.py`.

Tasks: the answer is the prompt's text of 600 tokens with 30 places changed (edit), or goes on with another text (prose), or
drafts are random (random). A checkpoint of a real shape with random weights computes every step; then the logits of the
answer's token are raised, so that the answer is known and the proposers see a real text. Modes take turns in each round. The
share of proposing is that of the drafter's CPU time, of the CPU time of all threads.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import checkpoints
import peer_process
import report
import torch
import transformers

from pdserve.cli.flags import command_from_config
from pdserve.config import EngineConfig, flag
from pdserve.costs import CostMeter
from pdserve.engine.engine import Engine
from pdserve.engine.model_runner import ModelRunner, StepInputs
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import StepOutcome, StepPlan
from pdserve.engine.warm_up import warm_up
from pdserve.keys import token_array
from pdserve.request import Request, SamplingParams
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.speculation.speculator import Speculator

ROOT = Path(__file__).parent.parent
MODES = ("off", "ngram", "suffix", "auto")
RAISED = 1e4  # more than any logit


@dataclass(frozen=True, kw_only=True)
class Settings(report.EngineSettings):
    shape: str = flag("of Qwen3: 0.6b; or demo", "0.6b")
    dtype: str = flag("of weights and KV: bfloat16, float32", "bfloat16")
    tokens: int = flag("of the text and of the answer", 600)
    changes: int = flag("places of the text that the answer changes", 30)
    streams: str = flag("streams at once, of the tasks beside edit", "1,8,32")
    repeat: int = flag("rounds; all modes take turns in each", 12)


QUICK = {"tokens": 40, "changes": 3, "streams": "1,2", "repeat": 1}


@dataclass(frozen=True)
class Task:
    """Prompts and the answers that they get. `drafts` are random ones, in place of those of the mode."""

    name: str
    prompts: list[list[int]]
    answers: list[list[int]]
    drafts: str = ""


class Chance:
    """Follows each sequence in a random text, in place of one in which its last tokens have stood."""

    def __init__(self, vocabulary: int) -> None:
        self._drawn = random.Random(0)
        self._text = token_array([self._drawn.randrange(vocabulary) for _ in range(4096)])

    def __call__(self, seq: Sequence, followed: Any) -> None:
        followed.follow(self._text, self._drawn.randrange(1, 2048), 3)


class Timed:
    """CPU seconds that an engine's thread takes to propose drafts, and to add them to its steps."""

    def __init__(self, engine: Engine) -> None:
        self.seconds = 0.0
        for owner, name in ((engine, "_draft"), (engine.drafter, "end")):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            started = time.thread_time()
            result = function(*arguments)
            self.seconds += time.thread_time() - started
            return result

        return call


class Machine:
    """Engines of all modes over one model, whose answers are those of the task."""

    def __init__(self, path: Path, settings: Settings, blocks: int) -> None:
        device, dtype = settings.device, settings.dtype
        config = EngineConfig(model=str(path), dtype=dtype, device=device, num_blocks=blocks, speculate="off")
        self.engines = {"off": Engine(config)}
        runner = self.engines["off"].runner
        assert isinstance(runner, ModelRunner)
        for mode in MODES[1:]:
            self.engines[mode] = Engine(replace(config, speculate=mode), runner=runner)
        self._timed = {mode: Timed(engine) for mode, engine in self.engines.items() if engine.drafter is not None}
        self._step, self._forward, self._plan = runner.step, runner.forward, StepPlan()
        self._texts: dict[str, list[int]] = {}
        self._meter = CostMeter()
        for work, seconds in warm_up(self.engines["off"]):
            self._meter.calibrate_step(work, seconds)
        setattr(runner, "step", self._stepped)  # noqa: B010 - mypy takes no assignment to a method
        setattr(runner, "forward", self._raised)  # noqa: B010

    def _stepped(self, plan: StepPlan) -> StepOutcome:
        self._plan = plan
        return self._step(plan)

    def _raised(self, inputs: StepInputs) -> torch.Tensor:
        logits_SV, rows, plan = self._forward(inputs), self._plan.rows(), self._plan
        ends = [
            seq.kv.num_computed + plan.counts[seq] + ahead for seq, ahead in zip(rows.sampled, rows.ahead, strict=True)
        ]
        tokens = [(self._texts[seq.request_id][end:] or [0])[0] for seq, end in zip(rows.sampled, ends, strict=True)]
        if tokens:
            logits_SV[range(len(tokens)), tokens] = RAISED
        return logits_SV

    def run(self, mode: str, task: Task) -> dict[str, float]:
        """Return seconds and CPU seconds of a token, from the first of the last sequence on, and what came of drafts."""
        engine = self.engines[mode]
        engine.scheduler.costs = self._meter.costs(report.now())
        timed, drafter = self._timed.get(mode), engine.drafter
        if isinstance(drafter, Speculator):
            setattr(drafter, "meet", Chance(2048) if task.drafts else Speculator.meet.__get__(drafter))  # noqa: B010
        waiting = set()
        for i, (prompt, answer) in enumerate(zip(task.prompts, task.answers, strict=True)):
            self._texts[str(i)] = [*prompt, *answer]
            sampling = SamplingParams(max_tokens=len(answer), temperature=0, ignore_eos=True)
            seq = engine.new_sequence(str(i), Request(prompt=prompt, sampling=sampling, salt=str(time.perf_counter())))
            waiting.add(seq)
            engine.add(seq)
        seqs, drafted = [*waiting], [0, 0]
        started = cpu = tokens = 0.0
        gaps: list[float] = []
        while engine.has_work:
            before = report.now()
            result = engine.step()
            if waiting:
                waiting -= {*result.sampled}
                started, cpu = report.now(), time.process_time()
                proposing = timed.seconds if timed is not None else 0.0
            else:
                self._meter.record_step(result.work, True, report.now() - before, before)
                tokens += result.num_tokens
                for accepted in result.outcome.values():
                    gaps += [(report.now() - before) / len(accepted.tokens)] * len(accepted.tokens)
            for proposed, right in result.drafted:
                drafted = [drafted[0] + proposed, drafted[1] + right]
            for seq in result.sampled:
                if seq.output.finish_reason() is not None:
                    engine.remove(seq)
        seconds, cpu = report.now() - started, time.process_time() - cpu
        assert [seq.output.generated.tolist() for seq in seqs] == [task.answers[int(seq.request_id)] for seq in seqs]
        proposing = timed.seconds - proposing if timed is not None else 0.0
        return {
            "seconds": seconds / tokens,
            "cpu": cpu / tokens,
            "itl_p50": statistics.median(gaps),
            "drafts": drafted[0],
            "accepted": drafted[1],
            "proposing": proposing / cpu,
        }


def benchmark(settings: Settings) -> None:
    """Measure tokens with and without speculation."""
    settings = settings.sized(QUICK).threaded()
    transformers.logging.set_verbosity_error()
    tasks = make_tasks(settings)
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    blocks = max(
        sum(-(-(len(p) + len(a) + 32) // 16) for p, a in zip(t.prompts, t.answers, strict=True)) for t in tasks
    )
    with peer_process.checkpoint(_shape(settings), "") as path:
        machine = Machine(path if settings.shape != "demo" else ROOT / "pdserve/demo_model", settings, blocks + 64)
        for turn in range(settings.repeat + 1):  # the first one warms up
            for task in tasks:
                modes = [*MODES] if task.name == "edit" else ["off", "auto"]
                for mode in modes[turn % len(modes) :] + modes[: turn % len(modes)]:
                    row = machine.run(mode, task)
                    if turn:
                        found.setdefault((task.name, mode), []).append(row)
    rows = [_row(task, mode, several, found[task, "off"]) for (task, mode), several in found.items()]
    report.show(rows)
    print(report.write("speculation", settings, {"rows": rows}))


def make_tasks(settings: Settings) -> list[Task]:
    """Return an edit by one stream, and texts without repetition and random drafts by several."""
    drawn = random.Random(1)
    pages = [ROOT / "docs" / name for name in ("architecture.md", "operations.md", "api.md", "slo.md")]
    tokenizer = Tokenizer(ROOT / "pdserve/demo_model")
    text = [token for page in pages for token in tokenizer.encode(page.read_text())]
    size = settings.tokens
    original = text[:size]
    edited = list(original)
    for at in drawn.sample(range(4, size - 4), settings.changes):
        edited[at] = drawn.choice(text)
    tasks = [Task("edit", [original], [edited])]
    for streams in map(int, settings.streams.split(",")):
        starts = [drawn.randrange(len(text) - size) for _ in range(streams)]
        prompts, answers = (
            [text[at : at + size // 3] for at in starts],
            [text[at + size // 3 : at + size // 2] for at in starts],
        )
        tasks += [Task(f"prose × {streams}", prompts, answers), Task(f"random × {streams}", prompts, answers, "random")]
    return tasks


def _shape(settings: Settings) -> checkpoints.Shape:
    shape = checkpoints.TINY if settings.quick or settings.shape == "demo" else checkpoints.QWEN3_0_6B
    return replace(shape, dtype=settings.dtype, vocabulary=max(2048, shape.vocabulary))


def _row(task: str, mode: str, several: list[dict[str, float]], off: list[dict[str, float]]) -> dict[str, Any]:
    ratios = [one["cpu"] / other["cpu"] for one, other in zip(several, off, strict=True)]
    spread = 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    middle = {name: statistics.median(one[name] for one in several) for name in several[0]}
    return {
        "task": task,
        "mode": mode,
        "tokens/s": f"{1 / middle['seconds']:.1f}",
        "ITL p50 ms": f"{1000 * middle['itl_p50']:.2f}",
        "ITL of off": f"{middle['itl_p50'] / statistics.median(one['itl_p50'] for one in off):.2f}",
        "CPU of off": f"{statistics.mean(ratios):.3f} ± {spread:.3f}",
        "drafts": int(middle["drafts"]),
        "accepted": f"{middle['accepted'] / middle['drafts']:.2f}" if middle["drafts"] else "",
        "proposing": f"{middle['proposing']:.2%}",
    }


if __name__ == "__main__":
    report.main(command_from_config(Settings, benchmark))

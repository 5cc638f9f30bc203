"""Compression and accuracy of KV codecs: `python benchmarks/kv_codecs.py`.

Documents are cut into a prompt and a continuation. The prompt's KV is computed and passed through a codec block by block,
and the continuation's logits are computed over the decoded KV. The continuation's tokens are given, so that a single
different choice does not change all later ones. The logits are compared with those over the original KV.
"""

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import report
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from pdserve.cli.flags import command_from_config
from pdserve.config import DTYPES, EngineConfig, flag
from pdserve.engine.engine import Engine
from pdserve.engine.sequence import Sequence as TokenSequence
from pdserve.engine.step import StepPlan
from pdserve.keys import token_array
from pdserve.kv_transfer.codec import CODECS, Codec
from pdserve.kv_transfer.header import Row
from pdserve.kv_transfer.staging import host_rows
from pdserve.model_path import resolve_model
from pdserve.request import SamplingParams

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
import demo_text


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    model: str = flag("a local directory, or `demo` for the bundled model", "demo")
    dtypes: str = flag("of weights and KV, comma separated", "bfloat16,float16,float32")
    documents: int = flag("how many, each drawn anew from the demo model's kind of text", 32)
    prompt_tokens: int = flag(
        "of each, passed through the codec; not a multiple of 16, so that one block is partial", 500
    )
    next_tokens: int = flag("of each, whose logits are compared", 64)
    speed: bool = flag("also time encoding and decoding beside a memcpy, on one thread; wants idle cores", False)

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that can never work."""
        for name in self.dtypes.split(","):
            if name not in DTYPES:
                raise ValueError(f"--dtypes {name!r} is not known; there are: {', '.join(DTYPES)}")


QUICK = {"dtypes": "bfloat16", "documents": 2, "prompt_tokens": 100, "next_tokens": 8}
SPEED_S = 0.5  # per measurement


class Bench:
    """One model in one dtype, with a pool for one sequence."""

    def __init__(self, settings: Settings, dtype: str, documents: Sequence[list[int]]) -> None:
        self._settings = settings
        self._documents = documents
        tokens = settings.prompt_tokens + settings.next_tokens
        self._engine = Engine(
            EngineConfig(model=settings.model, dtype=dtype, device="cpu", num_blocks=tokens // 16 + 1)
        )
        self._engine.checkpoint.model.register_forward_hook(self._keep_logits)
        self._engine.runner.graphs = None  # no CUDA graphs: each step runs the model
        self.layout = self._engine.layout
        self._rows = host_rows(self._engine.runner.kv.pool_NL2GBD)
        self._given = self._engine.pool.blocks_for(settings.prompt_tokens)
        self._logits = torch.empty(0)
        self.computed = [self._prefill(document) for document in documents]
        self._exact = self._all_logits(self.computed)

    def through(self, codec: Codec) -> dict[str, Any]:
        """Return the prompts' KV after encoding and decoding."""
        payloads = [[codec.encode(row).tobytes() for row in rows] for rows in self.computed]
        decoded = [np.stack([codec.decode(payload) for payload in each]) for each in payloads]
        logits = self._all_logits(decoded)
        difference, agree = (logits - self._exact).abs(), logits.argmax(-1) == self._exact.argmax(-1)
        crossed, whole = sum(len(one) for each in payloads for one in each), sum(rows.nbytes for rows in self.computed)
        return {
            "bytes_of_raw": round(crossed / whole, 4),
            "kv_equal": all(np.array_equal(one, other) for one, other in zip(decoded, self.computed, strict=True)),
            "logits_max_error": round(difference.max().item(), 5),
            "logits_mean_error": round(difference.mean().item(), 6),
            "logits_spread": round(self._exact.std(-1).mean().item(), 3),
            "greedy_agreement": round(agree.float().mean().item(), 5),
        }

    def speed(self, codec: Codec) -> dict[str, float]:
        """Return the rates of encoding and decoding, relative to a memcpy of the same blocks."""
        rows = self.computed[0]
        payloads = [codec.encode(row).tobytes() for row in rows]
        target = rows.copy()

        def copy_all() -> None:
            for to, row in zip(target, rows, strict=True):
                np.copyto(to, row)

        copy = _seconds(copy_all)
        return {
            "encode_of_memcpy": round(copy / _seconds(lambda: [codec.encode(row) for row in rows]), 4),
            "decode_of_memcpy": round(copy / _seconds(lambda: [codec.decode(one) for one in payloads]), 4),
        }

    def _prefill(self, document: list[int]) -> Row:
        """Return the blocks of a prompt; the tail of the last block is zero, as when it leaves an instance."""
        count, runner = self._settings.prompt_tokens, self._engine.runner
        runner.step(StepPlan({self._sequence(document, 0): count}))
        if count % self.layout.block_size:
            runner.kv.clear_tail(self._given - 1, count % self.layout.block_size)
        return self._rows[: self._given].copy()

    def _all_logits(self, blocks: Sequence[Row]) -> torch.Tensor:
        """Return logits [documents, next tokens, vocabulary], with these blocks as the prompts' KV."""
        return torch.stack([self._next_logits(*each) for each in zip(self._documents, blocks, strict=True)])

    def _next_logits(self, document: list[int], rows: Row) -> torch.Tensor:
        self._rows[: self._given] = rows
        seq, logits = self._sequence(document, self._settings.prompt_tokens), []
        for _ in range(self._settings.next_tokens):
            self._engine.runner.step(StepPlan({seq: 1}))
            seq.mark_computed(1)
            logits.append(self._logits)
        return torch.stack(logits)

    def _sequence(self, document: list[int], computed: int) -> TokenSequence:
        seq = self._engine.new_sequence("", document, SamplingParams(max_tokens=1))
        seq.tokens = token_array([*document, 0])  # never complete, so nothing is sampled
        seq.take_blocks(0, [], list(range(self._engine.pool.num_blocks)))
        seq.mark_loaded(computed)
        return seq

    def _keep_logits(self, _: torch.nn.Module, __: Any, output: Any) -> None:
        self._logits = output.logits[0, 0].float()


def benchmark(settings: Settings) -> None:
    """Measure each codec: transferred bytes, and the error of the logits."""
    settings = settings.sized(QUICK)
    documents = _documents(settings)
    rows: list[dict[str, Any]] = []
    with Console(stderr=True).status("…") as status:
        for dtype in settings.dtypes.split(","):
            status.update(f"{dtype}: prefill")
            bench = Bench(settings, dtype, documents)
            for name in CODECS:
                status.update(f"{dtype}: {name}")
                codec = CODECS[name](bench.layout)
                row = {"dtype": dtype, "codec": name} | bench.through(codec)
                rows.append(row | (bench.speed(codec) if settings.speed and not codec.is_identity else {}))
    _print(rows)
    print(report.write("kv_codecs", settings, {"rows": rows}))


def _documents(settings: Settings) -> list[list[int]]:
    """Return the token ids of each document, prompt and continuation together."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(settings.model))
    rng, wanted = random.Random(0), settings.prompt_tokens + settings.next_tokens
    documents = []
    for _ in range(settings.documents):
        ids: list[int] = []
        while len(ids) < wanted:
            ids += tokenizer.encode(demo_text.draw_long_document(rng, wanted).text)
        documents.append(ids[:wanted])
    return documents


def _seconds(run: Callable[[], Any]) -> float:
    """Return the best of many tries."""
    best, give_up = float("inf"), time.perf_counter() + SPEED_S
    while time.perf_counter() < give_up:
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(show_edge=False, pad_edge=False)
    for column in rows[-1]:
        table.add_column(column.replace("_", " "), justify="left" if column in ("dtype", "codec") else "right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    report.show(table)


if __name__ == "__main__":
    report.main(command_from_config(Settings, benchmark))

"""Blocks saved by sharing between the sequences of a request; part of `memory.py`.

The real engine and block pool serve one request after the other, with a runner that draws log probabilities instead of
computing them. Saved is the share of blocks, over all steps, that separate sequences would hold in addition.
"""

import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

from pdserve.beam_search import Candidate
from pdserve.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.paced_runner import PacedRunner
from pdserve.engine.step import StepOutcome, StepPlan
from pdserve.keys import Layout
from pdserve.request import SamplingParams

# Kwon et al., SOSP 2023, table and section 6.3: mean lengths, and percent of blocks saved with 2 to 6 sequences.
DATASETS = {"alpaca": (19.31, 58.45), "sharegpt": (161.31, 337.99)}
PUBLISHED = {
    ("alpaca", "parallel"): (6.1, 9.8),
    ("sharegpt", "parallel"): (16.2, 30.5),
    ("alpaca", "beams"): (37.6, 55.2),
    ("sharegpt", "beams"): (44.3, 66.3),
}
SEQUENCES = (2, 4, 6)
TOKENS = 200  # of the distribution from which each next token comes
SPREAD = 3.0  # standard deviation of its logits


class RandomRunner(PacedRunner):
    """A runner whose candidates are those of a random language model: softmax of normally distributed logits."""

    def __init__(self, config: EngineConfig, max_model_len: int, seed: int) -> None:
        layout = Layout(
            model_fingerprint="random",
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            block_size=config.block_size,
            dtype="uint8",
            itemsize=1,
        )
        no_time = lambda _: 0.0  # noqa: E731
        super().__init__(
            config, layout, max_model_len, no_time, no_time, lambda _: None, vocab_size=TOKENS, block_bytes=1
        )
        self._random = random.Random(seed)

    def step(self, plan: StepPlan) -> StepOutcome:
        sampled = plan.rows().sampled
        for seq in sampled:
            if seq.group is not None:
                seq.record_candidates(self._candidates(seq.group.search.num_candidates))
        return plan.outcome([(seq, self._random.randrange(TOKENS), None) for seq in sampled if seq.group is None])

    def _candidates(self, count: int) -> list[Candidate]:
        logits = [self._random.gauss(0, SPREAD) for _ in range(TOKENS)]
        total = math.log(sum(map(math.exp, logits)))
        best = sorted(range(TOKENS), key=lambda token: -logits[token])[:count]
        return [(token, logits[token] - total) for token in best]


def measure(requests: int, block_size: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield a row for each data set, kind and number of sequences, over requests of exponentially distributed lengths."""
    for (name, kind), published in PUBLISHED.items():
        for count in SEQUENCES:
            rng = random.Random(seed)
            lengths = [[max(1, round(rng.expovariate(1 / mean))) for mean in DATASETS[name]] for _ in range(requests)]
            longest = max(map(sum, lengths))
            config = EngineConfig(model=name, num_blocks=count * (longest // block_size + 3), block_size=block_size)
            engine = Engine(config, runner=RandomRunner(config, longest, seed))
            totals = [_run(engine, inputs, outputs, count, kind == "beams") for inputs, outputs in lengths]
            held, separate = (sum(column) for column in zip(*totals, strict=True))
            saved = round(100 * (1 - held / separate), 1)
            yield {"data set": name, "kind": kind, "sequences": count, "saved_percent": saved, "published": published}


def _run(engine: Engine, num_prompt: int, num_output: int, count: int, beams: bool) -> tuple[int, int]:
    """Serve one request. Returns the blocks held, and those of all its sequences, both summed over the steps."""
    engine.pool.clear_cache()
    sampling = SamplingParams(max_tokens=num_output, beam_width=count if beams else 0, ignore_eos=True)
    seq = engine.new_sequence("r", [1] * num_prompt, sampling)
    if not beams:
        seq.lead(engine.new_siblings(seq, [(str(i), i) for i in range(1, count)]))
    engine.add(seq)
    held = separate = 0
    while engine.has_work:
        result = engine.step()
        held += engine.pool.num_held
        separate += sum(len(one.held_blocks) for one in engine.scheduler.sequences())
        over = [one for one in result.sampled if one.finish_reason()]
        over += [one for one in result.advanced if one.group is not None and one.group.search.is_over]
        for one in over:
            engine.remove(one)
    return held, separate


def table(rows: list[Mapping[str, Any]]) -> list[list[str]]:
    """Return the cells of a table: one line for each data set and kind."""
    lines = []
    for name, kind in PUBLISHED:
        mine = [row for row in rows if (row["data set"], row["kind"]) == (name, kind)]
        low, high = mine[0]["published"]
        lines.append([name, kind, *(f"{row['saved_percent']:.1f} %" for row in mine), f"{low} to {high} %"])
    return lines

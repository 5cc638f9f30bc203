"""Requests of every kind and proposers of every kind, to compare outputs with and without speculation."""

import json
import random
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from pdserve.config import EngineConfig
from pdserve.engine.checkpoint import Checkpoint
from pdserve.engine.engine import Engine
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Drafter, StepPlan
from pdserve.reasoning import ReasoningSpan
from pdserve.request import Request, SamplingParams, TokenLogprobs

TOKENS = 40  # of each output, at most
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}
JSON, CHOICE = json.dumps({"json": SCHEMA}), json.dumps({"choice": ["aaaaaaaaaaaaaaaab", "aaaaaaaaaaaaaaaac"]})
THOUGHT = ReasoningSpan(start=(), ends=((65, 66),), closing=(65, 66), budget=6)
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.2, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_p": 0.8},
    {"temperature": 1.2, "seed": 3, "min_p": 0.1},
    {"temperature": 0.9, "seed": 4, "top_k": 20, "logprobs": 2},
    {"temperature": 0, "logprobs": 5},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0.5, "seed": 5, "frequency_penalty": 0.4, "presence_penalty": 0.3, "logprobs": 0},
    {"temperature": 0, "logit_bias": {7: 4.0, 9: -3.0}},
    {"temperature": 0, "bad_words": ((7,), (9, 9), (30, 31))},
    {"temperature": 0.8, "seed": 6, "allowed_token_ids": (1, 2, 3)},
    {"temperature": 0, "allowed_token_ids": (4, 5), "stop_token_ids": (4,), "min_tokens": 9},
    {"temperature": 1.0, "seed": 7, "stop_token_ids": tuple(range(0, 64, 2)), "min_tokens": 3},
    {"temperature": 0, "grammar": JSON},
    {"temperature": 1.0, "seed": 8, "grammar": JSON, "logprobs": 1},
    {"temperature": 0.6, "seed": 9, "grammar": CHOICE},
    {"temperature": 0, "reasoning": THOUGHT, "grammar": CHOICE},
    {"temperature": 1.0, "seed": 10, "reasoning": THOUGHT, "grammar": JSON, "repetition_penalty": 1.1},
]
PROMPTS = [[(i * 7 + j * (1 + i % 3)) % (5 + i) for j in range(2 + 11 * (i % 5))] for i in range(len(KINDS))]
Answer = tuple[list[int], list[TokenLogprobs]]


def changed(source: Path, path: Path, noise: float = 0.004, vocab_size: int | None = None) -> Path:
    """Write a copy of a model with noise in its weights, and another number of tokens: it often draws the same token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    model.resize_token_embeddings(vocab_size)
    shutil.copytree(source, path, dirs_exist_ok=True)
    model.save_pretrained(path)
    return path


def samplings() -> list[SamplingParams]:
    return [SamplingParams(max_tokens=TOKENS, **{"ignore_eos": "grammar" not in kind, **kind}) for kind in KINDS]


@dataclass
class Known(Drafter):
    """Proposes `length` tokens of known answers, of which every `wrong_every`-th ends with a wrong one; 0: none."""

    answers: list[Answer]
    length: int
    wrong_every: int = 0
    num_proposed: int = 0

    def propose(self, plan: StepPlan) -> Mapping[Sequence, list[int]]:
        return {seq: self._drafts(seq) for seq in plan.counts if plan.takes_drafts(seq)}

    def _drafts(self, seq: Sequence) -> list[int]:
        at = seq.output.num_generated
        drafts = self.answers[int(seq.request_id)][0][at : at + self.length]
        if drafts and self.wrong_every and at % self.wrong_every == 0:
            drafts = [*drafts[:-1], drafts[-1] ^ 1]
        self.num_proposed += len(drafts)
        return drafts


@dataclass
class Chance(Drafter):
    """Proposes random tokens."""

    length: int
    generator: random.Random = field(default_factory=lambda: random.Random(3))

    def propose(self, plan: StepPlan) -> Mapping[Sequence, list[int]]:
        return {
            seq: [self.generator.randrange(260) for _ in range(self.length)]
            for seq in plan.counts
            if plan.takes_drafts(seq)
        }


class Runs:
    """Engines over one checkpoint, and their answers to the same requests."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._path, self._dtype = path, dtype
        self._checkpoint: Checkpoint | None = None
        self._ready = threading.Event()
        self.accepted: list[int] = []  # tokens of each sequence in each step in which it got some
        self.engine = self.new_engine()
        self.expected = self.answers()

    def new_engine(self, **settings: Any) -> Engine:
        config: dict[str, Any] = {
            "model": str(self._path),
            "dtype": self._dtype,
            "num_blocks": 300,
            "max_num_batched_tokens": 512,
            "speculate": "off",
        }
        engine = Engine(EngineConfig(**(config | settings)), self._checkpoint, on_grammar_ready=self._ready.set)
        self._checkpoint = engine.checkpoint
        return engine

    def use(self, proposer: str, length: int, **settings: Any) -> Engine:
        """Go on with a new engine, and return it."""
        own = {"speculate": proposer, "speculative_tokens": length} if proposer in ("ngram", "suffix", "auto") else {}
        self.engine = self.new_engine(**settings, **own)
        drafters: dict[str, Callable[[], Any]] = {
            "random": lambda: Chance(length),
            "oracle": lambda: Known(self.expected, length),
            "erring": lambda: Known(self.expected, length, wrong_every=3),
        }
        if proposer in drafters:
            self.engine.drafter = drafters[proposer]()
        return self.engine

    def are_expected(self, answers: list[Answer]) -> bool:
        """Return whether answers are those without speculation, bit for bit, but for float32's rounding in other batches."""
        if self._dtype != "float32":
            return answers == self.expected
        return all(map(_nearly_equal, answers, self.expected))

    def answers(self, migrate_after: int = 0) -> list[Answer]:
        """Return the outputs, with their log probabilities. After some steps, all go on in the engine as if they were new."""
        engine, params = self.engine, samplings()
        seqs = [engine.new_sequence(str(i), Request(prompt=PROMPTS[i], sampling=one)) for i, one in enumerate(params)]
        found: list[Answer] = [([], []) for _ in seqs]
        unfinished = set(seqs)
        for seq in seqs:
            engine.add(seq)
        step, self.accepted = 0, []
        while unfinished:
            result, step = engine.step(), step + 1
            for seq, accepted in result.outcome.items():
                tokens, logprobs = found[int(seq.request_id)]
                tokens += accepted.tokens
                logprobs += accepted.logprobs
                self.accepted += [len(accepted.tokens)] if accepted.tokens else []
                constraint = seq.output.constraint
                assert seq.output.failure is None and not (constraint and constraint.failure)
                if accepted.finish_reason:
                    engine.remove(seq)
                    unfinished.remove(seq)
            engine.pool.check_integrity()
            if result.idle and unfinished:
                assert self._ready.wait(600)
                self._ready.clear()
            if step == migrate_after:
                for seq in list(unfinished):
                    engine.remove(seq)
                    i = int(seq.request_id)
                    moved = engine.new_sequence(
                        str(i), Request(prompt=PROMPTS[i], sampling=params[i]), output=found[i][0]
                    )
                    unfinished.remove(seq)
                    unfinished.add(moved)
                    engine.add(moved)
        assert engine.pool.num_held == 0
        return found


def _nearly_equal(one: Answer, other: Answer) -> bool:
    flat = [[[(-1, of.logprob), *of.top] for of in logprobs] for _, logprobs in (one, other)]
    pairs = [pair for of_tokens in zip(*flat, strict=True) for pair in zip(*of_tokens, strict=True)]
    return one[0] == other[0] and all(a[0] == b[0] and abs(a[1] - b[1]) < 1e-4 for a, b in pairs)

"""Features: who has them, what they read of a step, and that a step without them calls none."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pdserve.config import EngineConfig
from pdserve.engine import features as features_module
from pdserve.engine.engine import Engine
from pdserve.engine.features import Embedding, PromptScores, change_logits, features_of
from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.memory.groups import SwappedKV
from pdserve.engine.memory.sequence_kv import block_table
from pdserve.engine.sequence import Feature, Sequence
from pdserve.keys import token_array
from pdserve.pooling import Pooling
from pdserve.reasoning import ReasoningSpan
from pdserve.request import Request, SamplingParams

# Fields with which a token depends on its logits and its position alone, and those that only refine another field.
PLAIN = {"max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop_token_ids", "ignore_eos"}
REFINING = {"num_answers", "length_penalty", "early_stopping", "embed"}  # `embed` comes with a pooling
SET: dict[str, Any] = {
    "logprobs": 0,
    "prompt_logprobs": 0,
    "logit_bias": {1: 1.0},
    "grammar": "json",
    "allowed_token_ids": (1,),
    "bad_words": ((1,),),
    "beam_width": 2,
    "logits_processors": "{}",
    "reasoning": ReasoningSpan(start=(), ends=((1,),), closing=(1,)),
    "min_tokens": 1,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 0.5,
}
PROMPT = [5, 9, 200, 17, 33, 4, 80, 150, 7]


def sequence(*features: Feature, tokens: int = 6, computed: int = 0) -> Sequence:
    sampling, blocks = SamplingParams(max_tokens=3), block_table([0] * 4)
    ids = token_array(range(tokens))
    return Sequence.new(
        "r", ids, tokens, tokens, sampling, b"", 4, block_ids=blocks, num_computed=computed, features=features
    )


def test_each_field_that_needs_more_than_logits_has_a_feature() -> None:
    names = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert names == PLAIN | REFINING | SET.keys(), "of a new field, say here whether it needs a feature"
    for name in names:
        params = SamplingParams(**{name: SET[name]} if name in SET else {})
        assert bool(features_of(params, 4)) == (name in SET), name
    assert features_of(SamplingParams(prompt_logprobs=1), 4, is_continued=True) == ()


def test_a_feature_changes_only_the_rows_of_its_sequences() -> None:
    biased, plain = sequence(*features_of(SamplingParams(logit_bias={2: 5.0}), 6)), sequence()
    biased.sampling = SamplingParams(logit_bias={2: 5.0})
    logits_SV = torch.zeros(3, 8)
    change_logits(logits_SV, [plain, biased, plain])
    assert logits_SV.nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("mode", "computed", "count", "rows"),
    [
        ("last", 0, 6, [5]),
        ("last", 0, 4, []),
        ("last", 4, 2, [1]),
        ("cls", 0, 4, [0]),
        ("cls", 4, 2, []),
        ("mean", 4, 2, [0, 1]),
    ],
)
def test_hidden_states_that_count(mode: str, computed: int, count: int, rows: list[int]) -> None:
    embedding = Embedding(Pooling(mode))
    seq = sequence(embedding, computed=computed)
    assert [*embedding.hidden_rows(seq, count)] == rows
    assert (seq.num_usable_hits == 0) == (mode != "last")


def test_a_preempted_sequence_pools_again_unless_its_kv_was_kept() -> None:
    for swapped, expected in ((None, [3.0, 3.0]), (SwappedKV(0, 4, [1]), [4.0, 5.0])):
        embedding = Embedding(Pooling("cls", normalize=False))
        seq = sequence(embedding)
        embedding.take_hidden(seq, torch.tensor([[1.0, 2.0]]))
        seq.kv.block_ids = block_table()
        seq.preempt(BlockPool(8, 4), swapped, is_stored=False)
        embedding.take_hidden(seq, torch.tensor([[3.0, 3.0]]))
        embedding.complete(seq, torch.nn.Identity())
        assert torch.frombuffer(bytearray(embedding.vector), dtype=torch.float32).tolist() == expected


def test_prompt_scores_read_logits_until_all_are_known() -> None:
    scores = PromptScores(1, 6)
    seq = sequence(scores)
    assert [*scores.logits_rows(seq, 4)] == [0, 1, 2, 3] and seq.reads_logits and seq.num_usable_hits == 0
    scores.take_logits(seq, torch.eye(4, 8))
    seq.kv.mark_computed(4)
    assert [*scores.logits_rows(seq, 2)] == [0]
    scores.take_logits(seq, torch.eye(1, 8))
    assert sorted(scores.scores) == [1, 2, 3, 4, 5] and not scores.logits_rows(seq, 2)
    assert not seq.reads_logits and seq.num_usable_hits == 1


class Watcher(Feature):
    """A feature of another package: keeps what it sees of its sequence, and has that in place of an output if asked to."""

    def __init__(self, has_output: bool) -> None:
        self.has_output = has_output
        self.num_hidden = self.num_completed = 0
        self.best: list[int] = []

    @property
    def reads_prompt(self) -> bool:
        return True

    def logits_rows(self, seq: Sequence, count: int) -> range:
        return range(count)

    def hidden_rows(self, seq: Sequence, count: int) -> range:
        return range(count)

    def take_hidden(self, seq: Sequence, hidden_RH: torch.Tensor) -> None:
        self.num_hidden += len(hidden_RH)

    def take_logits(self, seq: Sequence, logits_RV: torch.Tensor) -> None:
        self.best += logits_RV.argmax(dim=-1).tolist()

    def complete(self, seq: Sequence, head: torch.nn.Module) -> None:
        self.num_completed += 1


def test_a_feature_from_outside(checkpoint: Callable[..., Path], generate: Callable[..., list[list[int]]]) -> None:
    """It sees each token of its own sequence once, over chunks of the prompt, and no token of the one beside it."""
    path = checkpoint("llama")
    engine = Engine(EngineConfig(model=str(path), block_size=4, num_blocks=40, max_num_batched_tokens=5))
    plain, seen, silent = (
        engine.new_sequence(name, Request(prompt=PROMPT, sampling=SamplingParams(temperature=0, max_tokens=6)))
        for name in ("p", "s", "x")
    )
    watcher, instead = Watcher(has_output=True), Watcher(has_output=False)
    seen, silent = replace(seen, features=(watcher,)), replace(silent, features=(instead,))
    for seq in (plain, seen, silent):
        engine.add(seq)
    running = {plain, seen, silent}
    while running:
        engine.step()
        for seq in [*running]:
            if seq.output.finish_reason() or (instead.num_completed and seq is silent):
                running.remove(seq)
                engine.remove(seq)
    (expected,) = generate(path, [PROMPT], 6)
    assert plain.output.generated.tolist() == seen.output.generated.tolist() == expected
    assert watcher.best[len(PROMPT) - 1 :] == expected and watcher.num_hidden == len(PROMPT) + 5
    assert (instead.num_hidden, instead.num_completed, watcher.num_completed) == (len(PROMPT), 1, 0)
    assert instead.best == watcher.best[: len(PROMPT)] and not silent.output.num_generated


def test_a_step_without_features_calls_none(checkpoint: Callable[..., Path]) -> None:
    engine = Engine(EngineConfig(model=str(checkpoint("llama")), block_size=4, num_blocks=40))
    called = set[str]()

    def record(frame: Any, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename == features_module.__file__:
            called.add(frame.f_code.co_name)

    def run(**sampling: Any) -> None:
        seq = engine.new_sequence(
            "r", Request(prompt=PROMPT, sampling=SamplingParams(temperature=0, max_tokens=3, **sampling))
        )
        engine.add(seq)
        sys.setprofile(record)
        try:
            while seq.output.finish_reason() is None:
                engine.step()
        finally:
            sys.setprofile(None)
        engine.remove(seq)

    run()
    assert called == set()
    run(logit_bias={3: 1.0})
    assert "change_logits" in called

"""Speculation is exact: whatever is proposed, tokens and log probabilities are what they are without."""

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.engine.step import StepPlan
from pdserve.keys import KeyChain, root_key, token_array
from pdserve.request import Request, SamplingParams
from tests.engine.speculating import KINDS, PROMPTS, TOKENS, Runs
from tests.integration.drafting import accept_one_wrong

PROPOSERS = ("ngram", "suffix", "auto", "random", "oracle", "erring")
LENGTHS = (0, 1, 4, 16)
FAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "preempted": {"num_blocks": 12},
    "swapped": {"num_blocks": 12, "swap_space": 0.001},
    "pipelined": {"async_scheduling": "on"},
    "crowded": {"max_num_batched_tokens": 24, "max_num_seqs": 5},
    "migrated": {},
}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runs(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Runs:
    return Runs(checkpoint("llama", dtype="float32"), request.param)


def check(runs: Runs, proposer: str, length: int, fault: str) -> None:
    engine = runs.use(proposer, length, **FAULTS[fault])
    for _ in range(2):  # the second time with a warm prefix cache
        assert runs.are_expected(runs.answers(migrate_after=7 if fault == "migrated" else 0))
    assert (engine.scheduler.num_preemptions > 0) == (fault in ("preempted", "swapped"))
    if proposer in ("oracle", "erring") and length:
        assert max(runs.accepted) > 1


def test_requests_differ(runs: Runs) -> None:
    assert len({tuple(tokens) for tokens, _ in runs.expected}) > len(KINDS) - 4
    lengths = {len(tokens) for tokens, _ in runs.expected}
    assert TOKENS in lengths and len(lengths) > 4, "some end by themselves"


CASES = [
    ("ngram", 4, "none"),
    ("suffix", 16, "migrated"),
    ("auto", 16, "preempted"),
    ("random", 4, "swapped"),
    ("erring", 4, "none"),
    ("erring", 16, "preempted"),
    ("erring", 1, "pipelined"),
    ("erring", 4, "migrated"),
    ("oracle", 16, "crowded"),
    ("oracle", 0, "none"),
]


@pytest.mark.parametrize(
    ("runs", "proposer", "length", "fault"),
    [
        *((("float32", "bfloat16")[i % 2], *case) for i, case in enumerate(CASES)),
    ],
    indirect=["runs"],
)
def test_answers_are_the_same(runs: Runs, proposer: str, length: int, fault: str) -> None:
    check(runs, proposer, length, fault)


@pytest.mark.slow
def test_answers_are_the_same_in_every_combination(runs: Runs) -> None:
    """5,184 requests for each dtype: every proposer, length, fault and kind together."""
    for proposer, length, fault in product(PROPOSERS, LENGTHS, FAULTS):
        check(runs, proposer, length, fault)


GROUPED = ["gemma3_mixed", "lfm2", "jamba", "kimi_linear", "falcon_h1"]
OF_GROUPED = [("oracle", 16, "none"), ("erring", 4, "preempted"), ("erring", 16, "migrated")]
MORE_OF_GROUPED = [("random", 4, "swapped"), ("suffix", 16, "crowded"), ("auto", 16, "none")]


@pytest.mark.parametrize("architecture", ["qwen3_5", *(pytest.param(name, marks=pytest.mark.slow) for name in GROUPED)])
def test_answers_of_models_with_states_or_windows_are_the_same(
    architecture: str, checkpoint: Callable[..., Path]
) -> None:
    runs, small = Runs(checkpoint(architecture, dtype="float32"), "bfloat16"), {"num_blocks": 12, "max_num_seqs": 6}
    faults = {**FAULTS, "preempted": small, "swapped": {**small, "swap_space": 0.001}}
    is_first = architecture == "qwen3_5"
    for proposer, length, fault in OF_GROUPED if is_first else OF_GROUPED + MORE_OF_GROUPED:
        engine = runs.use(proposer, length, **faults[fault])
        for _ in range(2):  # the second time with a warm prefix cache
            assert runs.are_expected(runs.answers(migrate_after=7 if fault == "migrated" else 0)), (proposer, fault)
        assert engine.scheduler.num_preemptions > 0 or fault != "preempted" or not is_first


def test_one_wrong_token_is_noticed(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.use("erring", 4)
    monkeypatch.setattr(StepPlan, "outcome", StepPlan.outcome)  # restored whatever becomes of the next line's
    accept_one_wrong()
    assert not runs.are_expected(runs.answers())


@pytest.mark.parametrize("length", [1, 4, 16])
def test_right_drafts_are_all_accepted(runs: Runs, length: int) -> None:
    engine = runs.use("oracle", length)
    for i, (tokens, _) in enumerate(runs.expected):
        seq = engine.new_sequence(
            str(i),
            Request(prompt=PROMPTS[i], sampling=SamplingParams(max_tokens=TOKENS, **{"ignore_eos": True} | KINDS[i])),
        )
        if seq.output.constraint is not None or len(tokens) < TOKENS:
            continue
        engine.add(seq)
        got = []
        while not seq.output.finish_reason():
            got += [len(one.tokens) for one in engine.step().outcome.values()]
        engine.remove(seq)
        full, rest = divmod(TOKENS - 1, length + 1)
        assert got == [1] + [length + 1] * full + ([rest] if rest else [])


class Announced:
    """A listener of the pool, which keeps the keys that it hears of."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()

    def store(self, key: bytes, parent: bytes | None, tokens: Tokens[int], group: int = 0) -> None:
        self.keys.add(key)

    def remove(self, key: bytes, group: int = 0) -> None:
        raise AssertionError("there is room for all of them")


@pytest.mark.parametrize("proposer", ["random", "erring"])
def test_only_accepted_tokens_are_keyed_and_announced(runs: Runs, proposer: str) -> None:
    """Every block with a key is one of an answer, and has the KV that it has without speculation."""
    kept = []
    for name in ("off", proposer):
        engine, announced = runs.use(name, 7), Announced()
        engine.pool.listeners.append(announced)
        assert runs.are_expected(runs.answers())
        kept.append({key: engine.runner.kv.pool_NX[engine.pool.match([key])[0]] for key in announced.keys})
    due = set()
    for prompt, (tokens, _) in zip(PROMPTS, runs.expected, strict=True):
        whole = token_array([*prompt, *tokens])
        ends = range(engine.pool.block_size, len(whole), engine.pool.block_size)  # the last token has no KV
        due |= {*KeyChain(root_key(model_digest=engine.layout.model_digest)).keys(whole, ends)}
    plain, speculated = kept
    assert speculated.keys() == plain.keys() == due
    tolerance = 0 if engine.checkpoint.dtype == torch.bfloat16 else 1e-5
    for key, block in speculated.items():
        numbers = [one.view(engine.checkpoint.dtype).float() for one in (block, plain[key])]
        assert (numbers[0] - numbers[1]).abs().max() <= tolerance

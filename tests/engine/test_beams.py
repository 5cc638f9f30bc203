"""Beam search: float32 output equals transformers' `generate(num_beams=…)`, token for token."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from pdserve.beam_search import BeamSearch, Branch
from pdserve.config import EngineConfig
from pdserve.costs import Costs
from pdserve.engine.engine import Engine
from pdserve.engine.sequence import Sequence
from pdserve.request import NO_TENANT, Request, SamplingParams, Tenant
from tests.instance.hash_model import HashRunner, beam_answers, spec_of

PROMPTS = [[i * 7 % 90 + seed for i in range(length)] for seed, length in enumerate((1, 5, 16, 31, 40))]


Kept = Callable[[Path, str, Callable[[], Any]], Any]
Check = Callable[[Engine, Path, list[list[int]], list[int], dict[str, Any]], None]


def reference(path: Path, prompt: list[int], eos: list[int], **settings: Any) -> list[tuple[list[int], float]]:
    """Return the sequences and scores of `generate`, without padding."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    n = settings.pop("n")
    answer = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_return_sequences=n,
        do_sample=False,
        eos_token_id=eos or None,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
        **settings,
    )
    outputs = []
    for ids, score in zip(answer.sequences[:, len(prompt) :].tolist(), answer.sequences_scores.tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(ids) if token in eos), len(ids))
        outputs.append((ids[:end], score))
    return outputs


def search(
    engine: Engine, requests: list[tuple[list[int], SamplingParams]], *, of_tenants: bool = False
) -> list[Sequence]:
    """Run the searches side by side, of one tenant or of one each, and return their sequences."""
    seqs = [
        engine.new_sequence(
            str(i), Request(prompt=prompt, sampling=sampling, tenant=Tenant(i, 1.0) if of_tenants else NO_TENANT)
        )
        for i, (prompt, sampling) in enumerate(requests)
    ]
    for seq in seqs:
        engine.add(seq)
    for _ in range(5000):
        engine.step()
        for seq in seqs:
            if seq.group is not None and seq.group.search.is_over:
                engine.remove(seq)
        engine.pool.check_integrity()
        if all(seq.group is not None and seq.group.search.is_over for seq in seqs):
            assert engine.pool.num_held == 0 and not engine.has_work
            return seqs
    raise AssertionError("the search does not end")


@pytest.fixture
def check(kept_reference: Kept) -> Check:
    """check(engine, path, prompts, eos, settings of `generate`) compares a search of each prompt with transformers'."""

    def run(engine: Engine, path: Path, prompts: list[list[int]], eos: list[int], settings: dict[str, Any]) -> None:
        width, max_tokens = settings.get("num_beams", 4), settings.get("max_new_tokens", 12)
        length_penalty, early_stopping = settings.get("length_penalty", 1.0), settings.get("early_stopping", False)
        sampling = SamplingParams(
            max_tokens=max_tokens,
            beam_width=width,
            stop_token_ids=tuple(eos),
            ignore_eos=True,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            repetition_penalty=settings.get("repetition_penalty", 1.0),
            min_tokens=settings.get("min_new_tokens", 0),
        )
        defaults = {"num_beams": width, "max_new_tokens": max_tokens}
        for seq, prompt in zip(search(engine, [(prompt, sampling) for prompt in prompts]), prompts, strict=True):
            assert seq.group is not None
            how = {"n": width, **defaults, **settings}
            expected = kept_reference(path, f"beams {prompt} {eos} {how}", partial(reference, path, prompt, eos, **how))
            found = seq.group.search.hypotheses(width)
            assert [list(one.token_ids) for one in found] == [ids for ids, _ in expected]
            assert [one.score for one in found] == pytest.approx([score for _, score in expected], rel=1e-5)
            reasons = ["stop" if ids[-1] in eos else "length" for ids, _ in expected]
            assert [one.finish_reason for one in found] == reasons

    return run


@pytest.mark.parametrize(
    "architecture",
    ["llama", "gemma3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "mistral", "qwen3_moe"))],
)
def test_equals_generate(architecture: str, checkpoint: Callable[..., Path], check: Check) -> None:
    path = checkpoint(architecture)
    engine = Engine(EngineConfig(model=str(path), num_blocks=200, max_num_batched_tokens=32))
    eos = [*range(60, 90)]  # so that a random model meets some
    check(engine, path, PROMPTS, [], {})
    check(engine, path, PROMPTS[:3], eos, {"num_beams": 3, "max_new_tokens": 20})


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
def test_equals_generate_with_every_way_to_stop(
    early_stopping: Any, length_penalty: float, checkpoint: Callable[..., Path], check: Check
) -> None:
    path = checkpoint("llama")
    engine = Engine(EngineConfig(model=str(path), num_blocks=200, max_num_batched_tokens=32))
    how = {"early_stopping": early_stopping, "length_penalty": length_penalty}
    for eos in ([70], [*range(20, 60)]):
        check(engine, path, PROMPTS[1:3], eos, {**how, "num_beams": 2, "max_new_tokens": 16})


def test_penalties_and_early_stops_equal_generate(checkpoint: Callable[..., Path], check: Check) -> None:
    path = checkpoint("llama")
    engine = Engine(EngineConfig(model=str(path), num_blocks=200))
    check(engine, path, PROMPTS, [], {"repetition_penalty": 1.3})
    check(engine, path, PROMPTS[:2], [*range(20, 60)], {"min_new_tokens": 5})


@pytest.mark.parametrize("settings", [{"num_blocks": 21}, {"num_blocks": 40, "max_num_seqs": 5}], ids=str)
@pytest.mark.parametrize("swap_space", [0, 0.01])
def test_equals_generate_while_preempting(
    settings: dict[str, Any], swap_space: float, checkpoint: Callable[..., Path], check: Check
) -> None:
    """In a pool, or a batch, in which only one of the searches finds room."""
    path = checkpoint("llama")
    engine = Engine(EngineConfig(model=str(path), max_num_batched_tokens=64, swap_space=swap_space, **settings))
    engine.scheduler.costs = Costs(prefill=(1, 1, 0), swap=(0, 0))
    check(engine, path, PROMPTS, [], {"max_new_tokens": 24})
    assert engine.scheduler.num_preemptions or "max_num_seqs" in settings
    assert engine.scheduler.swap_space.num_swaps == (engine.scheduler.num_preemptions if swap_space else 0)


def test_beams_share_blocks(checkpoint: Callable[..., Path]) -> None:
    engine = Engine(EngineConfig(model=str(checkpoint("llama")), num_blocks=200, max_num_batched_tokens=256))
    prompt = [i % 90 for i in range(165)]
    seq = engine.new_sequence(
        "r", Request(prompt=prompt, sampling=SamplingParams(max_tokens=20, beam_width=6, ignore_eos=True))
    )
    engine.add(seq)
    held = []
    while seq.group is not None and not seq.group.search.is_over:
        engine.step()
        held.append(engine.pool.num_held)
    assert 10 + 2 <= max(held) <= 10 + 2 * 6, "the 10 full blocks of the prompt are shared"
    engine.remove(seq)
    assert engine.pool.num_held == 0


@pytest.mark.parametrize(("slots", "num_blocks"), [(2, 64), (3, 64), (8, 14)])
def test_searches_of_several_tenants_do_not_wait_for_each_other(slots: int, num_blocks: int) -> None:
    """Each needs a slot and blocks for all its beams, of which the others have some: more than are left."""
    runner: Any = HashRunner(spec_of((None,)), 4, num_blocks, 0, frozenset(), 0.001)
    runner.is_warm = True
    config = EngineConfig(model="hashes", block_size=4, num_blocks=num_blocks, max_num_seqs=slots)
    sampling = SamplingParams(max_tokens=9, beam_width=2, num_answers=2, temperature=0.0, ignore_eos=True)
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    seqs = search(Engine(config, runner=runner), [(prompt, sampling) for prompt in prompts], of_tenants=True)
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert seq.group is not None
        answers = [[*one.token_ids] for one in seq.group.search.hypotheses(2)]
        assert answers == beam_answers(prompt, sampling, frozenset())


def test_a_search_that_does_not_fit_is_refused(checkpoint: Callable[..., Path]) -> None:
    engine = Engine(EngineConfig(model=str(checkpoint("llama")), num_blocks=20, max_num_seqs=8))
    assert "8 sequences" in engine.beams_fault(16, 9)
    assert "20 blocks" in engine.beams_fault(65, 4)
    assert not engine.beams_fault(64, 4)


def test_a_search_finds_the_same_beside_a_wider_one() -> None:
    """In 16 bits, where logits tie."""
    engine = Engine(EngineConfig(model="demo", dtype="bfloat16", num_blocks=600, max_num_batched_tokens=512))
    narrow = SamplingParams(max_tokens=20, beam_width=2, ignore_eos=True)
    for prompt in PROMPTS:
        (alone,) = search(engine, [(prompt, narrow)])
        beside, _ = search(engine, [(prompt, narrow), ([7, 8], structs.replace(narrow, beam_width=16, logprobs=20))])
        assert alone.group is not None and beside.group is not None
        assert alone.group.search.hypotheses(2) == beside.group.search.hypotheses(2)


def test_a_beam_ends_only_if_it_is_among_the_best() -> None:
    one = BeamSearch(2, frozenset({9}), 3, 1.0, True)
    assert one.num_candidates == 4
    assert one.step([[(1, -1.0), (2, -2.0), (9, -3.0), (3, -4.0)]]) == [Branch(0, 1), Branch(0, 2)]
    assert one.step([[(9, -1.0), (1, -3.0), (2, -4.0), (3, -5.0)], [(9, -1.0), (4, -3.0), (5, -4.0), (6, -5.0)]]) == []
    assert [(answer.token_ids, answer.score) for answer in one.hypotheses(2)] == [((1, 9), -1.0), ((2, 9), -1.5)]


LOGPROBS = st.sampled_from([-0.5, -2.0, -1e30, 0.0, -math.inf, math.inf, math.nan])


@given(
    data=st.data(),
    width=st.integers(1, 4),
    max_tokens=st.integers(1, 4),
    length_penalty=st.sampled_from([-10.0, -1.0, 0.0, 10.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
)
def test_searches_over_any_log_probabilities_end_with_finite_scores(
    data: st.DataObject, width: int, max_tokens: int, length_penalty: float, early_stopping: bool | str
) -> None:
    """As with a mask that leaves fewer tokens than there are beams, or logits that overflow."""
    search, beams = BeamSearch(width, frozenset([0]), max_tokens, length_penalty, early_stopping), 1
    while not search.is_over:
        candidates = [[(token, data.draw(LOGPROBS)) for token in range(search.num_candidates)] for _ in range(beams)]
        branches = search.step(candidates)
        assert all(math.isfinite(candidates[one.parent][one.token][1]) for one in branches)
        beams = len(branches)
        assert search.is_over is (beams == 0) and search.num_steps <= max_tokens
    answers = search.hypotheses(width)
    assert len(answers) <= width and all(math.isfinite(answer.score) for answer in answers)
    scores = [answer.score for answer in answers]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("length_penalty", [-10.0, 10.0])
def test_scores_beyond_float32_are_its_lowest_number(length_penalty: float) -> None:
    search = BeamSearch(1, frozenset([0]), 40_000, length_penalty, False)
    search.num_steps = 39_999
    search.step([[(1, -3.0), (2, -4.0)]])
    (answer,) = search.hypotheses(1)
    assert answer.token_ids == (1,) and math.isfinite(answer.score)

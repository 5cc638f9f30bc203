"""Drafts: whatever is proposed, the output is what it is without, in fewer steps."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.config import EngineConfig
from pdserve.costs import Costs
from pdserve.engine.engine import Engine
from pdserve.engine.step import Drafter, StepPlan
from pdserve.request import Request, SamplingParams, Tenant
from tests.oracle import Oracle

Answers = list[list[int]]


def run(engine: Engine, prompts: Answers, sampling: SamplingParams) -> tuple[Answers, list[int]]:
    """Return the outputs, and how many tokens each sequence got in each step in which it got some."""
    seqs = [engine.new_sequence(str(i), Request(prompt=prompt, sampling=sampling)) for i, prompt in enumerate(prompts)]
    accepted = []
    for seq in seqs:
        engine.add(seq)
    while engine.has_work:
        result = engine.step()
        assert result.advanced, "a step did nothing while there was work"
        accepted += [len(one.tokens) for one in result.outcome.values() if one.tokens]
        for seq in result.sampled:
            if seq.output.finish_reason():
                engine.remove(seq)
        engine.pool.check_integrity()
    assert engine.pool.num_held == 0
    return [seq.output.tokens[seq.output.num_prompt :].tolist() for seq in seqs], accepted


def make_engine(path: Path, **settings: Any) -> Engine:
    return Engine(
        EngineConfig(
            **{"model": str(path), "num_blocks": 400, "max_num_batched_tokens": 256, "speculate": "off", **settings}
        )
    )


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mistral", "deepseek_v3"])
def test_drafts_change_no_token(
    architecture: str, checkpoint: Callable[..., Path], generate: Callable[..., Answers], prompts: Answers
) -> None:
    path = checkpoint(architecture, dtype="float32")
    expected = generate(path, prompts, 32)
    engine, sampling = make_engine(path), SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    oracle = engine.drafter = Oracle(zip(prompts, expected, strict=True))
    for _ in range(2):  # the second time with a warm prefix cache
        answers, accepted = run(engine, prompts, sampling)
        assert answers == expected
        assert {1, 2, 3, 4} == {*accepted} and sum(accepted) > 1.9 * len(accepted)
    assert oracle.num_proposed > 0


@pytest.mark.parametrize("settings", [{}, {"swap_space": 0.001}, {"block_size": 32}], ids=str)
def test_drafts_under_preemption(
    settings: dict[str, Any], checkpoint: Callable[..., Path], generate: Callable[..., Answers], prompts: Answers
) -> None:
    path = checkpoint("llama", dtype="float32")
    expected = generate(path, prompts, 64)
    blocks = 1 + max(map(len, prompts)) // 16 + 64 // 16
    engine = make_engine(path, num_blocks=blocks, **settings)
    engine.drafter = Oracle(zip(prompts, expected, strict=True))
    answers, accepted = run(engine, prompts, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    assert answers == expected
    assert engine.scheduler.num_preemptions > 0 and max(accepted) > 1


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.7, "seed": 8, "top_p": 0.9},
        {"temperature": 0, "logprobs": 3},
        {"temperature": 0, "repetition_penalty": 1.3},
        {"temperature": 0, "min_tokens": 9},
    ],
    ids=str,
)
@pytest.mark.parametrize("settings", [{}, {"async_scheduling": "on"}, {"dtype": "bfloat16"}], ids=str)
def test_other_sampling(
    sampling: dict[str, Any], settings: dict[str, Any], checkpoint: Callable[..., Path], prompts: Answers
) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True, **sampling)
    engine = make_engine(checkpoint("llama", dtype="float32"), **settings)
    expected, _ = run(engine, prompts, params)
    oracle = engine.drafter = Oracle(zip(prompts, expected, strict=True))
    answers, accepted = run(engine, prompts, params)
    assert answers == expected
    assert max(accepted) > 1 and oracle.num_proposed > 0


def test_a_stop_token_among_drafts_ends_the_output(
    checkpoint: Callable[..., Path], generate: Callable[..., Answers], prompts: Answers
) -> None:
    path = checkpoint("llama", dtype="float32")
    expected = generate(path, prompts, 32)
    engine = make_engine(path)
    for at in range(12, 18):  # one of them is the first, second, third draft of a step
        engine.drafter = Oracle(zip(prompts, expected, strict=True))
        stop = expected[0][at]
        sampling = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, stop_token_ids=(stop,))
        answers, _ = run(engine, prompts[:1], sampling)
        assert answers[0] == expected[0][: expected[0].index(stop) + 1]


def test_drafts_take_no_room_of_others(checkpoint: Callable[..., Path], prompts: Answers) -> None:
    """The plan keeps to the step's tokens, to the request's, and leaves a block for each running sequence."""
    engine = make_engine(checkpoint("llama"), max_num_batched_tokens=len(prompts) + 3)

    class Eager(Drafter):
        def propose(self, plan: StepPlan) -> dict[Any, list[int]]:
            return {seq: [1] * 50 for seq in plan.counts if plan.takes_drafts(seq)}

    engine.drafter = Eager()
    planned, step = list[tuple[int, int]](), engine.runner.step

    def watch(plan: Any) -> Any:
        planned.append((sum(map(plan.num_tokens, plan.counts)), sum(map(len, plan.drafts.values()))))
        for seq, drafts in plan.drafts.items():
            assert 0 < len(drafts) < seq.sampling.max_tokens - seq.output.num_generated
            assert engine.pool.blocks_for(len(seq) + len(drafts)) <= len(seq.kv.block_ids)
        return step(plan)

    engine.runner.step = watch  # type: ignore[method-assign]
    run(engine, prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert max(tokens for tokens, _ in planned) <= len(prompts) + 3 and any(drafts for _, drafts in planned)


def test_a_tenant_without_time_for_all_its_work_gets_no_drafts(
    checkpoint: Callable[..., Path],
    generate: Callable[..., Answers],
    prompts: Answers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would lengthen the steps of another tenant, whose own sequences get theirs. Answers stay the same."""
    path, light = checkpoint("llama", dtype="float32"), Tenant(1)
    prompts = [[*prompt, i] for i, prompt in enumerate(prompts * 4)]
    expected = generate(path, prompts, 32)
    engine = make_engine(path)
    engine.scheduler.costs = Costs(prefill=(0.002, 1e-4, 0.0), decode=(0.001, 1e-3, 0.0))
    engine.drafter = Oracle(zip(prompts, expected, strict=True))
    sampling, step = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True), engine.runner.step
    drafted = Counter[tuple[Tenant, bool]]()  # steps by whose drafts they have, and whether both tenants decode

    def watch(plan: StepPlan) -> Any:
        decoding = {seq.tenant for seq in engine.scheduler.running if seq.kv.is_decoding}
        for tenant in {seq.tenant for seq in plan.drafts}:
            drafted[tenant, len(decoding) > 1] += 1
        return step(plan)

    monkeypatch.setattr(engine.runner, "step", watch)
    seqs = [
        engine.new_sequence(str(i), Request(prompt=prompt, sampling=sampling, tenant=light if i == 0 else Tenant(2)))
        for i, prompt in enumerate(prompts)
    ]
    for seq in seqs:
        engine.add(seq)
    while engine.has_work:
        for seq in engine.step().sampled:
            if seq.output.finish_reason():
                engine.remove(seq)
    assert [seq.output.generated.tolist() for seq in seqs] == expected
    assert drafted[light, True] > 0 and drafted[Tenant(2), False] > 0
    assert drafted[Tenant(2), True] == 0

"""Tests of the draft model's times in a profile, with real models and a virtual clock."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.step import StepPlan
from pdserve.errors import SetupError
from pdserve.profile.profile import DraftFacts, Profile, StepModel
from pdserve.speculation.draft_model import DraftModel
from pdserve.tools.profiling import drafts
from pdserve.tools.profiling.drafts import time_drafts
from tests.paced_engine import Clock

STEP = StepModel(
    decode=((1, 0.010), (2, 0.011), (4, 0.013)), context_s=1e-5, prefill=((2, 0.02), (16, 0.034), (256, 0.274))
)
AROUND = (0.003, 0.001)  # of a proposal, and of each sequence in it


def engine_with(model: Path, **settings: Any) -> tuple[Engine, DraftModel]:
    config = EngineConfig(
        model=str(model),
        dtype="bfloat16",
        max_num_seqs=4,
        speculate="draft",
        speculative_model=str(model),
        speculative_tokens=3,
        **{"num_blocks": 400, **settings},
    )
    engine = Engine(config)
    assert isinstance(engine.drafter, DraftModel)
    return engine, engine.drafter


def test_steps_of_drafts_are_timed(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, drafter = engine_with(checkpoint("llama"), max_model_len=256)
    clock = Clock()
    compute, propose = drafter._compute, drafter._propose

    def timed(new: Any, drafting: Any) -> list[int]:
        clock.take(STEP.seconds(drafter.work(new, drafting)))
        return compute(new, drafting)

    def proposed(plan: StepPlan) -> Any:
        clock.take(AROUND[0] + AROUND[1] * len(plan.counts))
        return propose(plan)

    monkeypatch.setattr(drafter, "_compute", timed)
    monkeypatch.setattr(drafter, "_propose", proposed)
    monkeypatch.setattr(drafts, "clock_of", lambda engine: clock)
    found, residuals = time_drafts(engine, drafter, "small", 1, lambda text: None)
    assert {1, 2, 8} <= {count for count, _ in found.step.decode} <= {*range(1, 9)}, "up to two rows of each sequence"
    for work in ([(1, 40)], [(1, 100)] * 4, [(1, 50), (1, 51)], [(1, 50), (1, 51)] * 4, [(100, 0)]):
        assert found.step.seconds(work) == pytest.approx(STEP.seconds(work), rel=0.1), work
    assert (found.engine_step_s, found.engine_sequence_s) == pytest.approx(AROUND)
    assert (found.num_blocks, found.max_model_len) == (100, drafter.context_length) and found.model == "small"
    assert residuals["draft model, decode"].p90 < 0.01
    assert engine.pool.num_held == drafter.pool.num_held == 0 and not drafter.followed
    assert drafter.on_step is None


def test_a_pool_without_room_for_drafts_is_named(checkpoint: Callable[..., Path]) -> None:
    engine, drafter = engine_with(checkpoint("llama"), num_blocks=40, max_model_len=256)
    drafter.pool.hold(drafter.pool.allocate(drafter.pool.num_free))
    with pytest.raises(
        SetupError, match="--speculate draft: the limits of the engine leave no timings of decode steps"
    ):
        time_drafts(engine, drafter, "small", 1, lambda text: None)


def test_a_profile_keeps_them(tmp_path: Path) -> None:
    facts = DraftFacts("small", STEP, 100, 256, *AROUND)
    profile = replace(Profile(model="m"), draft=facts)
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json").draft == facts
    with pytest.raises(ValueError, match="num_blocks and max_model_len of a draft model must be at least 1"):
        replace(facts, num_blocks=0)
    with pytest.raises(ValueError, match="the times around a draft model's steps must be finite"):
        replace(facts, engine_step_s=-1.0)

"""What a profile says of adapters: timed on a real engine, with a clock that only tells what it was asked."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.step import StepOutcome, StepPlan
from pdserve.profile.profile import AdapterModel, Profile, StepModel
from pdserve.tools.profiling import adapters
from tests.low_rank import make_adapter


@pytest.fixture
def engine(checkpoint: Callable[..., Path], tmp_path: Path) -> tuple[Engine, EngineConfig]:
    base = checkpoint("llama", dtype="float32")
    made = [f"{name}={make_adapter(tmp_path / name, base, seed=seed)}" for seed, name in enumerate(("a", "b", "c"))]
    config = EngineConfig(
        model=str(base), dtype="float32", lora_modules=",".join(made), max_loras=2, num_blocks=64, max_num_seqs=4
    )
    return Engine(config), config


def test_steps_are_timed_with_and_without_adapters(
    engine: tuple[Engine, EngineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 1 s more with an adapter, half a second more with the second one, and 10 ms for each row."""
    one, config = engine
    clock, step = [0.0], one.runner.step

    def timed(plan: StepPlan) -> StepOutcome:
        known = {seq.adapter.digest for seq in plan.counts if seq.adapter is not None}
        rows = sum(count for seq, count in plan.counts.items() if seq.adapter is not None)
        clock[0] += 3.0 + (1.0 + 0.5 * (len(known) - 1) + 0.01 * rows if known else 0.0)
        return step(plan)

    monkeypatch.setattr(one.runner, "step", timed)
    monkeypatch.setattr(adapters, "clock_of", lambda engine: lambda: clock[0])
    found = adapters.time_adapters(one, config, 1, lambda text: None)
    assert [rows for rows, _ in found.rows] == [1, 4, min(256, one.max_model_len - 1)]
    assert [seconds for _, seconds in found.rows] == pytest.approx([1 + 0.01 * rows for rows, _ in found.rows])
    assert found.adapter_s == pytest.approx(0.5) and found.load_s == 0
    assert one.adapters is not None and all(one.adapters.acquire(seq) for seq in waiting(one)), "slots are free again"


def waiting(engine: Engine) -> Iterator[Any]:
    """Yield sequences of as many adapters as there are slots."""
    from pdserve.request import Request, SamplingParams

    assert engine.adapters is not None
    for number, adapter in enumerate(engine.adapters.listing()[:2]):
        request = Request(prompt=[1, 2, 3], sampling=SamplingParams(max_tokens=2), adapter=adapter.digest)
        yield engine.new_sequence(str(number), request)


def test_a_profile_keeps_them(tmp_path: Path) -> None:
    model = AdapterModel(((1, 1e-3), (16, 4e-3)), 5e-4, 1e-5)
    Profile(model="m", adapters=model).save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json").adapters == model
    assumed = AdapterModel.assumed(StepModel())
    assert 0 < assumed.seconds(1, 1) < assumed.seconds(8, 8) < StepModel().decode_seconds(8, 0)
    with pytest.raises(ValueError, match="the knots of adapters must have ascending amounts"):
        AdapterModel(((4, 1e-3), (1, 1e-3)))

"""Simulated speculation: answers take as long as with the drafters of an engine, at the cost of their rows and steps."""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from pdserve.config import EngineConfig
from pdserve.costs import Costs
from pdserve.engine.engine import Engine
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.paced_runner import next_token
from pdserve.engine.step import Drafter
from pdserve.errors import SetupError
from pdserve.profile.profile import DraftFacts, Profile, StepModel
from pdserve.request import Request, SamplingParams
from pdserve.speculation.answers import LEAST
from pdserve.speculation.draft_model import DraftModel
from pdserve.speculation.speculator import Speculator
from pdserve.tools.bench.requests import Request as Load
from pdserve.tools.bench.requests import Sample
from pdserve.tools.load_config import FleetConfig, parse_acceptance
from pdserve.tools.planner.measured import share_of_right
from pdserve.tools.simulator.command import as_rows
from pdserve.tools.simulator.drafts import Draws, SimulatedDrafter, SimulatedDraftModel
from pdserve.tools.simulator.fleet import Fleet, load_profile, simulate
from pdserve.tools.simulator.model import InstanceModel
from pdserve.tools.simulator.simulation import Deployment, Outcome, Simulation
from tests.engine.speculating import changed
from tests.paced_engine import Answers, Clock, Played, finished, make_engine, play
from tests.tools.simulator.test_simulation import make_model

CHEAP = Costs(decode=(0.02, 1e-4, 0.0))  # a row costs a two-hundredth of a step
DEAR = Costs(decode=(1e-3, 0.02, 0.0))
FULL = 10  # steps of 17 tokens, behind those in which nothing is looked for
TOKENS = LEAST + FULL * 17
DRAFT_S = 0.002  # of a step of a draft model
DRAFT = DraftFacts("small", StepModel(decode=((1, DRAFT_S),), prefill=((1, DRAFT_S),)), 400, 2000)


def simulated(
    acceptance: Mapping[str, float], costs: Costs = CHEAP, keys: Sequence[str] = ("", ""), **changes: Any
) -> Outcome:
    """Play requests that come one after the other to a prefill and a decode instance, one for each key."""
    model = make_model(
        decode_seconds=costs.step_seconds,
        step_seconds=lambda work: costs.step_seconds(len(work), sum(before + 1 for _, before in work)),
    )
    deployment = Deployment(instance=replace(Deployment().instance, speculative_tokens=changes.pop("length", None)))
    loads = [Load(i, TOKENS, ((f"own-{i}", 40),), at=30.0 * i, key=key) for i, key in enumerate(keys)]
    outcome = Simulation(deployment, replace(model, acceptance=acceptance, **changes)).play(loads)
    assert all(sample.ok and sample.output_tokens == TOKENS for sample in outcome.samples)
    return outcome


def samples(*args: Any, **changes: Any) -> list[Sample]:
    return simulated(*args, **changes).samples


def tpot(samples: list[Sample]) -> float:
    return statistics.fmean(sample.tpot for sample in samples)


def test_without_drafts_nothing_changes() -> None:
    plain = samples({})
    assert [sample.token_times for sample in samples({"*": 0.0})] == [sample.token_times for sample in plain]
    assert [sample.token_times for sample in samples({"*": 1.0}, DEAR)] == [
        sample.token_times for sample in samples({}, DEAR)
    ]


def test_answers_come_as_fast_as_drafts_are_right() -> None:
    step = CHEAP.step_seconds(1, 0)
    ratios = [tpot(samples({"*": share})) / step for share in (0.0, 0.5, 0.9, 1.0)]
    assert ratios[0] == pytest.approx(1, rel=0.02)
    fastest = (LEAST - 1 + FULL * CHEAP.step_seconds(17, 0) / step) / (TOKENS - 1)
    assert ratios[3] == pytest.approx(fastest, rel=0.05), "17 tokens a step"
    assert ratios[0] > ratios[1] > 1.5 * ratios[2] > 2 * ratios[3]
    events = len(samples({"*": 1.0})[0].token_times)
    assert events == LEAST + FULL, "the tokens of a step are one event, as clients measure them"


def test_each_class_of_traffic_has_its_own_share() -> None:
    edit, other = samples({"edit": 1.0, "*": 0.0}, keys=("edit", "other"))
    assert tpot([edit]) < 0.3 * tpot([other])


@pytest.mark.parametrize("text", ["1.5", "a=b", "edit", "edit=0.5,-1"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not such as 0\.7"):
        FleetConfig(acceptance=text)


def test_shares_are_read_by_key() -> None:
    assert parse_acceptance("") == {}
    assert parse_acceptance("0.7") == {"*": 0.7}
    assert parse_acceptance("edit=0.9,*=0.1") == {"edit": 0.9, "*": 0.1}


def texts(keep: float) -> tuple[Answers, Answers]:
    """Return prompts, and answers that have each of their tokens with this chance, else another one."""
    drawn, prompts, answers = random.Random(3), dict[str, list[int]](), dict[str, list[int]]()
    for number in range(8):
        prompts[str(number)] = text = [drawn.randrange(1000, 30_000) for _ in range(600)]
        answers[str(number)] = [one if drawn.random() < keep else drawn.randrange(40_000, 60_000) for one in text]
    return prompts, answers


def plain(prompts: Answers, answers: Answers) -> Answers:
    """Return the answers that a simulation has in place of these."""
    return {name: [next_token(len(prompts[name]) + at) for at in range(len(one))] for name, one in answers.items()}


def run(
    prompts: Answers, answers: Answers, batch: int, costs: Costs, drafter: Callable[[Engine, Clock], Drafter]
) -> Played:
    clock = Clock()
    engine = make_engine(costs, answers, clock)
    engine.drafter = drafter(engine, clock)
    return play(engine, clock, prompts, answers, batch)


def measured_share(played: Played) -> float:
    return share_of_right(len(played.drafts), *map(sum, zip(*played.drafts, strict=True)))


@pytest.mark.parametrize("keep", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("row_s", [1e-4, 1e-3])
def test_what_is_found_takes_as_long_as_forecast(keep: float, batch: int, row_s: float) -> None:
    """Edits of texts, with the share of right drafts that was measured."""
    costs, (prompts, answers) = Costs(prefill=(0.0, 1e-4, 0.0), decode=(0.02, row_s, 0.0)), texts(keep)
    config = EngineConfig(model="model", speculate="auto")
    real = run(
        prompts,
        answers,
        batch,
        costs,
        lambda engine, clock: Speculator(config, engine.scheduler, engine.extra_seconds, clock),
    )
    share = measured_share(real)
    assert share == pytest.approx(keep, abs=0.05)
    draws = Draws(dict.fromkeys(answers, share))
    forecast = run(
        prompts,
        plain(prompts, answers),
        batch,
        costs,
        lambda engine, clock: SimulatedDrafter(engine.scheduler, draws, config.draft_length),
    )
    assert forecast.seconds == pytest.approx(real.seconds, rel=0.1)
    assert len(forecast.tokens) == pytest.approx(len(real.tokens), rel=0.15)
    assert not (keep > 0.6 and real.seconds > 0.8 * sum(map(len, answers.values())) * costs.step_seconds(1, 0))


def test_a_draft_model_takes_its_steps() -> None:
    """All right, with a fixed length: five tokens for five rows and four steps of the draft model, behind the first one."""
    outcome = simulated({"*": 1.0}, draft=DRAFT, length=4)
    full = CHEAP.step_seconds(5, 0) + 4 * DRAFT_S
    assert tpot(outcome.samples) == pytest.approx(full / 5, rel=0.05)
    assert outcome.drafts["spec_decode_acceptance_rate"] == 100
    assert outcome.drafts["spec_decode_acceptance_length"] == pytest.approx(5, rel=0.02)
    assert outcome.drafts["spec_decode_draft_time_fraction"] == pytest.approx(4 * DRAFT_S / full, rel=0.05)
    around = replace(DRAFT, engine_step_s=0.001, engine_sequence_s=0.003)
    slower = simulated({"*": 1.0}, draft=around, length=4)
    assert tpot(slower.samples) == pytest.approx((full + 0.004) / 5, rel=0.05)


def test_a_draft_model_that_does_not_pay_costs_little() -> None:
    without = tpot(samples({}))
    slow = replace(DRAFT, step=StepModel(decode=((1, 0.05),), prefill=((1, 0.05),)))
    for drafts in (simulated({"*": 0.0}, draft=DRAFT), simulated({"*": 1.0}, draft=slow)):
        assert tpot(drafts.samples) < 1.1 * without
        assert drafts.drafts["spec_decode_num_drafts"] <= 8 * len(drafts.samples)
    right = simulated({"*": 0.9}, draft=DRAFT)
    assert tpot(right.samples) < 0.5 * without and right.drafts["spec_decode_draft_time_fraction"] > 0.2


@pytest.fixture(scope="module")
def alike(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that often draws the token that `llama` draws, but not always."""
    return changed(checkpoint("llama", dtype="float32"), tmp_path_factory.mktemp("alike"))


@pytest.mark.parametrize("length", [None, 3])
def test_a_draft_model_takes_as_many_steps_as_forecast(
    length: int | None, checkpoint: Callable[..., Path], alike: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps of both models that the real ones took, with the share of right drafts that was measured."""
    clock, passes = Clock(), list[int]()
    config = EngineConfig(
        model=str(checkpoint("llama")),
        num_blocks=400,
        speculate="draft",
        speculative_model=str(alike),
        speculative_tokens=length,
    )
    engine = Engine(replace(config, speculate="off", speculative_model=""))
    drafter = engine.drafter = DraftModel(config, engine.scheduler, cast("ModelRunner", engine.runner), clock)
    engine.scheduler.costs = CHEAP
    forward = drafter.runner.forward

    def timed(inputs: Any) -> torch.Tensor:
        passes.append(1)
        clock.take(DRAFT_S)
        return forward(inputs)

    monkeypatch.setattr(drafter.runner, "forward", timed)
    real = Played()
    prompts = {str(number): [number * 9 + 1, 7, 3 * number] for number in range(8)}
    for name, prompt in prompts.items():
        sampling = SamplingParams(temperature=0.8, seed=int(name), max_tokens=300, ignore_eos=True)
        engine.add(engine.new_sequence(name, Request(prompt=prompt, sampling=sampling)))
        assert len([*finished(engine, real)]) == 1
    share, steps = measured_share(real), list[int]()
    assert 0.2 < share < 0.98
    draws = Draws(dict.fromkeys(prompts, share))

    def simulated_model(engine: Engine, clock: Clock) -> SimulatedDraftModel:
        found = SimulatedDraftModel(config, engine.scheduler, draws, DRAFT, clock, clock.take)
        found.on_step = lambda work, seconds: steps.append(len(work))
        return found

    answers = plain(prompts, dict.fromkeys(prompts, [0] * 300))
    forecast = run(prompts, answers, 1, CHEAP, simulated_model)
    assert len(forecast.tokens) == pytest.approx(len(real.tokens), rel=0.1)
    assert len(steps) == pytest.approx(len(passes), rel=0.15)


def with_draft(path: Path) -> Profile:
    return replace(Profile.load(path), draft=DRAFT)


def test_a_fleet_with_a_draft_model_is_forecast(tiny_profile: Path) -> None:
    settings: dict[str, Any] = {"num_prompts": 8, "random_input_len": 60, "random_output_len": 80, "request_rate": 2.0}
    profile = with_draft(tiny_profile)
    kinds: list[dict[str, Any]] = [{}, {"acceptance": "0.9", "speculate": "draft"}, {"acceptance": "0.9"}]
    found = [simulate(FleetConfig(**settings, **own), profile, {}, Fleet(1, 1), 2.0) for own in kinds]
    without, drafted, auto = (one.figures["mean_tpot_ms"] for one in found)
    assert drafted < 0.8 * without and auto < without
    assert "spec_decode_draft_time_fraction" not in found[2].figures
    columns, rows = as_rows(found[:2])
    accepted, drafting = columns.index("accepted"), columns.index("drafting")
    assert rows[0][accepted] == rows[0][drafting] == "0%"
    figures = found[1].figures
    assert rows[1][accepted] == f"{figures['spec_decode_acceptance_rate']:.0f}%" != "0%"
    assert rows[1][drafting] == f"{figures['spec_decode_draft_time_fraction']:.0%}" != "0%"
    assert "accepted" not in as_rows(found[:1])[0]


def test_the_pool_of_a_draft_model_is_as_large_a_share_as_when_it_was_measured(tiny_profile: Path) -> None:
    for num_blocks, expected in ((None, 400), (500, 200), (2, 1)):
        draft = InstanceModel.from_profile(with_draft(tiny_profile), "shm", num_blocks=num_blocks).draft
        assert draft is not None and draft.num_blocks == expected


def test_a_draft_model_that_is_not_known_is_refused(tiny_profile: Path) -> None:
    with pytest.raises(ValueError, match=r"--speculate draft needs the share .* such as --acceptance 0\.7"):
        FleetConfig(speculate="draft")
    config = FleetConfig(profile=str(tiny_profile), speculate="draft", acceptance="0.7")
    with pytest.raises(
        SetupError, match="the profile has no steps of a draft model; `pdserve profile --speculate draft`"
    ):
        load_profile(config)
    with_draft(tiny_profile).save(tiny_profile)
    assert load_profile(config).draft == DRAFT

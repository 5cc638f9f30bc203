"""The controller inside of simulations: it follows a shift of the traffic, and `pdserve autoscale --simulate` shows it."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from random import Random
from subprocess import CompletedProcess

from pdserve.profile.profile import EngineFacts, Profile, StepModel, TransferModel
from pdserve.tools.autoscaler.command import make_controller
from pdserve.tools.autoscaler.controller import LEAST_KEPT_S
from pdserve.tools.autoscaler.forecast import rate
from pdserve.tools.autoscaler.rehearsal import Rehearsal, rehearse
from pdserve.tools.bench.requests import Request
from pdserve.tools.load_config import AutoscaleConfig
from pdserve.tools.planner.targets import parse_targets
from pdserve.tools.simulator.fleet import instance_model
from pdserve.tools.simulator.simulation import Simulation

# Slow steps make few events: a prompt of 1,000 tokens takes 2 s, and a decode step of 8 sequences 0.8 s.
PROFILE = Profile(
    model="slow",
    engine=EngineFacts(16, 16384, 2000, 2048, 16, 4096),
    step=StepModel(decode=((1, 0.6), (8, 0.8), (16, 1.6)), context_s=0.0, prefill=((1, 0.2), (1000, 2.0)), pair_s=0.0),
    transfers={"shm": TransferModel(2e-3, 5e8, 2e-3, 5e8, 1e9)},
    start_up_s=5.0,
)
SLO = "ttft.p90=6s,itl.p99=2.5s"
SETTINGS = AutoscaleConfig(slo=SLO, window=40.0, horizon=30.0, cooldown=10.0, interval=10.0, local_prefill_tokens=0)


def shifting_load(seconds: float = 150.0) -> list[Request]:
    """Return long prompts with short answers, and from the middle on the reverse."""
    random, at, load = Random(3), 0.0, list[Request]()
    while (at := at + random.expovariate(1.1)) < seconds:
        prompt, answer = (900, 3) if at < seconds / 2 else (60, 26)
        load.append(Request(len(load), answer, ((f"own-{len(load)}", prompt),), input_tokens=prompt, at=at))
    return load


def play(config: AutoscaleConfig, prefill: int, decode: int, load: list[Request]) -> Rehearsal:
    controller, settings = make_controller(config, PROFILE, can_start=config.max_instances > 0)
    fleet = replace(settings, prefill=prefill, decode=decode)
    return rehearse(
        Simulation(fleet, instance_model(config, PROFILE)), controller.decide, load, config.interval, config.window
    )


def test_the_fleet_follows_a_shift_of_the_traffic() -> None:
    load, targets = shifting_load(), parse_targets(SLO)
    rehearsal = play(SETTINGS, 1, 4, load)
    kinds = [(change.before, change.after) for _, change in rehearsal.changes]
    assert kinds[0] == ("decode", "prefill") and ("prefill", "decode") in kinds
    pairs = combinations(rehearsal.changes, 2)
    assert all(later - earlier >= LEAST_KEPT_S for (earlier, one), (later, two) in pairs if two.undoes(one))
    _, settings = make_controller(SETTINGS, PROFILE, can_start=False)
    fixed = Simulation(replace(settings, prefill=1, decode=4), instance_model(SETTINGS, PROFILE)).play(load).samples
    assert len(rehearsal.samples) == len(load) and all(one.ok for one in rehearsal.samples)
    assert rate(targets, rehearsal.samples).attainment > rate(targets, fixed).attainment + 0.1
    check_decided_again(rehearsal, load, 30.0)


def check_decided_again(whole: Rehearsal, load: list[Request], until: float) -> None:
    """Rehearse the beginning of a load again: decisions, and answers until then, are the same, whatever comes later."""
    again = play(SETTINGS, 1, 4, [one for one in load if one.at is not None and one.at < until])
    decisions, samples = ([one.decisions for one in (again, whole)], [one.samples for one in (again, whole)])
    early, same = ([one for one in of if one.at <= until] for of in decisions)
    assert early == same and any(one.change for one in early)
    ended, same_ended = ([one for one in of if one.ended < until] for of in samples)
    assert ended and ended == same_ended


def test_instances_start_and_end_within_the_budget() -> None:
    load = shifting_load(100.0)
    rehearsal = play(replace(SETTINGS, max_instances=4), 1, 1, load)
    sizes = [sum(one.fleet.values()) for one in rehearsal.decisions]
    assert max(sizes) == 4 and ("", "prefill") in [(one.before, one.after) for _, one in rehearsal.changes]
    assert all(one.ok for one in rehearsal.samples)
    seconds = SETTINGS.interval * len(sizes)
    assert 2 * seconds < rehearsal.instance_seconds < 4 * seconds


def test_simulate_prints_and_writes_the_decisions(
    tmp_path: Path, pdserve: Callable[..., CompletedProcess[str]]
) -> None:
    PROFILE.save(tmp_path / "profile.json")
    text = (
        "--simulate --prefill 1 --decode 2 --window 40 --horizon 20 --cooldown 5 --interval 10 --local-prefill-tokens 0"
    )
    text += " --num-prompts 50 --request-rate 0.8 --random-input-len 900 --random-output-len 2 --slo ttft.p90=6s,itl.p99=2.5s"
    flags = [
        *text.split(),
        "--profile",
        str(tmp_path / "profile.json"),
        "--decisions",
        str(tmp_path / "decisions.jsonl"),
    ]
    done = pdserve("autoscale", *flags)
    assert done.returncode == 0, done.stderr
    assert "1P+2D: 1 decode to prefill: " in done.stdout and "of 50 requests good" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    (change,) = [row for row in rows if row["change"]]
    assert change["made"] and change["considered"][0]["rating"]["attainment"] < 0.9
    refused = pdserve("autoscale", *flags, "--slo", "")
    assert refused.returncode == 2 and "target" in refused.stderr

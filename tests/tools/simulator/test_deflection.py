"""Deflection: within an ITL target, decode computes prompts that wait for prefill, and an idle prefill instance decodes."""

from itertools import pairwise
from statistics import median

from pdserve.config import InstanceConfig, RouterConfig
from pdserve.profile.profile import EngineFacts, Profile, StepModel, TransferModel
from pdserve.tools.bench.requests import Request
from pdserve.tools.simulator.model import InstanceModel
from pdserve.tools.simulator.simulation import Deployment, Outcome, Simulation

PROFILE = Profile(
    model="demo",
    engine=EngineFacts(
        block_size=16,
        block_bytes=16384,
        num_blocks=4000,
        max_num_batched_tokens=2048,
        max_num_seqs=64,
        max_model_len=4096,
    ),
    step=StepModel(
        decode=((1, 0.01), (16, 0.02)), context_s=0.0, prefill=((1, 0.01), (1000, 0.2)), mixed=(-0.01, 1.0, 1.0)
    ),
    transfers={"shm": TransferModel(1e-3, 1e9, 1e-3, 1e9, 2e9)},
)
ITL_TARGET_MS = 60.0
TTFT_TARGET_MS = 300.0


def simulate(
    loads: list[Request], target: float | None, local_prefill_tokens: int | None = None
) -> tuple[Outcome, set[tuple[str, str]]]:
    """Return the outcome on 1P+1D, and the (way, reason) of all placements."""
    instance = InstanceConfig(model="model", itl_target_ms=target, max_num_seqs=64)
    ttft_target = None if target is None else TTFT_TARGET_MS
    router = RouterConfig(model="model", local_prefill_tokens=local_prefill_tokens, ttft_target_ms=ttft_target)
    simulation = Simulation(Deployment(instance=instance, router=router), InstanceModel.from_profile(PROFILE, "shm"))
    outcome = simulation.play(loads)
    assert all(sample.ok for sample in outcome.samples) and len(outcome.samples) == len(loads)
    timelines = [simulation.routers[0].dispatcher.timelines.get(f"r{load.index}") for load in loads]
    return outcome, {(one.placement.way, one.placement.reason) for one in timelines if one and one.placement}


def ttft_p50(outcome: Outcome) -> float:
    return median(sample.ttft for sample in outcome.samples)


def longest_gap(outcome: Outcome) -> float:
    """Return the longest time between two tokens, behind the second one: the gap before that contains the hand-over."""
    return max(later - earlier for one in outcome.samples for earlier, later in pairwise(one.token_times[1:]))


def test_decode_takes_prompts_of_a_burst_within_its_itl_target() -> None:
    burst = [Request(i, 40, ((f"prompt-{i}", 600),), input_tokens=600, at=0.05 * i) for i in range(24)]
    fixed, _ = simulate(burst, None, local_prefill_tokens=0)
    elastic, placements = simulate(burst, ITL_TARGET_MS)
    assert ("decode", "backlog") in placements and ("split", "forecast") in placements
    assert ttft_p50(elastic) < 0.7 * ttft_p50(fixed), "two instances compute prompts"
    assert longest_gap(elastic) < 1.05 * ITL_TARGET_MS / 1e3


STREAM = [Request(i, 200, ((f"prompt-{i}", 100),), input_tokens=100, at=0.1 * i) for i in range(40)]


def test_an_idle_prefill_instance_decodes_if_decode_would_miss_the_target() -> None:
    target_ms = 20.0  # 16 streams on decode meet it, and not more
    fixed, _ = simulate(STREAM, None, local_prefill_tokens=0)
    elastic, placements = simulate(STREAM, target_ms)
    assert ("prefill", "idle") in placements
    assert elastic.seconds < 0.9 * fixed.seconds, "two instances decode"
    assert longest_gap(elastic) < longest_gap(fixed)


def test_targets_that_are_met_anyway_cost_nothing() -> None:
    fixed, _ = simulate(STREAM, None)
    elastic, placements = simulate(STREAM, ITL_TARGET_MS)
    assert placements == {("split", "forecast")}
    assert [one.token_times for one in elastic.samples] == [one.token_times for one in fixed.samples]


def test_without_an_itl_target_no_stream_is_disturbed_for_another_request() -> None:
    burst = [Request(i, 40, ((f"prompt-{i}", 600),), input_tokens=600, at=0.05 * i) for i in range(24)]
    _, placements = simulate(burst, None)
    assert not {"backlog", "idle"} & {reason for _, reason in placements}

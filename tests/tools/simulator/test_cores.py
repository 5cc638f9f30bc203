"""Cores that a fleet shares: what they prolong, and that enough of them prolong nothing."""

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.profile.profile import EngineFacts, Machine, Profile
from pdserve.tools.load_config import SimulateConfig
from pdserve.tools.simulator.cores import SLICE_S, SharedCores, cores_needed
from pdserve.tools.simulator.fleet import Fleet, Forecast, simulate

PROFILE = Profile(model="m", machine=Machine(threads=1), engine=EngineFacts(block_bytes=4096, num_blocks=2000))
LOAD = SimulateConfig(num_prompts=30, request_rate=8, random_input_len=300, random_output_len=20, jobs=1)


def forecast(**settings: float) -> Forecast:
    return simulate(replace(LOAD, **settings), PROFILE, {}, Fleet(1, 1), LOAD.request_rate)  # type: ignore[arg-type]


def test_as_many_cores_as_processes_change_no_time() -> None:
    alone = forecast()
    for cores in (cores_needed(2, 1, 1), 64):
        shared = forecast(cores=cores)
        assert [one.token_times for one in shared.samples] == [one.token_times for one in alone.samples]


def test_fewer_cores_and_busier_ones_take_longer() -> None:
    alone, shared = forecast().figures, forecast(cores=1).figures
    busy = forecast(cores=1, busy_threads=4).figures
    for figure in ("mean_ttft_ms", "mean_tpot_ms"):
        assert alone[figure] < shared[figure] < busy[figure]
    assert busy["failed"] == 0 and busy["total_output_tokens"] == alone["total_output_tokens"]


WORK = st.lists(st.tuples(st.integers(0, 3), st.floats(0, 0.1), st.floats(1e-4, 0.5)), max_size=20)


@given(
    work=WORK, count=st.integers(1, 8), threads=st.integers(1, 4), others=st.floats(0, 8), contention=st.floats(1, 2)
)
def test_nothing_is_faster_than_alone_and_slower_than_its_share(
    work: list[tuple[int, float, float]], count: int, threads: int, others: float, contention: float
) -> None:
    cores, at = SharedCores(count, threads, others, contention), 0.0
    alone, took = defaultdict[int, float](float), defaultdict[int, float](float)
    for instance, gap, seconds in work:
        at += gap
        most = contention * max(1.0, (4 * threads + others) / count)  # four instances, and no router
        took[instance] += cores.step(instance, at, seconds)
        alone[instance] += seconds
        assert alone[instance] * (1 - 1e-9) <= took[instance] <= alone[instance] * most * (1 + 1e-9)


def test_work_of_a_router_takes_cores_from_instances_for_a_while() -> None:
    cores = SharedCores(1)
    assert cores.light(0.0, 0.05) == 0.05 and cores.step("a", 0.0, 1.0) == pytest.approx(2.0, abs=2 * SLICE_S)
    assert cores.step("a", 10.0, 1.0) == pytest.approx(1.0, abs=2 * SLICE_S)


def test_contention_grows_with_the_cores_that_compute() -> None:
    cores = SharedCores(3, contention=1.5)
    assert [cores.step(name, 0.0, 1.0) for name in "abc"] == pytest.approx([1.0, 1.25, 1.5])


def test_enough_cores_with_contention_take_longer() -> None:
    machine = replace(PROFILE.machine, contention=1.4)
    config = replace(LOAD, cores=cores_needed(2, 1, 1))
    crowded = simulate(config, replace(PROFILE, machine=machine), {}, Fleet(1, 1), LOAD.request_rate).figures
    assert forecast().figures["mean_tpot_ms"] < crowded["mean_tpot_ms"] <= 1.4 * forecast().figures["mean_tpot_ms"]


def test_short_work_waits_seldom_and_then_a_whole_slice() -> None:
    cores = SharedCores(1)
    cores.step("a", 0.0, 10.0)
    times = [cores.step("b", 0.0, 1e-3) for _ in range(8)]
    assert times == pytest.approx([*[1e-3] * 3, 5e-3] * 2)

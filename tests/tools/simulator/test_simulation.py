"""Simulation: the real objects on a virtual clock, which end every request, the same each time, and read no real clock."""

import gc
import itertools
import logging
import os
import subprocess
import sys
import time
import tracemalloc
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdserve.config import InstanceConfig, RouterConfig
from pdserve.costs import Costs, Work, attention_pairs
from pdserve.engine.paced_runner import paced_layout
from pdserve.engine.sequence import Sequence
from pdserve.errors import RequestError
from pdserve.keys import STATE_WINDOW, Layout
from pdserve.profile.profile import EngineFacts, KVFacts, Profile, StepModel
from pdserve.proto import pdserve_pb2 as pb
from pdserve.roles.job import Job
from pdserve.router.dispatch.request_state import RequestState
from pdserve.tools.bench.requests import Request as Load
from pdserve.tools.bench.requests import Sample
from pdserve.tools.simulator.model import InstanceModel
from pdserve.tools.simulator.router import SimulatedClient, SimulatedRouter
from pdserve.tools.simulator.simulation import Deployment, Outcome, Simulation
from pdserve.tools.simulator.store import Link

COSTS = Costs(prefill=(0.01, 1e-3, 1e-7), decode=(0.02, 2e-3, 1e-6))
LAYOUT = Layout(
    model_fingerprint="m", num_layers=2, num_kv_heads=2, head_dim=8, block_size=16, dtype="bfloat16", itemsize=2
)
Times = list[tuple[int, list[float]]]


def grouped(*groups: tuple[int, int]) -> Layout:
    """Return the layout of blocks of 16 tokens, given the window and the bytes of a block of each group."""
    facts = tuple(KVFacts(*one) for one in groups)
    return paced_layout(Profile(model="m", engine=EngineFacts(groups=facts)), 16)


def step_seconds(work: Work) -> float:
    decoding = [before + 1 for count, before in work if count == 1]
    prompts = [(count, before) for count, before in work if count > 1]
    _, b, c = COSTS.prefill
    added = sum(b * count + c * attention_pairs(count, before) for count, before in prompts)
    return added + (COSTS.step_seconds(len(decoding), sum(decoding)) or COSTS.prefill[0])


def make_model(**changes: Any) -> InstanceModel:
    values: dict[str, Any] = {
        "layout": LAYOUT,
        "num_blocks": 400,
        "max_model_len": 2000,
        "step_seconds": step_seconds,
        "decode_seconds": COSTS.step_seconds,
        "swap_seconds": lambda blocks: 1e-4 * blocks,
        "link": Link(1e-3, 1e8, 4e8, follows=True),
    }
    return InstanceModel(**values | changes)


def draw_loads(count: int, rate: float, seed: int = 0) -> list[Load]:
    """Return requests of which every third continues the conversation of an earlier one."""
    random, at, loads = Random(seed), 0.0, list[Load]()
    for index in range(count):
        at += random.expovariate(rate)
        blocks = (("shared", 40), (f"own-{index}", random.randrange(10, 400)))
        after = index - 2 if index % 3 == 2 else None
        loads.append(Load(index, random.randrange(1, 60), blocks, at=at, after=after, continues=after is not None))
    return loads


def index(sample: Sample) -> int:
    return sample.index


def cancel_first(router: SimulatedRouter) -> None:
    """Let the client of the oldest running request disconnect."""
    router.catch_up()
    for state in list(router.dispatcher.states.values())[:1]:
        state.cancel()
        state.emit_error(RequestError("cancelled", kind="cancelled"))


def times(outcome: Outcome) -> Times:
    samples = sorted(outcome.samples, key=index)
    return [(sample.index, [round(at, 9) for at in sample.token_times]) for sample in samples]


def check_complete(outcome: Outcome, loads: list[Load]) -> None:
    assert sorted(sample.index for sample in outcome.samples) == [load.index for load in loads]
    for sample in outcome.samples:
        assert sample.ok, sample.error
        assert len(sample.token_times) == sample.output_tokens == loads[sample.index].output_tokens
        assert sample.token_times == sorted(sample.token_times) and sample.sent < sample.token_times[0]


def check_released(simulation: Simulation) -> None:
    """Check that, once the last messages have arrived, nothing of the requests remains, but on instances that died."""
    end = simulation.clock.time + 1
    simulation.clock.run(until=lambda: simulation.clock.time > end)
    for instance in filter(lambda one: one.is_alive, simulation.instances.values()):
        assert instance.thread.num_jobs == 0 and instance.thread.engine.pool.num_held == 0
        instance.thread.engine.pool.check_integrity()
    for router in simulation.routers:
        assert not router.dispatcher.states
        assert {quota.choices for quota in router.admission.quotas.values()} == {0}


def test_every_request_ends_with_all_its_tokens_and_no_real_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> float:
        raise AssertionError("the simulation reads a real clock")

    loads = draw_loads(150, 2.0)
    router = RouterConfig(model="model", max_requests=12)
    simulation = Simulation(Deployment(prefill=2, decode=2, router=router), make_model())
    with monkeypatch.context() as patch:
        for name in ("monotonic", "perf_counter", "sleep", "thread_time"):
            patch.setattr(time, name, fail)
        outcome = simulation.play(loads, is_chat=True)
    check_complete(outcome, loads)
    check_released(simulation)
    assert outcome.seconds > 60 and all(0.02 < share <= 1 for share in outcome.busy.values())
    timelines = [simulation.routers[0].dispatcher.timelines.get(f"r{load.index}") for load in loads]
    ways = {timeline.placement.way for timeline in timelines if timeline is not None and timeline.placement}
    assert len(ways) > 1, "short prompts skip prefill"


def test_a_prompt_that_no_instance_takes_is_refused_without_its_tokens_in_memory() -> None:
    loads = [Load(0, 5, (("long", 3_000_000),), at=0.0), Load(1, 5, (("own", 20),), at=0.1)]
    simulation = Simulation(Deployment(), make_model())
    tracemalloc.start()
    try:
        refused, served = sorted(simulation.play(loads).samples, key=index)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "context is 2000 tokens; the prompt has 3000000" in refused.error and refused.input_tokens == 3_000_000
    assert served.ok and peak < 3_000_000


COLOCATED, SPLIT = Deployment(prefill=0, decode=0, both=2), Deployment(prefill=2, decode=2)
BENT = StepModel(
    decode=((1, 0.02), (3, 0.021), (12, 0.04), (64, 0.06)),
    context_s=2e-6,
    prefill=((4, 0.03), (64, 0.04), (1024, 0.3)),
    pair_s=3e-8,
    mixed=(-0.01, 0.95, 1.05),
)
BENT_STEPS = {"step_seconds": BENT.seconds, "decode_seconds": BENT.decode_seconds}
ITL_TARGET = InstanceConfig(model="model", itl_target_ms=40)


def play_both_ways(
    deployment: Deployment, model: InstanceModel, prepare: Callable[[Simulation], object] = lambda simulation: None
) -> tuple[list[Simulation], list[Outcome]]:
    """Play a load with and without skipping plain decode steps."""
    simulations = [Simulation(deployment, model, can_skip=can_skip) for can_skip in (True, False)]
    for simulation in simulations:
        prepare(simulation)
    return simulations, [simulation.play(draw_loads(60, 3.0), is_chat=True) for simulation in simulations]


@pytest.mark.parametrize(
    ("deployment", "changes"),
    [
        *((one, {"num_blocks": blocks}) for one in (Deployment(), COLOCATED, SPLIT) for blocks in (400, 75)),
        (COLOCATED, BENT_STEPS),
        (replace(COLOCATED, instance=ITL_TARGET), BENT_STEPS),
        (replace(SPLIT, routers=2), {"frame_latency_s": 5e-3}),
        *(
            (one, {"layout": grouped((0, 512), (64, 1536), (STATE_WINDOW, 9000)), "num_blocks": blocks})
            for one in (COLOCATED, SPLIT)
            for blocks in (400, 75)
        ),
        (SPLIT, {"window": 64}),
    ],
)
def test_skipping_plain_decode_steps_changes_no_time(deployment: Deployment, changes: dict[str, Any]) -> None:
    simulations, outcomes = play_both_ways(deployment, make_model(**changes))
    assert times(outcomes[0]) == times(outcomes[1])
    assert outcomes[0].preemptions == outcomes[1].preemptions
    steps = [
        {name: one.thread.reporter.counts["engine_steps"] for name, one in simulation.instances.items()}
        for simulation in simulations
    ]
    assert steps[0] == steps[1]
    costs = [[one.thread.engine.scheduler.costs for one in simulation.instances.values()] for simulation in simulations]
    assert costs[0] == costs[1], "the cost models have seen the same steps"


@pytest.mark.parametrize("can_skip", [True, False])
def test_updates_tell_of_the_blocks_of_steps_that_have_ended(can_skip: bool) -> None:
    simulation = Simulation(Deployment(prefill=0, decode=0, both=1), make_model(), can_skip=can_skip)
    updates, told = [number * 0.1 for number in range(1, 12)], list[int]()
    for at in updates:
        simulation.clock.at(at + 0.001, lambda: told.append(simulation.routers[0].fleet.index.num_blocks("both-0")))
    (sample,) = simulation.play([Load(0, 60, (("own", 15),), at=0.0)]).samples
    ended = [at - simulation.routers[0].model.frame_latency_s for at in sample.token_times]
    assert told == [(15 + bisect_right(ended, at) - 1) // LAYOUT.block_size for at in updates]


@pytest.mark.parametrize("way", ["kill", "freeze", "cancel"])
def test_skipped_steps_that_are_cut_change_no_time(way: str) -> None:
    def prepare(simulation: Simulation) -> None:
        if way == "cancel":
            simulation.clock.at(8.1, lambda: cancel_first(simulation.routers[0]))
        else:
            simulation.clock.at(8.1, lambda: getattr(simulation, way)("decode-0"))

    _, outcomes = play_both_ways(Deployment(prefill=1, decode=2), make_model(), prepare)
    assert times(outcomes[0]) == times(outcomes[1])


def test_tokens_of_skipped_steps_delay_no_request() -> None:
    """The router learns late of the tokens of skipped steps, and served them when they arrived."""
    model = make_model(router_token_s=1e-3, router_request_s=1e-3)
    _, outcomes = play_both_ways(Deployment(prefill=2, decode=3), model)
    skipping, stepping = ([sample.ttft for sample in sorted(one.samples, key=index)] for one in outcomes)
    assert sum(abs(a - b) for a, b in zip(skipping, stepping, strict=True)) / len(skipping) < 2e-4
    assert all(sample.token_times == sorted(sample.token_times) for one in outcomes for sample in one.samples)


def test_an_instance_that_stops_in_a_step_sends_and_stores_nothing_of_it() -> None:
    loads = [Load(0, 8, (("own", 800),), at=0.0)]
    simulation = Simulation(Deployment(prefill=0, decode=0, both=1), make_model())
    simulation.clock.at(0.4, lambda: simulation.freeze("both-0"))  # the prompt takes 0.8 s
    (sample,) = simulation.play(loads).samples
    assert not sample.token_times and sample.status == 503 and not simulation.store.leases
    assert simulation.instances["both-0"].busy_seconds == pytest.approx(0.4, abs=0.01)


def test_routers_do_not_see_the_end_of_a_step_that_is_under_way() -> None:
    simulation = Simulation(Deployment(prefill=0, decode=0, both=1), make_model())
    seen: list[tuple[int, float]] = []

    def look() -> None:
        router = simulation.routers[0].fleet
        counters = router.instances["both-0"].heartbeat.counters
        seen.append((router.index.num_blocks("both-0"), counters.get("engine_steps", 0)))

    for at in (0.75, 1.3):
        simulation.clock.at(at, look)
    simulation.play([Load(0, 30, (("own", 800),), at=0.0)])  # 800 tokens are one step
    assert seen[0] == (0, 0) and seen[1][0] >= 50 and seen[1][1] > 1


def test_it_logs_errors_only_and_leaves_the_log_level_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pdserve"):
        simulation = Simulation(Deployment(prefill=2), make_model())
        simulation.clock.at(0.1, lambda: simulation.kill("prefill-0"))
        simulation.play(draw_loads(4, 10.0))
        assert not caplog.records and logging.getLogger("pdserve").level == logging.INFO


def test_an_instance_that_a_router_drops_ends_the_simulation() -> None:
    """The frame would be a fault of the simulator, and the figures would be those of a fleet with an instance less."""
    simulation = Simulation(Deployment(), make_model())
    fleet = simulation.routers[0].fleet
    frame = pb.InstanceFrame(heartbeat=pb.Heartbeat(free_blocks=1 << 31))
    simulation.clock.at(0.1, lambda: fleet.handle_frame(fleet.instances["decode-0"], frame))
    with pytest.raises(AssertionError, match="decode-0 was dropped: it sent an invalid frame: "):
        simulation.play(draw_loads(4, 10.0))


def test_a_request_that_does_not_fit_gets_the_error_of_a_live_router() -> None:
    loads = [Load(0, 100, (("own", 1950),), at=0.0), Load(1, 8, (("short", 100),), at=0.0)]
    samples = Simulation(Deployment(), make_model()).play(loads).samples
    (failed,) = [sample for sample in samples if not sample.ok]
    message = "this model's context is 2000 tokens; you asked for 2050 (1950 in the prompt, 100 for the answer)"
    assert (failed.status, failed.error) == (400, message)


def test_requests_that_have_ended_leave_nothing_to_the_garbage_collector() -> None:
    """Neither simulated ones nor those of a real instance, of which all this is the code."""

    def requests() -> set[int]:
        return {id(one) for one in gc.get_objects() if type(one) in (Job, Sequence, SimulatedClient, RequestState)}

    gc.collect()
    gc.disable()
    try:
        before = requests()  # in the traceback of a failed test, for example
        simulation = Simulation(SPLIT, make_model())
        simulation.play(draw_loads(20, 3.0), is_chat=True)
        check_released(simulation)
        assert requests() <= before
    finally:
        gc.enable()


def test_seed_determines_all_times() -> None:
    loads, deployment = draw_loads(60, 3.0), Deployment(prefill=2, decode=2)
    runs = [times(Simulation(deployment, make_model(), seed).play(loads)) for seed in (1, 1)]
    assert runs[0] == runs[1]


def test_no_hash_of_a_text_determines_a_time() -> None:
    """The times in this process are those in another one, in which the same texts have other hashes."""
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_simulation import times_with_hits
print(times_with_hits())
"""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{times_with_hits()}\n" and len(done.stdout) > 1000


def times_with_hits() -> Times:
    return times(Simulation(SPLIT, make_model(num_blocks=75)).play(draw_loads(40, 4.0), is_chat=True))


def test_conversations_wait_and_find_their_earlier_turns_in_the_cache() -> None:
    loads = [
        Load(index, 32, ((f"turn-{index}", 320),), at=0.0, after=index - 1 if index else None, continues=index > 0)
        for index in range(3)
    ]
    simulation = Simulation(Deployment(prefill=0, decode=0, both=1), make_model())
    samples = sorted(simulation.play(loads, is_chat=True, think_s=1.0).samples, key=lambda sample: sample.index)
    for earlier, later in itertools.pairwise(samples):
        assert later.sent == pytest.approx(earlier.ended + 1.0)
    assert [sample.input_tokens for sample in samples] == [320, 672, 1024]
    (instance,) = simulation.instances.values()
    assert instance.thread.engine.scheduler.prefix_hits == 336 + 688  # all that is computed but the last, partial block


def test_turns_after_a_failed_one_count_as_failed() -> None:
    turns = [
        Load(index, 8, ((f"turn-{index}", 100),), at=0.0, after=index - 1 if index else None) for index in range(3)
    ]
    turns[0] = Load(0, 8, (("too-long", 5000),), at=0.0)
    other = Load(3, 8, (("other", 100),), at=0.0)
    samples = Simulation(Deployment(), make_model()).play([*turns, other]).samples
    failed = {sample.index: sample.error for sample in samples if not sample.ok}
    assert failed.keys() == {0, 1, 2} and failed[1] == failed[2] == "the previous turn failed"


@pytest.mark.parametrize("way", ["kill", "freeze"])
def test_decode_instance_that_dies_costs_no_request(way: str) -> None:
    loads = draw_loads(60, 3.0)
    simulation = Simulation(Deployment(prefill=1, decode=2), make_model())
    end: Callable[[str], None] = getattr(simulation, way)
    simulation.clock.at(8.0, lambda: end("decode-0"))
    outcome = simulation.play(loads)
    check_complete(outcome, loads)
    timelines = [simulation.routers[0].dispatcher.timelines.get(f"r{load.index}") for load in loads]
    moved = [one for one in timelines if one is not None and one.migrations]
    assert moved and all(8.0 < one.migrations[0].at < 10.5 for one in moved)


def test_full_admission_queue_refuses_with_429() -> None:
    router = RouterConfig(model="model", max_requests=1, max_queue=1)
    loads = [Load(index, 20, ((f"own-{index}", 100),), at=0.0) for index in range(5)]
    outcome = Simulation(Deployment(router=router), make_model()).play(loads)
    assert sorted(sample.status for sample in outcome.samples) == [200, 200, 429, 429, 429]
    assert all(isinstance(sample, Sample) and sample.rejected for sample in outcome.samples if not sample.ok)


def test_slower_link_delays_the_first_token_by_a_lookup_and_the_second_by_the_hand_over() -> None:
    loads = [Load(0, 8, (("own", 800),), at=0.0)]
    fast, slow = [
        Simulation(Deployment(), make_model(link=Link(latency, 1e8, 4e8))).play(loads).samples[0].token_times
        for latency in (0.001, 0.301)
    ]
    assert slow[0] - fast[0] == pytest.approx(0.3)
    assert 0.55 < (slow[1] - slow[0]) - (fast[1] - fast[0]) < 0.65, "once to store and once to load"


def test_several_routers_share_the_instances() -> None:
    loads = draw_loads(60, 3.0)
    simulation = Simulation(Deployment(prefill=2, decode=1, routers=2), make_model())
    outcome = simulation.play(loads)
    check_complete(outcome, loads)
    check_released(simulation)
    assert all(router.dispatcher.timelines.get(f"r{number}") for number, router in enumerate(simulation.routers))


# ---- random fleets, pools, loads, cancellations and failures ------------------------------------------------------------

LIMIT_S = 2000.0  # of a simulation: no request may take that long
counts = st.integers(0, 3)
fleets = st.builds(
    Deployment,
    prefill=counts,
    decode=counts,
    both=counts,
    routers=st.integers(1, 2),
    store_bytes=st.sampled_from([8 * LAYOUT.block_bytes, 1000 * LAYOUT.block_bytes]),
    instance=st.builds(
        InstanceConfig,
        model=st.just("model"),
        itl_target_ms=st.sampled_from([None, 40.0]),
        max_num_seqs=st.sampled_from([2, 64]),
        max_num_batched_tokens=st.sampled_from([24, 2048]),
    ),
    router=st.builds(
        RouterConfig, model=st.just("model"), max_requests=st.sampled_from([3, 1000]), max_queue=st.just(4)
    ),
)
loads = st.lists(
    st.tuples(st.integers(1, 700), st.integers(1, 60), st.floats(0, 0.5), st.booleans(), st.booleans()), max_size=14
)
events = st.lists(st.tuples(st.floats(0.01, 6), st.sampled_from(["cancel", "kill"]), st.integers(0, 8)), max_size=3)


def as_loads(drawn: list[tuple[int, int, float, bool, bool]]) -> list[Load]:
    requests, at = list[Load](), 0.0
    for index, (prompt, output, gap, is_shared, continues) in enumerate(drawn):
        at += gap
        blocks = (("shared", prompt // 2 + 1), (f"own-{index}", prompt)) if is_shared else ((f"own-{index}", prompt),)
        after = index - 1 if continues and index else None
        requests.append(Load(index, output, blocks, at=at, after=after, continues=after is not None))
    return requests


def play(
    deployment: Deployment,
    requests: list[Load],
    num_blocks: int,
    happens: list[tuple[float, str, int]],
    kv: dict[str, Any],
    *,
    can_skip: bool,
) -> tuple[Simulation, Outcome]:
    simulation = Simulation(deployment, make_model(num_blocks=num_blocks, **BENT_STEPS | kv), can_skip=can_skip)
    names = list(simulation.instances)
    for at, what, number in happens:
        action: Callable[[], object] = partial(cancel_first, simulation.routers[number % len(simulation.routers)])
        if what == "kill" and names:
            action = partial(simulation.kill, names[number % len(names)])
        simulation.clock.at(at, action)
    simulation.clock.at(LIMIT_S, partial(pytest.fail, "a request never ends"))
    return simulation, simulation.play(requests, is_chat=True)


BETWEEN_UPDATES: dict[str, Any] = {  # a skipped step fills a block of the later turn's prompt while KV events are due
    "deployment": Deployment(
        prefill=3,
        decode=0,
        both=1,
        store_bytes=8 * LAYOUT.block_bytes,
        instance=InstanceConfig(model="model", max_num_seqs=64, max_num_batched_tokens=2048),
        router=RouterConfig(model="model", max_requests=3, max_queue=4),
    ),
    "drawn": [
        (1, 1, 0.5, False, False),
        (284, 12, 0.0, False, False),
        (438, 8, 0.0, False, False),
        *[(1, 1, 0.0, False, False)] * 5,
        (1, 50, 0.125, False, False),
        (209, 1, 0.0, False, True),
        *[(1, 1, 0.0, False, False)] * 3,
        (355, 24, 0.0, False, False),
    ],
    "num_blocks": 400,
    "happens": [],
    "kv": {},
}
KINDS = [  # of KV: of one group; with windows, with states, with both; with one window in all layers
    {},
    *({"layout": grouped(*groups)} for groups in (((0, 512), (48, 1536)), ((0, 1024), (STATE_WINDOW, 9000)))),
    {"layout": grouped((0, 512), (64, 1024), (STATE_WINDOW, 5000))},
    {"window": 48},
]


@settings(max_examples=25, deadline=None)
@example(**BETWEEN_UPDATES)
@given(
    deployment=fleets,
    drawn=loads,
    num_blocks=st.sampled_from([12, 30, 400]),
    happens=events,
    kv=st.sampled_from(KINDS),
)
def test_requests_end_once_and_leave_nothing(
    deployment: Deployment,
    drawn: list[tuple[int, int, float, bool, bool]],
    num_blocks: int,
    happens: list[tuple[float, str, int]],
    kv: dict[str, Any],
) -> None:
    requests = as_loads(drawn)
    simulation, outcome = play(deployment, requests, num_blocks, happens, kv, can_skip=True)
    assert sorted(sample.index for sample in outcome.samples) == [load.index for load in requests]
    for sample in outcome.samples:
        assert sample.token_times == sorted(sample.token_times) and sample.scheduled <= sample.sent <= sample.ended
        assert all(sample.sent < at <= sample.ended for at in sample.token_times)
        if sample.ok:
            assert len(sample.token_times) == sample.output_tokens == requests[sample.index].output_tokens
        else:
            assert sample.error and sample.status in (0, 200, 400, 429, 500, 503)
    check_released(simulation)
    assert all(0 <= share <= 1 for share in outcome.busy.values())
    if (
        not happens and deployment.store_bytes > 100 * LAYOUT.block_bytes
    ):  # in a full store, some end by their time only
        assert max(simulation.store.leases.values(), default=0.0) <= simulation.clock.time, (
            "leases end with their requests"
        )
    _, stepping = play(deployment, requests, num_blocks, happens, kv, can_skip=False)
    assert times(outcome) == times(stepping) and outcome.preemptions == stepping.preemptions


def test_instances_change_their_roles_start_and_end_while_requests_run() -> None:
    simulation = Simulation(Deployment(prefill=2, decode=2), make_model(start_up_s=1.0))
    fleet, clock = simulation.routers[0].fleet, simulation.clock
    clock.at(1.0, lambda: simulation.drain("prefill-1", "decode"))
    clock.at(2.0, lambda: simulation.start("prefill"))
    clock.at(2.9, lambda: roles.append({name: one.role for name, one in fleet.instances.items()}))
    clock.at(5.0, lambda: simulation.drain("decode-0"))
    roles = list[dict[str, str]]()
    outcome = simulation.play(draw_loads(120, 12.0))
    assert len(outcome.samples) == 120 and all(one.ok for one in outcome.samples)
    assert roles == [{"prefill-0": "prefill", "prefill-1": "decode", "decode-0": "decode", "decode-1": "decode"}]
    after = {"prefill-0": "prefill", "prefill-1": "decode", "decode-1": "decode", "prefill-2": "prefill"}
    assert {name: one.role for name, one in fleet.instances.items()} == after
    moved = [one for one in simulation.routers[0].dispatcher.timelines.latest(200) if one.migrations]
    assert moved and all("was drained" in move.reason for one in moved for move in one.migrations)
    assert all(one.thread.engine.pool.num_held == 0 for one in simulation.instances.values())


def test_a_router_that_is_busy_itself_drops_no_instance() -> None:
    busy = make_model(router_request_s=0.02, router_token_s=1e-4)  # 3 s for all requests, and leases are of 1.5 s
    outcome = Simulation(Deployment(), busy).play([replace(one, at=0.0, after=None) for one in draw_loads(150, 1.0)])
    assert all(one.ok for one in outcome.samples), {one.error for one in outcome.samples}


def test_an_instance_may_start_after_the_last_request() -> None:
    simulation = Simulation(Deployment(prefill=1, decode=1), make_model())
    simulation.clock.at(0.05, lambda: simulation.add("decode"))
    outcome = simulation.play([Load(0, 60, (("own", 15),), at=0.0)])
    assert set(outcome.busy) == {"prefill-0", "decode-0", "decode-1"}
    assert outcome.busy["decode-1"] == 0

"""Adapters as classes of traffic: slots, what they add to steps, and KV that two of them do not share."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.config import InstanceConfig
from pdserve.profile.profile import AdapterModel, EngineFacts, Overheads, Profile, StepModel
from pdserve.tools.bench.requests import Request as Load
from pdserve.tools.bench.requests import Sample
from pdserve.tools.load_config import SimulateConfig
from pdserve.tools.planner.deploy import common_of
from pdserve.tools.simulator.fleet import adapter_names, draw_requests, notes
from pdserve.tools.simulator.model import InstanceModel
from pdserve.tools.simulator.simulation import MODEL, Deployment, Simulation

ADDED = AdapterModel(((1, 2e-3), (8, 9e-3)), 1e-3, 0.5)
PROFILE = Profile(
    model="m",
    engine=EngineFacts(16, 4096, 1000, max_model_len=4096),
    step=StepModel(),
    overheads=Overheads(router_request_s=0.0, router_token_s=0.0),  # whose threads skipped steps reach in another order
    adapters=ADDED,
)


def play(
    loads: list[Load], *, can_skip: bool = True, slots: int = 8, count: int = 4, **counts: Any
) -> tuple[Simulation, list[Sample]]:
    model = replace(InstanceModel.from_profile(PROFILE, "shm"), adapters=adapter_names(SimulateConfig(adapters=count)))
    instance = InstanceConfig(model=MODEL, max_loras=slots)
    deployment = replace(Deployment(prefill=0, decode=0, both=1, instance=instance), **counts)
    simulation = Simulation(deployment, model, can_skip=can_skip)
    samples = sorted(simulation.play(loads).samples, key=lambda one: one.index)
    assert all(one.ok for one in samples), {one.error for one in samples}
    return simulation, samples


def load(index: int, adapter: str, at: float = 0.0, output: int = 20) -> Load:
    return Load(index, output, (("shared", 320), (f"own-{index}", 16)), at=at, adapter=adapter)


def test_steps_take_as_much_longer_as_their_adapters_add() -> None:
    """And no longer without any, whatever an instance has."""
    (base,), (one,) = (play([load(0, name)])[1] for name in ("", "adapter-1"))
    assert one.itls == pytest.approx([gap + 2e-3 for gap in base.itls])
    assert one.ttft == pytest.approx(base.ttft + ADDED.seconds(1, 336) + ADDED.load_s)
    assert ADDED.seconds(0, 0) == 0 and ADDED.seconds(3, 8) == pytest.approx(11e-3)


def test_two_adapters_share_no_kv() -> None:
    def cached(*names: str) -> float:
        simulation, _ = play([load(number, name, 5.0 * number) for number, name in enumerate(names)])
        (instance,) = simulation.instances.values()
        return float(instance.thread.engine.scheduler.prefix_hits)

    assert cached("adapter-1", "adapter-1") == 320
    assert cached("adapter-1", "adapter-2") == cached("adapter-1", "") == 0


def test_a_request_waits_until_its_adapter_has_a_slot() -> None:
    loads = [load(number, f"adapter-{number % 4 + 1}", output=100) for number in range(8)]
    (_, alone), (simulation, samples) = play(loads, slots=4), play(loads, slots=1)
    assert max(one.ttft for one in samples) > 2 * max(one.ttft for one in alone)
    (instance,) = simulation.instances.values()
    assert instance.thread.num_jobs == 0


@pytest.mark.parametrize("counts", [{"both": 2}, {"both": 0, "prefill": 1, "decode": 1}])
def test_skipping_plain_steps_changes_no_time(counts: dict[str, int]) -> None:
    loads = [
        load(number, ["", "adapter-1", "adapter-2", "adapter-3"][number % 4], 0.3 * number) for number in range(16)
    ]
    (_, fast), (_, slow) = (play(loads, can_skip=one, slots=2, **counts) for one in (True, False))
    assert [[round(at, 9) for at in one.token_times] for one in fast] == [
        [round(at, 9) for at in one.token_times] for one in slow
    ]


def test_popular_adapters_get_most_requests_and_a_conversation_keeps_its_own(tmp_path: Path) -> None:
    def drawn(**settings: Any) -> Counter[str]:
        return Counter(one.adapter for one in draw_requests(SimulateConfig(num_prompts=600, **settings), 5.0))

    skewed, even = drawn(adapters=6), drawn(adapters=6, adapter_skew=0.0)
    assert set(skewed) == set(even) == set(adapter_names(SimulateConfig(adapters=6)))
    assert skewed["adapter-1"] > 4 * skewed["adapter-6"] and max(even.values()) < 1.6 * min(even.values())
    assert drawn() == {"": 600}
    path = tmp_path / "trace"
    path.write_text("".join(f'{{"prompt": "p", "session": "{number % 20}"}}\n' for number in range(200)))
    own: dict[str, Any] = {"dataset_name": "custom", "dataset_path": str(path), "multi_turn": True, "adapters": 6}
    requests = draw_requests(SimulateConfig(**own), 5.0)
    assert len({(one.adapter, one.index % 20) for one in requests}) == 20


def test_what_was_not_measured_is_said_and_what_cannot_be_is_refused() -> None:
    config = SimulateConfig(adapters=3, max_loras=2)
    assert any("what adapters add to steps" in one for one in notes(config, replace(PROFILE, adapters=None)))
    assert not any("adapters" in one for one in notes(config, PROFILE))
    common = common_of(config, PROFILE)
    assert common.engine["max-loras"] == 2 and "# with 3 adapters" in common.remarks[0]
    with pytest.raises(ValueError, match="--adapters need instances on CPUs"):
        SimulateConfig(adapters=3, gpu="h100", model="Qwen/Qwen3-8B")

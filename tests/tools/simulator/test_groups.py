"""Groups of KV in a simulation: windows and states take less of pools and ways than the KV of all tokens would."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from pdserve.engine.memory.groups import blocks_in
from pdserve.engine.memory.kv_memory import page_numbers, pool_groups
from pdserve.engine.paced_runner import paced_layout, pool_pages
from pdserve.keys import STATE_WINDOW
from pdserve.profile.profile import EngineFacts, KVFacts, Profile, TransferModel
from pdserve.tools.bench.requests import Request as Load
from pdserve.tools.simulator.model import InstanceModel
from pdserve.tools.simulator.simulation import Deployment, Simulation

# As Gemma 3 with five layers of a window of 512 to one without, and as a hybrid with a state of 2,000 tokens' KV.
WINDOWS = (KVFacts(0, 6 * 1024), KVFacts(512, 30 * 1024))
STATES = (KVFacts(0, 36 * 1024), KVFacts(STATE_WINDOW, 2000 // 16 * 36 * 1024))
WHOLE = EngineFacts(16, 36 * 1024, 1600, max_model_len=8192, max_num_seqs=64)


def profile(*groups: KVFacts, facts: EngineFacts = WHOLE) -> Profile:
    """Return a profile whose pool has as many bytes, whatever the groups."""
    own = Profile(model="m", engine=replace(facts, groups=groups), transfers={"shm": TransferModel(1e-4, 1e9)})
    page = page_numbers(paced_layout(own, 16))
    return replace(own, engine=replace(own.engine, num_pages=facts.num_blocks * facts.block_bytes // page))


def play(
    own: Profile, prompt: int, count: int, deployment: Deployment | None = None, output: int = 40
) -> tuple[Simulation, list[Any]]:
    simulation = Simulation(deployment or Deployment(), InstanceModel.from_profile(own, "shm"))
    loads = [Load(index, output, ((f"own-{index}", prompt),), at=0.0) for index in range(count)]
    samples = simulation.play(loads).samples
    assert all(one.ok for one in samples), {one.error for one in samples}
    return simulation, samples


def moved(simulation: Simulation) -> Counter[str]:
    """Return the bytes that were stored, and those that were loaded."""
    found = Counter[str]()
    for instance in simulation.instances.values():
        for part, group in zip(instance.connectors, instance.thread.engine.layout.groups, strict=True):
            found.update({way: count * group.block_bytes for way, count in part.stats().blocks.items()})
    return found


def test_a_hand_over_moves_what_a_window_reaches() -> None:
    whole, windows = (moved(play(profile(*groups), 4096, 1)[0]) for groups in ((), WINDOWS))
    assert whole["load"] == 256 * 36 * 1024
    expected = 256 * 6 * 1024 + 512 // 16 * 30 * 1024
    assert windows["load"] == pytest.approx(expected, rel=0.04) and windows["load"] < 0.28 * whole["load"]
    assert windows["store"] == windows["load"] + 30 * 1024, "and what tokens behind the last full block reach"


def test_a_hand_over_moves_one_state() -> None:
    simulation, _ = play(profile(*STATES), 500, 1)
    states = [one.connectors[1].stats().blocks for one in simulation.instances.values()]
    assert sum((Counter(one) for one in states), Counter()) == {"store": 1, "load": 1}


def test_a_pool_keeps_more_sequences_with_windows() -> None:
    """So that fewer of them are preempted, or wait."""
    both = Deployment(prefill=0, decode=0, both=1)
    ends = [max(one.ended for one in play(profile(*groups), 2048, 24, both, 300)[1]) for groups in ((), WINDOWS)]
    assert ends[1] < 0.8 * ends[0]


def test_a_pool_has_as_many_bytes_with_blocks_of_any_size() -> None:
    """States are padded to whole blocks of rows, so that no page becomes larger than all of these together."""
    for groups in (WINDOWS, STATES, (KVFacts(0, 160), KVFacts(64, 96), KVFacts(STATE_WINDOW, 1001))):
        own = profile(*groups)
        for size in (16, 64, 512):
            layout = paced_layout(own, size)
            page = page_numbers(layout)
            assert page <= 2 * max(group.block_bytes for group in layout.groups) * len(groups) * 16
            assert pool_pages(own, layout) * page == pytest.approx(1600 * 36 * 1024, rel=0.3)
            assert InstanceModel.from_profile(own, "shm", block_size=size).num_blocks == blocks_in(
                pool_pages(own, layout), pool_groups(layout, 0)
            )
            bytes_of = [group.block_bytes for group in layout.groups]
            rows = [one for one, group in zip(bytes_of, groups, strict=True) if group.window != STATE_WINDOW]
            assert rows == [group.block_bytes * size // 16 for group in groups if group.window != STATE_WINDOW]
            assert len(rows) == len(groups) or 1 <= bytes_of[-1] / groups[-1].block_bytes < 1 + 512


@pytest.mark.parametrize("groups", [(KVFacts(512, 1), KVFacts(0, 1)), (KVFacts(0, 1), KVFacts(0, 1)), (KVFacts(0, 0),)])
def test_groups_that_cannot_be_are_refused(groups: tuple[KVFacts, ...]) -> None:
    with pytest.raises(ValueError, match="groups must have windows of their own, the longest first"):
        EngineFacts(groups=groups)

"""Paced instances refuse profiles that are not theirs, in a sentence; what an engine asks of a runner's memory."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.config import EngineConfig
from pdserve.costs import Costs
from pdserve.engine.engine import Engine
from pdserve.engine.memory.blocks import BlockPairs
from pdserve.engine.paced_runner import PacedMemory, PacedRunner, paced_layout
from pdserve.engine.scheduling.preemption import Preemption
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import SchedulerOutput
from pdserve.errors import SetupError
from pdserve.profile.profile import EngineFacts, Profile
from tests.engine.scheduling.steps import sequence

PROFILE = Profile(model="demo", engine=EngineFacts(block_bytes=64, num_blocks=8, max_model_len=64))


def load(profile: Profile, folder: Path, *, force: bool = False) -> PacedRunner:
    profile.save(folder / "p.json")
    return PacedRunner.load(EngineConfig(model="demo", paced=str(folder / "p.json"), force=force))


def test_a_profile_of_another_model_is_refused_unless_forced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load(PROFILE, tmp_path).kv.num_blocks == 8
    other, reason = replace(PROFILE, model="llama"), "p.json is a profile of llama, and this instance serves demo"
    with pytest.raises(SetupError, match=f"{reason}; --force uses it nevertheless"):
        load(other, tmp_path)
    with caplog.at_level(logging.WARNING):
        assert load(other, tmp_path, force=True).kv.num_blocks == 8
    assert reason in caplog.text


def test_a_profile_without_blocks_or_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="says 0 blocks; give --num-blocks"):
        load(replace(PROFILE, engine=EngineFacts(block_bytes=64)), tmp_path)
    with pytest.raises(SetupError, match=r"--paced .*none.json cannot be read: No such file"):
        PacedRunner.load(EngineConfig(paced=str(tmp_path / "none.json")))


class Memory:
    """What each block has, in place of `PacedMemory`."""

    def __init__(self, kv: PacedMemory) -> None:
        self.blocks = {block: f"block {block}" for block in range(kv.num_blocks)}
        self.host = {block: f"host block {block}" for block in range(kv.num_host_blocks)}
        self.groups, self.host_groups = kv.groups, kv.host_groups
        self.num_blocks = self.num_pages = kv.num_blocks
        self.num_host_blocks = kv.num_host_blocks

    def swap(self, swap_out: BlockPairs, swap_in: BlockPairs) -> float:
        for block, host_block in swap_out:
            self.host[host_block] = self.blocks[block]
        for block, host_block in swap_in:
            self.blocks[block] = self.host[host_block]
        return 0.0

    def copy_blocks(self, pairs: BlockPairs) -> None:
        for source, target in pairs:
            self.blocks[target] = self.blocks[source]


def test_a_block_is_copied_before_another_is_restored_in_its_place() -> None:
    """A prompt gives up its last block, which others find, for a copy; in the same step, a swapped sequence takes it."""
    block = 4
    config = EngineConfig(model="m", num_blocks=12, block_size=block, swap_space=4 * 64 / 2**30, max_num_seqs=8)
    layout = paced_layout(replace(PROFILE, engine=replace(PROFILE.engine, block_size=block)), block)
    runner: Any = PacedRunner(config, layout, 48, lambda work: 0.0, lambda blocks: 0.0, lambda seconds: None)
    memory = runner.kv = Memory(runner.kv)
    engine = Engine(config, runner=runner)
    scheduler, pool = engine.scheduler, engine.pool
    scheduler.costs = Costs(prefill=(0.0, 1e-3, 0.0), swap=(0.0, 1e-6))

    def start(rank: int, prompt: Iterable[int], max_tokens: int = 9) -> Sequence:
        seq = sequence(str(rank), [*prompt], max_tokens)
        seq.rank = rank
        scheduler.add(seq)
        return seq

    def finish(seq: Sequence) -> None:
        while not seq.output.finish_reason():
            engine.step()
        engine.remove(seq)

    finish(start(0, range(100, 129), 1))
    start(-1, [7])
    finish(start(0, range(9), 1))
    scheduler.max_num_batched_tokens = 4
    swapped = start(2, range(50, 54))
    engine.step()
    preempted = SchedulerOutput()
    Preemption(scheduler, preempted).preempt(swapped)
    memory.swap(preempted.swap_out, [])
    scheduler.max_num_batched_tokens = 16
    repeated = sequence("0", [*range(8)])
    assert scheduler.reserve(repeated, 2, 8) and repeated.kv.num_registered == 2
    repeated.kv.mark_loaded(8)
    repeated.kv.reopen_prompt()
    shared = repeated.kv.block_ids[1]
    scheduler.add(repeated)
    start(1, range(200, 220))
    start(3, range(100, 132))  # it lacks room, but what it has found is used last
    scheduler.itl_target, scheduler.costs = 0.008, Costs(prefill=(0.0, 1e-3, 0.0), decode=(0.0, 0.0, 0.0))
    schedule = engine.step().schedule
    assert [block for block, _ in schedule.swap_in] == [shared] and len(schedule.block_copies) == 1
    assert memory.blocks[repeated.kv.block_ids[1]] == f"block {shared}"
    assert memory.blocks[shared] == memory.host[0]
    pool.check_integrity()

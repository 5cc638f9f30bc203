"""Model runners of several ranks: rank 0 passes on what its engine asks of it, and the followers do the same."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from pdserve.config import EngineConfig
from pdserve.engine.checkpoint import Checkpoint
from pdserve.engine.memory.blocks import BlockPairs
from pdserve.engine.memory.groups import BlockTable
from pdserve.engine.memory.kv_memory import KVMemory
from pdserve.engine.model_runner import ModelRunner, StepInputs, TokenIds
from pdserve.kernels.batch import Kernel
from pdserve.ranks.messages import OnMemory, Step
from pdserve.ranks.table_changes import ReceivedTables, SentTables, pack_ids, unpack_ids

if TYPE_CHECKING:
    from pdserve.ranks.followers import Followers


class LeadingRunner(ModelRunner):
    """The runner of rank 0.

    Attributes:
        followers: the other ranks' processes.
    """

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, followers: "Followers") -> None:
        self._is_leading = False  # all ranks go through the constructor by themselves
        self._tables = [SentTables() for _ in checkpoint.layout.groups]
        super().__init__(checkpoint, config)
        self.clock = time.monotonic  # the CPU time of a step would leave out that other ranks are slower
        self.followers = followers
        self.kv = _LeadingMemory(self.kv, self.kernel, checkpoint, followers)
        self._is_leading = True

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let steps be computed that the other ranks compute by themselves, at the same time."""
        self._is_leading = False
        try:
            yield
        finally:
            self._is_leading = True

    def step_inputs(
        self,
        ids_T: TokenIds,
        counts: list[int],
        first: list[int],
        tables: list[BlockTable],
        logit_rows: list[int],
        tails: Sequence[list[BlockTable]] = (),
    ) -> StepInputs:
        if self._is_leading:
            changes, *of_tails = [sent.changes(one) for sent, one in zip(self._tables, (tables, *tails), strict=False)]
            self.followers.send(Step(pack_ids(ids_T.tolist()), counts, first, changes, logit_rows, of_tails))
        return super().step_inputs(ids_T, counts, first, tables, logit_rows, tails)


class _LeadingMemory(KVMemory):
    """The KV memory of rank 0. What happens to its blocks happens to those of all ranks."""

    def __init__(self, own: KVMemory, kernel: Kernel, checkpoint: Checkpoint, followers: "Followers") -> None:
        super().__init__(own.pool_NX, own.host_NX, kernel, checkpoint.layout, checkpoint.spec)
        self._followers = followers

    def compile_copies(self) -> None:
        self._followers.send(OnMemory("compile_copies", []))
        super().compile_copies()

    def copy_blocks(self, pairs: BlockPairs) -> None:
        self._followers.send(OnMemory("copy_blocks", [pairs]))
        super().copy_blocks(pairs)

    def swap(self, swap_out: BlockPairs, swap_in: BlockPairs) -> float:
        self._followers.send(OnMemory("swap", [swap_out, swap_in]))
        return super().swap(swap_out, swap_in)

    def clear_tail(self, block: int, used: int) -> None:
        self._followers.send(OnMemory("clear_tail", [block, used]))
        super().clear_tail(block, used)


class FollowingRunner(ModelRunner):
    """The runner of another rank."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig) -> None:
        super().__init__(checkpoint, config)
        self._tables = [ReceivedTables() for _ in checkpoint.layout.groups]

    @torch.inference_mode()
    def follow(self, step: Step) -> None:
        """Compute the same step as rank 0, which alone gets the logits."""
        changes = (step.tables, *step.tails)
        tables, *tails = [received.apply(one) for received, one in zip(self._tables, changes, strict=False)]
        ids_T = np.array(unpack_ids(step.ids), dtype=np.uint32)
        self.forward(self.step_inputs(ids_T, step.counts, step.computed, tables, step.logit_rows, tails))

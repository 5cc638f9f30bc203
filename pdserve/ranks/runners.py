"""Model runners of several ranks: rank 0 passes on what its engine asks of it, and the followers do the same."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from pdserve.config import EngineConfig
from pdserve.engine.checkpoint import Checkpoint
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.sequence import Sequence
from pdserve.ranks.messages import ClearTail, CopyBlocks, Pairs, Step, Swap, pack_ids, unpack_ids

if TYPE_CHECKING:
    from pdserve.ranks.followers import Followers


class LeadingRunner(ModelRunner):
    """The runner of rank 0.

    Attributes:
        followers: the other ranks' processes.
    """

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, followers: "Followers") -> None:
        self._is_leading = False  # all ranks go through the constructor by themselves
        super().__init__(checkpoint, config)
        self.clock = time.monotonic  # the CPU time of a step would leave out that other ranks are slower
        self.followers = followers
        self._is_leading = True

    def _announce(self, seqs: list[Sequence], counts: list[int], ids: list[int], logit_rows: list[int]) -> None:
        if self._is_leading:
            computed, tables = [seq.num_computed for seq in seqs], [pack_ids(seq.block_ids) for seq in seqs]
            self.followers.send(Step(pack_ids(ids), counts, computed, tables, logit_rows))

    def copy_blocks(self, pairs: Pairs) -> None:
        if pairs:
            self.followers.send(CopyBlocks(pairs))
        super().copy_blocks(pairs)

    def swap(self, swap_out: Pairs, swap_in: Pairs) -> float:
        if swap_out or swap_in:
            self.followers.send(Swap(swap_out, swap_in))
        return super().swap(swap_out, swap_in)

    def clear_tail(self, block: int, used: int) -> None:
        self.followers.send(ClearTail(block, used))
        super().clear_tail(block, used)


@dataclass(frozen=True)
class _Progress:
    """What a step needs to know of a sequence."""

    num_computed: int
    block_ids: list[int]


class FollowingRunner(ModelRunner):
    """The runner of another rank."""

    @torch.inference_mode()
    def follow(self, step: Step) -> None:
        """Compute the same step as rank 0, which alone gets the logits."""
        tables = [unpack_ids(table) for table in step.tables]
        seqs = [_Progress(computed, table) for computed, table in zip(step.computed, tables, strict=True)]
        spans = [range(one, one + count) for one, count in zip(step.computed, step.counts, strict=True)]
        positions = [position for span in spans for position in span]
        batch = self._build_batch(cast(list[Sequence], seqs), step.counts, positions)
        rows = torch.tensor(step.logit_rows, dtype=torch.long, device=self.device)
        self.forward(unpack_ids(step.ids), positions, batch, rows)

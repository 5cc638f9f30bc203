"""Paced runner: stands in for the model runner, takes as long as a profile says, and computes nothing.

The rest of the instance is real: scheduler, block pool, roles, connector and router links. Paced instances show what a fleet
does that has more processors than this machine, and a simulation runs them on a virtual clock.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from pdserve.config import EngineConfig
from pdserve.costs import Work
from pdserve.engine.checkpoint import Checkpoint
from pdserve.engine.memory.blocks import BlockPairs
from pdserve.engine.memory.groups import Group, blocks_in, pages_for
from pdserve.engine.memory.kv_memory import group_views, page_numbers, pool_groups
from pdserve.engine.step import StepOutcome, StepPlan
from pdserve.errors import SetupError
from pdserve.keys import STATE_WINDOW, Layout, Section
from pdserve.kv_spec import KVSpec
from pdserve.profile.profile import Profile

log = logging.getLogger(__name__)
FIRST_TOKEN_ID = 40  # of the tokens that it "samples": letters in most vocabularies, so that each of them has text
NUM_TOKEN_IDS = 50


def next_token(num_tokens: int) -> int:
    """Return the token that follows `num_tokens` others."""
    return FIRST_TOKEN_ID + num_tokens % NUM_TOKEN_IDS


class PacedKernel:
    """Stands in for the attention kernel, of which an instance reports the name."""

    NAME = "paced"


def paced_layout(profile: Profile, block_size: int) -> Layout:
    """Return a layout whose blocks have the bytes of the profiled ones, in each group of layers."""
    engine = profile.engine
    common: dict[str, Any] = {
        "model_fingerprint": profile.model_fingerprint or profile.model,
        "block_size": block_size,
        "dtype": "uint8",
        "itemsize": 1,
    }
    if len(engine.groups) < 2:
        bytes_per_token = max(2, engine.block_bytes // engine.block_size)
        return Layout(num_layers=1, num_kv_heads=1, head_dim=bytes_per_token // 2, **common)
    sizes = {one: max(1, one.block_bytes // engine.block_size) for one in engine.groups if one.window != STATE_WINDOW}
    unit = math.lcm(*(size * block_size for size in sizes.values()))  # states are padded, see `KVSpec.layout`
    sizes |= {one: -(-one.block_bytes // unit) * unit // block_size for one in engine.groups if one not in sizes}
    first, *more = (
        Section(num_layers=1, num_kv_heads=1, head_dim=size, latent=True, window=one.window)
        for one, size in sizes.items()
    )
    return Layout(**asdict(first), more=tuple(more), **common)


def pool_pages(profile: Profile, layout: Layout) -> int:
    """Return the pages of a pool with as many bytes as when the profile was measured."""
    engine = profile.engine
    pages = engine.num_pages or engine.num_blocks
    return pages * page_numbers(paced_layout(profile, engine.block_size)) // page_numbers(layout)


@dataclass
class PacedMemory:
    """Stands in for `KVMemory`. Its blocks hold no KV, and swapping them only takes time.

    Attributes:
        pool_NX: its pages.
        num_host_blocks: pages in host memory.
        swap_seconds: duration of copying a number of blocks of the first group.
        take: lets a duration pass.
    """

    pool_NX: torch.Tensor
    layout: Layout
    num_host_blocks: int
    swap_seconds: Callable[[float], float]
    take: Callable[[float], None]
    copies: ClassVar[None] = None
    final_bytes: ClassVar[list[int]] = []  # a step writes nothing, and so no layer

    def __post_init__(self) -> None:
        self.groups: Sequence[Group] = pool_groups(self.layout, len(self.pool_NX))
        self.host_groups: Sequence[Group] = pool_groups(self.layout, self.num_host_blocks)
        self.num_blocks = blocks_in(len(self.pool_NX), self.groups)

    @property
    def num_pages(self) -> int:
        return len(self.pool_NX)

    @property
    def views(self) -> list[torch.Tensor]:
        return group_views(self.pool_NX, self.layout)

    def swap(self, swap_out: BlockPairs, swap_in: BlockPairs) -> float:
        """Take the time of copying blocks, and return it in seconds."""
        first = self.groups[0].per_page
        pages = [first / self._group(block).per_page for block, _ in (*swap_out, *swap_in)]
        seconds = self.swap_seconds(sum(pages))
        self.take(seconds)
        return seconds

    def _group(self, block: int) -> Group:
        return self.groups[sum(block >= group.first_id for group in self.groups) - 1]

    def copy_blocks(self, pairs: BlockPairs) -> None:
        """Do nothing."""

    def clear_tail(self, block: int, used: int) -> None:
        """Do nothing."""


class PacedRunner:
    """A runner whose steps only take time. Its attributes are those of `ModelRunner`.

    Args:
        layout: of one block.
        max_model_len: tokens of the longest request.
        step_seconds: duration of a step, by the (tokens to compute, tokens before them) of each sequence.
        swap_seconds: duration of copying a number of blocks to host memory, or back.
        sleep: lets a duration pass.
        block_bytes: bytes of a page in this process's memory, if they are not those of the layout.
        num_pages: of the pool; None: as many as the blocks of `config` take.
        window: of all layers, if there is one.
    """

    graphs = None
    pipeline = None
    numerics = ""
    kernel = PacedKernel()

    def __init__(
        self,
        config: EngineConfig,
        layout: Layout,
        max_model_len: int,
        step_seconds: Callable[[Work], float],
        swap_seconds: Callable[[float], float],
        sleep: Callable[[float], None],
        *,
        vocab_size: int = 2**31 - 1,
        block_bytes: int | None = None,
        num_pages: int | None = None,
        window: int | None = None,
    ) -> None:
        self.window = window
        if num_pages is None:
            assert config.num_blocks is not None
            num_pages = pages_for(config.num_blocks, pool_groups(layout, 0), config.max_num_seqs)
        self.checkpoint = Checkpoint(
            model=torch.nn.Module(),
            layout=layout,
            spec=KVSpec(()),
            context_length=max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=frozenset(),
            device=torch.device("cpu"),
            dtype=torch.uint8,
        )
        page_bytes = page_numbers(layout)
        pool = torch.zeros((num_pages, block_bytes or page_bytes), dtype=torch.uint8)
        num_host_blocks = int(config.swap_space * 2**30) // page_bytes
        self.kv = PacedMemory(pool, layout, num_host_blocks, swap_seconds, self._take)
        self._step_seconds = step_seconds
        self._sleep = sleep
        self._slept = 0.0

    @classmethod
    def load(cls, config: EngineConfig) -> "PacedRunner":
        """Return a runner that sleeps as long as the steps of the profile `config.paced` take.

        Raises:
            SetupError: the profile cannot be read, is of another model, or does not say how many blocks there are.
        """
        profile = Profile.load_setting("--paced", config.paced)
        if profile.model not in (config.name, config.model):  # the machine may be another one: that is the purpose
            reason = f"--paced {config.paced} is a profile of {profile.model}, and this instance serves {config.name}"
            if not config.force:
                raise SetupError(f"{reason}; --force uses it nevertheless")
            log.warning("%s", reason)
        size, (a, b) = config.block_size, profile.swap
        ratio = size / profile.engine.block_size  # of a block to the one that was measured
        layout = paced_layout(profile, size)
        pages = None if config.num_blocks else pool_pages(profile, layout)
        num_blocks = config.num_blocks or blocks_in(pages or 0, pool_groups(layout, 0))
        if num_blocks < 2:
            raise SetupError(f"--paced {config.paced} says {num_blocks} blocks; give --num-blocks")
        return cls(
            config,
            layout,
            profile.engine.max_model_len or num_blocks * size,
            profile.step.seconds,
            lambda blocks: a + b * ratio * blocks,
            time.sleep,
            num_pages=pages,
            window=profile.engine.window,
        )

    def clock(self) -> float:
        """Return the seconds that its steps have taken."""
        return self._slept

    def step(self, plan: StepPlan) -> StepOutcome:
        """Take the time of a step. The outcome has a token for each sequence whose KV is complete afterwards."""
        if not plan.counts:
            return {}
        self._take(self._step_seconds([row for seq in plan.counts for row in plan.work(seq)]))
        rows = plan.rows()
        for seq in rows.sampled:
            if seq.group is not None:
                count = seq.group.search.num_candidates
                seq.group.record_candidates(seq, [(next_token(len(seq)) + i, -1.0 - i) for i in range(count)])
        sampled = [(seq, next_token(len(seq) + ahead)) for seq, ahead in zip(rows.sampled, rows.ahead, strict=True)]
        return plan.outcome([(seq, token, None) for seq, token in sampled if seq.group is None])

    def _take(self, seconds: float) -> None:
        self._slept += seconds
        self._sleep(seconds)

"""A draft model whose KV are hashes, for tests of all that surrounds it: the rows of its pool are checked in each step."""

import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from pdserve.config import EngineConfig
from pdserve.engine.checkpoint import Checkpoint
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.keys import Tokens
from pdserve.speculation import draft_model
from pdserve.speculation.draft_model import DraftModel
from tests.instance.hash_model import HASH_BYTES, VOCAB, HashRunner, WrongRow, layout_of, next_token, rows_of, spec_of


class HashDraftModel(DraftModel):
    """Proposes as `DraftModel` does. Its tokens are those of the hash model, or others at random.

    Salts and adapters change its KV as they change that of the hash model: what one variant has left is of no use to another.

    Args:
        target: runs the model that drafts are for.
        rng: decides which tokens are right, how large its pool is, and how long its context.
    """

    def __init__(self, config: EngineConfig, scheduler: Scheduler, target: HashRunner, rng: random.Random) -> None:
        spec, size = spec_of((None,)), config.block_size
        model, context = torch.nn.Module(), rng.choice([20, 1 << 20, 1 << 20])
        own = model, layout_of(spec, size), spec, context, VOCAB, frozenset[int](), torch.device("cpu"), torch.uint8
        stands_in: dict[str, Any] = {
            "load": lambda config: Checkpoint(*own),
            "ModelRunner": lambda checkpoint, config: SimpleNamespace(checkpoint=checkpoint),
            "_check_vocabulary": lambda *models: None,
            "POOL_SHARE": rng.choice([4.0, 4.0, 100.0]),  # of few pages, a quarter would be no two blocks
        }
        with mock.patch.multiple(draft_model, **stands_in):
            super().__init__(config, scheduler, target, lambda: 0.0)  # type: ignore[arg-type]
        self._target, self._rng = target, rng
        self._rows = np.zeros((self.pool.num_blocks, size, HASH_BYTES), np.uint8)

    def _compute(self, new: Mapping[Sequence, Tokens], drafting: list[Sequence]) -> list[int]:
        variant_of = self._target.variant_of
        rows = {seq: rows_of([*seq.output.tokens], variant_of(seq.request_id)) for seq in new}
        for seq, tokens in new.items():
            kept = self.followed[seq]
            self._check(seq, rows[seq])
            stop = kept.num_computed + len(tokens)
            assert tokens == seq.output.tokens[kept.num_computed : stop]
            for at in range(kept.num_computed, stop):
                block = kept.block_ids[at // self.pool.block_size]
                self._rows[block, at % self.pool.block_size] = np.frombuffer(rows[seq][at], np.uint8)
            kept.compute(len(tokens))
        for seq in new:  # again, since two sequences may have written to one block
            self._check(seq, rows[seq])
        return [
            next_token(rows[seq][-1], seq.sampling.seed, seq.output.num_generated)
            if self._rng.random() < 0.8
            else self._rng.randrange(VOCAB)
            for seq in drafting
        ]

    def _check(self, seq: Sequence, rows: list[bytes]) -> None:
        """Raise WrongRow unless all that is there of a sequence is the KV of its tokens."""
        kept = self.followed[seq]
        found = self._rows[np.array(kept.block_ids, np.int64)].tobytes()[: kept.num_computed * HASH_BYTES]
        if found != b"".join(rows[: kept.num_computed]):
            raise WrongRow(f"{seq.request_id}: the draft model's KV of {len(seq)} tokens")

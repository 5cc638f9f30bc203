"""A draft model whose KV are hashes, for tests of all that surrounds it: the rows of its pool are checked in each step."""

import random
from collections.abc import Mapping

import numpy as np

from pdserve.config import EngineConfig
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.keys import Tokens
from pdserve.speculation.model_drafter import ModelDrafter
from tests.instance.hash_model import HASH_BYTES, VOCAB, HashRunner, WrongRow, layout_of, next_token, rows_of, spec_of


class HashDraftModel(ModelDrafter):
    """Proposes as a draft model does. Its tokens are those of the hash model, or others at random.

    Salts and adapters change its KV as they change that of the hash model: what one variant has left is of no use to another.

    Args:
        target: runs the model that drafts are for.
        rng: decides which tokens are right, how large its pool is, and how long its context.
    """

    def __init__(self, config: EngineConfig, scheduler: Scheduler, target: HashRunner, rng: random.Random) -> None:
        layout = layout_of(spec_of((None,)), config.block_size)
        context, share = rng.choice([20, 1 << 20, 1 << 20]), rng.choice([4.0, 4.0, 100.0])  # of the bytes of its pool
        room = int(share * target.kv.pool_NX.numel() / layout.block_bytes)
        super().__init__(config, scheduler, min(target.kv.num_blocks, room), context, lambda: 0.0)
        self._target, self._rng = target, rng
        self._rows = np.zeros((self.pool.num_blocks, config.block_size, HASH_BYTES), np.uint8)

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

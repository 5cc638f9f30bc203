"""Engine thread of a simulated instance: the real `Instance`, which can also take many identical decode steps at once."""

import math
from collections.abc import Sequence

from pdserve.engine.paced_runner import next_token
from pdserve.instance.instance import HEARTBEAT_UPDATE_S, Instance
from pdserve.instance.reporter import COSTS_UPDATE_S
from pdserve.kv_transfer.connector import Connector
from pdserve.kv_transfer.guarded import guard
from pdserve.lifetime import Stage
from pdserve.proto import pdserve_pb2 as pb


class EngineThread(Instance):
    """An instance whose plain decode steps can be skipped: those in which each sequence of the batch gets a token, and
    nothing else happens. Skipping them leaves it in the same state as taking them.
    """

    def _attach(self, connector: Connector, url: str) -> Connector:
        """Attach nothing: no bytes are moved."""
        return guard(connector, self._inbox.put, self.now)

    def num_plain_steps(self, most: int) -> int:
        """Return how many of the next steps are plain, at most `most`, if nothing arrives in the meantime."""
        scheduler, pool, decoder = self.engine.scheduler, self.engine.pool, self.decoder
        if scheduler.waiting or scheduler.loaded or decoder.unreserved or decoder.cramped or not scheduler.running:
            return 0
        if self.engine.drafter is not None or self._slotless:  # a slot may be free already
            return 0
        count: float = most
        for seq in scheduler.running:
            job = self._by_sequence[seq]
            if not seq.kv.is_decoding or job.phase == pb.PREFILL or Stage.DECODE_STARTED not in job.stamped:
                return 0
            if seq.kv.blocks_needed(pool) and pool.blocks_for(len(seq)) == len(seq.kv.block_ids):
                return 0  # a shared block is about to be copied
            count = min(
                count, seq.sampling.max_tokens - seq.output.num_generated - 1, self.decoder.steps_until_store(job) - 1
            )
        while count > 0 and self._blocks_for(int(count)) > pool.num_free:
            count = math.floor(count / 2)
        return max(0, int(count))

    def steps_until_keys_change(self) -> int:
        """Return how many plain steps it takes to fill a block; 0 if the next step takes one, which may evict another."""
        size = self.engine.pool.block_size
        return min(-seq.kv.num_computed % size for seq in self.engine.scheduler.running)

    def skip(self, began_at: float, ends: Sequence[float]) -> None:
        """Take plain steps at once, of which the first began at `began_at`, and each ends when the next one begins."""
        first, starts = 0, [began_at, *ends[:-1]]
        updates = self._heartbeat_updates(starts)
        for step in updates:
            # The next heartbeat replaces this one before a router can see it, but not what fits have forgotten at its time.
            if step == updates[-1] or ends[step] - self.reporter.costs_updated_at > COSTS_UPDATE_S:
                self._advance(starts[first : step + 1], ends[first : step + 1])
                self.reporter.update(self._by_sequence.values(), 0, ends[step])
                first = step + 1
        self._advance(starts[first:], ends[first:])
        self.send_outputs()

    def _heartbeat_updates(self, starts: Sequence[float]) -> list[int]:
        """Return the indices of the steps with these beginnings after which the heartbeat is updated."""
        updates = list[int]()
        for step, started in enumerate(starts):
            if started - self._heartbeat_updated_at > HEARTBEAT_UPDATE_S:
                self._heartbeat_updated_at = started
                updates.append(step)
        return updates

    def _advance(self, starts: Sequence[float], ends: Sequence[float]) -> None:
        """Do what plain steps do to sequences, counters and cost models."""
        running, pool, steps = self.engine.scheduler.running, self.engine.pool, len(ends)
        if not steps:
            return
        context, batch = sum(map(len, running)), len(running)
        record = self.reporter.meter.record_decode_step
        for started, ended in zip(starts, ends, strict=True):
            record(batch, context, ended - started, ended)
            context += batch
        if self.engine.scheduler.window is not None or pool.tail_groups:
            for _ in range(steps):
                self._advance_windows()
        else:
            for seq in running:
                tokens = [next_token(count) for count in range(len(seq), len(seq) + steps)]
                seq.output.extend(tokens[:-1])
                seq.kv.grow(pool)
                seq.output.append(tokens[-1])
                seq.kv.mark_computed(steps)
                seq.kv.register_full_blocks(pool)
                self._by_sequence[seq].pending_output().token_ids.extend(tokens)
        self.count("generation_tokens", steps * batch)
        self.count("engine_steps", steps)

    def _advance_windows(self) -> None:
        """Do the same for one step of a pool from which blocks go that leave a window: the order decides who gets which."""
        scheduler, pool = self.engine.scheduler, self.engine.pool
        for seq in scheduler.running:
            seq.kv.drop_blocks(pool, scheduler.num_out_of_window(seq.kv.num_computed))
            seq.kv.tails.drop(pool, seq.kv.num_computed)
        for seq in scheduler.running:  # as `Scheduler.schedule`: promised blocks come after those of all others
            if not seq.kv.blocks_needed(pool) <= seq.kv.num_promised <= pool.num_free:
                seq.kv.take_room(pool)
        for seq in scheduler.running if pool.num_promised else ():
            seq.kv.take_promised(pool, 1)
        for seq in scheduler.running:
            seq.kv.mark_computed(1)
            seq.kv.register_full_blocks(pool)
        for seq in scheduler.running:
            token = next_token(len(seq))
            seq.output.append(token)
            self._by_sequence[seq].pending_output().token_ids.append(token)

    def _blocks_for(self, steps: int) -> int:
        """Return how many new pages these plain steps take at most."""
        size, groups = self.engine.pool.block_size, self.engine.pool.groups
        running = self.engine.scheduler.running
        new = sum(max(0, -(-(len(seq) + steps - 1) // size) - len(seq.kv.block_ids)) for seq in running)
        return new * len(groups)

    def _check_idle(self, now: float) -> None:
        """Assert that nothing is held. The whole pool is not checked, which takes too long for every simulated second."""
        assert self.engine.pool.num_held == 0

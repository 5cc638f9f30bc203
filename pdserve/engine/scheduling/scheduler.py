"""Scheduler with continuous batching and chunked prefill: keeps an instance's sequences in queues, and gives them blocks.

What a step computes of them is decided by `schedule.py`, and who loses its blocks by `preemption.py`.

A prompt begins once the pool has room for all of it. It takes its blocks as it is computed; the others are promised to it.
Others go before one that lacks blocks `MAX_OVERTAKEN` times at most: shorter ones, and later ones before a hand-over.

Tenants share the instance by weight. The *level* of a tenant is the number of its running sequences, divided by its weight.
While several tenants have sequences here, those of the lowest level go first, whatever their rank. If one of them finds no
slot or no room, the tenant of the highest level gives way, with its newest sequence that has had its 32 tokens since it last
did so, as long as the other's level stays below: without slots to spare, levels become equal, and no slot goes to and fro. A
sequence that loses its slot keeps its blocks until they are needed. A step is not longer for a tenant than its share asks
for, and hardly longer than alone for one that has used less than its share lately (`budget.py`); what then is left out of it
takes turns.

Rank is the order of arrival. A level of priority counts as `ARRIVALS_PER_PRIORITY` arrivals, which bounds how many later
requests can overtake one of a lower priority: no sequence starves.
"""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from collections.abc import Set as AbstractSet
from itertools import count
from operator import attrgetter, itemgetter
from typing import Any

from pdserve.costs import Costs
from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.memory.groups import SwappedKV, pages_behind
from pdserve.engine.memory.swap_space import SwapSpace
from pdserve.engine.scheduling.budget import Credit
from pdserve.engine.scheduling.levels import levels_of
from pdserve.engine.scheduling.preemption import MAX_PREEMPTIONS, Preemption
from pdserve.engine.scheduling.schedule import MAX_OVERTAKEN, Schedule
from pdserve.engine.sequence import Feature, Sequence
from pdserve.engine.step import SchedulerOutput, StepPlan
from pdserve.request import SamplingParams, Tenant

Size = tuple[int, int, int, Sequence]  # of one without blocks: tokens to compute, rank, number in the order of queueing
_RANK, _FIRST = attrgetter("rank"), itemgetter(0)
_NO_COPY = SwappedKV(0, 0, [])  # of a sequence that was not swapped


class Scheduler:
    """Queues of sequences over one block pool.

    Args:
        window: attention window in tokens, the token itself included, that holds for every layer; None if some layer
            attends to all tokens.
        host_pool: block ids in host memory, for swapping.
        itl_target: seconds between two tokens of a decoding sequence that prompts in the same step should not exceed.
        refetch_preempted: return resumed sequences to their owner (`SchedulerOutput.resumed`), which looks for their KV in
            the store.
        grows_ahead: give decoding sequences the block of the token after the next one, too, while there are enough.

    Attributes:
        costs: forecasts of swapping and computing, which the owner replaces by newer ones.
        prefix_queries, prefix_hits: tokens looked up in the prefix cache, and found there.
        swap_space: KV of preempted sequences in host memory.
        waiting, loaded, running: the queues, each in order of rank; loaded sequences hold blocks, running ones a slot, too.
        by_tenant: all sequences in them, in the order in which they came.
        beams: those among them that are of a beam search.
        unreserved: the next sequence that waits for `reserve`, outside of the queues; None if there is none.
        credit: what tenants have left of their shares of earlier steps.
        num_steps: that were scheduled.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        window: int | None = None,
        host_pool: BlockPool | None = None,
        itl_target: float | None = None,
        refetch_preempted: bool = False,
        grows_ahead: bool = False,
    ) -> None:
        assert max_num_seqs > 0 and max_num_batched_tokens > 0
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.window = window
        self.swap_space = SwapSpace(host_pool)
        self.costs = Costs()
        self.itl_target = itl_target
        self.refetch_preempted = refetch_preempted
        self.grows_ahead = grows_ahead
        self.waiting: list[Sequence] = []
        self.loaded: list[Sequence] = []
        self.running: list[Sequence] = []
        self.by_tenant: dict[Tenant, dict[Sequence, None]] = {}
        self.beams = set[Sequence]()
        self.unreserved: Sequence | None = None
        self.credit = Credit()
        self.num_steps = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.num_preemptions = 0
        self.num_pauses = 0
        self._sizes: dict[Sequence, Size] = {}  # of those that wait
        self._by_size: dict[Tenant, list[Size]] = {}  # the same, in order
        self._numbers = count()

    def add(self, seq: Sequence) -> None:
        """Queue a sequence, with or without blocks."""
        self.by_tenant.setdefault(seq.tenant, {})[seq] = None
        if seq.group is not None:
            self.beams.add(seq)
        if seq.kv.block_ids:
            insort(self.loaded, seq, key=_RANK)
        else:
            self.wait(seq, len(seq) - len(self.pool.match(seq.usable_keys)) * self.pool.block_size)

    def wait(self, seq: Sequence, num_tokens: int) -> None:
        """Queue a sequence without blocks, of which that many tokens are to be computed."""
        insort(self.waiting, seq, key=_RANK)
        self._sizes[seq] = num_tokens, seq.rank, next(self._numbers), seq
        insort(self._by_size.setdefault(seq.tenant, []), self._sizes[seq])

    def _end_wait(self, seq: Sequence) -> None:
        """Remove a sequence from those that wait."""
        self.waiting.remove(seq)
        by_size = self._by_size[seq.tenant]
        del by_size[bisect_left(by_size, self._sizes.pop(seq))]

    def fork(
        self, seq: Sequence, request_id: str, sampling: SamplingParams, features: tuple[Feature, ...] = ()
    ) -> Sequence:
        """Queue and return a copy of a sequence that shares all KV computed so far. Later writes are copy-on-write."""
        fork = seq.fork(self.pool, request_id, sampling, features)
        self.add(fork)
        return fork

    def remove(self, seq: Sequence) -> None:
        """Dequeue a finished or aborted sequence and release its blocks."""
        for queue in (self.running, self.loaded):
            if seq in queue:
                queue.remove(seq)
        if seq in self._sizes:
            self._end_wait(seq)
        seq.kv.release_blocks(self.pool)
        self.beams.discard(seq)
        if seq.kv.swapped is not None:
            self.swap_space.discard(seq)
        if seq in (of_tenant := self.by_tenant.get(seq.tenant, {})):
            del of_tenant[seq]
            if not of_tenant:
                del self.by_tenant[seq.tenant]
                self._by_size.pop(seq.tenant, None)

    def order(self) -> Callable[[Sequence], Any]:
        """Return the order of sequences in all queues, as a key: the level of the tenant if it has rivals, and the rank."""
        if not self.has_rivals:
            return _RANK
        levels = levels_of(self.running)
        return lambda seq: (levels.get(seq.tenant, 0.0), seq.rank)

    @property
    def has_rivals(self) -> bool:
        """True if several tenants have sequences here. Alone, a tenant has the order of rank, and no limits."""
        if self.unreserved is None or self.unreserved.tenant in self.by_tenant:
            return len(self.by_tenant) > 1
        return len(self.by_tenant) > 0

    def schedule(self, *, pause_storing: bool = False, late: AbstractSet[Sequence] = frozenset()) -> SchedulerOutput:
        """Decide the next step. It contains at least one sequence whenever one can run.

        Args:
            pause_storing: leave out sequences whose KV is stored as it is computed.
            late: further ones to leave out, since the masks of their grammars are not there.
        """
        self.num_steps += 1
        if not self.by_tenant:
            return SchedulerOutput()
        output = SchedulerOutput(storing_paused=pause_storing and any(seq.stores_kv for seq in self.sequences()))
        if output.storing_paused or late:
            output.late = {seq for seq in self.sequences() if seq in late}
            output.left_out = output.late | {seq for seq in self.sequences() if pause_storing and seq.stores_kv}
        preemption = Preemption(self, output)
        schedule = Schedule(self, self.pool, self.running, self.has_rivals, output, preemption)
        schedule.decide()
        if self.grows_ahead:
            self._grow_ahead(output)
        if output.plan.counts and not self.credit.is_settled(self.by_tenant.keys()):
            seconds = defaultdict[Tenant, float](float)
            for seq, count in output.plan.counts.items():
                seconds[seq.tenant] += schedule.budget.seconds(seq, count)
            self.credit.spend(schedule.budget.base, seconds)
        self.num_preemptions += len(output.preempted)
        self.num_pauses += len(output.paused)
        return output

    def _grow_ahead(self, output: SchedulerOutput) -> None:
        """Give decoding sequences the block of the token after the next one, but leave one for each running sequence."""
        for seq in output.plan.counts:
            least = len(self.running) + len(self.pool.tail_groups)
            if seq.kv.is_decoding and not seq.output.awaits_last_token and self.pool.num_spare > least:
                seq.kv.grow(self.pool, 1)

    def add_drafts(self, plan: StepPlan, proposed: Mapping[Sequence, SequenceABC[int]]) -> None:
        """Add the proposed drafts to a plan, as far as the step has room for their tokens, and the pool for their KV."""
        room = self.max_num_batched_tokens - sum(plan.counts.values())
        for seq, drafts in proposed.items():
            # One stays for each running one.
            spare = max(0, self.pool.num_spare - len(self.running)) // len(self.pool.groups) + len(seq.kv.block_ids)
            left = seq.sampling.max_tokens - seq.output.num_generated - 1
            most = min(room, left, spare * seq.kv.block_size - len(seq))
            if most > 0 and drafts:
                plan.drafts[seq] = list(drafts[:most])
                seq.kv.grow(self.pool, len(plan.drafts[seq]))
                room -= len(plan.drafts[seq])

    def sequences(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.loaded
        yield from self.waiting

    def reserve(
        self,
        seq: Sequence,
        max_hit_blocks: int,
        num_tokens: int,
        *,
        first_block: int = 0,
        respect_queue: bool = False,
        watermark: int = 0,
        num_now: int | None = None,
        num_coming: int = 0,
    ) -> bool:
        """Give a sequence without blocks room for `num_tokens`: prefix hits first, new blocks for the rest.

        Args:
            max_hit_blocks: only this many leading full blocks may be prefix hits.
            first_block: index of the first block that it needs.
            respect_queue: leave the blocks that waiting sequences before it in the order, or of its rank, need.
            watermark: leave this many blocks free.
            num_now: leading blocks that it gets now, while the others are promised to it. None: all.
            num_coming: leading tokens that nobody computes here, see `BlockPool.match`.

        Returns:
            False if the pool has too few blocks, or a hand-over that lacks them was overtaken too often; nothing was taken.
        """
        assert not seq.kv.block_ids
        overtaken = self.unreserved
        if overtaken is not None and (overtaken is seq or self.order()(overtaken) >= self.order()(seq)):
            overtaken = None
        if overtaken is not None and overtaken.overtaken >= MAX_OVERTAKEN:
            return False
        claimed = self._claimed_before(seq) if respect_queue and self.waiting else 0
        hits = self.pool.match(seq.kv.full_keys()[first_block:max_hit_blocks], first_block, num_coming)
        self.pool.hold(hits)
        num_blocks, room = self.pool.blocks_for(num_tokens), -claimed - watermark
        stop = num_blocks if num_now is None else min(num_blocks, num_now)
        if self.pool.tail_groups:
            if not seq.kv.take_groups(self.pool, first_block, hits, num_coming, num_blocks, stop, room):
                return False
        else:
            needed = num_blocks - first_block - len(hits)
            if needed > self.pool.num_spare + room:
                self.pool.release(hits)
                return False
            now = max(0, stop - first_block - len(hits))
            seq.kv.take_blocks(first_block, hits, self.pool.allocate(now))
            seq.kv.promise(self.pool, needed - now)
        if overtaken is not None:
            overtaken.let_pass()
        self.prefix_queries += len(seq.kv.tokens) - first_block * self.pool.block_size
        self.prefix_hits += (seq.kv.num_registered - first_block) * self.pool.block_size
        return True

    def _claimed_before(self, seq: Sequence) -> int:
        """Return how many pages the waiting sequences need that are before one in the order, or of its rank."""
        order = self.order()
        ahead = [other for other in self.waiting if order(other) <= order(seq)]
        return sum(map(self._pages_needed, ahead)) + max((self._watermark(other) for other in ahead), default=0)

    def num_out_of_window(self, num_computed: int) -> int:
        """Return how many leading blocks lie outside the windows of all tokens behind the first `num_computed`.

        The next step of a running sequence releases them.
        """
        return 0 if self.window is None else max(0, num_computed + 1 - self.window) // self.pool.block_size

    def dequeue(self, seq: Sequence) -> bool:
        """Take a sequence from its queue if the pool has room for it.

        A waiting one gets hits and a block, while the others are promised, unless KV comes at once.
        """
        if seq.kv.block_ids:
            if has_room := seq.kv.blocks_needed(self.pool) <= self.pool.num_free:
                self.loaded.remove(seq)
            return has_room
        copy, most, spare = seq.kv.swapped or _NO_COPY, len(self._usable_keys(seq)), self._watermark(seq)
        first, coming = copy.first_block, copy.num_tokens
        now = 1 if copy is _NO_COPY and not seq.kv.needs_refetch else None
        has_room = self.reserve(seq, most, len(seq), first_block=first, watermark=spare, num_now=now, num_coming=coming)
        if has_room:
            self._end_wait(seq)
        return has_room

    def waiting_up_to(self, tenant: Tenant, limit: int) -> list[Size]:
        """Return the waiting sequences of a tenant with 2 to `limit` tokens to compute, the shortest first."""
        sizes = self._by_size.get(tenant, [])
        return sizes[bisect_right(sizes, 1, key=_FIRST) : bisect_right(sizes, limit, key=_FIRST)]

    def fits(self, seq: Sequence) -> bool:
        """Return whether the pool has the blocks that a sequence without any needs to be admitted."""
        return self._pages_needed(seq, len(self._hits(seq))) + self._watermark(seq) <= self.pool.num_spare

    def num_found(self, seq: Sequence) -> int:
        """Return how many leading tokens of a sequence without blocks need not be computed: hits, and what was swapped."""
        copy = seq.kv.swapped or _NO_COPY
        return max((copy.first_block + len(self._hits(seq))) * self.pool.block_size, copy.num_tokens)

    def _pages_needed(self, seq: Sequence, num_hits: int = 0) -> int:
        """Return how many pages a sequence without any takes, but for hits; if it was swapped, of windows only the last."""
        copy, pool = seq.kv.swapped or _NO_COPY, self.pool
        first, stop = copy.first_block + num_hits, pool.blocks_for(len(seq))
        return pages_behind(first, stop, copy.num_tokens, pool.groups, pool.block_size)

    def _hits(self, seq: Sequence) -> list[int]:
        """Return the blocks of the pool's first group that a sequence without any finds there."""
        copy = seq.kv.swapped or _NO_COPY
        return self.pool.match(self._usable_keys(seq)[copy.first_block :], copy.first_block, copy.num_tokens)

    def _usable_keys(self, seq: Sequence) -> list[bytes]:
        """Return the keys of the blocks that a sequence may take as prefix hits.

        Where pages have several blocks, it may take none once it was preempted MAX_PREEMPTIONS times: a page is held as a
        whole, so hits in many pages can take the room of the other beams of its search each time.
        """
        is_scattered = self.pool.tail_groups and seq.kv.num_preemptions >= MAX_PREEMPTIONS
        return [] if is_scattered else seq.usable_keys

    def _watermark(self, seq: Sequence) -> int:
        """Return how many blocks must stay free when a sequence gets its own.

        A preempted sequence is readmitted only if each running one keeps a spare block; otherwise it thrashes.
        """
        return len(self.running) if seq.kv.num_preemptions else 0

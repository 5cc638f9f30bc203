"""KV events add up to the pool's content for every router, whenever it subscribes and however slowly it reads."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdserve.engine.memory.blocks import BlockPool
from pdserve.instance.kv_events import KVEventPublisher, PendingKVEvents
from pdserve.router.scheduling.prefix_index import PrefixIndex
from tests.examples import examples

BLOCKS = 8


class Router:
    """A subscriber with a real prefix index."""

    def __init__(self, publisher: KVEventPublisher) -> None:
        self.pending: PendingKVEvents = publisher.subscribe()
        self.index = PrefixIndex()

    def read(self, limit: int) -> None:
        removed, added = self.pending.pop_batch(limit)
        assert len(removed) + len(added) <= limit
        self.index.remove("p", removed)
        self.index.add("p", added)


class KVEventsMachine(RuleBasedStateMachine):
    """A real pool whose blocks are cached and evicted, and routers that subscribe, read in batches, and unsubscribe."""

    def __init__(self) -> None:
        super().__init__()
        self.publisher = KVEventPublisher()
        self.pool = BlockPool(BLOCKS, 16)
        self.pool.listeners.append(self.publisher)
        self.routers: list[Router] = []
        self.held: list[list[int]] = []

    @rule(keys=st.lists(st.integers(0, 15), max_size=5))
    def compute(self, keys: list[int]) -> None:
        if len(keys) <= self.pool.num_free:
            blocks = self.pool.allocate(len(keys))
            for block, number in zip(blocks, keys, strict=True):
                self.pool.register(block, number.to_bytes(16))
            self.held.append(blocks)

    @rule(which=st.integers(0, 99))
    def finish(self, which: int) -> None:
        if self.held:
            self.pool.release(self.held.pop(which % len(self.held)))

    @rule()
    def evict_all(self) -> None:
        self.pool.release(self.pool.allocate(self.pool.num_free))

    @rule()
    def subscribe(self) -> None:
        self.routers.append(Router(self.publisher))

    @rule(which=st.integers(0, 99))
    def unsubscribe(self, which: int) -> None:
        if self.routers:
            self.publisher.unsubscribe(self.routers.pop(which % len(self.routers)).pending)

    @rule(which=st.integers(0, 99), limit=st.integers(1, 4))
    def read(self, which: int, limit: int) -> None:
        if self.routers:
            self.routers[which % len(self.routers)].read(limit)

    @invariant()
    def pending_events_are_bounded_by_the_pool(self) -> None:
        for router in self.routers:
            assert len(router.pending) <= 2 * BLOCKS
            assert router.index.num_blocks("p") <= BLOCKS

    def teardown(self) -> None:
        keys = [number.to_bytes(16) for number in range(16)]
        cached = {key for key in keys if self.pool.match([key])}
        for router in [*self.routers, Router(self.publisher)]:
            while router.pending:
                router.read(3)
            assert {key for key in keys if router.index.match([key])} == cached
            assert router.index.num_blocks("p") == len(cached)


TestKVEvents = KVEventsMachine.TestCase
TestKVEvents.settings = settings(max_examples=examples(2), stateful_step_count=40, deadline=None)


def test_removals_are_sent_before_additions() -> None:
    publisher = KVEventPublisher()
    pool = BlockPool(2, 16)
    pool.listeners.append(publisher)
    router = Router(publisher)
    for first in (0, 2, 4):  # each pair evicts the one before
        blocks = pool.allocate(2)
        for block, number in zip(blocks, (first, first + 1), strict=True):
            pool.register(block, bytes([number]) * 16)
        pool.release(blocks)
        while router.pending:
            router.read(1)
            assert router.index.num_blocks("p") <= 2


def test_blocks_that_were_evicted_again_are_never_sent() -> None:
    publisher = KVEventPublisher()
    pool = BlockPool(1, 16)
    pool.listeners.append(publisher)
    router = Router(publisher)
    for number in range(1000):
        (block,) = pool.allocate(1)
        pool.register(block, number.to_bytes(16))
        pool.release([block])
        assert len(router.pending) == 1
    assert router.pending.pop_batch(10) == ([], [(999).to_bytes(16)])

"""What routers are told of a pool: it adds up to what the pool has, whoever listens since when and however slowly."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdserve.engine.block_pool import BlockPool
from pdserve.instance.kv_events import KVEventPublisher, PendingKVEvents
from pdserve.router.scheduling.prefix_index import PrefixIndex

BLOCKS = 8


class Router:
    """One that listens, with a real index."""

    def __init__(self, news: KVEventPublisher) -> None:
        self.untold: PendingKVEvents = news.open()
        self.index = PrefixIndex()

    def listen(self, limit: int) -> None:
        removed, added = self.untold.take(limit)
        assert len(removed) + len(added) <= limit
        self.index.remove("p", removed)
        self.index.add("p", added)


class NewsMachine(RuleBasedStateMachine):
    """A real pool whose blocks come and go, and routers that join, listen in pieces, and leave."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.news = BlockPool(BLOCKS, 16), KVEventPublisher()
        self.pool.on_change = self.news.changed
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
    def clear(self) -> None:
        self.pool.clear_cache()

    @rule()
    def join(self) -> None:
        self.routers.append(Router(self.news))

    @rule(which=st.integers(0, 99))
    def leave(self, which: int) -> None:
        if self.routers:
            self.news.close(self.routers.pop(which % len(self.routers)).untold)

    @rule(which=st.integers(0, 99), limit=st.integers(1, 4))
    def listen(self, which: int, limit: int) -> None:
        if self.routers:
            self.routers[which % len(self.routers)].listen(limit)

    @invariant()
    def what_is_kept_is_bounded_by_the_pool(self) -> None:
        for router in self.routers:
            assert len(router.untold) <= 2 * BLOCKS
            assert router.index.blocks("p") <= BLOCKS

    def teardown(self) -> None:
        keys = [number.to_bytes(16) for number in range(16)]
        has = {key for key in keys if self.pool.match([key])}
        for router in [*self.routers, Router(self.news)]:
            while router.untold:
                router.listen(3)
            assert {key for key in keys if router.index.match([key])} == has
            assert router.index.blocks("p") == len(has)


TestNews = NewsMachine.TestCase
TestNews.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_what_has_gone_is_told_before_what_has_come() -> None:
    pool, news = BlockPool(2, 16), KVEventPublisher()
    pool.on_change = news.changed
    router = Router(news)
    for first in (0, 2, 4):  # each pair takes the place of the one before
        blocks = pool.allocate(2)
        for block, number in zip(blocks, (first, first + 1), strict=True):
            pool.register(block, bytes([number]) * 16)
        pool.release(blocks)
        while router.untold:
            router.listen(1)
            assert router.index.blocks("p") <= 2


def test_what_came_and_went_in_between_is_never_told() -> None:
    pool, news = BlockPool(1, 16), KVEventPublisher()
    pool.on_change = news.changed
    router = Router(news)
    for number in range(1000):
        (block,) = pool.allocate(1)
        pool.register(block, number.to_bytes(16))
        pool.release([block])
        assert len(router.untold) == 1
    assert router.untold.take(10) == ([], [(999).to_bytes(16)])

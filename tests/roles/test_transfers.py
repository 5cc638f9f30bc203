"""Never more in flight than allowed, in order of arrival, every transfer ends once, and every block comes back."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.block_pool import BlockPool
from pdserve.engine.sequence import Sequence as EngineSequence
from pdserve.kv_transfer.connector import Connector, Outcome, PoolMemory, Result, Stats
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import SamplingParams
from pdserve.roles.job import Job
from pdserve.roles.transfers import Transfers

POOL = 40


class ByHand(Connector):
    """Operations end when the test says so."""

    scheme = "byhand"

    def __init__(self) -> None:
        self.under_way: list[tuple[int, Future[Result]]] = []

    def attach(self, memory: PoolMemory) -> None: ...

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> Future[Result]:
        self.under_way.append((len(block_ids), Future()))
        return self.under_way[-1][1]

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        return self.store(keys, block_ids, lease_s=0)

    def match(self, keys: Sequence[bytes]) -> Future[int]:
        return Future()

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None: ...

    def stats(self) -> Stats:
        return Stats()

    def close(self) -> None: ...

    def end(self, index: int, held: "Future[None] | None" = None, outcome: Outcome = Outcome.OK) -> None:
        blocks, future = self.under_way.pop(index)
        future.set_result(Result([outcome] * blocks, 0.5, held=held))


class InstanceContext:
    """Futures end on this thread, at once. Time stands still unless it is moved."""

    def __init__(self) -> None:
        self.time = 0.0
        self.given_up = 0.0
        self.seconds_of: list[tuple[int, float]] = []

    def moved(self, blocks: int, seconds: float) -> None:
        self.seconds_of.append((blocks, seconds))

    def now(self) -> float:
        return self.time

    def when_done(self, future: "Future[Any]", then: Callable[[Any], None]) -> None:
        future.add_done_callback(lambda done: then(done.result()))

    def close_job(self, job: Job) -> None: ...

    def count(self, name: str, value: float, **labels: str) -> None:
        assert name == "kv_transfer_given_up_blocks"
        self.given_up += value

    def count_sources(self, job: Job) -> None: ...


def new_job() -> Job:
    return Job("router", EngineSequence("r", [1], 1, 1, SamplingParams(), b"", 16), pb.PREFILL)


class Stage:
    def __init__(self, max_blocks: int) -> None:
        self.pool, self.connector, self.context = BlockPool(POOL, 16), ByHand(), InstanceContext()
        self.transfers = Transfers(self.pool, self.connector, self.context, max_blocks, 1)
        self.results: list[Result] = []

    def store(self, job: Job, count: int) -> None:
        blocks = self.pool.allocate(count)
        self.transfers.store(job, [b""] * count, blocks, 1.0, self.results.append)
        self.pool.release(blocks)  # the request is gone; the transfer holds them


def test_what_does_not_fit_waits_in_order() -> None:
    stage, job = Stage(10), new_job()
    for count in (6, 5, 1):
        stage.store(job, count)
    transfers = stage.transfers
    assert (transfers.in_flight, transfers.waiting, transfers.room) == (6, 6, 0), "the small one does not overtake"
    assert transfers.stores_wait and job.transfers == 3
    stage.context.time = 3.0
    stage.connector.end(0)
    assert (transfers.in_flight, transfers.waiting, transfers.room) == (6, 0, 4)
    stage.connector.end(0)
    assert [result.seconds for result in stage.results] == [0.5, 3.5], "the time in the queue counts"
    assert stage.context.seconds_of == [(6, 0.5), (5, 0.5)], "but not for what a transfer takes"
    stage.connector.end(0)
    assert (stage.pool.num_held, job.transfers, transfers.num_holding) == (0, 0, 0)


def test_one_that_is_larger_than_all_the_room_goes_alone() -> None:
    stage, job = Stage(4), new_job()
    stage.store(job, 9)
    stage.store(job, 1)
    assert (stage.transfers.in_flight, stage.transfers.waiting) == (9, 1)


def test_what_is_read_in_place_is_held_until_it_has_been_read_and_fills_no_room() -> None:
    stage, job, read = Stage(4), new_job(), Future[None]()
    stage.connector.in_place = True  # type: ignore[misc]  # elsewhere it belongs to the class
    for _ in range(3):
        stage.store(job, 4)
    assert stage.transfers.in_flight == 0 and len(stage.connector.under_way) == 3
    for _ in range(3):
        stage.connector.end(0, held=read)
    assert job.transfers == 0 and stage.transfers.num_holding == 3 and stage.pool.num_held == 12
    assert not stage.context.seconds_of, "nothing moved"
    read.set_result(None)
    assert stage.transfers.num_holding == 0 and stage.pool.num_held == 0


def test_nothing_waits_for_a_store_that_is_silent() -> None:
    stage, job = Stage(4), new_job()
    for _ in range(3):
        stage.store(job, 3)
    stage.connector.end(0, outcome=Outcome.UNAVAILABLE)
    assert (stage.transfers.in_flight, stage.transfers.waiting) == (3, 0), "one has its turn, the other is given up"
    assert [result.outcomes for result in stage.results] == [[Outcome.UNAVAILABLE] * 3] * 2
    stage.store(job, 2)
    assert stage.transfers.waiting == 0 and len(stage.results) == 3 and stage.context.given_up == 5
    stage.store(job, 1)
    assert stage.transfers.in_flight == 4, "what has room is tried"
    stage.connector.end(1)
    stage.store(job, 2)
    assert stage.transfers.waiting == 2, "it has answered: it is worth waiting again"
    stage.connector.end(0, outcome=Outcome.UNAVAILABLE)
    stage.context.time += 0.5
    stage.store(job, 4)
    assert stage.transfers.waiting == 4, "that was long enough ago"
    while stage.connector.under_way:
        stage.connector.end(0)
    assert stage.pool.num_held == job.transfers == 0


@given(
    max_blocks=st.integers(1, 20),
    events=st.lists(
        st.tuples(st.sampled_from(["store", "end", "fail", "drop", "wait"]), st.integers(0, 3), st.integers(1, 8))
    ),
)
def test_whatever_comes_and_ends_and_is_dropped(max_blocks: int, events: list[tuple[str, int, int]]) -> None:
    stage, jobs, asked = Stage(max_blocks), [new_job() for _ in range(4)], 0
    for kind, which, count in events:
        if kind == "store" and stage.pool.num_free >= count:
            stage.store(jobs[which], min(count, stage.transfers.largest))
            asked += 1
        elif kind in ("end", "fail") and stage.connector.under_way:
            outcome = Outcome.OK if kind == "end" else Outcome.UNAVAILABLE
            stage.connector.end(which % len(stage.connector.under_way), outcome=outcome)
        elif kind == "wait":
            stage.context.time += 0.3
        elif kind == "drop":
            stage.transfers.drop(jobs[which])
        assert stage.transfers.in_flight == sum(blocks for blocks, _ in stage.connector.under_way) <= max_blocks
        assert stage.pool.num_held == stage.transfers.in_flight + stage.transfers.waiting
        assert sum(job.transfers for job in jobs) == asked - len(stage.results)
        assert stage.connector.under_way or not stage.transfers.waiting, "nothing waits for nothing"
    while stage.connector.under_way:
        stage.connector.end(0)
    assert len(stage.results) == asked and stage.pool.num_held == 0

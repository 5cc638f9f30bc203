"""Transfer queue: the limit in flight, the order, one result per transfer, and the release of every block."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.sequence import Sequence as EngineSequence
from pdserve.keys import token_array
from pdserve.kv_transfer.connector import Connector, OperationFuture, Outcome, PoolMemory, Result, Stats
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import SamplingParams
from pdserve.roles.job import Job
from pdserve.roles.transfers import Transfers

POOL = 40


class ManualConnector(Connector):
    """Operations end when the test ends them."""

    scheme = "manual"

    def __init__(self) -> None:
        self.active: list[tuple[int, Future[Result]]] = []
        self.next_future: Future[Result] = Future()
        self.current_stats = Stats()

    def attach(self, memory: PoolMemory) -> None: ...

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> Future[Result]:
        self.active.append((len(block_ids), self.next_future))
        self.next_future = Future()
        return self.active[-1][1]

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        return self.store(keys, block_ids, lease_s=0)

    def match(self, keys: Sequence[bytes]) -> Future[int]:
        return Future()

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None: ...

    def stats(self) -> Stats:
        return self.current_stats

    def close(self) -> None: ...

    def end(self, index: int, held: "Future[None] | None" = None, outcome: Outcome = Outcome.OK) -> None:
        blocks, future = self.active.pop(index)
        future.set_result(Result([outcome] * blocks, 0.5, held=held))


class FakeContext:
    """Runs callbacks at once on this thread. The test sets the time."""

    def __init__(self) -> None:
        self.time = 0.0
        self.failed_blocks = 0.0
        self.recorded: list[tuple[int, float]] = []

    def record_transfer(self, nbytes: int, seconds: float, now: float) -> None:
        self.recorded.append((nbytes, seconds))

    def now(self) -> float:
        return self.time

    def post(self, work: Callable[[], None]) -> None:
        work()

    def send_outputs(self) -> None: ...

    def close_job(self, job: Job) -> None: ...

    def count(self, name: str, value: float, **labels: str) -> None:
        assert name == "kv_transfer_given_up_blocks"
        self.failed_blocks += value


def new_job() -> Job:
    return Job("router", EngineSequence.new("r", token_array([1]), 1, 1, SamplingParams(), b"", 16), pb.PREFILL)


class Harness:
    def __init__(self, max_blocks: int) -> None:
        self.pool, self.connector, self.context = BlockPool(POOL, 16), ManualConnector(), FakeContext()
        self.transfers = Transfers(self.pool, self.connector, self.context, max_blocks, [1])
        self.results: list[Result] = []

    def store(self, job: Job, count: int) -> None:
        blocks = self.pool.allocate(count)
        self.transfers.store(job, 0, [b""] * count, blocks, 1.0, self.results.append)
        self.pool.release(blocks)  # only the transfer holds them now


def test_transfers_over_the_limit_wait_in_order() -> None:
    harness, job = Harness(10), new_job()
    for count in (6, 5, 1):
        harness.store(job, count)
    transfers = harness.transfers
    assert (transfers.in_flight, transfers.waiting, transfers.free_capacity) == (6, 6, 0), (
        "the small one does not overtake"
    )
    assert transfers.has_waiting_stores and job.open_transfers == 3
    harness.context.time = 3.0
    harness.connector.end(0)
    assert (transfers.in_flight, transfers.waiting, transfers.free_capacity) == (6, 0, 4)
    harness.connector.end(0)
    assert [result.seconds for result in harness.results] == [0.5, 3.5], "the result includes the time in the queue"
    assert harness.context.recorded == [(6, 0.5), (5, 0.5)], "the cost model does not"
    harness.connector.end(0)
    assert (harness.pool.num_held, job.open_transfers, transfers.num_holding) == (0, 0, 0)


def test_a_transfer_larger_than_the_limit_runs_alone() -> None:
    harness, job = Harness(4), new_job()
    harness.store(job, 9)
    harness.store(job, 1)
    assert (harness.transfers.in_flight, harness.transfers.waiting) == (9, 1)


def test_stores_read_in_place_hold_their_blocks_and_do_not_count_as_in_flight() -> None:
    harness, job, read = Harness(4), new_job(), Future[None]()
    harness.connector.in_place = True
    for _ in range(3):
        harness.store(job, 4)
    assert harness.transfers.in_flight == 0 and len(harness.connector.active) == 3
    for _ in range(3):
        harness.connector.end(0, held=read)
    assert job.open_transfers == 0 and harness.transfers.num_holding == 3 and harness.pool.num_held == 12
    assert not harness.context.recorded, "nothing moved"
    read.set_result(None)
    assert harness.transfers.num_holding == 0 and harness.pool.num_held == 0


@pytest.mark.parametrize(
    ("stats", "asked"),
    [(Stats(), 0), (Stats(is_out=True), 1), (Stats(parts={"tier 1": Stats(), "tier 2": Stats(is_out=True)}), 1)],
)
def test_a_store_that_is_out_is_asked_for_a_block_that_no_sequence_uses(stats: Stats, asked: int) -> None:
    harness = Harness(4)
    harness.connector.current_stats = stats
    others = harness.pool.allocate(POOL - 1)
    for _ in range(2):
        harness.transfers.probe()  # the second time, no block is free
        assert (len(harness.connector.active), harness.transfers.num_holding) == (asked, asked)
    if asked:
        harness.connector.end(0, outcome=Outcome.MISSING)
    harness.pool.release(others)
    assert harness.pool.num_held == harness.transfers.num_holding == 0 and not harness.context.recorded


def test_only_operations_that_can_be_cancelled_are_asked_to() -> None:
    harness, job, other, stopped = Harness(12), new_job(), new_job(), list[str]()
    for name, of in (("cancelled", job), ("other", other)):
        harness.connector.next_future = OperationFuture(partial(stopped.append, name))
        harness.store(of, 4)
    harness.store(job, 4)  # a plain future
    harness.transfers.cancel(job)
    assert stopped == ["cancelled"] and harness.transfers.in_flight == 12, "rows are held until the futures are done"
    while harness.connector.active:
        harness.connector.end(0, outcome=Outcome.CANCELLED)
    assert harness.pool.num_held == job.open_transfers == 0


def test_queued_transfers_fail_while_the_store_does_not_answer() -> None:
    harness, job = Harness(4), new_job()
    for _ in range(3):
        harness.store(job, 3)
    harness.connector.end(0, outcome=Outcome.UNAVAILABLE)
    assert (harness.transfers.in_flight, harness.transfers.waiting) == (3, 0), "one is started, the other fails"
    assert [result.outcomes for result in harness.results] == [[Outcome.UNAVAILABLE] * 3] * 2
    harness.store(job, 2)
    assert harness.transfers.waiting == 0 and len(harness.results) == 3 and harness.context.failed_blocks == 5
    harness.store(job, 1)
    assert harness.transfers.in_flight == 4, "a transfer that fits is still tried"
    harness.connector.end(1)
    harness.store(job, 2)
    assert harness.transfers.waiting == 2, "the store has answered, so transfers wait again"
    harness.connector.end(0, outcome=Outcome.UNAVAILABLE)
    harness.context.time += 0.5
    harness.store(job, 4)
    assert harness.transfers.waiting == 4, "the timeout has passed"
    while harness.connector.active:
        harness.connector.end(0)
    assert harness.pool.num_held == job.open_transfers == 0


@given(
    max_blocks=st.integers(1, 20),
    events=st.lists(
        st.tuples(st.sampled_from(["store", "end", "fail", "drop", "wait"]), st.integers(0, 3), st.integers(1, 8))
    ),
)
def test_invariants_under_arbitrary_events(max_blocks: int, events: list[tuple[str, int, int]]) -> None:
    harness, jobs, queued = Harness(max_blocks), [new_job() for _ in range(4)], 0
    for kind, index, count in events:
        if kind == "store" and harness.pool.num_free >= count:
            harness.store(jobs[index], min(count, harness.transfers.max_transfer_blocks))
            queued += 1
        elif kind in ("end", "fail") and harness.connector.active:
            outcome = Outcome.OK if kind == "end" else Outcome.UNAVAILABLE
            harness.connector.end(index % len(harness.connector.active), outcome=outcome)
        elif kind == "wait":
            harness.context.time += 0.3
        elif kind == "drop":
            harness.transfers.cancel(jobs[index])
        assert harness.transfers.in_flight == sum(blocks for blocks, _ in harness.connector.active) <= max_blocks
        assert harness.pool.num_held == harness.transfers.in_flight + harness.transfers.waiting
        assert sum(job.open_transfers for job in jobs) == queued - len(harness.results)
        assert harness.connector.active or not harness.transfers.waiting, "otherwise the queue would never advance"
    while harness.connector.active:
        harness.connector.end(0)
    assert len(harness.results) == queued and harness.pool.num_held == 0

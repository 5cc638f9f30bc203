"""The simulated store: what it has is not moved again, and what its writer did not finish is not there."""

from concurrent.futures import Future

from pdserve.kv_transfer.connector import Outcome, Result
from pdserve.tools.simulator.store import Link, SimulatedConnector, SimulatedStore
from pdserve.tools.simulator.virtual_clock import VirtualClock

KEYS = [b"a", b"b", b"c"]


def connect(clock: VirtualClock, store: SimulatedStore) -> SimulatedConnector:
    return SimulatedConnector(clock, clock.now, store, block_bytes=1000)


def finish(clock: VirtualClock, future: "Future[Result]") -> Result:
    clock.run(until=future.done)
    return future.result()


def test_blocks_that_the_store_has_are_not_moved_again() -> None:
    clock, store = VirtualClock(), SimulatedStore(Link(0.1, 1000, 1000), 10_000)
    connector = connect(clock, store)
    assert finish(clock, connector.store(KEYS[:2], [0, 1], lease_s=5)).seconds == 0.1 + 2
    again = finish(clock, connector.store(KEYS, [0, 1, 2], lease_s=5))
    assert again.outcomes == [Outcome.OK] * 3 and round(again.seconds, 9) == 0.1 + 1
    assert connector.stats().blocks["store"] == 5 and min(store.leases.values()) > clock.time + 3


def test_a_writer_that_stops_leaves_no_half_written_block() -> None:
    clock, store = VirtualClock(), SimulatedStore(Link(0.1, 1000, 1000), 10_000)
    writer, reader = connect(clock, store), connect(clock, store)
    writer.store(KEYS, [0, 1, 2], lease_s=5)
    clock.at(1.5, writer.stop)
    clock.run(until=lambda: clock.time >= 1.5)
    assert list(store.leases) == [b"a"], "complete at 1.1 s"
    assert finish(clock, reader.load(KEYS, [0, 1, 2])).outcomes == [Outcome.OK, Outcome.MISSING, Outcome.MISSING]
    assert not writer.store(KEYS, [0, 1, 2], lease_s=5).done()


def test_a_lease_ends_at_the_time_of_the_instance() -> None:
    clock, store = VirtualClock(), SimulatedStore(Link(0.1, 1000, 1000), 10_000)
    ahead = SimulatedConnector(clock, lambda: clock.time + 0.5, store, block_bytes=1000)
    assert store.put(b"a", 1000, 0.0, 0.0, lease_s=9)
    ahead.release([b"a"])
    assert store.leases == {b"a": 9}
    clock.run(until=lambda: False)
    assert store.leases == {b"a": 0} and clock.time == 0.5


def test_room_is_of_bytes_and_groups_do_not_meet() -> None:
    """A state is as large as many blocks of rows, which it drives out; equal keys of two groups are two blocks."""
    clock, store = VirtualClock(), SimulatedStore(Link(0.0, 1000, 1000), 10_000)
    rows, states = connect(clock, store), SimulatedConnector(clock, clock.now, store, block_bytes=8_500, group=1)
    assert finish(clock, rows.store(KEYS, [0, 1, 2], lease_s=0)).outcomes == [Outcome.OK] * 3
    assert finish(clock, states.load(KEYS[:1], [0])).outcomes == [Outcome.MISSING]
    clock.at(5.0, lambda: None)
    clock.run(until=lambda: clock.time == 5)
    assert finish(clock, states.store(KEYS[:1], [0], lease_s=9)).outcomes == [Outcome.OK]
    assert finish(clock, rows.load(KEYS, [0, 1, 2])).outcomes == [Outcome.MISSING, Outcome.MISSING, Outcome.OK]
    assert finish(clock, states.store(KEYS[1:2], [0], lease_s=9)).outcomes == [Outcome.FULL], "the other has a lease"

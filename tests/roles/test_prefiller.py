"""Prefill role: what it stores, reports and releases, without an instance around it."""

from collections.abc import Callable
from typing import Any

import pytest

from pdserve.kv_transfer.connector import Outcome
from pdserve.lifetime import Stage
from pdserve.output import Stored
from pdserve.proto import pdserve_pb2 as pb
from tests.outputs import is_stored, num_stored

PROMPT = [i % 90 for i in range(70)]  # 5 blocks, the last one partial; a step computes 2
Instance = Callable[..., Any]
Expected = Callable[[list[int], int], list[int]]


def test_blocks_are_announced_in_order_and_the_first_token_before_the_stores_have_ended(
    instance: Instance, expected: Expected, rows: dict[bytes, Any]
) -> None:
    prefill = instance()
    job = prefill.submit(pb.PREFILL, PROMPT, 4)
    prefill.step()
    assert not num_stored(job.output), "nothing is stored yet"
    prefill.run()
    assert list(job.output.token_ids) == expected(PROMPT, 4)[:1] and not is_stored(job.output)
    assert not prefill.context.closed and prefill.engine.pool.num_held == 5
    for index in reversed(range(1, len(prefill.store.active))):
        prefill.end(index)
        assert num_stored(job.output) == 0, "a block counts only with all before it"
    prefill.end()
    assert num_stored(job.output) == 5 and is_stored(job.output)
    assert list(rows) and set(rows) == set(job.keys) and job.output.moved.blocks == 5
    prefill.check_nothing_is_held()


def test_nothing_is_stored_after_a_block_that_could_not_be(instance: Instance) -> None:
    prefill = instance()
    job = prefill.submit(pb.PREFILL, PROMPT, 4)
    prefill.step()
    prefill.end(good=1, then=Outcome.FULL)
    prefill.run()
    assert not prefill.store.active, "a load needs all preceding blocks"
    assert num_stored(job.output) == 1 and is_stored(job.output) and job.output.token_ids
    prefill.check_nothing_is_held()


def test_leases_of_a_cancelled_prompt_end_once_each(instance: Instance) -> None:
    """Another prompt may have leased the same blocks."""
    prefill = instance()
    job = prefill.submit(pb.PREFILL, PROMPT, 4)
    prefill.step()
    prefill.step()
    prefill.prefiller.cancel(job)
    prefill.end(1)
    prefill.end(good=1, then=Outcome.FULL)
    prefill.run()
    assert sorted(prefill.store.released) == sorted([job.keys[0], *job.keys[2:4]])
    prefill.check_nothing_is_held()


def test_leases_of_blocks_behind_one_that_could_not_be_stored_end(instance: Instance) -> None:
    prefill = instance()
    job = prefill.submit(pb.PREFILL, PROMPT, 4)
    prefill.step()
    prefill.step()
    prefill.end(good=1, then=Outcome.FULL)
    assert not prefill.store.released
    prefill.end()
    assert prefill.store.released == job.keys[2:4], "decode ends the lease of the first block, and the second has none"
    prefill.run()
    prefill.check_nothing_is_held()


def test_cancelled_prompt_ends_the_leases_of_what_is_stored_and_of_what_will_be(instance: Instance) -> None:
    prefill = instance()
    job = prefill.submit(pb.PREFILL, PROMPT, 4)
    prefill.step()
    prefill.step()
    prefill.end()
    prefill.prefiller.cancel(job)
    assert prefill.store.released == job.keys[:2] and not prefill.context.closed
    prefill.end()
    assert prefill.store.released == job.keys[:4] and not prefill.step()
    prefill.check_nothing_is_held()


def test_prompt_whose_request_has_ended_still_reports_that_all_of_it_is_stored(instance: Instance) -> None:
    """Decode that follows may finish first, and the router then cancels what is left here."""
    prefill = instance(follows=True)
    job = prefill.submit(pb.PREFILL, PROMPT, 4)
    prefill.run()
    for _ in prefill.store.active[1:]:
        prefill.end()
    job.mark_cancelled()
    prefill.prefiller.cancel(job)
    assert Stage.KV_STORED not in job.stamped
    prefill.end()
    assert Stage.KV_STORED in job.output.stamps
    assert job.output.moved.blocks == 5 and not job.output.token_ids
    prefill.check_nothing_is_held()


def test_stamp_that_was_not_sent_before_the_request_ended_is_sent_after_it(instance: Instance) -> None:
    prefill = instance(follows=True)
    job = prefill.submit(pb.PREFILL, PROMPT, 4)
    prefill.run()
    prefill.end_all()
    job.mark_cancelled()
    assert Stage.KV_STORED in job.output.stamps
    assert not job.output.token_ids and job.output.stored is None


def test_request_for_one_token_ends_here_and_its_blocks_get_no_lease(instance: Instance, expected: Expected) -> None:
    prefill = instance()
    job = prefill.submit(pb.PREFILL, PROMPT, 1)
    prefill.run()
    assert job.output.finish_reason == "length" and list(job.output.token_ids) == expected(PROMPT, 1)
    assert {operation.lease_s for operation in prefill.store.active} == {0.0}
    prefill.end_all()
    prefill.check_nothing_is_held()


@pytest.mark.parametrize("follows", [True, False])
def test_blocks_being_stored_are_announced_where_decode_can_follow(instance: Instance, follows: bool) -> None:
    prefill = instance(follows=follows)
    job = prefill.submit(pb.PREFILL, PROMPT, 4)
    prefill.step()
    announced = (job.output and job.output.stored) or Stored()
    assert (announced.num_blocks, announced.coming) == (0, 2 if follows else 0)
    prefill.run()
    prefill.end_all()
    prefill.check_nothing_is_held()


@pytest.mark.parametrize("architecture", ["mistral"], indirect=True)
def test_blocks_that_leave_the_window_before_they_are_stored_are_a_gap(instance: Instance, expected: Expected) -> None:
    prompt = [i % 90 for i in range(200)]
    prefill = instance()
    job = prefill.submit(pb.PREFILL, prompt, 4)
    for _ in range(5):
        prefill.engine.step()  # of which the role hears nothing
    assert job.seq.kv.num_dropped > 0
    prefill.run()
    assert list(job.output.token_ids) == expected(prompt, 4)[:1] and not prefill.store.active
    assert is_stored(job.output) and num_stored(job.output) == 0
    assert prefill.context.counts["store_skipped_blocks", ""] == 13
    prefill.check_nothing_is_held()

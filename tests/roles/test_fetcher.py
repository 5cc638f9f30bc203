"""Fetcher: which stored blocks are loaded before a prompt is computed, without an instance around it."""

from collections.abc import Callable
from typing import Any

from pdserve.costs import Costs
from pdserve.kv_transfer.connector import Outcome
from pdserve.proto import pdserve_pb2 as pb

PROMPT = [i % 90 for i in range(70)]  # 4 full blocks, and a part that is always computed
SLOW_PREFILL = Costs(prefill=(0.0, 1.0, 0.0))  # a second per token, so that loading pays
Instance = Callable[..., Any]
Expected = Callable[[list[int], int], list[int]]


def fill(instance: Instance, blocks: int) -> None:
    """Store the first blocks of the prompt."""
    other = instance()
    job = other.submit(pb.PREFILL, PROMPT, 4)
    other.run()
    other.end_all()
    for key in job.keys[blocks:]:
        del other.store.rows[key]


def load(instance: Instance, **options: Any) -> tuple[Any, Any]:
    """Submit the prompt to a new instance, for which loading pays."""
    both = instance(**options)
    both.engine.scheduler.costs = SLOW_PREFILL
    return both, both.submit(pb.BOTH, PROMPT, 3)


def test_stored_blocks_are_loaded_and_the_rest_is_computed(instance: Instance, expected: Expected) -> None:
    fill(instance, 3)
    both, job = load(instance)
    assert not both.step(), "the prompt waits for its load"
    assert both.end().keys == job.seq.kv.full_keys()[:3]
    both.run()
    assert job.seq.output.tokens[70:].tolist() == expected(PROMPT, 3)
    assert job.prompt_sources() == {"computed": 22, "local_hit": 0, "loaded": 48, "unneeded": 0}
    both.check_nothing_is_held()


def test_blocks_that_cannot_be_loaded_are_computed(instance: Instance, expected: Expected) -> None:
    fill(instance, 4)
    both, job = load(instance)
    both.end(good=1, then=Outcome.CORRUPT)
    both.run()
    assert job.seq.output.tokens[70:].tolist() == expected(PROMPT, 3) and job.prompt_sources()["loaded"] == 16
    both.check_nothing_is_held()


def test_nothing_is_loaded_that_the_pool_has(instance: Instance) -> None:
    fill(instance, 4)
    both, _ = load(instance)
    both.end_all()
    both.run()
    job = both.submit(pb.BOTH, PROMPT, 3)
    assert not both.store.active
    both.run()
    assert job.prompt_sources() == {"computed": 6, "local_hit": 64, "loaded": 0, "unneeded": 0}
    both.check_nothing_is_held()


def test_nothing_is_loaded_that_is_computed_sooner(instance: Instance, expected: Expected) -> None:
    fill(instance, 4)
    both, _ = load(instance)
    both.end_all()  # a load takes 0.5 s, as the next decision knows
    both.run()
    pool = both.engine.pool
    pool.release(pool.allocate(pool.num_free))  # evicts all
    both.engine.scheduler.costs = Costs(prefill=(0.0, 1e-6, 0.0))
    job = both.submit(pb.BOTH, PROMPT, 3)
    assert not both.store.active and both.context.counts["store_hits", "dearer"] == 1
    both.run()
    assert job.seq.output.tokens[70:].tolist() == expected(PROMPT, 3) and job.prompt_sources()["computed"] == 70
    both.check_nothing_is_held()


def test_without_room_the_prompt_waits_in_the_engine_instead(instance: Instance, expected: Expected) -> None:
    fill(instance, 4)
    both = instance()
    both.engine.scheduler.costs = SLOW_PREFILL
    taken = both.engine.pool.allocate(62)
    job = both.submit(pb.BOTH, PROMPT, 3)
    assert not both.store.active and both.context.counts["store_hits", "no_room"] == 1
    both.engine.pool.release(taken)
    both.run()
    assert job.seq.output.tokens[70:].tolist() == expected(PROMPT, 3)
    both.check_nothing_is_held()


def test_cancelled_prompt_is_not_queued_and_keeps_its_blocks_until_the_load_ends(instance: Instance) -> None:
    fill(instance, 4)
    both, job = load(instance)
    both.decoder.cancel(job)
    assert both.engine.pool.num_held == 4 and not both.context.closed
    both.end()
    assert not both.step()
    both.check_nothing_is_held()

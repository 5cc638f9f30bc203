"""Tells a store that evicts leased blocks, and may (`keeps_leases=False`), from a connector that loses what it stored."""

from collections.abc import Callable

from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.rules.context import (
    EVICTS_LEASED,
    AttachedPool,
    Lost,
    NotChecked,
    RuleContext,
    expect,
    new_keys,
)

ATTEMPTS = 3  # of a rule in which blocks were lost although the store has room for them
MAX_BLOCKS = 1024  # of one length in the experiment; more are not needed to see a store evict


def run(rule: Callable[[RuleContext], str], context: RuleContext) -> str:
    """Run a rule. Where the store may evict leased blocks, a loss breaks it only if no eviction explains it.

    After a loss, as many blocks of the same lengths are stored one by one. If some of these are lost, too, the store
    evicts; if none is, and the rule loses blocks each time that it is tried, the connector does.

    Raises:
        Broken: the connector breaks the rule.
        NotChecked: the rule cannot be checked, for example because the store evicted its blocks.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return rule(context)
        except Lost as lost:
            if context.keeps_leases:
                raise
            counts = dict(context.stored_blocks)
            context.close()
            for block_bytes, count in counts.items():
                _expect_room(context, block_bytes, min(count, MAX_BLOCKS), str(lost))
            if attempt == ATTEMPTS:
                raise
            context.stored_blocks.clear()
    raise AssertionError("unreachable")


def _expect_room(context: RuleContext, block_bytes: int, count: int, lost: str) -> None:
    """Store blocks one by one. Raises `Lost` if most cannot be loaded right away, `NotChecked` if some have gone later."""
    pool, keys = context.attach(block_bytes, 2), new_keys(count)
    missing_at_once = sum(not _store_and_load(pool, key) for key in keys)
    seen = f"{missing_at_once} of {count} missing"
    expect(2 * missing_at_once < count, "a block to be there when its store has ended", seen, Lost)
    evicted = sum(pool.load([key], [1]).outcomes[0] is not Outcome.OK for key in keys)
    context.close()
    if evicted:
        raise NotChecked(
            f"{EVICTS_LEASED}; {evicted} of {count} blocks that were stored one by one were evicted ({lost})"
        )


def _store_and_load(pool: AttachedPool, key: bytes) -> bool:
    pool.must_store([key], [0])
    return pool.load([key], [1]).outcomes == [Outcome.OK]

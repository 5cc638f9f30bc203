"""Rules about a connector's connections to its store: which hang, stop in the middle of an answer, or deliver it slowly."""

import contextlib
import time
from concurrent.futures import Future

from pdserve.errors import SetupError
from pdserve.kv_transfer.cancellation import run_until
from pdserve.kv_transfer.connector import Connector, Outcome, PoolMemory, Result
from pdserve.kv_transfer.registry import connect
from pdserve.kv_transfer.rules.behaviour import TIMEOUT_S, TURNS
from pdserve.kv_transfer.rules.context import (
    WAIT_LIMIT_S,
    AttachedPool,
    Broken,
    NotChecked,
    RuleContext,
    expect,
    expect_count,
    new_keys,
    random_rows,
    summarize,
)
from pdserve.kv_transfer.rules.outage import Outage, relayed_outage, simulated_outage

PASSWORD = "conformance-password"
HELD_LOADS = 4  # at once, so that all connections of a connector with the default number of threads are used


def resumption(context: RuleContext) -> str:
    """If the store hangs and then resumes on the same connections, late answers do no harm and the store is used again."""
    with simulated_outage(context, TIMEOUT_S) as outage:
        pool, keys = outage.pool, new_keys(2 + TURNS)
        outage.require_usable(keys[:2])
        context.register_keys(pool.layout, keys)
        with outage.hanging():
            calls = list[tuple[str, Future[Result]]]()
            for turn, key in enumerate(keys[2:]):
                calls.append(("load", pool.start_load(keys[:1], [4 + turn])))
                calls.append(("store", pool.connector.store([key], [turn], lease_s=60.0)))
            for name, future in calls:
                seen = pool.wait_transfer(future, name, 1).outcomes[0]
                expect(seen is not Outcome.OK, f"no block of a {name} to be ok while the store hangs", seen)
        outage.expect_usable(new_keys(2), "the store to be used again after it hung")
        return outage.method


def refused_operations(context: RuleContext) -> str:
    """If the store is gone or hangs, blocks are unavailable: a store or load calls none of them missing, full or corrupt."""
    with simulated_outage(context, TIMEOUT_S) as outage:
        pool, keys = outage.pool, new_keys(3)
        outage.require_usable(keys[:2])
        for state, begin, end in (
            ("gone", outage.gone.set, outage.gone.clear),
            ("hanging", outage.responsive.clear, outage.responsive.set),
        ):
            context.register_keys(pool.layout, keys)
            begin()
            try:
                load = pool.start_load(keys[:2], [4, 5])
                store = pool.connector.store(keys[2:], [6], lease_s=60.0)
                for name, future, blocks in (("load", load, 2), ("store", store, 1)):
                    seen = pool.wait_transfer(future, name, blocks).outcomes
                    expected = f"each block of a {name} to be unavailable while the store is {state}"
                    expect(set(seen) == {Outcome.UNAVAILABLE}, expected, summarize(seen))
            finally:
                end()
            outage.expect_usable(keys[:2], "the store to be used again")
        return outage.method


def attaching(context: RuleContext) -> str:
    """If the store is gone or hangs, `attach` ends by a SetupError without the URL's password, and `close` ends, too."""
    with relayed_outage(context, TIMEOUT_S) as (outage, _):
        outage.require_usable(new_keys(2))
        for state, begin, end in (
            ("is gone", outage.gone.set, outage.gone.clear),
            ("hangs", outage.responsive.clear, outage.responsive.set),
        ):
            begin()
            try:
                _expect_refusal(outage, state)
                if state == "hangs":
                    limit = outage.pool.limit_s
                    has_ended = run_until(time.monotonic() + limit, outage.pool.close, "conformance-close")
                    expect(has_ended, "close to end while the store hangs", f"it wait for more than {limit:g} s")
            finally:
                end()
    return ""


def _expect_refusal(outage: Outage, state: str) -> None:
    """Expect a new connector not to attach."""
    connector, layout = _with_password(outage.url), outage.pool.layout
    limit = outage.pool.limit_s
    memory = PoolMemory(random_rows(1, layout.block_bytes), layout)
    try:
        has_ended = run_until(time.monotonic() + limit, lambda: connector.attach(memory), "conformance-attach")
    except SetupError as error:
        expect(PASSWORD not in str(error), "an error of attach not to tell the password of the URL", "it there")
        return
    except Exception as error:
        seen = f"{type(error).__name__}: {error}"
        raise Broken(f"expected attach to raise SetupError while the store {state}, saw {seen}") from error
    expect(has_ended, f"attach to end while the store {state}", f"it wait for more than {limit:g} s")
    connector.close()
    raise Broken(f"expected attach to raise SetupError while the store {state}, saw it succeed")


def _with_password(url: str) -> Connector:
    """Return a connector for a URL with a password, if it has none and takes one."""
    if "@" not in url:
        with contextlib.suppress(SetupError):
            return connect(url.replace("://", f"://:{PASSWORD}@", 1))
    return connect(url)


def stalled_value(context: RuleContext) -> str:
    """If an answer stops in the middle of a value, the load ends within the timeout; after a cut the store is used again."""
    with relayed_outage(context, TIMEOUT_S) as (outage, relay):
        pool, keys = outage.pool, new_keys(2)
        outage.require_usable(keys)
        relay.stall_after(pool.payload_bytes(10) // 2)
        future = pool.start_load(keys[:1], [4])
        seen = pool.wait_transfer(future, "load while its value has stopped half-way", 1).outcomes[0]
        if outage.responsive.is_set():
            raise NotChecked(f"no answer was as long as half a block (the load returned {seen})")
        expect(seen is not Outcome.OK, "no block to be ok of which a half has come", seen)
        relay.cut()
        outage.responsive.set()
        outage.expect_usable(new_keys(2), "the store to be used again over new connections")
    return ""


def silent_connections(context: RuleContext) -> str:
    """A connection over which nothing comes any more is given up: the store is used again over new ones."""
    with relayed_outage(context, TIMEOUT_S) as (outage, relay):
        pool, keys = outage.pool, new_keys(2)
        outage.require_usable(keys)
        _load_at_once(pool, keys)  # opens as many connections as the connector uses
        relay.silence()
        _load_at_once(pool, keys)
        expected = "the store to be used again over new connections, after nothing came over the first ones"
        outage.expect_usable(new_keys(2), expected)
    return ""


def _load_at_once(pool: AttachedPool, keys: list[bytes]) -> None:
    """Start several loads of the first key, and wait for the end of all, whatever their outcomes."""
    loads = [pool.start_load(keys[:1], [row]) for row in range(HELD_LOADS)]
    for future in loads:
        pool.wait_transfer(future, "load", 1)


def byte_by_byte(context: RuleContext) -> str:
    """Answers that come byte by byte mean the same as those that come at once."""
    with relayed_outage(context, 2 * WAIT_LIMIT_S, override=True) as (outage, relay):
        pool, keys = outage.pool, new_keys(3)
        outage.require_usable(new_keys(2))
        relay.byte_by_byte = True
        for _ in range(2):  # the second store finds the blocks
            pool.must_store(keys[:2], [0, 1])
        pool.must_load(keys[:2], [4, 5], pool.rows[:2])
        matched = pool.match(keys)
        expect_count(matched, 0 if context.tickets else 2, "2 leading keys, the third being missing")
        seen = pool.load(keys[2:], [8]).outcomes[0]
        expect(seen is Outcome.MISSING, "a block that was not stored to be missing", seen)
    return ""

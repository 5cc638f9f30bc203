"""Limits of migrations. Drains do not count; faults without a token between draw on a budget that all requests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.errors import Unavailable
from pdserve.output import Stored
from pdserve.router.dispatch.dispatcher import FREE_MIGRATIONS, MAX_RETRIES

if TYPE_CHECKING:
    from tests.router.dispatch.conftest import Cluster


def test_drains_do_not_count_against_the_migration_limits(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode", "decode")
    cluster.dispatcher._retry_budget = 0.0
    prefill = cluster.instances[0]
    state = cluster.open(max_tokens=20)
    for move in range(FREE_MIGRATIONS + 1):
        here = state.decode
        assert here is not None
        cluster.deliver(prefill, state.id, token_ids=[move], stored=Stored(num_blocks=1, final=True))
        cluster.fleet.begin_drain(here)
        cluster.dispatcher.on_draining(here)
        assert len(state.timeline.migrations) == move + 1 and state.decode is not here
        here.change_role(here.hello)
    assert state.emitted == list(range(FREE_MIGRATIONS + 1))
    cluster.fleet.deregister(state.final_instance, "test")
    assert not state.machine.is_over, "nor with a fault after them"


def test_repeated_migrations_need_retry_budget(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode")
    cluster.dispatcher._retry_budget = 1.0
    states = [cluster.open(f"r{number}") for number in range(2)]
    for number in range(2, 4):
        here = states[0].final_instance
        cluster.join(f"decode-{number}", "decode")
        cluster.fleet.deregister(here, "test")
    moved, ended = states
    assert len(moved.timeline.migrations) == 2 and not moved.machine.is_over
    with pytest.raises(Unavailable, match=r"decode-2 was lost .* the budget for repeated migrations is exhausted"):
        cluster.tokens(ended)
    assert b"pdserve_retry_budget 0.2" in cluster.dispatcher._metrics.text(), "each new request adds a tenth"
    cluster.dispatcher._retry_budget = MAX_RETRIES
    cluster.open("more")
    assert b"pdserve_retry_budget 100.0" in cluster.dispatcher._metrics.text(), "and no more than the most"


def test_migrations_with_a_token_between_need_no_budget_up_to_eight(make_cluster: type[Cluster]) -> None:
    """Faults that come often cost a stream time. One that outlives too many of them may be their cause."""
    cluster = make_cluster("both")
    cluster.dispatcher._retry_budget = 0.0
    state = cluster.open(max_tokens=20)
    for number in range(FREE_MIGRATIONS + 1):
        here = state.final_instance
        cluster.deliver(here, state.id, token_ids=[number + 1])
        cluster.join(f"both-{number + 1}", "both")
        cluster.fleet.deregister(here, "test")
        assert len(state.timeline.migrations) == number + 1
        assert state.machine.is_over == (number == FREE_MIGRATIONS)
    with pytest.raises(Unavailable, match=r"the budget for repeated migrations is exhausted"):
        cluster.tokens(state)

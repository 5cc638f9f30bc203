"""Hedged prefills: the first instance with a token wins, and the other one is cancelled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.dispatch.request_state import RequestState
from pdserve.router.instances.fleet import InstanceHandle

if TYPE_CHECKING:
    from tests.router.dispatch.conftest import Cluster


def hedged(cluster: Cluster) -> tuple[RequestState, InstanceHandle, InstanceHandle, InstanceHandle]:
    """Open a request and hedge it. Return its state, the first and the second prefill instance, and decode."""
    state = cluster.open()
    first, decode = state.prefill, state.decode
    assert decode is not None
    cluster.dispatcher._hedger.start(state)
    cluster.dispatcher._hedger.start(state)
    second = state.hedge
    assert second is not None and second is not first
    assert [message.phase for instance in (first, second) for _, message in cluster.sent(instance)] == [pb.PREFILL] * 2
    cluster.sent(decode)
    return state, first, second, decode


def assert_released(cluster: Cluster, state: RequestState) -> None:
    """Check that no request and no load remains."""
    assert not cluster.dispatcher.states and state.hedge is None
    for instance in cluster.fleet.instances.values():
        assert not instance.requests and instance.candidate.requests == 0


def test_first_instance_with_a_token_wins(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "prefill", "decode")
    state, first, second, decode = hedged(cluster)
    cluster.deliver(first, stored=pb.Stored(num_blocks=2))
    cluster.deliver(second, stored=pb.Stored(num_blocks=1, tickets=[b"t"]))
    assert [list(message.tickets) for _, message in cluster.sent(decode)] == [[]], "the hedge's outputs are held back"
    cluster.deliver(second, token_ids=[7])
    assert [kind for kind, _ in cluster.sent(first)] == ["cancel"] and state.prefill is second
    (ticket, token) = (message for _, message in cluster.sent(decode))
    assert list(ticket.tickets) == [b"t"] and token.first_token == 7
    cluster.deliver(first, token_ids=[99])  # sent before the cancel arrived
    cluster.deliver(second, stored=pb.Stored(num_blocks=2, final=True))
    cluster.deliver(decode, token_ids=[8, 9, 10], finish_reason="length")
    assert cluster.tokens(state) == [7, 8, 9, 10]
    assert state.timeline.prefill_instance == second.id
    assert_released(cluster, state)

    state, first, second, decode = hedged(cluster)
    cluster.deliver(second, stored=pb.Stored(num_blocks=1))
    cluster.deliver(first, token_ids=[7], stored=pb.Stored(num_blocks=1, final=True))
    assert [kind for kind, _ in cluster.sent(second)] == ["cancel"] and state.prefill is first
    cluster.deliver(second, token_ids=[99])
    cluster.deliver(decode, token_ids=[8, 9, 10], finish_reason="length")
    assert cluster.tokens(state) == [7, 8, 9, 10]
    assert_released(cluster, state)
    text = cluster.dispatcher._metrics.text()
    assert b'hedges_total{outcome="asked"} 2.0' in text and b'hedges_total{outcome="preferred"} 1.0' in text


@pytest.mark.parametrize("refused", [True, False])
def test_one_of_two_prefills_may_fail(make_cluster: type[Cluster], refused: bool) -> None:
    cluster = make_cluster("prefill", "prefill", "decode")
    state, first, second, decode = hedged(cluster)
    cluster.fleet.deregister(first, "test")
    assert state.prefill is second and not cluster.sent(decode), "the hedge takes over"
    cluster.deliver(second, token_ids=[7], finish_reason="stop")
    assert cluster.tokens(state) == [7]
    assert_released(cluster, state)

    cluster.join(first.id, "prefill")
    state, first, second, decode = hedged(cluster)
    if refused:
        cluster.deliver(second, error=pb.Error(kind="rejected", message="no"))
    else:
        cluster.fleet.deregister(second, "test")
    assert state.prefill is first and state.hedge is None
    cluster.deliver(first, token_ids=[7], finish_reason="stop")
    assert cluster.tokens(state) == [7]
    assert_released(cluster, state)


def test_only_requests_without_a_first_token_are_hedged(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "prefill", "decode", "decode", hedge_prefill_after=0.05)
    late, done = cluster.open("late"), cluster.open("done")
    cluster.deliver(done.prefill, "done", token_ids=[7])
    cluster.advance(0.04)
    assert late.hedge is None
    cluster.advance(0.02)
    assert late.hedge is not None
    cluster.fleet.deregister(late.final_instance, "test")  # it migrates, and may be hedged again
    assert late.hedge is None and done.hedge is None
    cluster.advance(0.06)
    assert late.hedge is not None and done.hedge is None
    late.cancel()
    done.cancel()
    assert_released(cluster, late)

"""Requests wait while no instance is eligible, and go on with the same tokens on the first that is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import Overloaded, Unavailable
from pdserve.output import Output, Stored, pack
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request, SamplingParams
from pdserve.router.dispatch.handover import MAX_MIGRATIONS, State
from pdserve.router.dispatch.request_state import RequestState
from pdserve.router.instances.fleet import InstanceHandle
from pdserve.router.routed_request import RoutedRequest
from tests.examples import examples

if TYPE_CHECKING:
    from tests.router.dispatch.conftest import Cluster

WAIT_S = 30.0


def attach(cluster: Cluster, name: str, role: str, dtype: str = "") -> InstanceHandle:
    """Attach an instance, and have the router tell it so."""
    instance = cluster.join(name, role)
    instance.hello.layout.dtype = dtype
    cluster.fleet.on_joined(instance)
    return instance


def sample(cluster: Cluster, name: str, **labels: str) -> float:
    return cluster.dispatcher._metrics.registry.get_sample_value(f"pdserve_{name}", labels) or 0.0


def check_nothing_is_left(cluster: Cluster) -> None:
    assert not cluster.dispatcher.states and not cluster.dispatcher._open_ids
    assert sample(cluster, "requests_waiting_for_instance") == 0
    assert not any(instance.requests for instance in cluster.fleet.instances.values())


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_a_stream_that_has_lost_all_instances_goes_on_where_one_attaches(
    make_cluster: type[Cluster], role: str
) -> None:
    cluster = make_cluster("prefill", "decode", no_instance_timeout=WAIT_S)
    prefill, decode = cluster.instances
    state = cluster.open()
    cluster.deliver(prefill, token_ids=[7], stored=Stored(num_blocks=1, final=True))
    cluster.deliver(decode, token_ids=[8])
    cluster.fleet.deregister(prefill, "test")
    cluster.fleet.deregister(decode, "test")
    assert state.machine.state is State.WAITING and sample(cluster, "requests_waiting_for_instance") == 1
    assert cluster.dispatcher.ready() == (False, "no prefill and no decode instance is registered")
    for _ in range(29):
        cluster.advance(1.0)
    back = attach(cluster, "back", role)
    ((kind, submit),) = cluster.sent(back)
    assert kind == "submit" and [*Request.unpack(submit.request).prompt] == [1, 2, 3] and [*submit.output] == [7, 8]
    cluster.deliver(back, "r#1", token_ids=[9, 10], finish_reason="length")
    assert cluster.tokens(state) == [7, 8, 9, 10]
    assert [wait.seconds for wait in state.timeline.waits] == [29.0]
    assert sample(cluster, "instance_waits_total", outcome="placed") == 1
    assert sample(cluster, "migrations_total", kind="instance_lost") == 1
    check_nothing_is_left(cluster)


def test_choices_that_have_waited_are_submitted_together_without_those_that_have_left(
    make_cluster: type[Cluster],
) -> None:
    cluster = make_cluster(no_instance_timeout=WAIT_S)
    sampling = SamplingParams(max_tokens=1)
    names = ["c0", "c1", "c2"]
    requests = [RoutedRequest(request_id=name, prompt=[1, 2], sampling=sampling) for name in names]
    states = cluster.dispatcher.open_choices(requests)
    states[0].cancel()
    assert sample(cluster, "instance_waits_total", outcome="cancelled") == 1
    back = attach(cluster, "back", "both")
    ((_, submit),) = cluster.sent(back)
    assert submit.request_id == "c1" and [member.request_id for member in submit.members] == ["c2"]
    for name in names[1:]:
        cluster.deliver(back, name, token_ids=[5], finish_reason="length")
    assert [cluster.tokens(state) for state in states[1:]] == [[5], [5]]
    check_nothing_is_left(cluster)


def test_after_the_time_out_requests_end_with_a_503(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("both", no_instance_timeout=WAIT_S)
    running = cluster.open("running")
    cluster.deliver(cluster.instances[0], token_ids=[7])
    cluster.fleet.deregister(cluster.instances[0], "test")
    cluster.advance(1.0)
    new = cluster.open("new")
    cluster.advance(WAIT_S)
    assert not new.machine.is_over
    assert [chunk.token_ids for chunk in running.take()] == [[7]]
    for state, kind in ((running, "instance_lost"), (new, "no_instance")):
        with pytest.raises(Unavailable, match="is available, and none has come within 30 s") as failed:
            cluster.advance(1.0)
            state.take()
        assert failed.value.kind == kind and failed.value.retry_after_s == 1
    assert sample(cluster, "instance_waits_total", outcome="expired") == 2
    check_nothing_is_left(cluster)


def test_the_time_of_a_wait_is_not_that_of_the_hand_over(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("both", no_instance_timeout=WAIT_S, handover_timeout_seconds=5.0)
    state = cluster.open()
    cluster.fleet.deregister(cluster.instances[0], "test")
    cluster.advance(20.0)
    back = attach(cluster, "back", "both")
    cluster.advance(4.0)
    assert state.id in back.requests


def test_faults_of_all_instances_at_once_end_no_stream_however_the_router_learns_of_them(
    make_cluster: type[Cluster],
) -> None:
    """It loses the instances one after another: each to which the stream might have moved was gone already."""
    cluster = make_cluster("prefill", "prefill", "decode", "decode", no_instance_timeout=WAIT_S)
    state = cluster.open()
    cluster.deliver(state.prefill, token_ids=[7], stored=Stored(num_blocks=1, final=True))
    while cluster.fleet.instances:
        cluster.now += 0.5
        attached = [*cluster.fleet.instances.values()]
        cluster.fleet.deregister(state.final_instance if state.final_instance in attached else attached[0], "test")
    assert state.machine.state is State.WAITING
    back = attach(cluster, "back", "decode")
    cluster.deliver(back, state.id, token_ids=[8, 9, 10], finish_reason="length")
    assert cluster.tokens(state) == [7, 8, 9, 10]
    check_nothing_is_left(cluster)


@pytest.mark.parametrize("sign", [{"others": pb.Load()}, {"heartbeat": pb.Heartbeat()}])
def test_after_two_faults_without_a_token_a_stream_goes_where_there_is_a_sign_of_life(
    make_cluster: type[Cluster], sign: dict[str, Any]
) -> None:
    cluster = make_cluster(*["both"] * 4, no_instance_timeout=WAIT_S)
    state, taken = cluster.open(), list[InstanceHandle]()
    for _ in range(2):
        cluster.now += 0.5
        taken.append(state.final_instance)
        cluster.fleet.deregister(taken[-1], "test")
    first, second = (one for one in cluster.instances if one not in taken)
    assert state.machine.state is State.WAITING and not first.requests and not second.requests
    cluster.now += 0.1
    cluster.fleet.handle_frame(second, pb.InstanceFrame(**sign))
    assert state.final_instance is second and [*second.requests] == [state.id]
    assert [wait.seconds for wait in state.timeline.waits] == [pytest.approx(0.1)]


def test_a_stream_that_may_not_wait_moves_without_a_sign_of_life(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster(*["both"] * 3)
    state = cluster.open()
    for _ in range(2):
        cluster.now += 0.5
        cluster.fleet.deregister(state.final_instance, "test")
    assert state.id in state.final_instance.requests


def test_a_breaker_that_allows_a_trial_gets_one_of_the_waiting_requests(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("both", no_instance_timeout=WAIT_S)
    (both,) = cluster.instances
    for _ in range(3):
        cluster.now += 2.0
        cluster.fleet.record_fault(both, cluster.now)
    states = [cluster.open(name) for name in ("first", "second")]
    assert not both.requests
    cluster.advance(6.0)
    assert [*both.requests] == ["first"]
    cluster.deliver(both, "first", token_ids=[1])
    cluster.advance(1.0)
    assert [*both.requests] == ["first", "second"] and states[0].timeline.waits[0].seconds == 6.0


@pytest.mark.parametrize("dtype", ["", "float16"])
def test_tokens_of_two_models_are_not_mixed(make_cluster: type[Cluster], dtype: str) -> None:
    cluster = make_cluster(no_instance_timeout=WAIT_S)
    before = attach(cluster, "before", "both")
    state = cluster.open()
    cluster.fleet.deregister(before, "test")
    back = attach(cluster, "back", "both", dtype)
    assert (state.id in back.requests) is (dtype == "")
    if dtype:
        with pytest.raises(Unavailable, match="back, which has attached, has other weights or another dtype"):
            state.take()
        check_nothing_is_left(cluster)


def test_a_request_that_has_waited_too_long_for_the_slo_is_refused(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster(no_instance_timeout=WAIT_S, slo="ttft=1s")
    state = cluster.open(received=cluster.now)
    cluster.advance(5.0)
    busy = cluster.join("busy", "both")
    busy.update_other_load(pb.Load(requests=9, prefills=9, prefill_tokens=10**9, attended_tokens=10**15))
    cluster.fleet.on_joined(busy)
    with pytest.raises(Overloaded):
        state.take()
    assert sample(cluster, "instance_waits_total", outcome="refused") == 1
    check_nothing_is_left(cluster)


STEPS = st.lists(
    st.one_of(
        st.sampled_from(["open", "token", "cancel", "wait"]),
        st.tuples(st.sampled_from(["join", "lose", "drain"]), st.integers(0, 2)),
    ),
    max_size=40,
)


@settings(max_examples=examples(2))
@given(steps=STEPS)
def test_every_request_ends_and_none_loses_repeats_or_changes_a_token(
    make_cluster: type[Cluster], steps: list[Any]
) -> None:
    """Instances that join and leave in any order, and answer each submission with the tokens that follow its output."""
    cluster = make_cluster(no_instance_timeout=WAIT_S)
    attached: dict[int, InstanceHandle] = {}
    states: list[RequestState] = []
    read: dict[RequestState, list[int]] = {}

    def answer(instance: InstanceHandle) -> None:
        for state in states:
            if state.id in instance.requests and instance is state.final_instance:
                last = state.remaining_tokens == 1
                output = Output(request_id=state.id, token_ids=[len(state.emitted) + 1])
                output.finish_reason = "length" if last else None
                cluster.fleet.handle_frame(instance, pb.InstanceFrame(outputs=pack([output])))

    def collect(state: RequestState) -> None:
        try:
            read.setdefault(state, []).extend(token for chunk in state.take() for token in chunk.token_ids)
        except Unavailable:
            assert state.machine.state is State.FAILED

    for step in steps:
        match step:
            case "open":
                states.append(cluster.open(f"r{len(states)}", max_tokens=6))
            case "token":
                for instance in list(attached.values()):
                    answer(instance)
            case "cancel" if states:
                states[-1].cancel()
            case "wait":
                cluster.advance(10.0)
            case ("join", number) if number not in attached:
                attached[number] = attach(cluster, f"both-{number}", "both")
            case ("lose", number) if number in attached:
                cluster.fleet.deregister(attached.pop(number), "test")
            case ("drain", number) if number in attached:
                cluster.fleet.handle_frame(attached[number], pb.InstanceFrame(draining=pb.Draining()))
        for state in states:
            collect(state)
            assert state.machine.is_over or (state.machine.state is State.WAITING) is not any(
                state.id in one.requests for one in cluster.fleet.instances.values()
            )
        assert sample(cluster, "requests_waiting_for_instance") == sum(
            state.machine.state is State.WAITING for state in states
        )
    instance = attach(cluster, "last", "both")
    for one in list(attached.values()):
        cluster.fleet.deregister(one, "test")
    for _ in range(6):
        answer(instance)
    for state in states:
        collect(state)
        assert read[state] == [1, 2, 3, 4, 5, 6][: len(read[state])]
        done = state.machine.state
        assert done is not State.FINISHED or len(read[state]) == 6
        if done is State.FAILED:  # it has migrated too often, or waited too long
            waited = any((wait.seconds or 0) > WAIT_S for wait in state.timeline.waits)
            assert waited or len(state.timeline.migrations) > MAX_MIGRATIONS - 1
        assert state.machine.is_over
    check_nothing_is_left(cluster)

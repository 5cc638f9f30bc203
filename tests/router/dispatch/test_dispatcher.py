"""The dispatcher over simulated instances: frames sent to them, and the resulting client streams."""

from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from pdserve.errors import Conflict, NotFound, Overloaded, RequestError, Unavailable
from pdserve.output import Failure, Moved, Output, Predicted, Sources, Stored, pack
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request, SamplingParams, TokenLogprobs
from pdserve.router.dispatch.dispatcher import FREE_MIGRATIONS, MAX_RETRIES, p99
from pdserve.router.dispatch.handover import State
from pdserve.router.dispatch.request_state import RequestState
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.scheduling.policy import POLICIES

if TYPE_CHECKING:
    from tests.router.dispatch.conftest import Cluster, SentFrames


def test_split_request_streams_tokens_from_prefill_then_decode(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode")
    prefill, decode = cluster.instances
    state = cluster.open(priority=-3)
    ((_, first_submit),) = cluster.sent(prefill)
    ((_, submit),) = cluster.sent(decode)
    assert first_submit.phase == pb.PREFILL and first_submit.request == submit.request
    request = Request.unpack(submit.request)
    assert submit.phase == pb.DECODE and [*request.prompt] == [1, 2, 3] and request.priority == -3
    cluster.deliver(prefill, stored=Stored(num_blocks=1))
    cluster.deliver(prefill, token_ids=[7])
    cluster.deliver(prefill, stored=Stored(num_blocks=2, final=True, tickets=[b"t"]))
    first, second, third = (message for _, message in cluster.sent(decode))
    assert first.num_blocks == 1 and not first.HasField("first_token")
    assert second.first_token == 7
    assert third.final and list(third.tickets) == [b"t"]
    cluster.deliver(decode, token_ids=[8, 9])
    cluster.deliver(decode, token_ids=[10], finish_reason="length")
    assert cluster.tokens(state) == [7, 8, 9, 10]
    assert not cluster.sent(prefill) and not cluster.sent(decode), "no cancel after the end"
    assert not cluster.dispatcher.states and not prefill.requests and not decode.requests


def test_decode_may_finish_before_prefill_reports_the_last_store(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode")
    prefill, decode = cluster.instances
    state = cluster.open()
    cluster.deliver(prefill, token_ids=[7], stored=Stored(num_blocks=0, coming=1))
    cluster.deliver(decode, stamps={"kv_ready": 0.0}, token_ids=[8, 9, 10], finish_reason="length")
    assert cluster.tokens(state) == [7, 8, 9, 10]
    stored, moved = Stored(num_blocks=1, final=True), Moved(blocks=1, bytes=64, seconds=0.5)
    cluster.deliver(prefill, stamps={"kv_stored": 0.0}, stored=stored, moved=moved)
    timeline = cluster.dispatcher.timelines.get("r")
    assert timeline is not None and timeline.stored == Moved(1, 64, 0.5)
    at = {stamp.value: seconds for stamp, seconds in timeline.stamps.items()}
    assert at["first_token"] <= at["kv_stored"] == at["kv_ready"] <= at["finished"]


def test_single_token_request_uses_no_decode_instance(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode")
    prefill, decode = cluster.instances
    state = cluster.open(max_tokens=1)
    cluster.deliver(prefill, token_ids=[7], finish_reason="length")
    assert cluster.tokens(state) == [7]
    assert not cluster.sent(decode)


def test_lost_prefill_falls_back_to_decode(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode")
    prefill, decode = cluster.instances
    state = cluster.open()
    cluster.sent(decode)
    cluster.fleet.deregister(prefill, "test")
    ((kind, message),) = cluster.sent(decode)
    assert kind == "hand_over" and message.final and not message.HasField("first_token")
    cluster.deliver(decode, token_ids=[7, 8, 9, 10], finish_reason="length")
    assert cluster.tokens(state) == [7, 8, 9, 10]


def test_requests_with_one_id_at_once_are_apart(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("both")
    (both,) = cluster.instances
    states = [cluster.open("r") for _ in range(3)]
    assert [state.timeline.request_id for state in states] == ["r", "r.1", "r.2"]
    for number, state in enumerate(states):
        cluster.deliver(both, state.id, token_ids=[number], finish_reason="length")
    assert [cluster.tokens(state) for state in states] == [[0], [1], [2]]
    assert cluster.dispatcher.timeline("r.1") is states[1].timeline
    assert cluster.open("r").timeline.request_id == "r", "an id is free again when its request has ended"


def test_lost_decode_migrates_the_stream(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode", "decode")
    prefill, *decodes = cluster.instances
    state = cluster.open()
    lost = state.decode
    assert lost is not None
    other = next(instance for instance in decodes if instance is not lost)
    cluster.deliver(prefill, token_ids=[7], stored=Stored(num_blocks=1, final=True))
    cluster.deliver(lost, token_ids=[8])
    cluster.sent(prefill)
    cluster.fleet.deregister(lost, "test")
    ((_, again),) = cluster.sent(other)
    assert [*Request.unpack(again.request).prompt] == [1, 2, 3] and list(again.output) == [7, 8]
    assert again.request_id == "r#1"
    cluster.deliver(prefill, "r", token_ids=[99])  # a late output of the first submission
    cluster.deliver(prefill, "r#1", token_ids=[9], stored=Stored(num_blocks=1, final=True))
    cluster.deliver(other, "r#1", token_ids=[10], finish_reason="length")
    assert cluster.tokens(state) == [7, 8, 9, 10]
    assert len(state.timeline.migrations) == 1
    cluster.open("r").cancel()  # the id may be used again


def pauses(cluster: Cluster, histogram: str = "migration_pause") -> list[float]:
    """Return the number and the sum of the pauses in the metrics, or of another histogram's seconds."""
    text = cluster.metrics.text().decode()
    return [float(re.findall(rf"^pdserve_{histogram}_seconds_{one} (.*)", text, re.M)[0]) for one in ("count", "sum")]


def test_the_tokens_of_a_step_share_the_time_since_the_last_one(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("both")
    state = cluster.open(max_tokens=9)
    for tokens in ([1], [2], [3, 4, 5]):
        cluster.deliver(state.final_instance, token_ids=tokens)
        cluster.now += 3.0
    assert pauses(cluster, "inter_token_latency") == [4, 6.0]


def test_the_pause_of_a_moved_stream_lasts_from_token_to_token(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("both", "both", "both")
    state = cluster.open(max_tokens=9)
    cluster.deliver(state.final_instance, token_ids=[7])
    for _ in range(2):  # it is moved twice before another token comes
        cluster.now += 2.0
        cluster.fleet.deregister(state.final_instance, "test")
    assert pauses(cluster) == [0, 0]
    cluster.now += 1.0
    cluster.deliver(state.final_instance, state.id, token_ids=[8])
    assert pauses(cluster) == [1, 5.0]
    cluster.now += 7.0
    cluster.deliver(state.final_instance, state.id, token_ids=[9])
    assert pauses(cluster) == [1, 5.0], "it does not wait for a token of before"
    assert [move.pause_s for move in state.timeline.migrations] == [5.0, 5.0]


def test_the_pause_of_a_stream_without_a_token_begins_with_its_move(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("both", "both")
    state = cluster.open()
    cluster.now += 2.0
    cluster.fleet.deregister(state.final_instance, "test")
    cluster.now += 1.0
    cluster.deliver(state.final_instance, state.id, token_ids=[8])
    assert pauses(cluster) == [1, 1.0]


def test_lost_decode_that_computed_the_prompt_migrates_the_stream(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode", "decode", local_prefill_tokens=100)
    state = cluster.open()
    lost = state.final_instance
    cluster.deliver(lost, token_ids=[7, 8])
    cluster.fleet.deregister(lost, "test")
    other = state.final_instance
    assert other is not lost
    ((_, again),) = cluster.sent(other)
    assert again.phase == pb.BOTH and list(again.output) == [7, 8]
    cluster.deliver(other, "r#1", token_ids=[9, 10], finish_reason="length")
    assert cluster.tokens(state) == [7, 8, 9, 10]


def test_prefill_takes_over_the_stream_of_the_only_decode(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode")
    prefill, decode = cluster.instances
    state = cluster.open()
    cluster.deliver(prefill, token_ids=[7], stored=Stored(num_blocks=1, final=True))
    cluster.deliver(decode, token_ids=[8])
    cluster.sent(prefill)
    cluster.fleet.deregister(decode, "test")
    ((_, submit),) = cluster.sent(prefill)
    assert submit.phase == pb.BOTH and list(submit.output) == [7, 8]
    cluster.deliver(prefill, "r#1", token_ids=[9, 10], finish_reason="length")
    assert cluster.tokens(state) == [7, 8, 9, 10]


def test_draining_decode_migrates_its_streams_if_another_decode_exists(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode", "decode")
    prefill, *decodes = cluster.instances
    state = cluster.open()
    leaving = state.decode
    assert leaving is not None
    staying = next(instance for instance in decodes if instance is not leaving)
    cluster.deliver(prefill, token_ids=[7], stored=Stored(num_blocks=1, final=True))
    cluster.sent(leaving)
    cluster.fleet.begin_drain(leaving)
    cluster.dispatcher.on_draining(leaving)
    assert [kind for kind, _ in cluster.sent(leaving)] == ["cancel"]
    assert [kind for kind, _ in cluster.sent(staying)] == ["submit"] and state.decode is staying
    cluster.fleet.begin_drain(staying)
    cluster.dispatcher.on_draining(staying)
    assert not cluster.sent(staying), "the stream finishes here: there is no other decode instance"
    assert cluster.open("later").final_instance is prefill


def test_drains_do_not_count_against_the_migration_limits(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode", "decode")
    cluster.dispatcher._retry_budget = 0.0
    prefill = cluster.instances[0]
    state = cluster.open(max_tokens=20)
    for move in range(6):
        here = state.decode
        assert here is not None
        cluster.deliver(prefill, state.id, token_ids=[move], stored=Stored(num_blocks=1, final=True))
        cluster.fleet.begin_drain(here)
        cluster.dispatcher.on_draining(here)
        assert len(state.timeline.migrations) == move + 1 and state.decode is not here
        here.change_role(here.hello)
    assert state.emitted == [0, 1, 2, 3, 4, 5]


def test_drain_and_role_change_require_other_instances(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode", "decode")
    prefill, one, other = cluster.instances
    drain = cluster.dispatcher.drain
    with pytest.raises(NotFound, match="no instance 'decode-9'"):
        drain("decode-9")
    with pytest.raises(Conflict, match="no prefill instance would be available while prefill-0 drains"):
        drain(prefill.id)
    drain(one.id, "decode")  # its current role: no effect
    assert not any(map(cluster.sent, cluster.instances)) and not one.is_draining
    drain(one.id, "prefill")
    assert cluster.sent(one) == [("drain", pb.Drain(role="prefill"))]
    with pytest.raises(Conflict, match="decode-1 is already draining"):
        drain(one.id)
    with pytest.raises(Conflict, match="no decode instance would be available"):
        drain(other.id)
    assert cluster.open().decode is other, "the draining instance gets no new requests"

    again = pb.Hello()
    again.CopyFrom(one.hello)
    again.role = "both"
    cluster.fleet._handle_second_hello(one, pb.InstanceFrame(hello=again))
    assert one.candidate.is_both and not one.is_draining
    drain(other.id)
    assert cluster.sent(other)[-1] == ("drain", pb.Drain())
    assert cluster.open("alone").final_instance is one


def test_incompatible_role_change_is_rejected(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode", "decode", "prefill")
    for instance, size in zip(
        cluster.instances, (16, 16, 16, 32), strict=True
    ):  # with --convert-kv, 16 can load blocks of 32
        instance.hello.namespace = bytes([size])
        instance.hello.layout.block_size = size
        instance.hello.convert_kv = size == 16
    with pytest.raises(Conflict, match=r"prefill-3 cannot serve as decode: .* with --convert-kv"):
        cluster.dispatcher.drain("prefill-3", "decode")
    assert not cluster.instances[3].is_draining and not cluster.sent(cluster.instances[3])


def test_rejected_request_does_not_migrate(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode", "decode")
    state = cluster.open()
    cluster.deliver(cluster.instances[0], error=Failure(kind="rejected", message="too long"))
    with pytest.raises(RequestError, match="too long"):
        cluster.tokens(state)
    assert len(state.timeline.migrations) == 0 and state.timeline.finish_reason == "error"


def test_owner_without_progress_times_out_but_a_busy_one_does_not(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode", handover_timeout_seconds=0.2)
    prefill, decode = cluster.instances
    state = cluster.open()
    cluster.sent(decode)
    for _ in range(8):  # prefill works on other requests
        prefill.last_step_at = cluster.fleet.awake_now()
        cluster.advance(0.15)
    assert not cluster.sent(decode)
    cluster.advance(0.1)  # prefill makes no progress
    frames = cluster.sent(decode)
    assert frames[0][0] == "hand_over" and frames[0][1].final
    assert not prefill.requests
    while not state.machine.is_over:
        cluster.advance(0.25)
    with pytest.raises(Unavailable, match=r"no progress for 0\.2 s while"):  # nor does decode
        cluster.tokens(state)


def test_time_in_which_the_router_was_stalled_is_not_the_instances(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("both", handover_timeout_seconds=20.0, lease_seconds=60.0)
    state = cluster.open()
    cluster.advance(5.0)
    cluster.advance(1000.0)  # after which the frames of its instances are still unread
    assert not state.machine.is_over
    cluster.deliver(cluster.instances[0], token_ids=[7])
    for seconds in range(0, 20, 5):
        assert not state.machine.is_over, seconds
        cluster.fleet.expire_leases()
        cluster.advance(5.0)
    cluster.fleet.expire_leases()
    cluster.advance(5.0)
    with pytest.raises(Unavailable, match=r"no progress for 20\.0 s while"):
        cluster.tokens(state)


def test_engine_steps_without_tokens_hold_a_request_for_a_limited_time(make_cluster: type[Cluster]) -> None:
    """An instance that always reports steps and never answers; in a long queue, it answers other requests meanwhile."""

    cluster = make_cluster("both", handover_timeout_seconds=1.0)
    (both,) = cluster.instances
    state, earlier = cluster.open(), cluster.open("earlier", max_tokens=90)

    def pass_time(steps: int) -> None:
        for _ in range(steps):
            both.last_step_at = cluster.fleet.awake_now()
            cluster.advance(0.5)

    for token in range(40):
        cluster.deliver(both, "earlier", token_ids=[token])
        pass_time(1)
    assert not state.machine.is_over, "a long queue"
    pass_time(23)
    assert state.machine.is_over and earlier.machine.is_over
    with pytest.raises(Unavailable, match=r"no progress for 1\.0 s while"):
        cluster.tokens(state)


def test_a_request_ends_even_if_its_instance_works_for_ever(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("both", handover_timeout_seconds=1.0)
    (both,) = cluster.instances
    state = cluster.open(max_tokens=4)
    for _ in range(104):
        both.last_token_at = cluster.fleet.awake_now()
        cluster.advance(1.0)
    assert not state.machine.is_over
    cluster.advance(1.0)
    with pytest.raises(Unavailable, match="the request has taken 105 s, and is still loading"):
        cluster.tokens(state)


INVALID_OUTPUTS = [
    dict(token_ids=[1] * 20_000),
    dict(token_ids=[50]),
    dict(token_ids=[1], finish_reason="because"),
    dict(finish_reason="stop"),
    dict(error=Failure(kind="no such\nkind")),
    dict(stored=Stored(num_blocks=2**32 - 1)),
    dict(sources=Sources(local_hit=2**32 - 1)),
    dict(predicted=Predicted(accepted=1)),
    dict(drafted=Predicted(accepted=1)),
    dict(token_ids=[1], predicted=Predicted(rejected=2**62)),
    dict(moved=Moved(bytes=1, seconds=5e-324)),
    dict(moved=Moved(bytes=1, seconds=float("nan"))),
    dict(stamps={"nowhere": 0.0}),
    dict(stamps={"kv_ready": float("nan")}),
    dict(stamps={"kv_ready": -1.0}),
]


@pytest.mark.parametrize("output", INVALID_OUTPUTS, ids=str)
def test_an_impossible_output_is_a_fault_of_the_instance_and_the_request_migrates(
    make_cluster: type[Cluster], output: dict[str, Any]
) -> None:
    cluster = make_cluster("both", "both")
    state = cluster.open()
    rogue = state.final_instance
    (other,) = (instance for instance in cluster.instances if instance is not rogue)
    cluster.deliver(rogue, token_ids=[7])
    frame = pb.InstanceFrame(outputs=pack([Output(request_id="r", **output)]))
    cluster.fleet.handle_frame(rogue, frame)
    assert list(cluster.fleet.instances) == [other.id]
    cluster.deliver(other, "r#1", token_ids=[8, 9, 10], finish_reason="length")
    assert cluster.tokens(state) == [7, 8, 9, 10]


def test_an_output_that_is_impossible_in_the_state_of_the_handover_is_a_fault(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode")
    prefill, decode = cluster.instances
    state = cluster.open()
    frame = pb.InstanceFrame(outputs=pack([Output(request_id="r", token_ids=[8])]))
    cluster.fleet.handle_frame(decode, frame)  # before the first token
    assert list(cluster.fleet.instances) == [prefill.id]
    cluster.deliver(prefill, "r#1", token_ids=[7, 8, 9, 10], finish_reason="length")
    assert cluster.tokens(state) == [7, 8, 9, 10]


@pytest.mark.parametrize("decoded", [(), (8,)])
def test_a_second_first_token_is_a_fault_and_reaches_neither_client_nor_decode(
    make_cluster: type[Cluster], decoded: tuple[int, ...]
) -> None:
    cluster = make_cluster("prefill", "decode")
    prefill, decode = cluster.instances
    state = cluster.open()
    cluster.deliver(prefill, token_ids=[7])
    if decoded:
        cluster.deliver(decode, token_ids=decoded)
    cluster.sent(decode)
    frame = pb.InstanceFrame(outputs=pack([Output(request_id="r", token_ids=[9])]))
    cluster.fleet.handle_frame(prefill, frame)
    assert list(cluster.fleet.instances) == [decode.id]
    assert not any(getattr(message, "first_token", 0) == 9 for _, message in cluster.sent(decode))
    cluster.deliver(decode, token_ids=[8, 9, 10][len(decoded) :], finish_reason="length")
    assert cluster.tokens(state) == [7, 8, 9, 10]


NUMBERS = st.floats(width=64) | st.sampled_from([0.0, 1e-300, 1e300])
OUTPUTS = st.fixed_dictionaries(
    {},
    optional={
        "token_ids": st.lists(st.sampled_from([0, 49, 50, 2**32 - 1]), max_size=5),
        "finish_reason": st.sampled_from([None, "", "stop", "length", "?"]),
        "error": st.builds(Failure, kind=st.sampled_from(["rejected", "?"]), message=st.text(max_size=3)),
        "stamps": st.dictionaries(st.sampled_from(["released", "kv_ready", "?"]), NUMBERS),
        "stored": st.builds(Stored, num_blocks=st.sampled_from([0, 1, 2**32 - 1]), final=st.booleans()),
        "sources": st.builds(Sources, computed=st.sampled_from([0, 3, 2**32 - 1])),
        "moved": st.builds(Moved, bytes=st.sampled_from([0, 2**64 - 1]), seconds=NUMBERS),
        "logprobs": st.lists(st.builds(TokenLogprobs, st.floats(width=32), st.lists(st.just((60, -1.0))).map(tuple))),
    },
)


@settings(max_examples=200)
@given(outputs=st.lists(st.tuples(st.integers(0, 1), OUTPUTS), max_size=8), logprobs=st.sampled_from([None, 2]))
def test_no_output_makes_the_router_raise_or_report_numbers_that_are_not_finite(
    make_cluster: type[Cluster], outputs: list[tuple[int, dict[str, Any]]], logprobs: int | None
) -> None:
    cluster = make_cluster("prefill", "decode")
    state = cluster.open(sampling=SamplingParams(max_tokens=4, logprobs=logprobs))
    for which, output in outputs:
        frame = pb.InstanceFrame(outputs=pack([Output(request_id=state.id, **output)]))
        cluster.fleet.handle_frame(cluster.instances[which], frame)
    json.dumps([state.timeline.as_dict(), cluster.dispatcher.instances()], allow_nan=False)
    assert len(state.emitted) <= 4 and all(token_id < 50 for token_id in state.emitted)
    assert cluster.dispatcher.fleet.instances.keys() >= {m.id for m in cluster.instances if m.requests}
    if state.machine.is_over:
        with contextlib.suppress(RequestError):
            cluster.tokens(state)
    state.cancel()


def test_cancelling_tells_everyone(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode")
    state = cluster.open()
    for instance in cluster.instances:
        cluster.sent(instance)
    state.cancel()
    state.cancel()
    assert [[kind for kind, _ in cluster.sent(instance)] for instance in cluster.instances] == [
        ["cancel"],
        ["cancel"],
    ]
    assert state.timeline.finish_reason == "cancelled"


def test_late_outputs_of_a_cancelled_request_do_not_reach_the_next_one_with_its_id(make_cluster: type[Cluster]) -> None:
    """A client chooses the ids of its requests. An output that is impossible for a request would drop the instance."""

    cluster = make_cluster("prefill", "decode")
    prefill, decode = cluster.instances
    cluster.open("r").cancel()
    state = cluster.open("r")
    assert [message.request_id for _, message in cluster.sent(decode)] == ["r", "r", "r#1"]
    cluster.deliver(decode, "r", token_ids=[8, 9])  # impossible before a first token
    cluster.deliver(prefill, "r", token_ids=[7], finish_reason="length")
    assert cluster.dispatcher.fleet.instances.keys() == {prefill.id, decode.id}
    cluster.deliver(prefill, "r#1", token_ids=[1], finish_reason="length")
    assert cluster.tokens(state) == [1]


def test_slo_rejection_leaves_no_state_and_spares_running_requests(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode", "decode", slo="ttft=1s")
    prefill, *_ = cluster.instances
    prefill.update_heartbeat(pb.Heartbeat(costs=pb.Costs(prefill=(0, 0.25, 0), decode=(0, 0, 0), transfer=(0, 0))))
    first = cluster.open("first", prompt=[1] * 3)
    for _ in range(2):  # the rejected id is free again
        with pytest.raises(Overloaded, match=r"TTFT of 1\.5 s exceeds") as refused:
            cluster.open("second", prompt=[1] * 3)
    assert (refused.value.kind, refused.value.retry_after_s) == ("slo_ttft", 1)
    assert prefill.candidate.requests == 1 and list(cluster.dispatcher.states) == ["first"]
    timeline = cluster.dispatcher.timeline("second")
    assert timeline is not None and timeline.finish_reason == "refused" and "TTFT of 1.5 s exceeds" in timeline.error
    cluster.open("second", prompt=[1])
    assert (timeline := cluster.dispatcher.timeline("second")) is not None and not timeline.finish_reason
    # A running request may migrate, although it is late.
    assert first.decode is not None
    cluster.fleet.deregister(first.decode, "test")
    assert len(first.timeline.migrations) == 1 and not first.machine.is_over
    assert b'pdserve_refusals_total{reason="slo_ttft"} 2.0' in cluster.dispatcher._metrics.text()


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


EVENTS = st.lists(
    st.tuples(st.sampled_from(["join", "lose", "drain", "open", "first", "end", "cancel"]), st.integers(0, 99))
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25)
@given(events=EVENTS)
def test_only_live_instances_receive_requests_and_no_load_remains(
    make_cluster: type[Cluster], policy: str, events: list[tuple[str, int]]
) -> None:
    cluster = make_cluster("prefill", "decode", "both", policy=policy)
    states: list[RequestState] = []
    everyone = list(cluster.instances)
    for number, (event, which) in enumerate(events):
        attached = list(cluster.fleet.instances.values())
        instance = attached[which % len(attached)] if attached else None
        eligible = [m for m in attached if not m.is_draining]
        before = {m.id: len(cast("SentFrames", m.connection)) for m in everyone}
        if event == "join":
            everyone.append(cluster.join(f"late-{number}", ("prefill", "decode", "both")[which % 3]))
        elif event == "lose" and instance is not None:
            eligible = [m for m in eligible if m is not instance]
            cluster.fleet.deregister(instance, "test")
        elif event == "drain" and instance is not None:
            eligible = [m for m in eligible if m is not instance]
            cluster.fleet.begin_drain(instance)
            cluster.dispatcher.on_draining(instance)
        elif event == "open":
            with contextlib.suppress(Unavailable):
                states.append(cluster.open(f"r{number}", session=str(which % 5), max_tokens=1 + which % 3))
        elif states and event == "first":
            state = states[which % len(states)]
            if state.id in state.prefill.requests and state.machine.state is State.PREFILLING:
                cluster.deliver(state.prefill, state.id, token_ids=[7])
        elif states and event == "end":
            state = states[which % len(states)]
            cluster.deliver(state.final_instance, state.id, error=Failure(kind="rejected"))
        elif states:
            states[which % len(states)].cancel()
        for one in everyone:
            frames = cluster.sent(one)[before[one.id] :] if one.id in before else []
            assert one in eligible or not [kind for kind, _ in frames if kind == "submit"]
    for state in states:
        state.cancel()
    for instance in everyone:
        assert instance.candidate.requests == instance.candidate.work_tokens == instance.candidate.context_tokens == 0
    assert not cluster.dispatcher.states


def test_choices_of_a_prompt_are_submitted_together_and_migrate_alone(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode", "decode")
    prefill, *decoders = cluster.instances
    requests = [
        RoutedRequest(request_id=f"r-{i}", prompt=[1, 2, 3], sampling=SamplingParams(max_tokens=4, seed=i))
        for i in range(3)
    ]
    states = cluster.dispatcher.open_choices(requests)
    decode = states[0].decode
    assert decode is not None and all((one.prefill, one.decode) == (prefill, decode) for one in states)
    for instance in (prefill, decode):
        ((kind, submit),) = cluster.sent(instance)
        members = [(member.request_id, member.seed) for member in submit.members]
        assert (kind, submit.request_id, members) == (
            "submit",
            states[0].id,
            [(one.id, i) for i, one in [*enumerate(states)][1:]],
        )
    assert prefill.candidate.prefill_tokens == 3, "the prompt is computed once"
    for i, state in enumerate(states):
        cluster.deliver(prefill, state.id, token_ids=[10 + i], stored=Stored(num_blocks=2, final=True))
    cluster.sent(decode)
    cluster.fleet.deregister(decode, "test")
    (other,) = (one for one in decoders if one is not decode)
    frames = [message for kind, message in cluster.sent(other) if kind == "submit"]
    assert [list(one.output) for one in frames] == [[10], [11], [12]] and not any(one.members for one in frames)
    again = cluster.dispatcher.open_choices([structs.replace(requests[0], request_id="x"), requests[1]])
    assert [state.request.request_id for state in again] == ["x", f"{requests[1].request_id}.1"]


def test_p99_leaves_out_one_gap_of_a_hundred() -> None:
    assert p99([]) is None and p99([3.0]) == 3.0
    assert p99([1.0] * 98 + [9.0]) == 9.0 and p99([1.0] * 99 + [9.0]) == 1.0

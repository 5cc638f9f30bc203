"""The dispatcher over simulated instances: frames sent to them, and the resulting client streams."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import BadRequest, Conflict, NotFound, Overloaded, RequestError, Unavailable
from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.dispatch.handover import State
from pdserve.router.dispatch.request_state import RequestState
from pdserve.router.scheduling.policy import POLICIES
from pdserve.router.telemetry.timeline import TransferStats

if TYPE_CHECKING:
    from tests.router.dispatch.conftest import Clock, Cluster, RunAsync, SentFrames


def test_split_request_streams_tokens_from_prefill_then_decode(
    make_cluster: type[Cluster], run_async: RunAsync
) -> None:
    async def scenario() -> None:
        cluster = make_cluster("prefill", "decode")
        prefill, decode = cluster.instances
        state = cluster.open(priority=-3)
        ((_, first_submit),) = cluster.sent(prefill)
        ((_, submit),) = cluster.sent(decode)
        assert first_submit.phase == pb.PREFILL and first_submit.priority == submit.priority == -3
        assert submit.phase == pb.DECODE and list(submit.prompt) == [1, 2, 3]
        cluster.deliver(prefill, stored=pb.Stored(num_blocks=1))
        cluster.deliver(prefill, token_ids=[7])
        cluster.deliver(prefill, stored=pb.Stored(num_blocks=2, final=True, tickets=[b"t"]))
        first, second, third = (message for _, message in cluster.sent(decode))
        assert first.num_blocks == 1 and not first.HasField("first_token")
        assert second.first_token == 7
        assert third.final and list(third.tickets) == [b"t"]
        cluster.deliver(decode, token_ids=[8, 9])
        cluster.deliver(decode, token_ids=[10], finish_reason="length")
        assert await cluster.tokens(state) == [7, 8, 9, 10]
        assert not cluster.sent(prefill) and not cluster.sent(decode), "no cancel after the end"
        assert not cluster.dispatcher.states and not prefill.requests and not decode.requests

    run_async(scenario())


def test_decode_may_finish_before_prefill_reports_the_last_store(
    make_cluster: type[Cluster], run_async: RunAsync
) -> None:
    async def scenario() -> None:
        cluster = make_cluster("prefill", "decode")
        prefill, decode = cluster.instances
        state = cluster.open()
        cluster.deliver(prefill, token_ids=[7], stored=pb.Stored(num_blocks=0, coming=1))
        cluster.deliver(decode, stamps=[pb.Stamp(stage="kv_ready")], token_ids=[8, 9, 10], finish_reason="length")
        assert await cluster.tokens(state) == [7, 8, 9, 10]
        stored, moved = pb.Stored(num_blocks=1, final=True), pb.Moved(blocks=1, bytes=64, seconds=0.5)
        cluster.deliver(prefill, stamps=[pb.Stamp(stage="kv_stored")], stored=stored, moved=moved)
        timeline = cluster.dispatcher.timelines.get("r")
        assert timeline is not None and timeline.stored == TransferStats(1, 64, 0.5)
        at = {stamp.value: seconds for stamp, seconds in timeline.stamps.items()}
        assert at["first_token"] <= at["kv_stored"] == at["kv_ready"] <= at["finished"]

    run_async(scenario())


def test_single_token_request_uses_no_decode_instance(make_cluster: type[Cluster], run_async: RunAsync) -> None:
    async def scenario() -> None:
        cluster = make_cluster("prefill", "decode")
        prefill, decode = cluster.instances
        state = cluster.open(max_tokens=1)
        cluster.deliver(prefill, token_ids=[7], finish_reason="length")
        assert await cluster.tokens(state) == [7]
        assert not cluster.sent(decode)

    run_async(scenario())


def test_lost_prefill_falls_back_to_decode(make_cluster: type[Cluster], run_async: RunAsync) -> None:
    async def scenario() -> None:
        cluster = make_cluster("prefill", "decode")
        prefill, decode = cluster.instances
        state = cluster.open()
        cluster.sent(decode)
        cluster.fleet.deregister(prefill, "test")
        ((kind, message),) = cluster.sent(decode)
        assert kind == "hand_over" and message.final and not message.HasField("first_token")
        cluster.deliver(decode, token_ids=[7, 8, 9, 10], finish_reason="length")
        assert await cluster.tokens(state) == [7, 8, 9, 10]

    run_async(scenario())


def test_lost_decode_migrates_the_stream(make_cluster: type[Cluster], run_async: RunAsync) -> None:
    async def scenario() -> None:
        cluster = make_cluster("prefill", "decode", "decode")
        prefill, *decodes = cluster.instances
        state = cluster.open()
        lost = state.decode
        assert lost is not None
        other = next(instance for instance in decodes if instance is not lost)
        cluster.deliver(prefill, token_ids=[7], stored=pb.Stored(num_blocks=1, final=True))
        cluster.deliver(lost, token_ids=[8])
        cluster.sent(prefill)
        cluster.fleet.deregister(lost, "test")
        ((_, again),) = cluster.sent(other)
        assert list(again.prompt) == [1, 2, 3] and list(again.output) == [7, 8] and again.request_id == "r#1"
        with pytest.raises(BadRequest, match="in use"):
            cluster.open("r")
        cluster.deliver(prefill, "r", token_ids=[99])  # a late output of the first submission
        cluster.deliver(prefill, "r#1", token_ids=[9], stored=pb.Stored(num_blocks=1, final=True))
        cluster.deliver(other, "r#1", token_ids=[10], finish_reason="length")
        assert await cluster.tokens(state) == [7, 8, 9, 10]
        assert len(state.timeline.migrations) == 1
        cluster.open("r").cancel()  # the id may be used again

    run_async(scenario())


def test_lost_decode_that_computed_the_prompt_migrates_the_stream(
    make_cluster: type[Cluster], run_async: RunAsync
) -> None:
    async def scenario() -> None:
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
        assert await cluster.tokens(state) == [7, 8, 9, 10]

    run_async(scenario())


def test_prefill_takes_over_the_stream_of_the_only_decode(make_cluster: type[Cluster], run_async: RunAsync) -> None:
    async def scenario() -> None:
        cluster = make_cluster("prefill", "decode")
        prefill, decode = cluster.instances
        state = cluster.open()
        cluster.deliver(prefill, token_ids=[7], stored=pb.Stored(num_blocks=1, final=True))
        cluster.deliver(decode, token_ids=[8])
        cluster.sent(prefill)
        cluster.fleet.deregister(decode, "test")
        ((_, submit),) = cluster.sent(prefill)
        assert submit.phase == pb.BOTH and list(submit.output) == [7, 8]
        cluster.deliver(prefill, "r#1", token_ids=[9, 10], finish_reason="length")
        assert await cluster.tokens(state) == [7, 8, 9, 10]

    run_async(scenario())


def test_draining_decode_migrates_its_streams_if_another_decode_exists(
    make_cluster: type[Cluster], run_async: RunAsync
) -> None:
    async def scenario() -> None:
        cluster = make_cluster("prefill", "decode", "decode")
        prefill, *decodes = cluster.instances
        state = cluster.open()
        leaving = state.decode
        assert leaving is not None
        staying = next(instance for instance in decodes if instance is not leaving)
        cluster.deliver(prefill, token_ids=[7], stored=pb.Stored(num_blocks=1, final=True))
        cluster.sent(leaving)
        leaving.is_draining = True
        cluster.dispatcher.on_draining(leaving)
        assert [kind for kind, _ in cluster.sent(leaving)] == ["cancel"]
        assert [kind for kind, _ in cluster.sent(staying)] == ["submit"] and state.decode is staying
        staying.is_draining = True
        cluster.dispatcher.on_draining(staying)
        assert not cluster.sent(staying), "the stream finishes here: there is no other decode instance"
        assert cluster.open("later").final_instance is prefill

    run_async(scenario())


def test_drains_do_not_count_against_the_migration_limits(make_cluster: type[Cluster], run_async: RunAsync) -> None:
    async def scenario() -> None:
        cluster = make_cluster("prefill", "decode", "decode")
        cluster.dispatcher._retry_budget.balance = 0.0
        prefill = cluster.instances[0]
        state = cluster.open(max_tokens=20)
        for move in range(6):
            here = state.decode
            assert here is not None
            cluster.deliver(prefill, state.id, token_ids=[move], stored=pb.Stored(num_blocks=1, final=True))
            here.is_draining = True
            cluster.dispatcher.on_draining(here)
            assert len(state.timeline.migrations) == move + 1 and state.decode is not here
            here.change_role(here.hello)
        assert state.emitted == [0, 1, 2, 3, 4, 5]

    run_async(scenario())


def test_drain_and_role_change_require_other_instances(make_cluster: type[Cluster], run_async: RunAsync) -> None:
    async def scenario() -> None:
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
        cluster.fleet._handle_role_change(one, pb.InstanceFrame(hello=again))
        assert one.candidate.is_both and not one.is_draining
        drain(other.id)
        assert cluster.sent(other)[-1] == ("drain", pb.Drain())
        assert cluster.open("alone").final_instance is one

    run_async(scenario())


def test_incompatible_role_change_is_rejected(make_cluster: type[Cluster], run_async: RunAsync) -> None:
    async def scenario() -> None:
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

    run_async(scenario())


def test_rejected_request_does_not_migrate(make_cluster: type[Cluster], run_async: RunAsync) -> None:
    async def scenario() -> None:
        cluster = make_cluster("prefill", "decode", "decode")
        state = cluster.open()
        cluster.deliver(cluster.instances[0], error=pb.Error(kind="rejected", message="too long"))
        with pytest.raises(RequestError, match="too long"):
            await cluster.tokens(state)
        assert len(state.timeline.migrations) == 0 and state.timeline.finish_reason == "error"

    run_async(scenario())


def test_owner_without_progress_times_out_but_a_busy_one_does_not(
    make_cluster: type[Cluster], run_async: RunAsync, clock: Clock
) -> None:
    async def scenario() -> None:
        cluster = make_cluster("prefill", "decode", handover_timeout_seconds=0.2)
        prefill, decode = cluster.instances
        state = cluster.open()
        cluster.sent(decode)
        for _ in range(8):  # prefill works on other requests
            prefill.last_step_at = clock.now
            await clock.advance(cluster, 0.15)
        assert not cluster.sent(decode)
        await clock.advance(cluster, 0.1)  # prefill makes no progress
        frames = cluster.sent(decode)
        assert frames[0][0] == "hand_over" and frames[0][1].final
        assert not prefill.requests
        while not state.machine.is_over:
            await clock.advance(cluster, 0.25)
        with pytest.raises(Unavailable, match=r"no progress for 0\.2 s while"):  # nor does decode
            await cluster.tokens(state)

    run_async(scenario())


def test_cancelling_tells_everyone(make_cluster: type[Cluster], run_async: RunAsync) -> None:
    async def scenario() -> None:
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

    run_async(scenario())


def test_slo_rejection_leaves_no_state_and_spares_running_requests(
    make_cluster: type[Cluster], run_async: RunAsync
) -> None:
    async def scenario() -> None:
        cluster = make_cluster("prefill", "decode", "decode", slo="ttft=1s")
        prefill, *_ = cluster.instances
        prefill.update_heartbeat(pb.Heartbeat(costs=pb.Costs(prefill=(0, 0.25, 0), decode=(0, 0, 0), transfer=(0, 0))))
        first = cluster.open("first", prompt=[1] * 3)
        for _ in range(2):  # the rejected id is free again
            with pytest.raises(Overloaded, match=r"TTFT of 1\.5 s exceeds") as refused:
                cluster.open("second", prompt=[1] * 3)
        assert (refused.value.kind, refused.value.retry_after_s) == ("slo_ttft", 1)
        assert prefill.candidate.requests == 1 and cluster.dispatcher.timeline("second") is None
        cluster.open("second", prompt=[1])
        # A running request may migrate, although it is late.
        assert first.decode is not None
        cluster.fleet.deregister(first.decode, "test")
        assert len(first.timeline.migrations) == 1 and not first.machine.is_over
        assert b'pdserve_refusals_total{reason="slo_ttft"} 2.0' in cluster.dispatcher._metrics.text()

    run_async(scenario())


def test_repeated_migrations_need_retry_budget(make_cluster: type[Cluster], run_async: RunAsync) -> None:
    async def scenario() -> None:
        cluster = make_cluster("prefill", "decode")
        cluster.dispatcher._retry_budget.balance = 1.0
        states = [cluster.open(f"r{number}") for number in range(2)]
        for number in range(2, 4):
            here = states[0].final_instance
            cluster.join(f"decode-{number}", "decode")
            cluster.fleet.deregister(here, "test")
        moved, ended = states
        assert len(moved.timeline.migrations) == 2 and not moved.machine.is_over
        with pytest.raises(Unavailable, match=r"decode-2 was lost .* the budget for repeated migrations is exhausted"):
            await cluster.tokens(ended)
        assert b"pdserve_retry_budget 0." in cluster.dispatcher._metrics.text()

    run_async(scenario())


EVENTS = st.lists(
    st.tuples(st.sampled_from(["join", "lose", "drain", "open", "late", "first", "end", "cancel"]), st.integers(0, 99))
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25)
@given(events=EVENTS)
def test_only_live_instances_receive_requests_and_no_load_remains(
    make_cluster: type[Cluster], run_async: RunAsync, policy: str, events: list[tuple[str, int]]
) -> None:
    async def scenario() -> None:
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
                instance.is_draining = True
                cluster.dispatcher.on_draining(instance)
            elif event == "open":
                with contextlib.suppress(Unavailable):
                    states.append(cluster.open(f"r{number}", session=str(which % 5), max_tokens=1 + which % 3))
            elif states and event == "late" and not states[which % len(states)].machine.is_over:
                cluster.dispatcher._hedger.start(states[which % len(states)])
            elif states and event == "first":
                state = states[which % len(states)]
                if state.id in (state.hedge or state.prefill).requests and state.machine.state is State.PREFILLING:
                    cluster.deliver(state.hedge or state.prefill, state.id, token_ids=[7])
            elif states and event == "end":
                state = states[which % len(states)]
                cluster.deliver(state.final_instance, state.id, finish_reason="stop")
            elif states:
                states[which % len(states)].cancel()
            for one in everyone:
                frames = cluster.sent(one)[before[one.id] :] if one.id in before else []
                assert one in eligible or not [kind for kind, _ in frames if kind == "submit"]
        for state in states:
            state.cancel()
        for instance in everyone:
            assert (
                instance.candidate.requests == instance.candidate.work_tokens == instance.candidate.context_tokens == 0
            )
        assert not cluster.dispatcher.states

    run_async(scenario())

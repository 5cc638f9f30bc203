"""Instance selection over simulated instances: policies, placement, breakers and unreachable pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.costs import Costs
from pdserve.errors import Unavailable
from pdserve.keys import block_keys
from pdserve.output import Failure, Moved, Stored
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import SamplingParams
from pdserve.router.dispatch.selector import MAX_FAILED_HANDOVERS, RETRY_AFTER_S, StoreReachability
from pdserve.router.instances.fleet import InstanceHandle

if TYPE_CHECKING:
    from tests.router.dispatch.conftest import Cluster


@pytest.mark.parametrize(("first", "second"), [("prefill", "decode"), ("decode", "prefill")])
def test_last_role_does_everything_and_without_instances_the_request_fails(
    make_cluster: type[Cluster], first: str, second: str
) -> None:
    cluster = make_cluster(first, second)
    left, lost = cluster.instances
    cluster.fleet.deregister(lost, "test")
    state = cluster.open()
    ((_, submit),) = cluster.sent(left)
    placement = state.timeline.placement
    assert submit.phase == pb.BOTH and placement is not None and placement.reason == f"no_{second}_instance"
    cluster.deliver(left, token_ids=[7])
    again = cluster.join("both-1", "both")
    cluster.fleet.deregister(left, "test")
    ((_, submit),) = cluster.sent(again)
    assert submit.phase == pb.BOTH and list(submit.output) == [7]
    cluster.fleet.deregister(again, "test")
    with pytest.raises(Unavailable, match=r"both-1 was lost .* no prefill and no decode instance is available"):
        cluster.tokens(state)
    with pytest.raises(Unavailable, match="no prefill and no decode instance"):
        cluster.open()


def test_an_instance_gets_the_requests_that_it_has_room_for(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "prefill", "decode", "decode", policy="round_robin")
    short = [cluster.instances[0], cluster.instances[2]]
    for instance in short:
        instance.hello.max_model_len = instance.max_model_len = 5
    states = [cluster.open(f"long-{i}", max_tokens=4) for i in range(4)]  # 7 tokens
    assert not {state.prefill for state in states} & set(short) and not {state.decode for state in states} & set(short)
    states = [cluster.open(f"short-{i}", max_tokens=2) for i in range(4)]
    assert set(short) <= {state.prefill for state in states} | {state.decode for state in states}
    cluster.fleet.on_change()
    info = cluster.dispatcher.model
    assert info is not None and (info.max_model_len, info.common_model_len) == (100, 5)
    with pytest.raises(Unavailable, match="no instance for 103 tokens is available"):
        cluster.open("too-long", max_tokens=100)


def test_a_beam_search_may_take_the_whole_context(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode")
    search = SamplingParams(max_tokens=97, beam_width=2, num_answers=2)
    assert cluster.open(sampling=search).timeline.decode_instance == "decode-1"
    one_token = SamplingParams(max_tokens=1, beam_width=2, num_answers=2)
    assert cluster.open("short", sampling=one_token).timeline.decode_instance == "decode-1"


@pytest.mark.parametrize("lack", ["context", "adapter"])
def test_a_stream_that_no_other_instance_can_take_finishes_on_the_draining_one(
    make_cluster: type[Cluster], lack: str
) -> None:
    cluster = make_cluster("both", "both", policy="round_robin")
    here, other = cluster.instances
    if lack == "context":
        other.max_model_len = 6
    else:
        here.adapters = frozenset([b"sql"])
    state = cluster.open(adapter=b"sql" if lack == "adapter" else b"")
    cluster.deliver(here, token_ids=[7])
    cluster.sent(here)
    cluster.fleet.begin_drain(here)
    cluster.dispatcher.on_draining(here)
    assert not cluster.sent(here) and not cluster.sent(other)
    cluster.deliver(here, token_ids=[8], finish_reason="stop")
    assert cluster.tokens(state) == [7, 8]


def test_each_role_has_its_own_policy_explained_in_the_timeline(make_cluster: type[Cluster]) -> None:
    roles = ["prefill"] * 2 + ["decode"] * 2
    cluster = make_cluster(*roles, prefill_policy="round_robin", decode_policy="session")
    states = [cluster.open(f"r{i}", session="s1") for i in range(4)]
    assert {state.prefill.id for state in states} == {"prefill-0", "prefill-1"}
    assert len({state.final_instance.id for state in states}) == 1
    decisions = states[0].timeline.as_dict()["decisions"]
    assert isinstance(decisions, list)
    assert [(one["role"], one["policy"]) for one in decisions] == [
        ("decode", "session"),
        ("prefill", "round_robin"),
    ]
    assert decisions[1]["chosen"] == states[0].prefill.id and decisions[1]["considered"] == 2
    assert {one["instance"] for one in decisions[1]["candidates"]} == {"prefill-0", "prefill-1"}


def test_pairs_without_a_common_store_are_detected_and_avoided(
    make_cluster: type[Cluster], caplog: pytest.LogCaptureFixture
) -> None:
    cluster = make_cluster("prefill", "prefill", "decode", prefill_policy="round_robin")
    unreachable, reachable, decode = cluster.instances
    number = 0

    def hand_over(blocks: int | None = None) -> InstanceHandle:
        """Run one request; decode reports `blocks` loaded (by default 2, or 0 from the unreachable prefill)."""
        nonlocal number
        number += 1
        state = cluster.open(f"r{number}")
        loaded = blocks if blocks is not None else 2 if state.prefill is reachable else 0
        cluster.deliver(state.prefill, state.id, token_ids=[7], stored=Stored(num_blocks=2, final=True))
        cluster.deliver(decode, state.id, moved=Moved(blocks=loaded, bytes=loaded, seconds=0.1))
        cluster.deliver(decode, state.id, token_ids=[8, 9, 10], finish_reason="length", stamps={"kv_ready": 0.0})
        return state.prefill

    used = [hand_over() for _ in range(20)]
    assert used.count(unreachable) == 3, "and none after that"
    (warning,) = (record.getMessage() for record in caplog.records if "found none of" in record.getMessage())
    assert warning.startswith(
        "decode-2 (://) found none of the blocks that prefill-0 (://) had stored, in 3 consecutive"
    )
    assert b'in_vain_total{decode="decode-2",prefill="prefill-0"} 3.0' in cluster.dispatcher._metrics.text()
    cluster.fleet.deregister(reachable, "test")
    assert hand_over(blocks=2) is unreachable, "there is no other prefill instance"
    cluster.instances[1] = reachable = cluster.join("prefill-1", "prefill")
    assert {hand_over().id for _ in range(4)} == {"prefill-0", "prefill-1"}, "the pair is reachable again"
    assert hand_over(blocks=0) and b"in_vain_total{" in cluster.dispatcher._metrics.text()
    for prefill in (unreachable, reachable):
        cluster.fleet.deregister(prefill, "test")
    assert b"in_vain_total{" not in cluster.dispatcher._metrics.text(), "names of instances that left are not kept"
    cluster.instances[0], cluster.instances[1] = (
        cluster.join("prefill-0", "prefill"),
        cluster.join("prefill-1", "prefill"),
    )
    caplog.set_level("WARNING")


def test_a_hand_over_from_an_instance_that_has_left_counts_for_nothing(make_cluster: type[Cluster]) -> None:
    """Its name would stay in the metrics, and a store in its memory is gone."""
    cluster = make_cluster("prefill", "decode")
    prefill, decode = cluster.instances
    state = cluster.open()
    cluster.deliver(prefill, token_ids=[7], stored=Stored(num_blocks=2, final=True))
    cluster.fleet.deregister(prefill, "test")
    cluster.deliver(decode, state.id, moved=Moved(seconds=0.1))
    cluster.deliver(decode, state.id, token_ids=[8, 9, 10], finish_reason="length", stamps={"kv_ready": 0.0})
    assert b"in_vain_total{" not in cluster.metrics.text()


def test_auto_uses_the_cost_models_that_instances_report(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "prefill", "decode", "decode")
    slow, fast = (
        pb.Costs(prefill=(1, 1, 0), decode=(1, 1, 0), transfer=(1, 1)),
        pb.Costs(prefill=(0.5, 1, 0), decode=(0.5, 1, 0), transfer=(1, 1)),
    )
    for instance, costs in zip(cluster.instances, (slow, fast, fast, slow), strict=True):
        instance.update_heartbeat(pb.Heartbeat(costs=costs))
    cluster.instances[1].update_heartbeat(pb.Heartbeat())  # without costs: the old ones stay
    state = cluster.open(max_tokens=64)
    assert (state.prefill, state.decode) == (cluster.instances[1], cluster.instances[2])
    decode, prefill = (decision for _, decision in state.timeline.decisions)
    assert [one.score for one in prefill.candidates] == [0.5 + 3, 1 + 3]
    assert [one.score for one in decode.candidates] == [0.5 + 1, 1 + 1], "the Hello has no block size, so KV is free"
    assert "TTFT" in prefill.why and "ITL" in decode.why


def test_short_prompt_is_computed_on_decode(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode", local_prefill_tokens=3)
    prefill, decode = cluster.instances
    state = cluster.open()
    assert not cluster.sent(prefill)
    ((_, submit),) = cluster.sent(decode)
    assert submit.phase == pb.BOTH and decode.candidate.prefill_tokens == 3
    assert state.timeline.as_dict()["placement"] == {
        "way": "decode",
        "reason": "threshold",
        "uncached_tokens": 3,
        "here_seconds": None,
        "there_seconds": None,
    }
    assert [role for role, _ in state.timeline.decisions] == ["decode"], "no prefill instance was selected"
    cluster.deliver(decode, token_ids=[7])
    assert decode.candidate.prefill_tokens == 0
    cluster.deliver(decode, token_ids=[8, 9, 10], finish_reason="length")
    assert cluster.tokens(state) == [7, 8, 9, 10]
    cluster.open("long", prompt=[1] * 4)
    assert [kind for kind, _ in cluster.sent(prefill)] == ["submit"]
    cluster.open("one", max_tokens=1)
    text = cluster.dispatcher._metrics.text().decode()
    for way, reason in (("decode", "threshold"), ("split", "threshold"), ("prefill", "one_token")):
        assert f'pdserve_placements_total{{reason="{reason}",way="{way}"}} 1.0' in text


def test_open_breaker_excludes_an_instance_and_half_open_sends_one_probe(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode")
    prefill, decode = cluster.instances
    for number in range(3):
        cluster.open(f"r{number}")
        cluster.now += 10
        cluster.fleet.deregister(decode, "test")
        decode = cluster.join("decode-1", "decode")
    assert cluster.open("r3").final_instance is prefill and not cluster.sent(decode), "prefill does everything for now"
    assert cluster.dispatcher.ready() == (
        False,
        "no decode instance (excluded after repeated faults: decode-1) is registered",
    )
    assert b'pdserve_breaker_state{instance="decode-1"} 2.0' in cluster.dispatcher._metrics.text()
    other = cluster.join("decode-2", "decode")
    assert all(cluster.open(f"o{number}").decode is other for number in range(5))
    cluster.fleet.deregister(other, "test")
    cluster.now += 5
    assert {one["breaker"] for one in cluster.dispatcher.instances()} == {"closed", "half_open"}
    probe = cluster.open("probe")
    assert cluster.open("r4").final_instance is prefill
    cluster.deliver(prefill, "probe", token_ids=[7], stored=Stored(num_blocks=1, final=True))
    cluster.deliver(decode, "probe", token_ids=[8])
    assert not probe.machine.is_over
    assert all(cluster.open(f"p{number}").decode is decode for number in range(5))


def test_rejected_requests_do_not_count_as_faults(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode")
    for number in range(9):
        cluster.now += 10
        cluster.open(f"r{number}")
        cluster.deliver(cluster.instances[number % 2], f"r{number}", error=Failure(kind="rejected", message="too long"))
    assert {one["breaker"] for one in cluster.dispatcher.instances()} == {"closed"}


def test_repeated_timeouts_open_the_breaker(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode", handover_timeout_seconds=0.05)
    prefill, decode = cluster.instances
    for now in (cluster.now - 40, cluster.now - 20):
        cluster.fleet.breakers.record_fault(prefill.id, now)
    state = cluster.open()
    cluster.sent(decode)
    cluster.advance(0.06)
    assert [kind for kind, _ in cluster.sent(decode)] == ["hand_over"]
    states = {one["instance_id"]: one["breaker"] for one in cluster.dispatcher.instances()}
    assert states[prefill.id] == "open"
    while not state.machine.is_over:
        cluster.advance(0.06)
    with pytest.raises(Unavailable, match="no progress"):
        cluster.tokens(state)


def test_a_prompt_in_the_kv_store_is_forecast_as_loaded(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode", local_prefill_tokens=None)
    prompt, slow = list(range(41)), Costs(prefill=(0.01, 1.0, 0.0))
    for instance in cluster.instances:
        instance.candidate.update_costs(slow)
    keys = {2: block_keys(b"root", prompt, 2)}
    cold = cluster.open("cold", prompt=prompt, keys=keys)
    cluster.fleet.stored.add("store", keys[2])
    warm = cluster.open("warm", prompt=prompt, keys=keys)
    assert cold.timeline.placement is not None and warm.timeline.placement is not None
    assert cold.timeline.placement.way == "split" and warm.timeline.placement.way == "decode"
    assert warm.timeline.placement.uncached_tokens == 41, "none is in the pool"
    cluster.fleet.stored.remove("store", keys[2])
    again = cluster.open("again", prompt=prompt, keys=keys)
    assert again.timeline.placement is not None and again.timeline.placement.way == "split"


def test_cached_tokens_reduce_the_assigned_work(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "prefill", "prefill", "decode", policy="prefix_aware")
    for instance, size in zip(cluster.instances, (2, 2, 4, 2), strict=True):
        instance.hello.block_size = size
    _, twos, fours, _ = cluster.instances
    keys = {size: block_keys(b"root", [1] * 12, size) for size in (2, 4)}
    cluster.fleet.handle_frame(twos, pb.InstanceFrame(blocks=pb.Blocks(added=b"".join(keys[2][:3]))))
    state = cluster.open(prompt=[1] * 12, keys=keys)
    assert state.prefill is twos and twos.candidate.prefill_tokens == 6
    cluster.fleet.handle_frame(fours, pb.InstanceFrame(blocks=pb.Blocks(added=b"".join(keys[4]))))
    state = cluster.open("again", prompt=[1] * 12, keys=keys)
    assert state.prefill is fours and fours.candidate.prefill_tokens == 4, "the last token always has to be computed"
    cluster.fleet.deregister(fours, "test")
    cluster.fleet.handle_frame(twos, pb.InstanceFrame(blocks=pb.Blocks(removed=b"".join(keys[2][:3]))))
    state = cluster.open("later", prompt=[1] * 12, keys=keys)
    assert state.prefill is cluster.instances[0] and state.prefill.candidate.prefill_tokens == 12


def test_both_and_prefill_instances_share_the_prompts(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "both", prefill_policy="least_loaded")
    prefill, both = cluster.instances
    states = [cluster.open(f"r{i}", prompt=[1] * 50) for i in range(10)]
    assert all(state.final_instance is both for state in states)
    alone = [state for state in states if state.decode is None]
    assert 2 <= len(alone) <= 5, "it also has their output to generate"
    phases = [message.phase for _, message in cluster.sent(both)]
    assert phases.count(pb.BOTH) == len(alone) and phases.count(pb.DECODE) == 10 - len(alone)
    assert len(cluster.sent(prefill)) == 10 - len(alone)


def test_both_instances_do_not_prefill_for_each_other(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("both", "both", "decode", decode_policy="round_robin")
    states = [cluster.open(f"r{i}") for i in range(9)]
    alone = [state for state in states if state.decode is None]
    assert len(alone) == 6
    assert all(state.decode is cluster.instances[2] for state in states if state not in alone)


PAIR = ("prefill-0", "decode-0")


def test_one_block_resets_the_count_of_failures() -> None:
    reachability = StoreReachability()
    for _ in range(5):
        assert not any(reachability.record_handover(PAIR, 0, 0.0) for _ in range(MAX_FAILED_HANDOVERS - 1))
        assert not reachability.record_handover(PAIR, 1, 0.0) and not reachability.is_unreachable(PAIR, 0.0)


def test_failure_is_reported_once_and_the_pair_retried_after_a_while() -> None:
    reachability = StoreReachability()
    assert [reachability.record_handover(PAIR, 0, 0.0) for _ in range(MAX_FAILED_HANDOVERS + 2)] == [False] * (
        MAX_FAILED_HANDOVERS - 1
    ) + [
        True,
        False,
        False,
    ]
    assert reachability.is_unreachable(PAIR, RETRY_AFTER_S - 1) and not reachability.is_unreachable(PAIR, RETRY_AFTER_S)
    assert not reachability.is_unreachable(("prefill-0", "decode-1"), 0.0)
    assert not reachability.record_handover(PAIR, 0, RETRY_AFTER_S), "not the first time"
    assert reachability.is_unreachable(PAIR, RETRY_AFTER_S + 1)
    reachability.record_handover(PAIR, 2, RETRY_AFTER_S + 1)
    assert not reachability.is_unreachable(PAIR, RETRY_AFTER_S + 1)


def test_forget_drops_all_pairs_of_an_instance() -> None:
    reachability = StoreReachability()
    other = ("prefill-1", "decode-0")
    for pair in (PAIR, other):
        for _ in range(MAX_FAILED_HANDOVERS):
            reachability.record_handover(pair, 0, 0.0)
    reachability.forget("prefill-0")
    assert not reachability.is_unreachable(PAIR, 0.0) and reachability.is_unreachable(other, 0.0)
    reachability.forget("decode-0")
    assert not reachability.is_unreachable(other, 0.0)

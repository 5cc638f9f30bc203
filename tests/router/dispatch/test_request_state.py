"""The output stream of a request, and its remaining load on the instances."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import RequestError, Unavailable
from pdserve.output import Predicted, Stored
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import SamplingParams, TokenLogprobs
from pdserve.router.api.generation import read

if TYPE_CHECKING:
    from pdserve.router.dispatch.request_state import RequestState
    from pdserve.router.instances.fleet import InstanceHandle
    from tests.router.dispatch.conftest import Cluster


def test_unread_chunks_are_taken_together_and_before_an_error(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("both")
    (both,) = cluster.instances
    state = cluster.open(sampling=SamplingParams(max_tokens=9, logprobs=0))
    assert state.take() == []
    cluster.deliver(both, token_ids=[7], logprobs=[TokenLogprobs(-7)])
    assert [chunk.token_ids for chunk in state.take()] == [[7]]
    for token in (8, 9):
        cluster.deliver(both, token_ids=[token], logprobs=[TokenLogprobs(-token)])
    cluster.fleet.deregister(both, "test")  # and no other instance is left
    chunks = state.take()
    assert [chunk.token_ids for chunk in chunks] == [[8], [9]]
    assert [one.logprob for chunk in chunks for one in chunk.logprobs] == [-8, -9]
    with pytest.raises(RequestError):
        state.take()


def test_late_outputs_are_told_apart_when_the_timeline_of_their_request_was_dropped(
    make_cluster: type[Cluster],
) -> None:
    cluster = make_cluster("prefill", "decode", timelines=1)
    prefill, _ = cluster.instances
    cluster.open("r").cancel()
    cluster.open("other").cancel()
    state = cluster.open("r")
    cluster.deliver(prefill, "r", token_ids=[7])
    assert state.emitted == [] and state.id != "r"


def test_whole_request_is_readable_once_at_the_end_or_raises(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode")
    prefill, decode = cluster.instances
    state, calls = cluster.open(whole=True), list[str]()
    state.on_readable = lambda: calls.append("readable")
    for instance, ids in ((prefill, [7]), (decode, [8]), (decode, [9])):
        cluster.deliver(instance, token_ids=ids)
        assert not calls and not state.take()
    cluster.deliver(decode, token_ids=[10], finish_reason="length")
    assert calls == ["readable"] and [chunk.token_ids for chunk in state.take()] == [[7, 8, 9, 10]]

    state = cluster.open("s", whole=True)
    cluster.deliver(prefill, "s", token_ids=[7])
    cluster.fleet.deregister(decode, "test")
    cluster.fleet.deregister(prefill, "test")
    assert [chunk.token_ids for chunk in state.take()] == [[7]]
    with pytest.raises(Unavailable):
        state.take()


def test_a_waiting_reader_is_woken_by_chunks_and_by_errors(make_cluster: type[Cluster]) -> None:
    async def scenario() -> None:
        cluster = make_cluster("both")
        (both,) = cluster.instances
        for request_id in ("ends", "fails"):
            state, turns = cluster.open(request_id), list[list[int]]()
            cluster.deliver(both, token_ids=[7])
            reader = asyncio.create_task(collect(state, turns))
            for token in (8, 9):
                await asyncio.sleep(0.01)
                cluster.deliver(both, token_ids=[token])
            await asyncio.sleep(0.01)
            assert turns == [[7], [8], [9]] and not reader.done()
            if request_id == "ends":
                cluster.deliver(both, token_ids=[10], finish_reason="length")
                await reader
                assert turns == [[7], [8], [9], [10]]
            else:
                cluster.fleet.deregister(both, "test")
                with pytest.raises(Unavailable):
                    await reader

    async def collect(state: RequestState, turns: list[list[int]]) -> None:
        async for _, chunks in read({0: state}):
            turns.append([token for chunk in chunks for token in chunk.token_ids])

    asyncio.run(asyncio.wait_for(scenario(), 600))


def test_remaining_load_follows_each_output(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode")
    prefill, decode = cluster.instances
    prefill.hello.block_size = 2
    cluster.open("other", prompt=[1] * 5)
    cluster.open(prompt=[1] * 9)
    assert prefill.candidate.prefill_tokens == 14 and prefill.candidate.output_tokens == 0
    assert (decode.candidate.prefill_tokens, decode.candidate.output_tokens, decode.candidate.context_tokens) == (
        0,
        8,
        14,
    )
    cluster.deliver(prefill, stored=Stored(num_blocks=2))
    assert prefill.candidate.prefill_tokens == 10, "two blocks of two tokens are computed"
    cluster.deliver(prefill, token_ids=[7], stored=Stored(num_blocks=5, final=True))
    assert prefill.candidate.prefill_tokens == 5 and prefill.candidate.requests == 1
    cluster.deliver(decode, token_ids=[8])
    assert decode.candidate.output_tokens == 6 and decode.candidate.context_tokens == 16
    prefill.update_other_load(pb.Load(requests=2, prefill_tokens=100))
    prefill.update_other_load(pb.Load(requests=1, prefill_tokens=30))
    assert prefill.candidate.prefill_tokens == 35 and prefill.candidate.requests == 2, (
        "includes the load of other routers"
    )


def test_decode_gets_the_layout_of_prefill_if_it_differs(make_cluster: type[Cluster]) -> None:
    def set_block_size(instance: InstanceHandle, block_size: int) -> None:
        instance.hello.namespace = bytes([block_size])
        instance.hello.layout.block_size = block_size

    cluster = make_cluster("prefill", "decode")
    prefill, decode = cluster.instances
    set_block_size(prefill, 16)
    set_block_size(decode, 32)
    cluster.open()
    ((_, to_prefill),), ((_, to_decode),) = cluster.sent(prefill), cluster.sent(decode)
    assert to_decode.writer == prefill.hello.layout and not to_prefill.HasField("writer")
    same, other = cluster.join("prefill-1", "prefill"), cluster.join("decode-1", "decode")
    set_block_size(same, 32)
    set_block_size(other, 32)
    cluster.fleet.deregister(decode, "test")  # the request migrates to another pair of layouts
    cluster.fleet.deregister(prefill, "test")
    cluster.open("s")
    frames = [message for kind, message in cluster.sent(other) if kind == "submit" and message.request_id == "s"]
    assert [submit.HasField("writer") for submit in frames] == [False]
    assert "submit" in [kind for kind, _ in cluster.sent(same)]


@pytest.mark.parametrize("leaves_nothing", [True, False])
def test_the_instance_that_decodes_knows_whose_answers_are_not_kept(
    leaves_nothing: bool, make_cluster: type[Cluster]
) -> None:
    cluster = make_cluster("prefill", "decode")
    state = cluster.open(max_tokens=9, leaves_nothing=leaves_nothing)
    sent = {one.role: [kind[1].leaves_nothing for kind in cluster.sent(one)] for one in state.holders}
    assert sent == {"prefill": [False], "decode": [leaves_nothing]}


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("both",)])
def test_a_prediction_goes_to_the_instance_that_decodes_also_after_a_migration(
    make_cluster: type[Cluster], roles: tuple[str, ...]
) -> None:
    cluster = make_cluster(*roles, *roles, policy="round_robin")
    state = cluster.open(max_tokens=9, prediction=b"\x01\0\0\0")
    for attempt in range(2):
        sent = {one.role: [kind[1].prediction for kind in cluster.sent(one)] for one in state.holders}
        assert sent.pop(state.final_instance.role) == [b"\x01\0\0\0"] and sent in ({}, {"prefill": [b""]})
        if state.decode is not None:
            cluster.deliver(state.prefill, state.id, token_ids=[7], stored=Stored(num_blocks=1, final=True))
        first = state.final_instance
        cluster.deliver(first, state.id, token_ids=[8, 9], predicted=Predicted(1 - attempt, 2))
        cluster.deliver(first, state.id, token_ids=[1], drafted=Predicted(0, 3))
        if not attempt:
            cluster.fleet.deregister(first, "test")
            assert state.final_instance is not first
    assert state.timeline.predicted == Predicted(1, 4)
    assert state.timeline.drafted == Predicted(0, 6) and state.timeline.as_dict()["drafts"] == {
        "accepted": 0,
        "rejected": 6,
    }


def test_requests_that_a_client_gives_one_id_are_apart(make_cluster: type[Cluster]) -> None:
    """Meshes give all calls of one user request the same."""
    cluster = make_cluster("both")
    states = [cluster.open("trace-1", max_tokens=1) for _ in range(3)]
    assert len({state.id for state in states}) == 3
    for token, state in enumerate(states):
        cluster.deliver(state.final_instance, state.id, token_ids=[token], finish_reason="length")
    assert [cluster.tokens(state) for state in states] == [[0], [1], [2]]

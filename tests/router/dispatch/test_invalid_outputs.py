"""Outputs with invalid content fail their request alone; what makes the router drop instances is not tried on all of them."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.beam_search import Hypothesis
from pdserve.errors import BadRequest, RequestError
from pdserve.output import MAX_OUTPUTS, Failure, Moved, Output, Predicted, Sources, Stored, pack, unpack
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import SamplingParams, TokenLogprobs
from pdserve.router.dispatch.dispatcher import MAX_DROPS
from pdserve.router.scheduling.breaker import FAULT_THRESHOLD, BreakerState
from pdserve.router.scheduling.output_faults import MIN_CLIENTS, MIN_REQUESTS, WINDOW_S, OutputFaults

if TYPE_CHECKING:
    from tests.router.dispatch.conftest import Cluster

SEARCH = SamplingParams(max_tokens=4, beam_width=2, num_answers=2)
SCORED = SamplingParams(max_tokens=4, logprobs=2)
EMBEDDED = SamplingParams(max_tokens=1, embed=True)
VALUES = st.sampled_from([math.nan, math.inf, -math.inf, 0.5, 2.0, -1.0])


def answer(score: float = -1.0, tokens: int = 1) -> Hypothesis:
    return Hypothesis(token_ids=(7,) * tokens, score=score, finish_reason="length")


INVALID_CONTENT: list[tuple[SamplingParams, dict[str, Any], str]] = [
    (SCORED, dict(token_ids=[1]), "0 log probabilities"),
    (SCORED, dict(token_ids=[1], logprobs=[TokenLogprobs(math.nan)]), "NaN"),
    (SCORED, dict(token_ids=[1], logprobs=[TokenLogprobs(0.0, ((1, math.nan),))]), "NaN"),
    (SCORED, dict(token_ids=[1], logprobs=[TokenLogprobs(0.0, ((1, -1.0), (2, math.nan)))]), "NaN"),
    (SCORED, dict(token_ids=[1], logprobs=[TokenLogprobs(0.0, ((60, -1.0),))]), "does not exist"),
    (SamplingParams(), dict(token_ids=[1], logprobs=[TokenLogprobs(-1.0)]), "1 log probabilities"),
    (SamplingParams(), dict(hypotheses=[answer()], finish_reason="stop"), "not requested"),
    (SEARCH, dict(hypotheses=[answer(-math.inf), answer()], finish_reason="stop"), "without a score"),
    (SEARCH, dict(hypotheses=[answer()], finish_reason="stop"), "1 answers of a beam search for 2"),
    (SEARCH, dict(hypotheses=[answer(), answer(tokens=5)], finish_reason="stop"), "an answer of 5 tokens"),
    (SEARCH, dict(hypotheses=[answer(), answer(tokens=0)], finish_reason="stop"), "an answer of 0 tokens"),
    (EMBEDDED, dict(embedding=struct.pack("<2f", math.nan, 1), finish_reason="stop"), "NaN"),
    (EMBEDDED, dict(embedding=b"1234", finish_reason="stop"), "an embedding of 4 bytes"),
]


def send(cluster: Cluster, which: int, **output: Any) -> None:
    """Send an output in a frame, as over a connection."""
    frame = pb.InstanceFrame(outputs=pack([Output(**output)]))
    cluster.fleet.handle_frame(cluster.instances[which], frame)


@pytest.mark.parametrize(("sampling", "output", "reason"), INVALID_CONTENT, ids=lambda value: str(value)[-40:])
def test_invalid_content_fails_its_request_and_no_other(
    make_cluster: type[Cluster], sampling: SamplingParams, output: dict[str, Any], reason: str
) -> None:
    cluster = make_cluster("both", "both")
    for instance in cluster.instances:
        instance.hello.embedding_size = 2
    state, innocent = cluster.open("bad", sampling=sampling), cluster.open("good")
    which = cluster.instances.index(state.final_instance)
    send(cluster, which, request_id="bad", **output)
    with pytest.raises(RequestError, match=reason) as failed:
        cluster.tokens(state)
    assert (failed.value.status, failed.value.kind) == (500, "invalid_output")
    assert not state.timeline.migrations and not any("bad" in one.requests for one in cluster.instances)
    cluster.deliver(innocent.final_instance, "good", token_ids=[7, 8, 9, 10], finish_reason="length")
    assert cluster.tokens(innocent) == [7, 8, 9, 10]
    assert len(cluster.fleet.instances) == 2 and cluster.fleet.num_invalid_frames == 0


UNREADABLE = [
    b"",
    b"\xc1",
    pack([Output(request_id="r", token_ids=[1])])[:-1],
    pack([{"request_id": "r", "later": 1}]),
    pack([{"request_id": "r", "token_ids": [-1]}]),
    pack([{"request_id": "r", "token_ids": [1.5]}]),
    pack([{"request_id": "r", "token_ids": None}]),
    pack([{"request_id": "r", "stored": {"num_blocks": -1}}]),
    pack([{"request_id": "r", "stored": {"later": 1}}]),
    pack([{"request_id": "r", "logprobs": [[-1.0, [[-1, -1.0]], 0]]}]),
    pack([{"request_id": "r", "hypotheses": [{"token_ids": [1]}]}]),
    pack([{"request_id": "r", "stamps": {"kv_ready": "now"}}]),
    pack([{}] * (MAX_OUTPUTS + 1)),
]


@pytest.mark.parametrize("outputs", UNREADABLE, ids=lambda data: str(data[:60]))
def test_outputs_that_cannot_be_read_drop_the_instance_and_may_be_due_to_any_of_its_requests(
    make_cluster: type[Cluster], outputs: bytes
) -> None:
    cluster = make_cluster("both", "both", "both")
    state = cluster.open()
    for attempt in range(MAX_DROPS + 1):
        assert state.timeline.attempt == attempt
        cluster.fleet.handle_frame(state.final_instance, pb.InstanceFrame(outputs=outputs))
    assert cluster.fleet.num_invalid_frames == MAX_DROPS + 1 and len(cluster.fleet.instances) == 1
    with pytest.raises(RequestError, match=f"{MAX_DROPS + 1} instances have failed over this request"):
        cluster.tokens(state)


def test_an_output_is_the_same_behind_a_frame() -> None:
    one = TokenLogprobs(-0.5, ((1, -0.5), (2, -math.inf)), 3)
    output = Output(
        [1, 2], "stop", [one], [one], [answer()], b"1234", "r", Failure("rejected", "why"), {"kv_ready": 0.5}
    )
    output.stored, output.sources = Stored(2, True, [b"t"], 3), Sources(1, 2, 3)
    output.moved, output.searching, output.predicted = Moved(1, 64, 0.25), True, Predicted(1, 2)
    output.drafted = Predicted(3, 4)
    assert unpack(pack([output, Output()])) == [output, Output()]
    assert len(pack([Output(request_id="r", token_ids=[7])])) < 32, "fields at their defaults take no bytes"


@given(values=st.lists(VALUES, min_size=1, max_size=4), scores=st.lists(VALUES, min_size=2, max_size=2))
def test_no_number_of_a_model_drops_an_instance_or_reaches_a_client_as_nan(
    make_cluster: type[Cluster], values: list[float], scores: list[float]
) -> None:
    cluster = make_cluster("both")
    scored, search = cluster.open("scored", sampling=SCORED), cluster.open("search", sampling=SEARCH)
    one = TokenLogprobs(values[0], tuple((1, value) for value in values[1:]))
    send(cluster, 0, request_id="scored", token_ids=[1], logprobs=[one])
    send(cluster, 0, request_id="search", hypotheses=[*map(answer, scores)], finish_reason="stop")
    assert len(cluster.fleet.instances) == 1
    is_valid = not any(math.isnan(value) or value >= 1 for value in values)
    assert scored.machine.is_over is not is_valid
    if all(map(math.isfinite, scores)):
        assert [one.score for chunk in search.take() for one in chunk.hypotheses] == scores
    else:
        with pytest.raises(RequestError, match="without a score"):
            search.take()


def test_a_search_without_enough_answers_is_an_error_of_the_client(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("both")
    state = cluster.open(sampling=SEARCH)
    send(cluster, 0, request_id="r", searching=True, error=Failure(kind="too_few_answers", message="1 of 2 answers"))
    with pytest.raises(BadRequest, match="1 of 2 answers"):
        cluster.tokens(state)


def test_a_request_for_which_instances_are_dropped_is_not_tried_on_all_of_them(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster(*["both"] * 4)
    poison, innocent = cluster.open("poison"), cluster.open("innocent")
    while not poison.machine.is_over:
        cluster.deliver(innocent.final_instance, innocent.id, token_ids=[len(innocent.emitted)])
        which = cluster.instances.index(poison.final_instance)
        send(cluster, which, request_id=poison.id, token_ids=[99])
    with pytest.raises(RequestError, match="2 instances have failed over this request"):
        cluster.tokens(poison)
    assert len(cluster.fleet.instances) == 4 - MAX_DROPS - 1
    cluster.deliver(innocent.final_instance, innocent.id, token_ids=[8], finish_reason="stop")
    assert cluster.tokens(innocent)[-1] == 8


def test_after_failures_of_engines_only_requests_without_an_output_are_suspected(
    make_cluster: type[Cluster],
) -> None:
    cluster = make_cluster(*["both"] * 4)
    silent, streaming = cluster.open("silent"), cluster.open("streaming", max_tokens=20)
    for drops in (1, 2):
        for state in (silent, streaming):
            instance = state.final_instance
            if instance.id in cluster.fleet.instances:
                cluster.deliver(streaming.final_instance, streaming.id, token_ids=[1])
                cluster.fleet.handle_frame(instance, pb.InstanceFrame(failed=pb.Failed()))
        assert silent.machine.is_over is (drops > MAX_DROPS)
        if not cluster.fleet.instances.keys() - {streaming.final_instance.id}:
            break
    assert silent.num_drops > MAX_DROPS and streaming.num_drops == 0


def test_losses_that_no_frame_has_caused_may_repeat(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster(*["both"] * 4)
    state = cluster.open()
    for _ in range(3):
        cluster.fleet.deregister(state.final_instance, "the connection was lost")
    cluster.deliver(state.final_instance, state.id, token_ids=[1, 2, 3, 4], finish_reason="length")
    assert cluster.tokens(state) == [1, 2, 3, 4]


@pytest.mark.parametrize(("clients", "is_fault"), [(["mallory"], False), (["alice", "bob", "carol"], True)])
def test_faults_that_several_clients_see_open_the_breaker(
    make_cluster: type[Cluster], clients: list[str], is_fault: bool
) -> None:
    cluster = make_cluster("both")
    (instance,) = cluster.instances
    other = cluster.open("tokens", max_tokens=90)
    for number in range(MIN_REQUESTS + FAULT_THRESHOLD - 1):
        cluster.advance(2.0)
        cluster.deliver(instance, "tokens", token_ids=[1])  # which alone does not close the breaker
        client = clients[number % len(clients)]
        cluster.open(f"r{number}", sampling=SCORED, client=client)
        send(cluster, 0, request_id=f"r{number}", token_ids=[1])
    is_open = cluster.fleet.breakers.state(instance.id, cluster.now) is BreakerState.OPEN
    assert is_open is is_fault and not other.machine.is_over
    cluster.now += WINDOW_S + 1
    cluster.deliver(instance, "tokens", token_ids=[1])
    assert cluster.fleet.breakers.state(instance.id, cluster.now) is BreakerState.CLOSED


EVENTS = st.tuples(st.sampled_from("ab"), st.sampled_from("12345"), st.floats(0, WINDOW_S))


@given(st.lists(EVENTS, max_size=20))
def test_an_instance_is_suspect_by_the_faults_of_the_last_minute(events: list[tuple[str, str, float]]) -> None:
    faults, now, seen = OutputFaults(), 0.0, list[tuple[float, str, str]]()
    for client, request, pause in events:
        now += pause
        seen.append((now, client, request))
        latest = {one[1:] for one in seen if now - one[0] <= WINDOW_S}
        expected = len(latest) >= MIN_REQUESTS and len({client for client, _ in latest}) >= MIN_CLIENTS
        assert faults.record("decode-0", request, client, now) is expected is faults.is_suspect("decode-0", now)
        assert not faults.is_suspect("decode-1", now)
    assert not faults.is_suspect("decode-0", now + WINDOW_S + 1)


def test_faults_of_instances_that_left_are_not_kept() -> None:
    faults = OutputFaults()
    for number in range(10):
        faults.record(f"decode-{number}", "r", "a", now=float(number))
    assert len(faults.by_instance) == 10
    faults.record("decode-x", "r", "a", now=8.5 + WINDOW_S)
    assert faults.by_instance.keys() == {"decode-9", "decode-x"}

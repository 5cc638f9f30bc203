"""The dispatcher over members that this test plays itself: what they are sent, and what the client's stream becomes."""

import asyncio
import contextlib
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.config import RouterConfig
from pdserve.errors import BadRequest, Conflict, NotFound, Overloaded, RequestError, Unavailable
from pdserve.handover import State
from pdserve.keys import block_keys
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request, SamplingParams
from pdserve.router import chooser, dispatch, metrics
from pdserve.router.dispatch import Dispatcher
from pdserve.router.fleet import Fleet, Member
from pdserve.router.flight import Flight
from pdserve.router.metrics import Metrics
from pdserve.router.policy import POLICIES
from pdserve.router.timeline import Moved
from pdserve.wire import PROTOCOL_VERSION


class Told(list[pb.RouterFrame]):
    """In place of a connection to an instance: what it was sent."""

    put = list.append

    def close(self) -> None: ...

    def abort(self) -> None: ...


class Stage:
    """A dispatcher and the members of its fleet."""

    def __init__(self, *roles: str, **settings: Any) -> None:
        self.fleet = Fleet("router", "model", 1.0)
        config = RouterConfig(model="model", **{"local_prefill_tokens": 0, **settings})
        self.dispatcher = Dispatcher(config, self.fleet, Metrics(self.fleet))
        self.members = [self.join(f"{role}-{i}", role) for i, role in enumerate(roles)]

    def join(self, name: str, role: str) -> Member:
        hello = pb.Hello(instance_id=name, role=role, model="model", max_model_len=100, vocab_size=50, num_blocks=99)
        hello.protocol_version = PROTOCOL_VERSION
        return self.fleet.join(hello, Told())

    def open(self, request_id: str = "r", max_tokens: int = 4, **request: Any) -> Flight:
        request = {"prompt": [1, 2, 3], "sampling": SamplingParams(max_tokens=max_tokens), **request}
        return self.dispatcher.open(Request(request_id=request_id, **request))

    def says(self, member: Member, request_id: str = "r", **output: Any) -> None:
        self.dispatcher.on_output(member, pb.Output(request_id=request_id, **output))


def sent(member: Member) -> list[tuple[str, Any]]:
    """What a member was told since the last call: (kind of frame, its content)."""
    assert isinstance(member.wire, Told)
    frames: list[tuple[str, Any]] = []
    for frame in member.wire:
        kind = frame.WhichOneof("frame")
        assert kind is not None
        frames.append((kind, getattr(frame, kind)))
    member.wire.clear()
    return frames


async def tokens(flight: Flight) -> list[int]:
    return [token async for chunks in flight for chunk in chunks for token in chunk.token_ids]


def play(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 600))


def test_the_good_way() -> None:
    async def story() -> None:
        stage = Stage("prefill", "decode")
        prefill, decode = stage.members
        flight = stage.open(priority=-3)
        ((_, first_submit),) = sent(prefill)
        ((_, submit),) = sent(decode)
        assert first_submit.phase == pb.PREFILL and first_submit.priority == submit.priority == -3
        assert submit.phase == pb.DECODE and list(submit.prompt) == [1, 2, 3]
        stage.says(prefill, stored=pb.Stored(num_blocks=1))
        stage.says(prefill, token_ids=[7])
        stage.says(prefill, stored=pb.Stored(num_blocks=2, final=True, tickets=[b"t"]))
        first, second, third = (message for _, message in sent(decode))
        assert first.num_blocks == 1 and not first.HasField("first_token")
        assert second.first_token == 7
        assert third.final and list(third.tickets) == [b"t"]
        stage.says(decode, token_ids=[8, 9])
        stage.says(decode, token_ids=[10], finish_reason="length")
        assert await tokens(flight) == [7, 8, 9, 10]
        assert not sent(prefill) and not sent(decode), "nobody is told to let go of what is over"
        assert not stage.dispatcher.flights and not prefill.requests and not decode.requests

    play(story())


def test_decode_may_end_before_prefill_knows_that_all_is_stored() -> None:
    async def story() -> None:
        stage = Stage("prefill", "decode")
        prefill, decode = stage.members
        flight = stage.open()
        stage.says(prefill, token_ids=[7], stored=pb.Stored(num_blocks=0, coming=1))
        stage.says(decode, stamps=[pb.Stamp(stage="kv_ready")], token_ids=[8, 9, 10], finish_reason="length")
        assert await tokens(flight) == [7, 8, 9, 10]
        stored, moved = pb.Stored(num_blocks=1, final=True), pb.Moved(blocks=1, bytes=64, seconds=0.5)
        stage.says(prefill, stamps=[pb.Stamp(stage="kv_stored")], stored=stored, moved=moved)
        timeline = stage.dispatcher.timelines.get("r")
        assert timeline is not None and timeline.stored == Moved(1, 64, 0.5)
        at = {stamp.value: seconds for stamp, seconds in timeline.stamps.items()}
        assert at["first_token"] <= at["kv_stored"] == at["kv_ready"] <= at["finished"]

    play(story())


def test_chunks_that_nobody_has_taken_yet_come_together_and_an_error_comes_after_them() -> None:
    async def story() -> None:
        stage = Stage("both")
        (both,) = stage.members
        flight = stage.open(max_tokens=9)
        turns = aiter(flight)
        stage.says(both, token_ids=[7])
        assert [chunk.token_ids for chunk in await anext(turns)] == [[7]]
        for token in (8, 9):
            stage.says(both, token_ids=[token], logprobs=[pb.Logprobs(logprob=-token)])
        stage.fleet.leave(both, "test")  # and nobody can take over
        chunks = await anext(turns)
        assert [chunk.token_ids for chunk in chunks] == [[8], [9]]
        assert [one.logprob for chunk in chunks for one in chunk.logprobs] == [-8, -9]
        with pytest.raises(RequestError):
            await anext(turns)

    play(story())


def test_one_token_needs_no_decode() -> None:
    async def story() -> None:
        stage = Stage("prefill", "decode")
        prefill, decode = stage.members
        flight = stage.open(max_tokens=1)
        stage.says(prefill, token_ids=[7], finish_reason="length")
        assert await tokens(flight) == [7]
        assert not sent(decode)

    play(story())


def test_a_lost_prefill_leaves_the_rest_to_decode() -> None:
    async def story() -> None:
        stage = Stage("prefill", "decode")
        prefill, decode = stage.members
        flight = stage.open()
        sent(decode)
        stage.fleet.leave(prefill, "test")
        ((kind, message),) = sent(decode)
        assert kind == "hand_over" and message.final and not message.HasField("first_token")
        stage.says(decode, token_ids=[7, 8, 9, 10], finish_reason="length")
        assert await tokens(flight) == [7, 8, 9, 10]

    play(story())


def test_a_lost_decode_is_replaced_and_the_stream_goes_on() -> None:
    async def story() -> None:
        stage = Stage("prefill", "decode", "decode")
        prefill, *decodes = stage.members
        flight = stage.open()
        lost = flight.decode
        assert lost is not None
        other = next(member for member in decodes if member is not lost)
        stage.says(prefill, token_ids=[7], stored=pb.Stored(num_blocks=1, final=True))
        stage.says(lost, token_ids=[8])
        sent(prefill)
        stage.fleet.leave(lost, "test")
        ((_, again),) = sent(other)
        assert list(again.prompt) == [1, 2, 3] and list(again.output) == [7, 8] and again.request_id == "r#1"
        with pytest.raises(BadRequest, match="in use"):
            stage.open("r")
        stage.says(prefill, "r", token_ids=[99])  # late news of the first attempt
        stage.says(prefill, "r#1", token_ids=[9], stored=pb.Stored(num_blocks=1, final=True))
        stage.says(other, "r#1", token_ids=[10], finish_reason="length")
        assert await tokens(flight) == [7, 8, 9, 10]
        assert flight.timeline.migrations == 1
        stage.open("r").cancel()  # the id is free again

    play(story())


def test_a_whole_answer_wakes_its_reader_once_at_the_end_or_with_the_error() -> None:
    async def story() -> None:
        stage = Stage("prefill", "decode")
        prefill, decode = stage.members
        flight, turns = stage.open(whole=True), []

        async def read() -> None:
            async for chunks in flight:
                turns.append([chunk.token_ids for chunk in chunks])

        reader = asyncio.create_task(read())
        for member, ids in ((prefill, [7]), (decode, [8]), (decode, [9])):
            stage.says(member, token_ids=ids)
            await asyncio.sleep(0.01)
            assert not turns
        stage.says(decode, token_ids=[10], finish_reason="length")
        await reader
        assert turns == [[[7, 8, 9, 10]]]

        flight = stage.open("s", whole=True)
        stage.says(prefill, "s", token_ids=[7])
        stage.fleet.leave(decode, "test")
        stage.fleet.leave(prefill, "test")
        with pytest.raises(Unavailable):
            await read()

    play(story())


def test_a_draining_decode_hands_its_streams_over_if_somebody_can_take_them() -> None:
    async def story() -> None:
        stage = Stage("prefill", "decode", "decode")
        prefill, *decodes = stage.members
        flight = stage.open()
        leaving = flight.decode
        assert leaving is not None
        staying = next(member for member in decodes if member is not leaving)
        stage.says(prefill, token_ids=[7], stored=pb.Stored(num_blocks=1, final=True))
        sent(leaving)
        leaving.draining = True
        stage.dispatcher.on_draining(leaving)
        assert [kind for kind, _ in sent(leaving)] == ["cancel"]
        assert [kind for kind, _ in sent(staying)] == ["submit"] and flight.decode is staying
        staying.draining = True
        stage.dispatcher.on_draining(staying)
        assert not sent(staying), "it ends here: no other decode instance is left"
        assert stage.open("later").last_member is prefill

    play(story())


def test_a_stream_may_be_drained_any_number_of_times() -> None:
    async def story() -> None:
        stage = Stage("prefill", "decode", "decode")
        stage.dispatcher._budget.left = 0.0
        prefill = stage.members[0]
        flight = stage.open(max_tokens=20)
        for move in range(6):
            here = flight.decode
            assert here is not None
            stage.says(prefill, flight.id, token_ids=[move], stored=pb.Stored(num_blocks=1, final=True))
            here.draining = True
            stage.dispatcher.on_draining(here)
            assert flight.timeline.migrations == move + 1 and flight.decode is not here
            here.serves_as(here.hello)
        assert flight.emitted == [0, 1, 2, 3, 4, 5]

    play(story())


def test_instances_drain_and_take_roles_only_while_others_can_serve() -> None:
    async def story() -> None:
        stage = Stage("prefill", "decode", "decode")
        prefill, one, other = stage.members
        drain = stage.dispatcher.drain
        with pytest.raises(NotFound, match="no instance 'decode-9'"):
            drain("decode-9")
        with pytest.raises(Conflict, match="while prefill-0 drains, no prefill instance would be there"):
            drain(prefill.id)
        drain(one.id, "decode")  # it does already
        assert not any(map(sent, stage.members)) and not one.draining
        drain(one.id, "prefill")
        assert sent(one) == [("drain", pb.Drain(role="prefill"))]
        with pytest.raises(Conflict, match="decode-1 is draining already"):
            drain(one.id)
        with pytest.raises(Conflict, match="no decode instance would be there"):
            drain(other.id)
        assert stage.open().decode is other, "nobody is sent there any more"

        again = pb.Hello()
        again.CopyFrom(one.hello)
        again.role = "both"
        stage.fleet._take_role(one, pb.InstanceFrame(hello=again))
        assert one.load.both and not one.draining
        drain(other.id)
        assert sent(other)[-1] == ("drain", pb.Drain())
        assert stage.open("alone").last_member is one

    play(story())


def test_a_role_that_does_not_go_with_the_others_is_refused() -> None:
    async def story() -> None:
        stage = Stage("prefill", "decode", "decode", "prefill")
        for member, size in zip(stage.members, (16, 16, 16, 32), strict=True):  # 32 may prefill for who converts
            member.hello.namespace = bytes([size])
            member.hello.layout.block_size = size
            member.hello.convert_kv = size == 16
        with pytest.raises(Conflict, match=r"prefill-3 cannot serve as decode: .* with --convert-kv"):
            stage.dispatcher.drain("prefill-3", "decode")
        assert not stage.members[3].draining and not sent(stage.members[3])

    play(story())


@pytest.mark.parametrize(("first", "second"), [("prefill", "decode"), ("decode", "prefill")])
def test_who_is_left_does_everything_and_with_nobody_left_the_client_is_told(first: str, second: str) -> None:
    async def story() -> None:
        stage = Stage(first, second)
        left, lost = stage.members
        stage.fleet.leave(lost, "test")
        flight = stage.open()
        ((_, submit),) = sent(left)
        placement = flight.timeline.placement
        assert submit.phase == pb.BOTH and placement is not None and placement.reason == f"no_{second}_instance"
        stage.says(left, token_ids=[7])
        again = stage.join("both-1", "both")
        stage.fleet.leave(left, "test")
        ((_, submit),) = sent(again)
        assert submit.phase == pb.BOTH and list(submit.output) == [7]
        stage.fleet.leave(again, "test")
        with pytest.raises(Unavailable, match=r"both-1 was lost .* no prefill and no decode instance is there to take"):
            await tokens(flight)
        with pytest.raises(Unavailable, match="no prefill and no decode instance"):
            stage.open()

    play(story())


def test_a_stream_of_a_lost_decode_goes_on_with_prefill_alone() -> None:
    async def story() -> None:
        stage = Stage("prefill", "decode")
        prefill, decode = stage.members
        flight = stage.open()
        stage.says(prefill, token_ids=[7], stored=pb.Stored(num_blocks=1, final=True))
        stage.says(decode, token_ids=[8])
        sent(prefill)
        stage.fleet.leave(decode, "test")
        ((_, submit),) = sent(prefill)
        assert submit.phase == pb.BOTH and list(submit.output) == [7, 8]
        stage.says(prefill, "r#1", token_ids=[9, 10], finish_reason="length")
        assert await tokens(flight) == [7, 8, 9, 10]

    play(story())


def test_a_refusal_is_not_tried_again() -> None:
    async def story() -> None:
        stage = Stage("prefill", "decode", "decode")
        flight = stage.open()
        stage.says(stage.members[0], error=pb.Error(kind="rejected", message="too long"))
        with pytest.raises(RequestError, match="too long"):
            await tokens(flight)
        assert flight.timeline.migrations == 0 and flight.timeline.finish_reason == "error"

    play(story())


def test_who_has_not_moved_for_long_has_failed_but_a_queue_may_be_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        stage, clock = Stage("prefill", "decode", handover_timeout_seconds=0.2), Clock(monkeypatch)
        prefill, decode = stage.members
        flight = stage.open()
        sent(decode)
        for _ in range(8):  # prefill works on others
            prefill.stepped = clock.now
            await looked_at(stage, clock, 0.15)
        assert not sent(decode)
        await looked_at(stage, clock, 0.1)  # prefill stands still
        frames = sent(decode)
        assert frames[0][0] == "hand_over" and frames[0][1].final
        assert not prefill.requests
        while not flight.machine.ended:
            await looked_at(stage, clock, 0.25)
        with pytest.raises(Unavailable, match=r"no progress for 0\.2 s while"):  # and so does decode
            await tokens(flight)

    play(story())


def test_cancelling_tells_everybody() -> None:
    async def story() -> None:
        stage = Stage("prefill", "decode")
        flight = stage.open()
        for member in stage.members:
            sent(member)
        flight.cancel()
        flight.cancel()
        assert [[kind for kind, _ in sent(member)] for member in stage.members] == [["cancel"], ["cancel"]]
        assert flight.timeline.finish_reason == "cancelled"

    play(story())


# ---- who is picked ------------------------------------------------------------------------------------------------


def test_each_role_has_its_policy_and_the_timeline_explains_it() -> None:
    async def story() -> None:
        roles = ["prefill"] * 2 + ["decode"] * 2
        stage = Stage(*roles, prefill_policy="round_robin", decode_policy="session")
        flights = [stage.open(f"r{i}", session="s1") for i in range(4)]
        assert {flight.prefill.id for flight in flights} == {"prefill-0", "prefill-1"}
        assert len({flight.last_member.id for flight in flights}) == 1
        told = flights[0].timeline.as_dict()["decisions"]
        assert isinstance(told, list)
        assert [(one["role"], one["policy"]) for one in told] == [("decode", "session"), ("prefill", "round_robin")]
        assert told[1]["chosen"] == flights[0].prefill.id and told[1]["considered"] == 2
        assert {one["instance"] for one in told[1]["candidates"]} == {"prefill-0", "prefill-1"}

    play(story())


def test_what_is_left_to_do_is_known_between_heartbeats() -> None:
    async def story() -> None:
        stage = Stage("prefill", "decode")
        prefill, decode = stage.members
        prefill.hello.block_size = 2
        stage.open(prompt=[1] * 9)
        stage.open("other", prompt=[1] * 5)
        assert prefill.load.prefill_tokens == 14 and prefill.load.output_tokens == 0
        assert (decode.load.prefill_tokens, decode.load.output_tokens, decode.load.context_tokens) == (0, 8, 14)
        stage.says(prefill, stored=pb.Stored(num_blocks=2))
        assert prefill.load.prefill_tokens == 10, "four tokens are done"
        stage.says(prefill, token_ids=[7], stored=pb.Stored(num_blocks=5, final=True))
        assert prefill.load.prefill_tokens == 5 and prefill.load.requests == 1
        stage.says(decode, token_ids=[8])
        assert decode.load.output_tokens == 6 and decode.load.context_tokens == 16
        prefill.heard_of_others(pb.Load(requests=2, prefill_tokens=100))
        prefill.heard_of_others(pb.Load(requests=1, prefill_tokens=30))
        assert prefill.load.prefill_tokens == 35 and prefill.load.requests == 2, "what other routers have sent"

    play(story())


def test_instances_that_share_no_store_are_told_apart_and_kept_apart(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        stage = Stage("prefill", "prefill", "decode", prefill_policy="round_robin")
        stranger, friend, decode = stage.members
        number = 0

        def hand_over(blocks: int | None = None) -> Member:
            """One request through decode, which says what it got from a store: by default, what it gets from whom."""
            nonlocal number
            number += 1
            flight = stage.open(f"r{number}")
            came = blocks if blocks is not None else 2 if flight.prefill is friend else 0
            stage.says(flight.prefill, flight.id, token_ids=[7], stored=pb.Stored(num_blocks=2, final=True))
            stage.says(decode, flight.id, moved=pb.Moved(blocks=came, bytes=came, seconds=0.1))
            ready = pb.Stamp(stage="kv_ready", seconds=0)
            stage.says(decode, flight.id, token_ids=[8, 9, 10], finish_reason="length", stamps=[ready])
            return flight.prefill

        used = [hand_over() for _ in range(20)]
        assert used.count(stranger) == 3, "and never again"
        (warning,) = (record.getMessage() for record in caplog.records if "found nothing" in record.getMessage())
        assert warning.startswith("decode-2 (://) found nothing of what prefill-0 (://) had stored, 3 times in a row")
        assert b'in_vain_total{decode="decode-2",prefill="prefill-0"} 3.0' in stage.dispatcher._metrics.text()
        stage.fleet.leave(friend, "test")
        assert hand_over(blocks=2) is stranger, "there is nobody else"
        stage.members[1] = friend = stage.join("prefill-1", "prefill")
        assert {hand_over().id for _ in range(4)} == {"prefill-0", "prefill-1"}, "it was right after all"

    caplog.set_level("WARNING")
    play(story())


def test_auto_forecasts_with_what_each_instance_says_of_itself() -> None:
    async def story() -> None:
        stage = Stage("prefill", "prefill", "decode", "decode")
        slow, quick = (
            pb.Costs(prefill=(1, 1, 0), decode=(1, 1, 0), transfer=(1, 1)),
            pb.Costs(prefill=(0.5, 1, 0), decode=(0.5, 1, 0), transfer=(1, 1)),
        )
        for member, costs in zip(stage.members, (slow, quick, quick, slow), strict=True):
            member.heard_of(pb.Heartbeat(costs=costs))
        stage.members[1].heard_of(pb.Heartbeat())  # says nothing new of them
        flight = stage.open(max_tokens=64)
        assert (flight.prefill, flight.decode) == (stage.members[1], stage.members[2])
        decode, prefill = (decision for _, decision in flight.timeline.decisions)
        assert [one.score for one in prefill.candidates] == [0.5 + 3, 1 + 3]
        assert [one.score for one in decode.candidates] == [0.5 + 1, 1 + 1], "the hello knows no size of KV"
        assert "first token" in prefill.why and "between tokens" in decode.why

    play(story())


def test_a_short_prompt_goes_straight_to_decode_and_that_is_counted() -> None:
    async def story() -> None:
        stage = Stage("prefill", "decode", local_prefill_tokens=3)
        prefill, decode = stage.members
        flight = stage.open()
        assert not sent(prefill)
        ((_, submit),) = sent(decode)
        assert submit.phase == pb.BOTH and decode.load.prefill_tokens == 3
        assert flight.timeline.as_dict()["placement"] == {
            "way": "decode",
            "reason": "threshold",
            "uncached_tokens": 3,
            "here_seconds": None,
            "there_seconds": None,
        }
        assert [role for role, _ in flight.timeline.decisions] == ["decode"], "nobody was asked to prefill"
        stage.says(decode, token_ids=[7])
        assert decode.load.prefill_tokens == 0
        stage.says(decode, token_ids=[8, 9, 10], finish_reason="length")
        assert await tokens(flight) == [7, 8, 9, 10]
        stage.open("long", prompt=[1] * 4)
        assert [kind for kind, _ in sent(prefill)] == ["submit"]
        stage.open("one", max_tokens=1)
        text = stage.dispatcher._metrics.text().decode()
        for way, reason in (("decode", "threshold"), ("split", "threshold"), ("prefill", "one_token")):
            assert f'pdserve_placements_total{{reason="{reason}",way="{way}"}} 1.0' in text

    play(story())


def test_a_lost_decode_that_had_the_prompt_is_replaced() -> None:
    async def story() -> None:
        stage = Stage("prefill", "decode", "decode", local_prefill_tokens=100)
        flight = stage.open()
        lost = flight.last_member
        stage.says(lost, token_ids=[7, 8])
        stage.fleet.leave(lost, "test")
        other = flight.last_member
        assert other is not lost
        ((_, again),) = sent(other)
        assert again.phase == pb.BOTH and list(again.output) == [7, 8]
        stage.says(other, "r#1", token_ids=[9, 10], finish_reason="length")
        assert await tokens(flight) == [7, 8, 9, 10]

    play(story())


def test_who_would_be_late_is_refused_and_leaves_nothing_behind() -> None:
    async def story() -> None:
        stage = Stage("prefill", "decode", "decode", slo="ttft=1s")
        prefill, *_ = stage.members
        prefill.heard_of(pb.Heartbeat(costs=pb.Costs(prefill=(0, 0.25, 0), decode=(0, 0, 0), transfer=(0, 0))))
        first = stage.open("first", prompt=[1] * 3)
        for _ in range(2):  # its id is not in use
            with pytest.raises(Overloaded, match=r"after 1\.5 s, by forecast") as refused:
                stage.open("second", prompt=[1] * 3)
        assert (refused.value.kind, refused.value.retry_after_s) == ("slo_ttft", 1)
        assert prefill.load.requests == 1 and stage.dispatcher.timeline("second") is None
        stage.open("second", prompt=[1])
        # What has begun goes on, however late.
        assert first.decode is not None
        stage.fleet.leave(first.decode, "test")
        assert first.timeline.migrations == 1 and not first.machine.ended
        assert b'pdserve_refusals_total{reason="slo_ttft"} 2.0' in stage.dispatcher._metrics.text()

    play(story())


class Clock:
    """In place of the dispatcher's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in (chooser, dispatch, metrics):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


async def looked_at(stage: Stage, clock: Clock, seconds: float) -> None:
    """So much later, the dispatcher looks at its flights, once."""
    clock.now += seconds
    with pytest.MonkeyPatch.context() as patch, pytest.raises(EOFError):
        patch.setattr(dispatch, "asyncio", SimpleNamespace(sleep=AsyncMock(side_effect=[None, EOFError])))
        await stage.dispatcher.watch()


def test_who_dies_again_and_again_gets_nothing_and_then_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        stage, clock = Stage("prefill", "decode"), Clock(monkeypatch)
        prefill, decode = stage.members
        for number in range(3):
            stage.open(f"r{number}")
            clock.now += 10
            stage.fleet.leave(decode, "test")
            decode = stage.join("decode-1", "decode")
        assert stage.open("r3").last_member is prefill and not sent(decode), "prefill does everything meanwhile"
        assert stage.dispatcher.ready() == (
            False,
            "no decode instance but decode-1, out after repeated faults, is registered",
        )
        assert b'pdserve_breaker_state{instance="decode-1"} 2.0' in stage.dispatcher._metrics.text()
        other = stage.join("decode-2", "decode")
        assert all(stage.open(f"o{number}").decode is other for number in range(5))
        stage.fleet.leave(other, "test")
        clock.now += 5
        assert {one["breaker"] for one in stage.dispatcher.instances()} == {"closed", "half_open"}
        probe = stage.open("probe")
        assert stage.open("r4").last_member is prefill
        stage.says(prefill, "probe", token_ids=[7], stored=pb.Stored(num_blocks=1, final=True))
        stage.says(decode, "probe", token_ids=[8])
        assert not probe.machine.ended
        assert all(stage.open(f"p{number}").decode is decode for number in range(5))

    play(story())


def test_a_refusal_is_no_fault_of_the_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        stage, clock = Stage("prefill", "decode"), Clock(monkeypatch)
        for number in range(9):
            clock.now += 10
            stage.open(f"r{number}")
            stage.says(stage.members[number % 2], f"r{number}", error=pb.Error(kind="rejected", message="too long"))
        assert {one["breaker"] for one in stage.dispatcher.instances()} == {"closed"}

    play(story())


def test_who_makes_no_progress_again_and_again_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        stage, clock = Stage("prefill", "decode", handover_timeout_seconds=0.05), Clock(monkeypatch)
        prefill, decode = stage.members
        for now in (clock.now - 40, clock.now - 20):
            stage.fleet.breakers.failed(prefill.id, now)
        flight = stage.open()
        sent(decode)
        await looked_at(stage, clock, 0.06)
        assert [kind for kind, _ in sent(decode)] == ["hand_over"]
        states = {one["instance_id"]: one["breaker"] for one in stage.dispatcher.instances()}
        assert states[prefill.id] == "open"
        while not flight.machine.ended:
            await looked_at(stage, clock, 0.06)
        with pytest.raises(Unavailable, match="no progress"):
            await tokens(flight)

    play(story())


def test_who_moves_again_needs_budget_for_it() -> None:
    async def story() -> None:
        stage = Stage("prefill", "decode")
        stage.dispatcher._budget.left = 1.0
        flights = [stage.open(f"r{number}") for number in range(2)]
        for number in range(2, 4):
            here = flights[0].last_member
            stage.join(f"decode-{number}", "decode")
            stage.fleet.leave(here, "test")
        moved, ended = flights
        assert moved.timeline.migrations == 2 and not moved.machine.ended
        with pytest.raises(Unavailable, match=r"decode-2 was lost .* too many requests had to move again lately"):
            await tokens(ended)
        assert b"pdserve_retry_budget 0." in stage.dispatcher._metrics.text()

    play(story())


def test_cached_tokens_need_no_computing() -> None:
    async def story() -> None:
        stage = Stage("prefill", "prefill", "prefill", "decode", policy="prefix_aware")
        for member, size in zip(stage.members, (2, 2, 4, 2), strict=True):
            member.hello.block_size = size
        _, twos, fours, _ = stage.members
        keys = {size: block_keys(b"root", [1] * 12, size) for size in (2, 4)}
        stage.fleet._take_news(twos, pb.Blocks(added=b"".join(keys[2][:3])))
        flight = stage.open(prompt=[1] * 12, keys=keys)
        assert flight.prefill is twos and twos.load.prefill_tokens == 6
        stage.fleet._take_news(fours, pb.Blocks(added=b"".join(keys[4])))
        flight = stage.open("again", prompt=[1] * 12, keys=keys)
        assert flight.prefill is fours and fours.load.prefill_tokens == 4, "the last token is computed in any case"
        stage.fleet.leave(fours, "test")
        stage.fleet._take_news(twos, pb.Blocks(removed=b"".join(keys[2][:3])))
        flight = stage.open("later", prompt=[1] * 12, keys=keys)
        assert flight.prefill is stage.members[0] and flight.prefill.load.prefill_tokens == 12

    play(story())


def test_a_both_instance_and_prefill_instances_share_the_prompts() -> None:
    async def story() -> None:
        stage = Stage("prefill", "both", prefill_policy="least_loaded")
        prefill, both = stage.members
        flights = [stage.open(f"r{i}", prompt=[1] * 50) for i in range(10)]
        assert all(flight.last_member is both for flight in flights)
        alone = [flight for flight in flights if flight.decode is None]
        assert 2 <= len(alone) <= 5, "it has their output to generate too"
        phases = [message.phase for _, message in sent(both)]
        assert phases.count(pb.BOTH) == len(alone) and phases.count(pb.DECODE) == 10 - len(alone)
        assert len(sent(prefill)) == 10 - len(alone)

    play(story())


def test_both_instances_do_not_prefill_for_each_other() -> None:
    async def story() -> None:
        stage = Stage("both", "both", "decode", decode_policy="round_robin")
        flights = [stage.open(f"r{i}") for i in range(9)]
        alone = [flight for flight in flights if flight.decode is None]
        assert len(alone) == 6
        assert all(flight.decode is stage.members[2] for flight in flights if flight not in alone)

    play(story())


def hedged(stage: Stage) -> tuple[Flight, Member, Member, Member]:
    """A flight that two are asked to prefill: it, the first, the second, and decode."""
    flight = stage.open()
    first, decode = flight.prefill, flight.decode
    assert decode is not None
    stage.dispatcher._hedges.ask(flight)
    stage.dispatcher._hedges.ask(flight)
    second = flight.hedge
    assert second is not None and second is not first
    assert [message.phase for member in (first, second) for _, message in sent(member)] == [pb.PREFILL] * 2
    sent(decode)
    return flight, first, second, decode


def ends_well(stage: Stage, flight: Flight) -> None:
    """Nobody is left with anything, and the counts of hedges are these."""
    assert not stage.dispatcher.flights and flight.hedge is None
    for member in stage.fleet.members.values():
        assert not member.requests and member.load.requests == 0


def test_of_two_that_prefill_the_faster_one_goes_on() -> None:
    async def story() -> None:
        stage = Stage("prefill", "prefill", "decode")
        flight, first, second, decode = hedged(stage)
        stage.says(first, stored=pb.Stored(num_blocks=2))
        stage.says(second, stored=pb.Stored(num_blocks=1, tickets=[b"t"]))
        assert [list(message.tickets) for _, message in sent(decode)] == [[]], "only the first one's news count yet"
        stage.says(second, token_ids=[7])
        assert [kind for kind, _ in sent(first)] == ["cancel"] and flight.prefill is second
        (ticket, token) = (message for _, message in sent(decode))
        assert list(ticket.tickets) == [b"t"] and token.first_token == 7
        stage.says(first, token_ids=[99])  # it had not heard yet
        stage.says(second, stored=pb.Stored(num_blocks=3, final=True))
        stage.says(decode, token_ids=[8, 9, 10], finish_reason="length")
        assert await tokens(flight) == [7, 8, 9, 10]
        assert flight.timeline.prefill_instance == second.id
        ends_well(stage, flight)

        flight, first, second, decode = hedged(stage)
        stage.says(second, stored=pb.Stored(num_blocks=1))
        stage.says(first, token_ids=[7], stored=pb.Stored(num_blocks=1, final=True))
        assert [kind for kind, _ in sent(second)] == ["cancel"] and flight.prefill is first
        stage.says(second, token_ids=[99])
        stage.says(decode, token_ids=[8, 9, 10], finish_reason="length")
        assert await tokens(flight) == [7, 8, 9, 10]
        ends_well(stage, flight)
        text = stage.dispatcher._metrics.text()
        assert b'hedges_total{outcome="asked"} 2.0' in text and b'hedges_total{outcome="preferred"} 1.0' in text

    play(story())


@pytest.mark.parametrize("refused", [True, False])
def test_of_two_that_prefill_one_may_fail(refused: bool) -> None:
    async def story() -> None:
        stage = Stage("prefill", "prefill", "decode")
        flight, first, second, decode = hedged(stage)
        stage.fleet.leave(first, "test")
        assert flight.prefill is second and not sent(decode), "the other goes on"
        stage.says(second, token_ids=[7, 8, 9, 10], finish_reason="length")
        assert await tokens(flight) == [7, 8, 9, 10]
        ends_well(stage, flight)

        stage.join(first.id, "prefill")
        flight, first, second, decode = hedged(stage)
        if refused:
            stage.says(second, error=pb.Error(kind="rejected", message="no"))
        else:
            stage.fleet.leave(second, "test")
        assert flight.prefill is first and flight.hedge is None
        stage.says(first, token_ids=[7, 8, 9, 10], finish_reason="length")
        assert await tokens(flight) == [7, 8, 9, 10]
        ends_well(stage, flight)

    play(story())


def test_only_what_waits_for_its_first_token_is_asked_of_a_second() -> None:
    async def story() -> None:
        stage = Stage("prefill", "prefill", "decode", "decode", hedge_prefill_after=0.05)
        watch = asyncio.create_task(stage.dispatcher.watch())
        late, done = stage.open("late"), stage.open("done")
        stage.says(done.prefill, "done", token_ids=[7])
        while late.hedge is None:
            await asyncio.sleep(0.01)
        stage.fleet.leave(late.last_member, "test")  # it moves, and may be late again
        assert late.hedge is None and done.hedge is None
        while late.hedge is None:
            await asyncio.sleep(0.01)
        late.cancel()
        done.cancel()
        ends_well(stage, late)
        watch.cancel()

    play(story())


EVENTS = st.lists(
    st.tuples(st.sampled_from(["join", "lose", "drain", "open", "late", "first", "end", "cancel"]), st.integers(0, 99))
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25)
@given(events=EVENTS)
def test_nobody_dead_or_draining_is_asked_and_nothing_stays_on_the_books(
    policy: str, events: list[tuple[str, int]]
) -> None:
    async def story() -> None:
        stage = Stage("prefill", "decode", "both", policy=policy)
        flights: list[Flight] = []
        everybody = list(stage.members)
        for number, (event, which) in enumerate(events):
            here = list(stage.fleet.members.values())
            member = here[which % len(here)] if here else None
            able = [m for m in here if not m.draining]
            before = {m.id: len(cast(Told, m.wire)) for m in everybody}
            if event == "join":
                everybody.append(stage.join(f"late-{number}", ("prefill", "decode", "both")[which % 3]))
            elif event == "lose" and member is not None:
                able = [m for m in able if m is not member]
                stage.fleet.leave(member, "test")
            elif event == "drain" and member is not None:
                able = [m for m in able if m is not member]
                member.draining = True
                stage.dispatcher.on_draining(member)
            elif event == "open":
                with contextlib.suppress(Unavailable):
                    flights.append(stage.open(f"r{number}", session=str(which % 5), max_tokens=1 + which % 3))
            elif flights and event == "late" and not flights[which % len(flights)].machine.ended:
                stage.dispatcher._hedges.ask(flights[which % len(flights)])
            elif flights and event == "first":
                flight = flights[which % len(flights)]
                if flight.id in (flight.hedge or flight.prefill).requests and flight.machine.state is State.PREFILLING:
                    stage.says(flight.hedge or flight.prefill, flight.id, token_ids=[7])
            elif flights and event == "end":
                flight = flights[which % len(flights)]
                stage.says(flight.last_member, flight.id, finish_reason="stop")
            elif flights:
                flights[which % len(flights)].cancel()
            for asked in everybody:
                fresh = sent(asked)[before[asked.id] :] if asked.id in before else []
                assert asked in able or not [kind for kind, _ in fresh if kind == "submit"]
        for flight in flights:
            flight.cancel()
        for member in everybody:
            assert member.load.requests == member.load.work_tokens == member.load.context_tokens == 0
        assert not stage.dispatcher.flights

    play(story())

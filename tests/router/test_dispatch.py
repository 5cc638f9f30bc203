"""The dispatcher over members that this test plays itself: what they are sent, and what the client's stream becomes."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from pdserve.config import RouterConfig
from pdserve.errors import BadRequest, RequestError, Unavailable
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request, SamplingParams
from pdserve.router.dispatch import Dispatcher, Flight
from pdserve.router.fleet import Fleet, Member
from pdserve.router.metrics import Metrics


class Stage:
    """A dispatcher and the members of its fleet."""

    def __init__(self, *roles: str, **settings: Any) -> None:
        self.fleet = Fleet("router", "model", 1.0)
        self.dispatcher = Dispatcher(RouterConfig(model="model", **settings), self.fleet, Metrics(self.fleet))
        self.members = [self.join(f"{role}-{i}", role) for i, role in enumerate(roles)]

    def join(self, name: str, role: str) -> Member:
        hello = pb.Hello(instance_id=name, role=role, model="model", max_model_len=100, vocab_size=50)
        return self.fleet._join(hello)

    def open(self, request_id: str = "r", max_tokens: int = 4) -> Flight:
        sampling = SamplingParams(max_tokens=max_tokens)
        return self.dispatcher.open(Request(request_id=request_id, prompt=[1, 2, 3], sampling=sampling))

    def says(self, member: Member, request_id: str = "r", **output: Any) -> None:
        self.dispatcher.on_output(member, pb.Output(request_id=request_id, **output))


def sent(member: Member) -> list[tuple[str, Any]]:
    """What a member was told since the last call: (kind of frame, its content)."""
    frames = []
    while not member.outbox.empty():
        frame = member.outbox.get_nowait()
        if frame is not None:
            kind = frame.WhichOneof("frame")
            assert kind is not None
            frames.append((kind, getattr(frame, kind)))
    return frames


async def tokens(flight: Flight) -> list[int]:
    return [token async for chunk in flight for token in chunk.token_ids]


def play(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 10))


def test_the_good_way() -> None:
    async def story() -> None:
        stage = Stage("prefill", "decode")
        prefill, decode = stage.members
        flight = stage.open()
        assert [kind for kind, _ in sent(prefill)] == ["submit"]
        ((_, submit),) = sent(decode)
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
        stage.fleet._leave(prefill, "test")
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
        stage.fleet._leave(lost, "test")
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
        assert not sent(staying), "it ends here: nobody else is left"
        with pytest.raises(Unavailable, match="no decode instance"):
            stage.open("later")

    play(story())


def test_with_nobody_left_the_client_is_told() -> None:
    async def story() -> None:
        stage = Stage("prefill", "decode")
        prefill, decode = stage.members
        flight = stage.open()
        sent(prefill)
        stage.fleet._leave(decode, "test")
        with pytest.raises(Unavailable, match=r"decode-1 was lost .* no decode instance is there to take it"):
            await tokens(flight)
        assert [kind for kind, _ in sent(prefill)] == ["cancel"]
        with pytest.raises(Unavailable, match="no decode instance"):
            stage.open()

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


def test_who_has_not_moved_for_long_has_failed_but_a_queue_may_be_long() -> None:
    async def story() -> None:
        stage = Stage("prefill", "decode", handover_timeout_seconds=0.2)
        prefill, decode = stage.members
        watch = asyncio.create_task(stage.dispatcher.watch())
        flight = stage.open()
        sent(decode)
        for _ in range(8):  # prefill works on others
            prefill.stepped = time.monotonic()
            await asyncio.sleep(0.05)
        assert not sent(decode)
        while not (frames := sent(decode)):  # prefill stands still
            await asyncio.sleep(0.02)
        assert frames[0][0] == "hand_over" and frames[0][1].final
        assert not prefill.requests
        with pytest.raises(Unavailable, match=r"no progress for 0\.2 s while"):  # and so does decode
            await tokens(flight)
        watch.cancel()

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

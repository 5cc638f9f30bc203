"""Answers of a beam search as token streams: each is read alone, and a search that ends without them is an error."""

import asyncio
from collections.abc import Callable

import pytest

from pdserve.beam_search import Hypothesis
from pdserve.errors import RequestError
from pdserve.output import Output
from pdserve.request import TokenLogprobs
from pdserve.router.api.beams import answer_streams
from pdserve.router.api.generation import read
from pdserve.router.telemetry.timeline import Timeline


class Stream:
    """A search whose chunks are there from the start."""

    def __init__(self, chunks: list[Output]) -> None:
        self.timeline = Timeline("r", prompt_tokens=1)
        self.on_readable: Callable[[], object] = lambda: None
        self._chunks = chunks

    def take(self) -> list[Output]:
        return [self._chunks.pop(0)] if self._chunks else []

    def cancel(self, finish_reason: str = "cancelled") -> None:
        pass


def answers_of(chunks: list[Output], count: int) -> list[list[Output]]:
    async def read_all() -> list[list[Output]]:
        async with asyncio.timeout(600):
            return [
                [one for some in [part async for _, part in read({0: stream})] for one in some] for stream in streams
            ]

    streams = answer_streams(Stream(chunks), count)
    return asyncio.run(read_all())


def test_each_answer_is_a_stream() -> None:
    scored = (TokenLogprobs(-0.5), TokenLogprobs(-0.25))
    found = [Hypothesis((1, 2), -0.5, "stop", scored), Hypothesis((3,), -1.0, "length")]
    assert answers_of([Output([], "stop", hypotheses=found)], 2) == [
        [Output([1, 2], "stop", list(scored))],
        [Output([3], "length")],
    ]


@pytest.mark.parametrize("found", [[], [Hypothesis((1,), 0.0, "stop")]], ids=len)
def test_a_search_without_its_answers_is_an_error(found: list[Hypothesis]) -> None:
    with pytest.raises(RequestError, match=f"ended with {len(found)} of 2 answers"):
        answers_of([Output([], "stop", hypotheses=found)], 2)

"""What leaves in one write, and clients that leave at the worst moment."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from starlette.applications import Starlette
from starlette.types import Message

from pdserve.router.respond import unless_disconnected

if TYPE_CHECKING:
    from tests.router.conftest import ScriptedBackend

IDS = [40, 41, 42]
USAGE = {"include_usage": True, "continuous_usage_stats": True}


def writes(app: Starlette, **body: Any) -> list[bytes]:
    """The body of a streamed completion, as it is handed to the server."""
    sent: list[Message] = []

    async def story() -> None:
        asked = [{"type": "http.request", "body": json.dumps({"prompt": "hello", "stream": True, **body}).encode()}]

        async def receive() -> Message:
            return asked.pop() if asked else await asyncio.Future()

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
        await app(scope, receive, send)

    asyncio.run(asyncio.wait_for(story(), 600))
    assert [message["type"] for message in sent] == ["http.response.start", *["http.response.body"] * (len(sent) - 1)]
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
    return [message["body"] for message in sent[1:]]


def test_each_token_is_a_write_and_the_end_goes_with_the_last(app: Starlette, backend: ScriptedBackend) -> None:
    backend.plays(IDS)
    bodies = writes(app, stream_options=USAGE)
    assert [body.count(b"data: ") for body in bodies] == [1, 1, 3]
    assert b'"finish_reason":"length"' in bodies[-1] and bodies[-1].endswith(b"data: [DONE]\n\n")


def test_tokens_that_come_together_are_events_of_one_write(app: Starlette, backend: ScriptedBackend) -> None:
    backend.plays(IDS, together=True)
    (body,) = writes(app, stream_options=USAGE, return_token_ids=True)
    *events, usage, done = body.split(b"\n\n")[:-1]
    said = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert [event["choices"][0]["token_ids"] for event in said] == [[token_id] for token_id in IDS]
    assert [event["usage"]["completion_tokens"] for event in said] == [1, 2, 3]
    assert b'"choices":[]' in usage and done == b"data: [DONE]"


@pytest.mark.parametrize("turns", range(8))
def test_a_client_that_leaves_around_the_end_of_the_work_ends_the_work_or_nothing(turns: int) -> None:
    """So many turns of the loop are between the two; a cancel that comes late would hit whatever the task does next."""

    async def story() -> bool:
        gone = asyncio.Event()
        ended = False

        async def receive() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def work() -> None:
            nonlocal ended
            await asyncio.sleep(0)  # the watcher waits by now
            gone.set()
            for _ in range(turns):
                await asyncio.sleep(0)
            ended = True

        finished = await unless_disconnected(receive, work())
        for _ in range(8):
            await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0 and finished == ended
        return finished

    finished = asyncio.run(asyncio.wait_for(story(), 600))
    if turns in (0, 7):
        assert finished == (turns == 0)

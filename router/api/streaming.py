"""Generations as responses: whole or as events, worded as OpenAI words them."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdserve.errors import RequestError
from pdserve.router.api.generation import Delta, Generation, Json
from pdserve.router.api.http_responses import CLIENT_GONE, InternalError, error_data, json_response
from pdserve.router.api.logprobs import of_chat, of_completion
from pdserve.router.api.requests import ParsedRequest
from pdserve.router.text.tool_calls import CallPart

Word = Callable[[Generation, list[Delta]], Json]


async def answer(generation: Generation, receive: Receive, word: Word) -> Response:
    """The whole answer at once, as `word` words its choices, or nothing if the client leaves before."""
    parsed = generation.parsed
    deltas: list[list[Delta]] = [[] for _ in parsed.requests]

    async def collect(new: Iterable[Delta]) -> None:
        for delta in new:
            deltas[delta.index].append(delta)

    try:
        finished = await unless_disconnected(receive, generation.run(collect))
    finally:
        generation.close()
    if not finished:
        return Response(status_code=CLIENT_GONE)
    return json_response(word(generation, [_joined(parts) for parts in deltas]))


def _joined(deltas: list[Delta]) -> Delta:
    return Delta(
        deltas[0].index,
        "".join(delta.text for delta in deltas),
        [token_id for delta in deltas for token_id in delta.token_ids],
        deltas[-1].finish_reason,
        [one for delta in deltas for one in delta.logprobs],
        [start for delta in deltas for start in delta.starts],
        [part for delta in deltas for part in delta.calls],
    )


class EventStream(Response, ABC):
    """Server-sent events. The status line waits for the first token, so that an error before it has its own status.

    An error after it is an event of its own, on which OpenAI's client raises.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._unfinished = len(generation.parsed.requests)  # choices whose last event is not out
        self._started = False
        self._sending = asyncio.Lock()  # choices send side by side, and wait for a slow client in turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._stream(send))
        finally:
            self._generation.close()

    async def _stream(self, send: Send) -> None:
        async def emit(deltas: Iterable[Delta]) -> None:
            async with self._sending:
                events: list[Json] = []
                for delta in deltas:
                    events += self.events_of(delta)
                    self._unfinished -= delta.finish_reason is not None
                last = not self._unfinished
                await self._send(send, [*events, *self.last_events()] if last else events, last)

        try:
            await self._generation.run(emit)
        except Exception as error:
            if not self._started:
                raise
            told = error if isinstance(error, RequestError) else InternalError()
            await self._send(send, [self.error_event(told)], told is error)
            if told is not error:
                raise

    async def _send(self, send: Send, events: list[Json], last: bool) -> None:
        """One write, which wakes the client and costs more than wording an event."""
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        body = b"".join(self.encoded(event) for event in events) + (self.end if last else b"")
        await send({"type": "http.response.body", "body": body, "more_body": not last})

    # ---- how one endpoint words it ----------------------------------------------------------------------------

    end = b""  # behind the last event

    @abstractmethod
    def events_of(self, delta: Delta) -> list[Json]: ...

    @abstractmethod
    def last_events(self) -> list[Json]: ...

    def error_event(self, error: RequestError) -> Json:
        return error_data(error)

    def encoded(self, event: Json) -> bytes:
        return b"data: " + to_json(event) + b"\n\n"


class ChunkStream(EventStream):
    """The events of completions and chats; `[DONE]` follows them, for readers that wait for it."""

    end = b"data: [DONE]\n\n"

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation)
        self._prompt_ids_due = generation.parsed.return_token_ids
        self._unspoken = set(range(len(generation.parsed.requests)))

    def events_of(self, delta: Delta) -> list[Json]:
        parsed, events = self._generation.parsed, []
        if parsed.chat and delta.index in self._unspoken:
            events.append(_event(parsed, [_role(delta.index)]))
        self._unspoken.discard(delta.index)
        events.append(_event(parsed, [_part(self._generation, delta)]))
        return [self._with_extras(event) for event in events]

    def last_events(self) -> list[Json]:
        parsed = self._generation.parsed
        return [{**_event(parsed, []), "usage": self._generation.usage()}] if parsed.include_usage else []

    def _with_extras(self, event: Json) -> Json:
        parsed = self._generation.parsed
        if self._prompt_ids_due:
            event["prompt_token_ids"] = _prompt_token_ids(parsed)
            self._prompt_ids_due = False
        if parsed.include_usage or parsed.continuous_usage:
            event["usage"] = self._generation.usage() if parsed.continuous_usage else None
        return event


async def unless_disconnected(receive: Receive, work: Coroutine[None, None, None]) -> bool:
    """Does the work, but cancels it at once when the client goes away. Whether it was done to its end."""
    worker, gone, over = asyncio.current_task(), False, False
    assert worker is not None

    def leave(_: "asyncio.Task[None]") -> None:
        nonlocal gone
        if not over:  # a call that the loop has scheduled can no longer be taken back
            gone = True
            worker.cancel()

    watcher = asyncio.create_task(_disconnect(receive))
    watcher.add_done_callback(leave)
    try:
        await work
    except asyncio.CancelledError:
        if not gone or worker.uncancel() > 0:  # somebody else wants us to end
            raise
        return False
    finally:
        over = True
        watcher.cancel()
    return True


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def whole_body(generation: Generation, choices: list[Delta]) -> Json:
    parsed = generation.parsed
    kind = "chat.completion" if parsed.chat else "text_completion"
    body = {
        **_head(parsed, kind),
        "choices": [_whole(generation, choice) for choice in choices],
        "usage": generation.usage(),
    }
    if parsed.return_token_ids:
        body["prompt_token_ids"] = _prompt_token_ids(parsed)
    return body


def _head(parsed: ParsedRequest, kind: str) -> Json:
    return {"id": parsed.id, "object": kind, "created": parsed.created, "model": parsed.model}


def _event(parsed: ParsedRequest, choices: list[Json]) -> Json:
    return {**_head(parsed, "chat.completion.chunk" if parsed.chat else "text_completion"), "choices": choices}


def _role(index: int) -> Json:
    return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}


def _whole(generation: Generation, choice: Delta) -> Json:
    message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.calls:
        message = {**message, "content": choice.text or None, "tool_calls": _whole_calls(choice.calls)}
    return _choice(generation, choice, {"message": message} if generation.parsed.chat else {"text": choice.text})


def _part(generation: Generation, delta: Delta) -> Json:
    if not generation.parsed.chat:
        return _choice(generation, delta, {"text": delta.text})
    new: Json = {"content": delta.text} if delta.text or not delta.calls else {}
    if delta.calls:
        new["tool_calls"] = [_call_part(part) for part in delta.calls]
    return _choice(generation, delta, {"delta": new})


def _call_part(part: CallPart) -> Json:
    if not part.id:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}


def _whole_calls(parts: list[CallPart]) -> list[Json]:
    heads = [part for part in parts if part.id]
    arguments = {head.index: "".join(part.arguments for part in parts if part.index == head.index) for head in heads}
    return [
        {"id": head.id, "type": "function", "function": {"name": head.name, "arguments": arguments[head.index]}}
        for head in heads
    ]


def _choice(generation: Generation, choice: Delta, text: Json) -> Json:
    ids = {"token_ids": choice.token_ids} if generation.parsed.return_token_ids else {}
    logprobs = _logprobs(generation, choice)
    return {"index": choice.index, **text, "logprobs": logprobs, "finish_reason": choice.finish_reason, **ids}


def _logprobs(generation: Generation, choice: Delta) -> Json | None:
    parsed, tokenizer = generation.parsed, generation.tokenizer
    if not parsed.logprobs:
        return None
    if parsed.chat:
        return of_chat(tokenizer, choice.token_ids, choice.logprobs)
    return of_completion(tokenizer, choice.token_ids, choice.logprobs, choice.starts)


def _prompt_token_ids(parsed: ParsedRequest) -> list[int] | list[list[int]]:
    """The prompt's ids; of several prompts, a list of them."""
    return parsed.prompts[0] if len(parsed.prompts) == 1 else parsed.prompts

"""Turns generations into HTTP responses: one JSON body, or server-sent events, in OpenAI's formats."""

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdserve.errors import RequestError
from pdserve.request import TokenLogprobs
from pdserve.router.api.generation import Delta, Generation, Json, cancel_all
from pdserve.router.api.http_responses import CLIENT_GONE, InternalError, json_response, sliced_json
from pdserve.router.api.logprobs import (
    are_many,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    logprobs_by_id,
    prompt_logprobs,
)
from pdserve.router.text.parsers.output import ToolCallDelta

MAX_DELTAS = 64  # sent at once; a client that has not read for a while has many, and others are served between
BuildBody = Callable[[Generation, list[Delta]], Json]  # builds the response body from one merged delta per choice


# What follows the index of the choice in the events of a plain chat.
ROLE_EVENT = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
TEXT_EVENT = b',"delta":{"content":%b},"logprobs":null,"finish_reason":%b}]}\n\n'


@dataclass(eq=False)
class ClientConnection:
    """The client's end of a request, as `request.state.client`: runs work for as long as the client can read the answer.

    The server calls `disconnect`, from the event loop. A client that cannot disconnect, such as a batch, has one, too.

    Attributes:
        body_size: bytes of the request's body, once all of it has arrived.
    """

    body_size: int | None = None
    is_connected: bool = True
    _workers: list[asyncio.Task[object]] = field(default_factory=list)  # that run for the client

    def disconnect(self) -> None:
        """Cancel what runs for the client."""
        self.is_connected = False
        for worker in self._workers:
            worker.cancel()

    async def run(self, work: Coroutine[None, None, None]) -> bool:
        """Run the work and cancel it as soon as the client disconnects. Return whether it ran to its end.

        It runs in the caller's task, so a request needs no second one that waits for the disconnect.
        """
        if not self.is_connected:
            work.close()
            return False
        worker = asyncio.current_task()
        assert worker is not None
        self._workers.append(worker)
        try:
            await work
        except asyncio.CancelledError:
            if self.is_connected or worker.uncancel() > 0:  # the task is also being cancelled from elsewhere
                raise
            return False
        finally:
            self._workers.remove(worker)
        return True


async def whole_response(generation: Generation, client: ClientConnection, build_body: BuildBody) -> Response:
    """Run the generation to its end and return the whole answer; an empty response if the client disconnects first."""
    deltas: list[list[Delta]] = [[] for _ in generation.requests]

    async def collect() -> None:
        async for new in generation.run():
            for delta in new:
                deltas[delta.index].append(delta)
                if delta.finish_reason is None:
                    await asyncio.sleep(0)  # parsing a long answer must not stop the streams of others

    try:
        finished = await client.run(collect())
    finally:
        generation.close()
    if not finished:
        return Response(status_code=CLIENT_GONE)
    choices = [merge(parts) for parts in deltas]
    if not are_many(*_all_logprobs(choices)):
        return json_response(build_body(generation, choices))
    # In a thread, which shares the interpreter with the streams of others.
    body = await asyncio.to_thread(lambda: sliced_json(build_body(generation, choices)))
    return Response(body, media_type="application/json")


def _all_logprobs(deltas: Iterable[Delta]) -> Iterator[Sequence[TokenLogprobs]]:
    for delta in deltas:
        yield delta.logprobs
        yield delta.prompt_logprobs or ()


def merge(deltas: list[Delta]) -> Delta:
    """Merge all deltas of one choice."""
    lengths = accumulate((len(delta.text) for delta in deltas), initial=0)
    return Delta(
        deltas[0].index,
        "".join(delta.text for delta in deltas),
        [token_id for delta in deltas for token_id in delta.token_ids],
        deltas[-1].finish_reason,
        [entry for delta in deltas for entry in delta.logprobs],
        [offset for delta in deltas for offset in delta.text_offsets],
        [
            replace(call, at=call.at + length)
            for length, delta in zip(lengths, deltas, strict=False)
            for call in delta.tool_calls
        ],
        deltas[0].prompt_logprobs,
        "".join(delta.reasoning for delta in deltas),
    )


class EventStream(Response, ABC):
    """A generation as server-sent events.

    The status line is sent with the first token, so an error before it gets an HTTP status of its own. A later error becomes
    an event, on which OpenAI's client raises.

    Attributes:
        beginning: starts the generation, and returns False if the client has left before; None: it has been started.
        keep_alive_s: with `beginning`, seconds without an event after which a comment is sent, and the status if it was not.
    """

    media_type = "text/event-stream"
    keep_alive_s = 0.0
    beginning: Callable[[], Coroutine[None, None, bool]] | None = None

    def __init__(self, generation: Generation) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._unfinished = len(generation.requests)  # choices whose final event has not been built
        self._started = self._ended = False
        self._is_quiet = True  # since the last comment
        self._sending = asyncio.Lock()  # comments and events take turns if the client is slow

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            client: ClientConnection = scope["state"]["client"]
            begin = self.beginning
            await client.run(self._stream_events(send, None) if begin is None else self._stream(send, begin))
        finally:
            self._generation.close()

    async def _stream(self, send: Send, begin: Callable[[], Coroutine[None, None, bool]]) -> None:
        beginning, comments = asyncio.create_task(begin()), asyncio.create_task(self._keep_alive(send))
        try:
            await self._stream_events(send, beginning)
        finally:
            await cancel_all([beginning, comments])

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self.keep_alive_s)
            async with self._sending:
                if self._ended:
                    return
                if self._is_quiet:
                    await self._write(send, self.comment, last=False)
                self._is_quiet = True

    async def _stream_events(self, send: Send, beginning: Awaitable[bool] | None) -> None:
        try:
            if beginning is not None and not await beginning:
                return
            async for deltas in self._generation.run():
                async with self._sending:
                    events: list[bytes] = []
                    for number, delta in enumerate(deltas, 1):
                        scores = delta.logprobs or delta.prompt_logprobs
                        if scores and are_many(*_all_logprobs([delta])):
                            events += await asyncio.to_thread(self._large_events, delta)
                        else:
                            events += self.encoded_events(delta)
                        self._unfinished -= delta.finish_reason is not None
                        if not number % MAX_DELTAS:
                            await self._send(send, events, last=False)
                            await asyncio.sleep(0)
                            events = []
                    last = not self._unfinished
                    if last:
                        events += map(self.encode, self.final_events())
                        await self.before_end()
                    await self._send(send, events, last)
        except Exception as error:
            async with self._sending:
                self._ended = True
                if not self._started:
                    raise
                reported = error.with_traceback(None) if isinstance(error, RequestError) else InternalError()
                await self._send(send, [self.encode(self.error_event(reported))], reported is error)
            if reported is not error:
                raise

    def _large_events(self, delta: Delta) -> list[bytes]:
        """Return the events of a delta with many log probabilities, which only `ChunkStream` has. To be run in a thread."""
        return [b"data: " + sliced_json(event) + b"\n\n" for event in self.delta_events(delta)]

    async def _send(self, send: Send, events: list[bytes], last: bool) -> None:
        """Send all events in one write: a write wakes the client and costs more than building an event."""
        if events or last:
            self._is_quiet = False
            await self._write(send, b"".join(events) + (self.terminator if last else b""), last)

    async def _write(self, send: Send, body: bytes, last: bool) -> None:
        self._ended |= last
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": body, "more_body": not last})

    # ---- the format of one endpoint ---------------------------------------------------------------------------

    terminator = b""  # follows the last event
    comment = b": keep-alive\n\n"  # says that the request still waits

    def encoded_events(self, delta: Delta) -> Iterable[bytes]:
        """Return the events of one delta, as they are sent."""
        return map(self.encode, self.delta_events(delta))

    @abstractmethod
    def delta_events(self, delta: Delta) -> list[Json]:
        """Return the events of one delta."""

    @abstractmethod
    def final_events(self) -> list[Json]:
        """Return the events after the last delta of all choices."""

    async def before_end(self) -> None:
        """Do what is to be done before the client reads the final events, which have been built."""

    def error_event(self, error: RequestError) -> Json:
        return error.body()

    def encode(self, event: Json) -> bytes:
        return b"data: " + to_json(event) + b"\n\n"


class ChunkStream(EventStream):
    """The events of completions and chat completions, terminated by `[DONE]`.

    Of a chat, those that would say nothing are left out, as long as a call, a stop string or a character is incomplete: there
    are clients that take an empty content for an answer.
    """

    terminator = b"data: [DONE]\n\n"

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation)
        self._sends_prompt_ids = generation.return_token_ids
        self._without_role = set(range(len(generation.requests)))  # choices whose role event was not built
        # Of a plain chat, events differ in text and finish reason alone.
        self._is_of_tokens = bool(generation.return_token_ids or generation.logprobs or generation.continuous_usage)
        self._is_plain = generation.chat and not (self._is_of_tokens or generation.include_usage)
        self._beginning = b"data: " + to_json(_event(generation, []))[:-2] + b'{"index":' if self._is_plain else b""

    def encoded_events(self, delta: Delta) -> Iterable[bytes]:
        if not self._is_plain or delta.tool_calls or delta.reasoning:
            return super().encoded_events(delta)
        beginning, events = self._beginning + str(delta.index).encode(), []
        if delta.index in self._without_role:
            self._without_role.discard(delta.index)
            events.append(beginning + ROLE_EVENT)
        if delta.text or delta.finish_reason:
            events.append(beginning + TEXT_EVENT % (to_json(delta.text), to_json(delta.finish_reason)))
        return events

    def delta_events(self, delta: Delta) -> list[Json]:
        generation, events = self._generation, []
        if generation.chat and delta.index in self._without_role:
            events.append(_event(generation, [_role_choice(delta.index)]))
        self._without_role.discard(delta.index)
        says_something = delta.text or delta.finish_reason or delta.tool_calls or delta.reasoning
        if says_something or self._is_of_tokens or not generation.chat:
            events.append(_event(generation, [_delta_choice(generation, delta)]))
        return [self._with_extras(event) for event in events]

    def final_events(self) -> list[Json]:
        generation = self._generation
        return [{**_event(generation, []), "usage": generation.usage()}] if generation.include_usage else []

    def _with_extras(self, event: Json) -> Json:
        """Add the prompt's ids to the first event, and the usage, if the request asks for them."""
        generation = self._generation
        if self._sends_prompt_ids:
            event["prompt_token_ids"] = _prompt_token_ids(generation)
            self._sends_prompt_ids = False
        if generation.include_usage or generation.continuous_usage:
            event["usage"] = generation.usage() if generation.continuous_usage else None
        return event


def completion_body(generation: Generation, choices: list[Delta]) -> Json:
    """Return the body of a completion or a chat completion."""
    kind = "chat.completion" if generation.chat else "text_completion"
    body = {
        **_head(generation, kind),
        "choices": [_whole_choice(generation, choice) for choice in choices],
        "usage": generation.usage(),
    }
    if generation.return_token_ids:
        body["prompt_token_ids"] = _prompt_token_ids(generation)
    if generation.prompt_logprobs is not None and generation.chat:
        body["prompt_logprobs"] = _prompt_logprobs(generation, choices[0])
    return body


def _head(generation: Generation, kind: str) -> Json:
    return {"id": generation.id, "object": kind, "created": generation.created, "model": generation.model}


def _event(generation: Generation, choices: list[Json]) -> Json:
    return {**_head(generation, "chat.completion.chunk" if generation.chat else "text_completion"), "choices": choices}


def _role_choice(index: int) -> Json:
    return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}


def _whole_choice(generation: Generation, choice: Delta) -> Json:
    message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.reasoning:
        message = {**message, "content": choice.text or None, **_reasoning(choice.reasoning)}
    if choice.tool_calls:
        message = {**message, "content": choice.text or None, "tool_calls": _whole_calls(choice.tool_calls)}
    return _choice(generation, choice, {"message": message} if generation.chat else {"text": choice.text})


def _delta_choice(generation: Generation, delta: Delta) -> Json:
    if not generation.chat:
        return _choice(generation, delta, {"text": delta.text})
    new: Json = {"content": delta.text} if delta.text or not (delta.tool_calls or delta.reasoning) else {}
    if delta.reasoning:
        new |= _reasoning(delta.reasoning)
    if delta.tool_calls:
        new["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
    return _choice(generation, delta, {"delta": new})


def _reasoning(text: str) -> Json:
    """Return the fields of reasoning: vLLM's, and the older name that many clients read."""
    return {"reasoning": text, "reasoning_content": text}


def _call_delta(call: ToolCallDelta) -> Json:
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _whole_calls(deltas: list[ToolCallDelta]) -> list[Json]:
    arguments = whole_arguments(deltas)
    return [
        {"id": head.id, "type": "function", "function": {"name": head.name, "arguments": arguments[head.index]}}
        for head in deltas
        if head.id
    ]


def whole_arguments(deltas: Iterable[ToolCallDelta]) -> dict[int, str]:
    """Return the arguments of each call by its index."""
    parts = defaultdict[int, list[str]](list)
    for delta in deltas:
        parts[delta.index].append(delta.arguments)
    return {index: "".join(texts) for index, texts in parts.items()}


def _choice(generation: Generation, choice: Delta, content: Json) -> Json:
    ids = {"token_ids": choice.token_ids} if generation.return_token_ids else {}
    logprobs = _logprobs(generation, choice)
    if generation.prompt_logprobs is not None and not generation.chat:
        content = {**content, "prompt_logprobs": _prompt_logprobs(generation, choice)}
    return {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": choice.finish_reason, **ids}


def _logprobs(generation: Generation, choice: Delta) -> Json | None:
    tokenizer = generation.tokenizer
    if not generation.logprobs:
        return None
    if generation.chat:
        return chat_logprobs(tokenizer, choice.token_ids, choice.logprobs)
    answer = completion_logprobs(tokenizer, choice.token_ids, choice.logprobs, choice.text_offsets)
    num_top = generation.requests[choice.index].sampling.logprobs or 0
    if generation.return_token_ids and not generation.echo:
        answer["by_token_id"] = logprobs_by_id(tokenizer, choice.token_ids, choice.logprobs, num_top)
    if not generation.echo or choice.prompt_logprobs is None:
        return answer
    prompt = echoed_logprobs(tokenizer, generation.prompt_of(choice.index), choice.prompt_logprobs, num_top)
    return {name: [*prompt[name], *values] for name, values in answer.items()}


def _prompt_logprobs(generation: Generation, choice: Delta) -> list[Json | None]:
    num_top, prompt = generation.prompt_logprobs, generation.prompt_of(choice.index)
    assert num_top is not None and choice.prompt_logprobs is not None
    return prompt_logprobs(generation.tokenizer, prompt, choice.prompt_logprobs, num_top)


def _prompt_token_ids(generation: Generation) -> list[int] | list[list[int]]:
    """Return the ids of the prompt, or a list of them if there are several prompts."""
    return generation.prompts[0] if len(generation.prompts) == 1 else generation.prompts

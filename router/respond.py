"""From token streams to the response: the choices of one request, run side by side and worded as OpenAI words them.

`Generation` owns the token streams of a request. However it ends (the answer complete, an error, the client gone),
`close` cancels what still runs, so that no instance works for nobody.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdserve.errors import RequestError, Unavailable
from pdserve.request import TokenLogprobs
from pdserve.router.detokenizer import TextStream
from pdserve.router.logprobs import of_chat, of_completion
from pdserve.router.middleware import InternalError, error_data, json_response, to_json
from pdserve.router.openai import Plan
from pdserve.router.stream import Backend, TokenStream
from pdserve.router.tokenizer import Tokenizer
from pdserve.router.tool_calls import CallPart, Parts, ToolCalls

Json = dict[str, object]
CLIENT_GONE = 499  # nginx's number; nobody reads it but the access log


@dataclass(frozen=True)
class Delta:
    """What is new in one choice."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprobs]  # one for each id, if they were asked for
    starts: list[int]  # where in the choice's text each token begins, in characters
    calls: list[CallPart]  # of tools; what is in them is not in the text


Emit = Callable[[Delta], Awaitable[None]]


@dataclass
class Choice:
    index: int
    stream: TokenStream
    text: TextStream
    echo: str = ""  # goes before the text
    tools: ToolCalls | None = None
    tokens: int = 0

    async def run(self, emit: Emit) -> None:
        """Emits until the end of the choice, which a stop string may bring before the end of its tokens."""
        async for chunk in self.stream:
            text, token_ids = self.text.push(chunk)
            text, self.echo = self.echo + text, ""
            self.tokens += len(token_ids)
            logprobs, starts = chunk.logprobs[: len(token_ids)], self.text.starts
            parts, reason = self._divided(text)
            await emit(Delta(self.index, parts.text, token_ids, reason, logprobs, starts, parts.calls))
            if self.text.finish_reason is not None:
                if chunk.finish_reason is None:
                    self.stream.cancel(self.text.finish_reason)
                return
        raise Unavailable("the tokens ended without a reason", kind="incomplete_stream")

    def _divided(self, text: str) -> tuple[Parts, str | None]:
        """The text and the tool calls in it, and why the choice ends, if it does."""
        reason = self.text.finish_reason
        if self.tools is None:
            return Parts(text), reason
        parts = self.tools.push(text)
        if reason is not None:
            parts.text += self.tools.finish().text
        return parts, "tool_calls" if reason == "stop" and self.tools.calls else reason


class Generation:
    """The choices of one request, from the moment that the backend has accepted them all.

    `leave` is called once or more when it is over, with the tokens of its prompts and of its choices, or 0 if it was refused.
    """

    def __init__(self, plan: Plan, tokenizer: Tokenizer, backend: Backend, leave: Callable[[int], None]) -> None:
        """Raises RequestError, with nothing left running, if the backend refuses one of them."""
        self.plan = plan
        self._leave = leave
        self.tokenizer = tokenizer
        self.choices: list[Choice] = []
        try:
            for index, request in enumerate(plan.requests):
                min_tokens = request.sampling.min_tokens
                text = TextStream(tokenizer, plan.stops, include_stop=plan.include_stop, min_tokens=min_tokens)
                echo = plan.echo[index * len(plan.echo) // len(plan.requests)] if plan.echo else ""
                tools = ToolCalls(plan.tools.format, plan.tools.names, plan.tools.single) if plan.tools else None
                self.choices.append(Choice(index, backend.open(request), text, echo, tools))
        except BaseException:
            leave(0)
            self.close()
            raise

    async def run(self, emit: Emit) -> None:
        """Emits what the choices bring, in the order in which it comes. The first error ends all of them."""
        tasks = [asyncio.create_task(choice.run(emit)) for choice in self.choices]
        try:
            await asyncio.gather(*tasks)
        finally:
            await _stop(tasks)

    def close(self) -> None:
        """Cancels the choices that are not over."""
        for choice in self.choices:
            if choice.text.finish_reason is None:
                choice.stream.cancel()
        self._leave(self.prompt_tokens + self.completion_tokens)

    @property
    def prompt_tokens(self) -> int:
        """The prompt of several choices counts once."""
        return sum(map(len, self.plan.prompts))

    @property
    def completion_tokens(self) -> int:
        """So far."""
        return sum(choice.tokens for choice in self.choices)

    def usage(self) -> Json:
        """Tokens so far; as cached count only those of a prompt that none of its choices computed."""
        prompts, choices = self.plan.prompts, self.choices
        n = len(choices) // len(prompts)
        cached = 0
        for i in range(len(prompts)):
            cached += min(choice.stream.timeline.cached_tokens for choice in choices[i * n : (i + 1) * n])
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


Word = Callable[[Generation, list[Delta]], Json]


async def answer(generation: Generation, receive: Receive, word: Word) -> Response:
    """The whole answer at once, as `word` words its choices, or nothing if the client leaves before."""
    plan = generation.plan
    deltas: list[list[Delta]] = [[] for _ in plan.requests]

    async def collect(delta: Delta) -> None:
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
        self._started = False
        self._sending = asyncio.Lock()  # choices send side by side, and some send twice in a row

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._stream(send))
        finally:
            self._generation.close()

    async def _stream(self, send: Send) -> None:
        async def emit(delta: Delta) -> None:
            await self._send(send, self.events_of(delta))

        try:
            await self._generation.run(emit)
            await self._send(send, self.last_events())
        except Exception as error:
            if not self._started:
                raise
            told = error if isinstance(error, RequestError) else InternalError()
            await self._send(send, [self.error_event(told)])
            if told is not error:
                raise
        await send({"type": "http.response.body", "body": self.end, "more_body": False})

    async def _send(self, send: Send, events: list[Json]) -> None:
        async with self._sending:
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            body = b"".join(self.encoded(event) for event in events)
            await send({"type": "http.response.body", "body": body, "more_body": True})

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
        self._prompt_ids_due = generation.plan.return_token_ids
        self._unspoken = set(range(len(generation.plan.requests)))

    def events_of(self, delta: Delta) -> list[Json]:
        plan, events = self._generation.plan, []
        if plan.chat and delta.index in self._unspoken:
            events.append(_event(plan, [_role(delta.index)]))
        self._unspoken.discard(delta.index)
        events.append(_event(plan, [_part(self._generation, delta)]))
        return [self._with_extras(event) for event in events]

    def last_events(self) -> list[Json]:
        plan = self._generation.plan
        return [{**_event(plan, []), "usage": self._generation.usage()}] if plan.include_usage else []

    def _with_extras(self, event: Json) -> Json:
        plan = self._generation.plan
        if self._prompt_ids_due:
            event["prompt_token_ids"] = _prompt_token_ids(plan)
            self._prompt_ids_due = False
        if plan.include_usage or plan.continuous_usage:
            event["usage"] = self._generation.usage() if plan.continuous_usage else None
        return event


async def unless_disconnected(receive: Receive, work: Coroutine[None, None, None]) -> bool:
    """Does the work, but stops it at once when the client goes away. Whether it was done to its end."""
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            return False
        worker.result()
        return True
    finally:
        await _stop([worker, watcher])


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stop(tasks: list[asyncio.Task[None]]) -> None:
    """Cancels what runs and waits for it; the errors are the caller's, who has them from the first that failed."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def whole_body(generation: Generation, choices: list[Delta]) -> Json:
    plan = generation.plan
    kind = "chat.completion" if plan.chat else "text_completion"
    body = {
        **_head(plan, kind),
        "choices": [_whole(generation, choice) for choice in choices],
        "usage": generation.usage(),
    }
    if plan.return_token_ids:
        body["prompt_token_ids"] = _prompt_token_ids(plan)
    return body


def _head(plan: Plan, kind: str) -> Json:
    return {"id": plan.id, "object": kind, "created": plan.created, "model": plan.model}


def _event(plan: Plan, choices: list[Json]) -> Json:
    return {**_head(plan, "chat.completion.chunk" if plan.chat else "text_completion"), "choices": choices}


def _role(index: int) -> Json:
    return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}


def _whole(generation: Generation, choice: Delta) -> Json:
    message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.calls:
        message = {**message, "content": choice.text or None, "tool_calls": _whole_calls(choice.calls)}
    return _choice(generation, choice, {"message": message} if generation.plan.chat else {"text": choice.text})


def _part(generation: Generation, delta: Delta) -> Json:
    if not generation.plan.chat:
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
    ids = {"token_ids": choice.token_ids} if generation.plan.return_token_ids else {}
    logprobs = _logprobs(generation, choice)
    return {"index": choice.index, **text, "logprobs": logprobs, "finish_reason": choice.finish_reason, **ids}


def _logprobs(generation: Generation, choice: Delta) -> Json | None:
    plan, tokenizer = generation.plan, generation.tokenizer
    if not plan.logprobs:
        return None
    if plan.chat:
        return of_chat(tokenizer, choice.token_ids, choice.logprobs)
    return of_completion(tokenizer, choice.token_ids, choice.logprobs, choice.starts)


def _prompt_token_ids(plan: Plan) -> list[int] | list[list[int]]:
    """The prompt's ids; of several prompts, a list of them."""
    return plan.prompts[0] if len(plan.prompts) == 1 else plan.prompts

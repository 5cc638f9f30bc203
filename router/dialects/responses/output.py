"""Generations as responses of /v1/responses and as the events of one: items of reasoning, messages and calls."""

import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields

from pydantic_core import to_json

from pdserve.errors import BadRequest, RequestError
from pdserve.router.api.chat import parse_chat
from pdserve.router.api.generation import Delta, Generation, Json
from pdserve.router.api.parsing import or_default, renamed
from pdserve.router.api.streaming import EventStream
from pdserve.router.backend import ModelInfo
from pdserve.router.dialects.responses.conversion import FIELDS, conversation, to_chat_body
from pdserve.router.dialects.responses.schemas import ResponseBody
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.text.parsers.output import ToolCallDelta, in_order
from pdserve.router.text.tokenizer import Tokenizer

RESPONSE_PREFIX = "resp_"
# Of items with content, by type: the part that holds their text.
PARTS: dict[str, Json] = {
    "reasoning": {"type": "reasoning_text"},
    "message": {"type": "output_text", "annotations": [], "logprobs": []},
}
TEXT_EVENTS = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
}


@dataclass(kw_only=True)
class ResponseGeneration(Generation):
    """A request to /v1/responses.

    Attributes:
        echoed: the fields that the response repeats.
        messages: the input, if the response is to be kept.
        keep: called with the finished response before the client gets its end; None: it is not kept.
    """

    echoed: Json = field(default_factory=dict)
    messages: list[Json] = field(default_factory=list)
    keep: Callable[[Json], Awaitable[None]] | None = None


def parse_response(
    has_store: bool,
    earlier: Sequence[Json],
    body: ResponseBody,
    draft: RoutedRequest,
    tokenizer: Tokenizer,
    info: ModelInfo,
    max_n: int,
) -> ResponseGeneration:
    """Parse a body of /v1/responses. With a store, the response is to be kept unless it says `store: false`, as at OpenAI.

    Args:
        earlier: the messages of the conversation that it continues.

    Raises:
        RequestError: as `parse_chat`, or it continues a response and there is no store.
    """
    if body.previous_response_id is not None and not has_store:
        param = "previous_response_id"
        message = (
            f"{param} is not supported: this router keeps no responses; send the whole conversation in input, or start the "
            "router with --response-store"
        )
        raise BadRequest(message, kind="unsupported_parameter", param=param)
    with renamed(FIELDS):
        chat = parse_chat(to_chat_body(body, earlier), draft, tokenizer, info, max_n)
    return _with_echoed_fields(chat, body, is_kept=has_store and body.store is not False)


def _with_echoed_fields(chat: Generation, body: ResponseBody, *, is_kept: bool) -> ResponseGeneration:
    """Return the chat with the fields that the response repeats."""
    text = {"format": {"type": "text"}} if body.text is None else body.text.model_dump(by_alias=True, exclude_none=True)
    echoed: Json = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "temperature": chat.requests[0].sampling.temperature,
        "top_p": chat.requests[0].sampling.top_p,
        "text": text,
        "user": body.user,
        "background": False,
        "parallel_tool_calls": or_default(body.parallel_tool_calls, True),
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": is_kept,
        "tool_choice": or_default(body.tool_choice, "auto"),
        "tools": [{"strict": False, **tool.model_dump(exclude_none=True)} for tool in body.tools or ()],
        "truncation": "disabled",
    }
    if is_kept and not chat.id.startswith(RESPONSE_PREFIX):
        chat.id = RESPONSE_PREFIX + secrets.token_hex(12)  # the client's id may be that of another kept response
    parsed = {one.name: getattr(chat, one.name) for one in fields(chat) if one.init}
    return ResponseGeneration(**parsed, echoed=echoed, messages=conversation(body) if is_kept else [])


def response_body(generation: Generation, choices: list[Delta]) -> Json:
    """Return the body of a whole response."""
    [choice] = choices
    status = _status(choice.finish_reason)
    response_id = generation.id
    parts: list[tuple[Json, list[str]]] = []  # the items with their texts
    if choice.reasoning:
        parts.append((_head("reasoning", response_id, 0), [choice.reasoning]))
    for part in in_order(choice.text, choice.tool_calls):
        if isinstance(part, str):
            parts.append((_head("message", response_id, len(parts)), [part]))
        elif part.id:
            parts.append((_call_head(part), [part.arguments]))
        else:
            parts[-1][1].append(part.arguments)
    num_whole = len(parts) - 1  # only the last item may have been cut off
    if not (choice.text or choice.tool_calls):
        parts.append((_head("message", response_id, len(parts)), []))
    statuses = ["completed" if i < num_whole else status for i in range(len(parts))]
    items = [_filled(head, "".join(texts), one) for (head, texts), one in zip(parts, statuses, strict=True)]
    return _response(generation, status, items)


class ResponseEventStream(EventStream):
    """The stream of one response: OpenAI's named and numbered events, one item after the other, without a terminator."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation)
        self._sequence_number = 0
        self._has_begun = False
        self._items: list[Json] = []  # those that are complete
        self._open: _OpenItem | None = None
        self._finish_reason: str | None = None
        self._response: Json = {}

    async def before_end(self) -> None:
        generation = self._generation
        assert isinstance(generation, ResponseGeneration)
        if generation.keep is not None:
            await generation.keep(self._response)

    def delta_events(self, delta: Delta) -> list[Json]:
        events = self._begin_response()
        self._finish_reason = delta.finish_reason
        if delta.reasoning:
            events += self._extend("reasoning", delta.reasoning)
        if self._generation.open_parser is None:
            return [*events, *self._extend("message", delta.text)]
        for part in in_order(delta.text, delta.tool_calls):
            if isinstance(part, str):
                events += self._extend("message", part)
                continue
            events += self._begin(_call_head(part)) if part.id else []
            if part.arguments:
                assert self._open is not None
                events.append(self._open.delta(part.arguments))
        return events

    def final_events(self) -> list[Json]:
        kinds = {item["type"] for item in self._items} | ({self._open.kind} if self._open else set())
        has_answer = kinds & {"message", "function_call"}
        status = _status(self._finish_reason)
        events = self._end(status)
        if not has_answer:
            events += [*self._extend("message", ""), *self._end(status)]
        response = self._response = _response(self._generation, status, self._items)
        return [*events, {"type": f"response.{status}", "response": response}]

    def _begin_response(self) -> list[Json]:
        if self._has_begun:
            return []
        self._has_begun = True
        started = _response(self._generation, "in_progress", [])
        return [
            {"type": "response.created", "response": started},
            {"type": "response.in_progress", "response": started},
        ]

    def _extend(self, kind: str, text: str) -> list[Json]:
        """Return the events of more text of a kind of item, which begins unless it is the open one."""
        is_open = self._open is not None and self._open.kind == kind
        events = [] if is_open else self._end("completed")
        events += [] if is_open else self._begin(_head(kind, self._generation.id, len(self._items)))
        assert self._open is not None
        return [*events, self._open.delta(text)] if text else events

    def _begin(self, head: Json) -> list[Json]:
        """Return the events that begin an item, and end the one before it."""
        events = self._end("completed")
        self._open = _OpenItem(head, len(self._items))
        return [*events, *self._open.begin()]

    def _end(self, status: str) -> list[Json]:
        """Return the events that end the open item, if there is one."""
        if self._open is None:
            return []
        events = self._open.end(status)
        self._items.append(self._open.item)
        self._open = None
        return events

    def error_event(self, error: RequestError) -> Json:
        return {"type": "error", "code": error.kind, "message": str(error), "param": error.param}

    def encode(self, event: Json) -> bytes:
        numbered = {**event, "sequence_number": self._sequence_number}
        self._sequence_number += 1
        return f"event: {event['type']}\n".encode() + b"data: " + to_json(numbered) + b"\n\n"


class _OpenItem:
    """An item of the output that is being sent.

    Attributes:
        item: as far as it is known; complete after `end`.
    """

    def __init__(self, head: Json, index: int) -> None:
        self.item = head
        self._index = index
        self._text = ""
        self._has_parts = self.kind in PARTS
        self._position: Json = {"item_id": head["id"], "output_index": index}
        if self._has_parts:
            self._position["content_index"] = 0

    @property
    def kind(self) -> str:
        return str(self.item["type"])

    def begin(self) -> list[Json]:
        """Return the events that begin it."""
        item: Json = {**_filled(self.item, "", "in_progress"), **({"content": []} if self._has_parts else {})}
        added: Json = {"type": "response.output_item.added", "output_index": self._index, "item": item}
        return [added, *self._part_event("added")]

    def delta(self, text: str) -> Json:
        """Return the event of more text, or of more arguments."""
        self._text += text
        extra: Json = {"logprobs": []} if self.kind == "message" else {}
        return {"type": f"{TEXT_EVENTS[self.kind]}.delta", **self._position, "delta": text, **extra}

    def end(self, status: str) -> list[Json]:
        """Return the events that end it."""
        self.item = _filled(self.item, self._text, status)
        whole: Json = {"text": self._text}
        if self.kind == "message":
            whole["logprobs"] = []
        elif self.kind == "function_call":
            whole = {"name": self.item["name"], "arguments": self._text}
        return [
            {"type": f"{TEXT_EVENTS[self.kind]}.done", **self._position, **whole},
            *self._part_event("done"),
            {"type": "response.output_item.done", "output_index": self._index, "item": self.item},
        ]

    def _part_event(self, name: str) -> list[Json]:
        if not self._has_parts:
            return []
        part = {**PARTS[self.kind], "text": self._text}
        return [{"type": f"response.content_part.{name}", **self._position, "part": part}]


def _response(generation: Generation, status: str, output: list[Json]) -> Json:
    assert isinstance(generation, ResponseGeneration)
    usage = generation.usage() if status != "in_progress" else None
    return {
        "id": generation.id,
        "object": "response",
        "created_at": generation.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": generation.model,
        "output": output,
        "usage": usage and _usage(usage),
        **generation.echoed,
    }


def _usage(usage: Json) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": usage["total_tokens"],
    }


def _head(kind: str, response_id: str, index: int) -> Json:
    """Return what does not change in an item of reasoning or a message, the `index`th of the output."""
    prefix = "rs" if kind == "reasoning" else "msg"
    extra: Json = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
    suffix = f"_{index}" if index > 1 else ""  # for a message after calls
    return {"id": f"{prefix}_{response_id}{suffix}", "type": kind, **extra}


def _call_head(call: ToolCallDelta) -> Json:
    return {"id": call.id.replace("call_", "fc_"), "type": "function_call", "call_id": call.id, "name": call.name}


def _filled(head: Json, text: str, status: str) -> Json:
    """Return an item with its text, or a call with its arguments."""
    kind = str(head["type"])
    content = {"content": [{**PARTS[kind], "text": text}]} if kind in PARTS else {"arguments": text}
    return {**head, "status": status, **content}


def _status(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason == "length" else "completed"

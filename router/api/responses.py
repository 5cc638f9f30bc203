"""/v1/responses for text: converts its bodies to chat bodies, and generations to response objects and events.

The parser is that of /v1/chat/completions. A conversation is the input, after that of the response that it continues.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from pydantic_core import to_json

from pdserve.errors import BadRequest, RequestError
from pdserve.router.api.generation import Delta, Generation, Json
from pdserve.router.api.parsing import quote
from pdserve.router.api.requests import ParsedRequest
from pdserve.router.api.schemas import (
    ChatBody,
    GenerationBody,
    JsonSchema,
    Message,
    ResponseBody,
    ResponseFormat,
    StreamOptions,
)
from pdserve.router.api.streaming import EventStream

ROLES = ("system", "developer", "user", "assistant")
TEXT_PARTS = ("input_text", "output_text", "text")
REASONING_ITEM_FIELDS = {"type", "id", "status", "summary", "content", "encrypted_content"}
ITEM_FIELDS = {"type", "role", "content", "id", "status"}
PART_FIELDS = {"type", "text", "annotations", "logprobs"}


@dataclass(frozen=True, kw_only=True)
class ParsedResponseRequest(ParsedRequest):
    """A validated request to /v1/responses.

    Attributes:
        echoed: the fields that the response repeats.
        keep: called with the finished response before the client gets its end; None: it is not kept.
    """

    echoed: Json = field(default_factory=dict)
    keep: Callable[[Json], Awaitable[None]] | None = None


def to_chat_body(body: ResponseBody, earlier: Sequence[Json] = ()) -> ChatBody:
    """Return the equivalent body of /v1/chat/completions.

    Args:
        earlier: the messages of the conversation that it continues.

    Raises:
        BadRequest: an item of `input` is not a message, or its content is not text.
    """
    messages = [Message.model_validate(message) for message in earlier] + _messages(body.input)
    if body.instructions is not None:
        messages.insert(0, Message(role="system", content=body.instructions))
    return ChatBody(
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        response_format=_response_format(body),
        stream_options=StreamOptions() if body.stream else None,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        **{name: getattr(body, name) for name in GenerationBody.model_fields},
    )


def with_echoed_fields(
    parsed: ParsedRequest, body: ResponseBody, keep: Callable[[Json], Awaitable[None]] | None = None
) -> ParsedResponseRequest:
    """Return the parsed chat request with the fields that the response repeats; `keep` is that of the result."""
    text = {"format": {"type": "text"}} if body.text is None else body.text.model_dump(by_alias=True, exclude_none=True)
    echoed: Json = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "temperature": parsed.requests[0].sampling.temperature,
        "top_p": parsed.requests[0].sampling.top_p,
        "text": text,
        "user": body.user,
        "background": False,
        "parallel_tool_calls": True,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": keep is not None,
        "tool_choice": "auto",
        "tools": [],
        "truncation": "disabled",
    }
    return ParsedResponseRequest(**vars(parsed), echoed=echoed, keep=keep)


def conversation(body: ResponseBody, earlier: Sequence[Json] = ()) -> list[Json]:
    """Return the messages of the conversation up to the answer, without instructions, which apply to one response."""
    return [*earlier, *(message.model_dump(exclude_none=True) for message in _messages(body.input))]


def answer_message(response: Json) -> Json:
    """Return a finished response as a message of the conversation."""
    items: list[Json] = response["output"]  # type: ignore[assignment]
    texts = {item["type"]: "".join(part["text"] for part in item["content"]) for item in items}  # type: ignore[attr-defined]
    message: Json = {"role": "assistant", "content": texts["message"]}
    return message | ({"reasoning": texts["reasoning"]} if "reasoning" in texts else {})


def response_body(generation: Generation, choices: list[Delta]) -> Json:
    """Return the body of a whole response."""
    [choice] = choices
    response_id, status = generation.parsed.id, _status(choice.finish_reason)
    reasoning = [_reasoning_item(response_id, choice.reasoning, status)] if choice.reasoning else []
    return _response(generation, status, [*reasoning, _item(response_id, choice)])


class ResponseEventStream(EventStream):
    """The stream of one response: OpenAI's named and numbered events, without a terminator."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation)
        self._sequence_number = 0
        self._has_begun = False
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._items: list[Json] = []  # complete items before the message
        self._finish_reason: str | None = None
        self._response: Json = {}

    async def before_end(self) -> None:
        parsed = self._generation.parsed
        assert isinstance(parsed, ParsedResponseRequest)
        if parsed.keep is not None:
            await parsed.keep(self._response)

    def delta_events(self, delta: Delta) -> list[Json]:
        events = self._begin_response()
        self._finish_reason = delta.finish_reason
        if delta.reasoning:
            events += self._begin_reasoning()
            self._reasoning.append(delta.reasoning)
            position = self._reasoning_position()
            events.append({"type": "response.reasoning_text.delta", **position, "delta": delta.reasoning})
        if delta.text or not (self._reasoning or self._generation.parsed.finds_reasoning):
            events += self._begin_message()
            self._text.append(delta.text)
        if delta.text:
            new = {"delta": delta.text, "logprobs": []}
            events.append({"type": "response.output_text.delta", **self._position(), **new})
        return events

    def final_events(self) -> list[Json]:
        begun = self._begin_message()
        text, status = "".join(self._text), _status(self._finish_reason)
        item = _item(self._generation.parsed.id, Delta(0, text, [], self._finish_reason, [], [], []))
        response = self._response = _response(self._generation, status, [*self._items, item])
        return [
            *begun,
            {"type": "response.output_text.done", **self._position(), "text": text, "logprobs": []},
            {"type": "response.content_part.done", **self._position(), "part": _part(text)},
            {"type": "response.output_item.done", "output_index": len(self._items), "item": item},
            {"type": f"response.{status}", "response": response},
        ]

    def _begin_response(self) -> list[Json]:
        if self._has_begun:
            return []
        self._has_begun = True
        started = _response(self._generation, "in_progress", [])
        return [
            {"type": "response.created", "response": started},
            {"type": "response.in_progress", "response": started},
        ]

    def _begin_reasoning(self) -> list[Json]:
        """Return the events that begin the item of reasoning, unless it has begun."""
        if self._reasoning:
            return []
        item: Json = {**_reasoning_item(self._generation.parsed.id, "", "in_progress"), "content": []}
        return [
            {"type": "response.output_item.added", "output_index": 0, "item": item},
            {"type": "response.content_part.added", **self._reasoning_position(), "part": _reasoning_part("")},
        ]

    def _end_reasoning(self) -> list[Json]:
        """Return the events that end the item of reasoning, if there is one."""
        if not self._reasoning:
            return []
        text = "".join(self._reasoning)
        item = _reasoning_item(self._generation.parsed.id, text, _status(self._finish_reason))
        self._items.append(item)
        return [
            {"type": "response.reasoning_text.done", **self._reasoning_position(), "text": text},
            {"type": "response.content_part.done", **self._reasoning_position(), "part": _reasoning_part(text)},
            {"type": "response.output_item.done", "output_index": 0, "item": item},
        ]

    def _begin_message(self) -> list[Json]:
        """Return the events that begin the message, and end the reasoning before it, unless it has begun."""
        if self._text:
            return []
        self._text.append("")
        events = self._end_reasoning()
        item: Json = {**_item(self._generation.parsed.id, None), "content": []}
        return [
            *events,
            {"type": "response.output_item.added", "output_index": len(self._items), "item": item},
            {"type": "response.content_part.added", **self._position(), "part": _part("")},
        ]

    def error_event(self, error: RequestError) -> Json:
        return {"type": "error", "code": error.kind, "message": str(error), "param": error.param}

    def encode(self, event: Json) -> bytes:
        numbered = {**event, "sequence_number": self._sequence_number}
        self._sequence_number += 1
        return f"event: {event['type']}\n".encode() + b"data: " + to_json(numbered) + b"\n\n"

    def _position(self) -> Json:
        item_id = _item_id(self._generation.parsed.id)
        return {"item_id": item_id, "output_index": len(self._items), "content_index": 0}

    def _reasoning_position(self) -> Json:
        return {"item_id": _reasoning_id(self._generation.parsed.id), "output_index": 0, "content_index": 0}


def _messages(input_: object) -> list[Message]:
    if isinstance(input_, str):
        return [Message(role="user", content=input_)]
    if not isinstance(input_, list):
        raise _invalid_input("input must be a string or a list of messages")
    messages: list[Message] = []
    reasoning: str | None = None  # of the assistant's message that follows
    for i, item in enumerate(input_):
        if isinstance(item, dict) and item.get("type") == "reasoning":
            reasoning = _reasoning_text(item, f"input[{i}]")
            continue
        message = _message(item, f"input[{i}]")
        if reasoning is not None and message.role == "assistant":
            message.reasoning = reasoning
        messages.append(message)
        reasoning = None
    return messages


def _reasoning_text(item: dict[str, object], path: str) -> str:
    """Return the text of an item of reasoning that a client sends back."""
    parts = item.get("content") or []
    if set(item) - REASONING_ITEM_FIELDS or not isinstance(parts, list):
        raise _invalid_input(f"{path} must be an item of reasoning as the router returned it")
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise _invalid_input(f'{path}.content must hold parts such as {{"type": "reasoning_text", "text": "…"}}')
    return "\n".join(map(str, texts))


def _message(item: object, path: str) -> Message:
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        kind = quote(str(item.get("type"))) if isinstance(item, dict) else "this"
        raise _invalid_input(
            f"{path} must be a message; {kind} is not supported here (for tools, use /v1/chat/completions)"
        )
    if set(item) - ITEM_FIELDS or item.get("role") not in ROLES:
        raise _invalid_input(
            f"{path} must have content and one of the roles {', '.join(ROLES)}; it may have type, id and status"
        )
    content = item.get("content")
    if isinstance(content, list):
        content = [_text_part(part, f"{path}.content[{i}]") for i, part in enumerate(content)]
    elif not isinstance(content, str):
        raise _invalid_input(f"{path}.content must be a string or a list of text parts")
    return Message(role=item["role"], content=content)


def _text_part(part: object, path: str) -> dict[str, str]:
    if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS or not isinstance(part.get("text"), str):
        raise _invalid_input(
            f'{path} must be a text part, {{"type": "input_text", "text": "…"}}; others are not supported'
        )
    if extra := set(part) - PART_FIELDS:
        raise _invalid_input(f"{path} has an unknown field {quote(min(extra))}")
    return {"type": "text", "text": part["text"]}


def _response_format(body: ResponseBody) -> ResponseFormat | None:
    if body.text is None or body.text.format is None:
        return None
    text_format = body.text.format
    schema = None
    if text_format.type == "json_schema":
        schema = JsonSchema(
            name=text_format.name,
            description=text_format.description,
            schema=text_format.schema_,
            strict=text_format.strict,
        )
    return ResponseFormat(type=text_format.type, json_schema=schema)


def _response(generation: Generation, status: str, output: list[Json]) -> Json:
    parsed = generation.parsed
    assert isinstance(parsed, ParsedResponseRequest)
    usage = generation.usage() if status != "in_progress" else None
    return {
        "id": parsed.id,
        "object": "response",
        "created_at": parsed.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": parsed.model,
        "output": output,
        "usage": usage and _usage(usage),
        **parsed.echoed,
    }


def _usage(usage: Json) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": usage["total_tokens"],
    }


def _item(response_id: str, choice: Delta | None) -> Json:
    """Return the message of a response; `choice` is None while it is being generated."""
    status = "in_progress" if choice is None else _status(choice.finish_reason)
    content = [] if choice is None else [_part(choice.text)]
    head = {"id": _item_id(response_id), "type": "message", "role": "assistant"}
    return {**head, "status": status, "content": content}


def _reasoning_item(response_id: str, text: str, status: str) -> Json:
    head = {"id": _reasoning_id(response_id), "type": "reasoning", "status": status, "summary": []}
    return {**head, "content": [_reasoning_part(text)]}


def _reasoning_part(text: str) -> Json:
    return {"type": "reasoning_text", "text": text}


def _reasoning_id(response_id: str) -> str:
    return f"rs_{response_id}"


def _item_id(response_id: str) -> str:
    return f"msg_{response_id}"


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def _invalid_input(message: str) -> BadRequest:
    return BadRequest(message, kind="invalid_messages", param="input")

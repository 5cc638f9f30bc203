"""/v1/responses, for text: its input as a chat, and the answer as a response, whole or as a stream of events.

Nothing is kept: a conversation comes whole with each request, as in /v1/chat/completions, which does the work.
"""

from dataclasses import dataclass, field

from pydantic_core import to_json

from pdserve.errors import BadRequest, RequestError
from pdserve.router.api.generation import Delta, Generation, Json
from pdserve.router.api.http_responses import error_data
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
OF_ITEM = {"type", "role", "content", "id", "status"}
OF_PART = {"type", "text", "annotations", "logprobs"}


@dataclass(frozen=True, kw_only=True)
class ResponsePlan(ParsedRequest):
    """`asked` is what the response repeats of its request."""

    asked: Json = field(default_factory=dict)


def chat_of(body: ResponseBody) -> ChatBody:
    """The same request to /v1/chat/completions.

    Raises:
        BadRequest: an item of `input` is no message, or its content no text.
    """
    messages = _messages(body.input)
    if body.instructions is not None:
        messages.insert(0, Message(role="system", content=body.instructions))
    return ChatBody(
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        response_format=_format(body),
        stream_options=StreamOptions() if body.stream else None,
        **{name: getattr(body, name) for name in GenerationBody.model_fields},
    )


def parse_response(body: ResponseBody, parsed: ParsedRequest) -> ResponsePlan:
    text = {"format": {"type": "text"}} if body.text is None else body.text.model_dump(by_alias=True, exclude_none=True)
    asked: Json = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "temperature": parsed.requests[0].sampling.temperature,
        "top_p": parsed.requests[0].sampling.top_p,
        "text": text,
        "user": body.user,
        "background": False,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "tool_choice": "auto",
        "tools": [],
        "truncation": "disabled",
    }
    return ResponsePlan(**vars(parsed), asked=asked)


def whole_response(generation: Generation, choices: list[Delta]) -> Json:
    [choice] = choices
    return _response(generation, _status(choice.finish_reason), [_item(generation.parsed.id, choice)])


class ResponseEvents(EventStream):
    """The stream of one response: OpenAI's named and numbered events."""

    end = b""

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation)
        self._number = 0
        self._text: list[str] = []
        self._finish_reason: str | None = None

    def events_of(self, delta: Delta) -> list[Json]:
        parsed = self._generation.parsed
        events: list[Json] = []
        if not self._text:
            started = _response(self._generation, "in_progress", [])
            item = {**_item(parsed.id, None), "content": []}
            events = [
                {"type": "response.created", "response": started},
                {"type": "response.in_progress", "response": started},
                {"type": "response.output_item.added", "output_index": 0, "item": item},
                {"type": "response.content_part.added", **self._place(), "part": _part("")},
            ]
        self._text.append(delta.text)
        self._finish_reason = delta.finish_reason
        if delta.text:
            new = {"delta": delta.text, "logprobs": []}
            events.append({"type": "response.output_text.delta", **self._place(), **new})
        return events

    def last_events(self) -> list[Json]:
        text, status = "".join(self._text), _status(self._finish_reason)
        item = _item(self._generation.parsed.id, Delta(0, text, [], self._finish_reason, [], [], []))
        return [
            {"type": "response.output_text.done", **self._place(), "text": text, "logprobs": []},
            {"type": "response.content_part.done", **self._place(), "part": _part(text)},
            {"type": "response.output_item.done", "output_index": 0, "item": item},
            {"type": f"response.{status}", "response": _response(self._generation, status, [item])},
        ]

    def error_event(self, error: RequestError) -> Json:
        told = error_data(error)["error"]
        assert isinstance(told, dict)
        return {"type": "error", "code": told["code"], "message": told["message"], "param": told["param"]}

    def encoded(self, event: Json) -> bytes:
        numbered = {**event, "sequence_number": self._number}
        self._number += 1
        return f"event: {event['type']}\n".encode() + b"data: " + to_json(numbered) + b"\n\n"

    def _place(self) -> Json:
        return {"item_id": _item_id(self._generation.parsed.id), "output_index": 0, "content_index": 0}


def _messages(given: object) -> list[Message]:
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    if not isinstance(given, list):
        raise _refusal("input must be a string or a list of messages")
    return [_message(item, f"input[{i}]") for i, item in enumerate(given)]


def _message(item: object, where: str) -> Message:
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        kind = quote(str(item.get("type"))) if isinstance(item, dict) else "this"
        raise _refusal(f"{where} must be a message; {kind} is not supported here, /v1/chat/completions knows tools")
    if set(item) - OF_ITEM or item.get("role") not in ROLES:
        raise _refusal(f"{where} must have content and a role of {', '.join(ROLES)}, and may have type, id and status")
    content = item.get("content")
    if isinstance(content, list):
        content = [_text_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    elif not isinstance(content, str):
        raise _refusal(f"{where}.content must be a string or a list of text parts")
    return Message(role=item["role"], content=content)


def _text_part(part: object, where: str) -> dict[str, str]:
    if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS or not isinstance(part.get("text"), str):
        raise _refusal(f'{where} must be a text part, {{"type": "input_text", "text": "…"}}; others are not supported')
    if extra := set(part) - OF_PART:
        raise _refusal(f"{where} has an unknown field {quote(min(extra))}")
    return {"type": "text", "text": part["text"]}


def _format(body: ResponseBody) -> ResponseFormat | None:
    if body.text is None or body.text.format is None:
        return None
    form = body.text.format
    schema = None
    if form.type == "json_schema":
        schema = JsonSchema(name=form.name, description=form.description, schema=form.schema_, strict=form.strict)
    return ResponseFormat(type=form.type, json_schema=schema)


def _response(generation: Generation, status: str, output: list[Json]) -> Json:
    parsed = generation.parsed
    assert isinstance(parsed, ResponsePlan)
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
        **parsed.asked,
    }


def _usage(usage: Json) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _item(response_id: str, choice: Delta | None) -> Json:
    """The one message of a response; None while it is under way."""
    status = "in_progress" if choice is None else _status(choice.finish_reason)
    content = [] if choice is None else [_part(choice.text)]
    head = {"id": _item_id(response_id), "type": "message", "role": "assistant"}
    return {**head, "status": status, "content": content}


def _item_id(response_id: str) -> str:
    return f"msg_{response_id}"


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def _refusal(message: str) -> BadRequest:
    return BadRequest(message, kind="invalid_messages", param="input")

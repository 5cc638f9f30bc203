"""/v1/responses for text and function calls: converts its bodies to chat bodies, and generations to responses and events.

The parser is that of /v1/chat/completions. A conversation is the input, after that of the response that it continues.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from pdserve.errors import BadRequest, RequestError
from pdserve.router.api.generation import Delta, Generation, Json
from pdserve.router.api.parsing import or_default, quote
from pdserve.router.api.requests import ParsedRequest
from pdserve.router.api.schemas import (
    CalledFunction,
    ChatBody,
    Function,
    FunctionTool,
    GenerationBody,
    JsonSchema,
    Message,
    ResponseBody,
    ResponseFormat,
    StreamOptions,
    Tool,
    ToolCall,
)
from pdserve.router.api.streaming import EventStream
from pdserve.router.text.parsers.output import ToolCallDelta

ROLES = ("system", "developer", "user", "assistant")
TEXT_PARTS = ("input_text", "output_text", "text")
REASONING_ITEM_FIELDS = {"type", "id", "status", "summary", "content", "encrypted_content"}
ITEM_FIELDS = {"type", "role", "content", "id", "status"}
PART_FIELDS = {"type", "text", "annotations", "logprobs"}
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
        BadRequest: an item of `input` is of another kind than text, reasoning, calls and their results.
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
        tools=[Tool(type="function", function=_function(tool)) for tool in body.tools or ()] or None,
        tool_choice=_tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls,
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
        "parallel_tool_calls": or_default(body.parallel_tool_calls, True),
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": keep is not None,
        "tool_choice": or_default(body.tool_choice, "auto"),
        "tools": [{"strict": False, **tool.model_dump(exclude_none=True)} for tool in body.tools or ()],
        "truncation": "disabled",
    }
    return ParsedResponseRequest(**vars(parsed), echoed=echoed, keep=keep)


def conversation(body: ResponseBody, earlier: Sequence[Json] = ()) -> list[Json]:
    """Return the messages of the conversation up to the answer, without instructions, which apply to one response."""
    return [*earlier, *(message.model_dump(exclude_none=True) for message in _messages(body.input))]


def answer_message(response: Json) -> Json:
    """Return a finished response as a message of the conversation."""
    items: list[Json] = response["output"]  # type: ignore[assignment]
    texts = dict.fromkeys(PARTS, "")
    calls = []
    for item in items:
        if item["type"] == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            calls.append({"id": item["call_id"], "type": "function", "function": function})
        else:
            texts[str(item["type"])] += "".join(part["text"] for part in item["content"])  # type: ignore[attr-defined]
    message: Json = {"role": "assistant", "content": texts["message"]}
    message |= {"reasoning": texts["reasoning"]} if texts["reasoning"] else {}
    return message | ({"tool_calls": calls} if calls else {})


def response_body(generation: Generation, choices: list[Delta]) -> Json:
    """Return the body of a whole response."""
    [choice] = choices
    status = _status(choice.finish_reason)
    items: list[Json] = []
    for kind, text in (("reasoning", choice.reasoning), ("message", choice.text)):
        if text or (kind == "message" and not choice.tool_calls):
            items.append(_filled(_head(kind, generation.parsed.id, len(items)), text, status))
    for call in choice.tool_calls:
        if call.id:
            arguments = "".join(one.arguments for one in choice.tool_calls if one.index == call.index)
            items.append(_filled(_call_head(call), arguments, status))
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
        parsed = self._generation.parsed
        assert isinstance(parsed, ParsedResponseRequest)
        if parsed.keep is not None:
            await parsed.keep(self._response)

    def delta_events(self, delta: Delta) -> list[Json]:
        events = self._begin_response()
        self._finish_reason = delta.finish_reason
        if delta.reasoning:
            events += self._extend("reasoning", delta.reasoning)
        if delta.text or self._generation.parsed.open_parser is None:
            events += self._extend("message", delta.text)
        for call in delta.tool_calls:
            if call.id:
                events += self._begin(_call_head(call))
            if call.arguments:
                assert self._open is not None
                events.append(self._open.delta(call.arguments))
        return events

    def final_events(self) -> list[Json]:
        kinds = {item["type"] for item in self._items} | ({self._open.kind} if self._open else set())
        has_answer = kinds & {"message", "function_call"}
        events = [*([] if has_answer else self._extend("message", "")), *self._end()]
        status = _status(self._finish_reason)
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
        events = [] if is_open else self._begin(_head(kind, self._generation.parsed.id, len(self._items)))
        assert self._open is not None
        return [*events, self._open.delta(text)] if text else events

    def _begin(self, head: Json) -> list[Json]:
        """Return the events that begin an item, and end the one before it."""
        events = self._end()
        self._open = _OpenItem(head, len(self._items))
        return [*events, *self._open.begin()]

    def _end(self) -> list[Json]:
        """Return the events that end the open item, if there is one."""
        if self._open is None:
            return []
        events = self._open.end(_status(self._finish_reason))
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


def _messages(input_: object) -> list[Message]:
    if isinstance(input_, str):
        return [Message(role="user", content=input_)]
    if not isinstance(input_, list):
        raise _invalid_input("input must be a string or a list of messages")
    messages: list[Message] = []
    reasoning: str | None = None  # of the assistant's message that follows
    for i, item in enumerate(input_):
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "reasoning":
            reasoning = _reasoning_text(item, f"input[{i}]")
            continue
        message = CALL_ITEMS[kind](item, f"input[{i}]") if kind in CALL_ITEMS else _message(item, f"input[{i}]")
        if message.tool_calls and reasoning is None and messages and messages[-1].role == "assistant":
            messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), *message.tool_calls]
            continue
        if reasoning is not None and message.role == "assistant":
            message.reasoning = reasoning
        messages.append(message)
        reasoning = None
    return messages


def _call_message(item: dict[str, Any], path: str) -> Message:
    """Return an earlier call as a message of the assistant."""
    name, arguments, call_id = _strings(item, path, ("name", "arguments", "call_id"))
    call = ToolCall(id=call_id, type="function", function=CalledFunction(name=name, arguments=arguments))
    return Message(role="assistant", tool_calls=[call])


def _result_message(item: dict[str, Any], path: str) -> Message:
    """Return the result of a call as a message of the tool."""
    output = item.get("output")
    if isinstance(output, list):
        parts = [_text_part(part, f"{path}.output[{i}]")["text"] for i, part in enumerate(output)]
        item = {**item, "output": "\n".join(parts)}
    output, call_id = _strings(item, path, ("output", "call_id"))
    return Message(role="tool", content=output, tool_call_id=call_id)


def _strings(item: dict[str, Any], path: str, names: tuple[str, ...]) -> list[str]:
    values = [item.get(name) for name in names]
    if set(item) - {"type", "id", "status", *names} or not all(isinstance(value, str) for value in values):
        raise _invalid_input(f"{path} must have {', '.join(names)} as strings; it may have type, id and status")
    return [str(value) for value in values]


CALL_ITEMS = {"function_call": _call_message, "function_call_output": _result_message}


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
            f"{path} must be a message, reasoning, a function_call or a function_call_output; {kind} is not supported"
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


def _function(tool: FunctionTool) -> Function:
    return Function(name=tool.name, description=tool.description, parameters=tool.parameters)


def _tool_choice(body: ResponseBody) -> object:
    """Return `tool_choice` in the form of /v1/chat/completions."""
    choice = body.tool_choice
    if not isinstance(choice, dict):
        return choice
    for tool in body.tools or ():
        if choice == {"type": "function", "name": tool.name}:
            return {"type": "function", "function": {"name": tool.name}}
    message = 'tool_choice must be "none", "auto", "required", or {"type": "function", "name": …} with a name of tools'
    raise BadRequest(message, kind="invalid_parameter", param="tool_choice")


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


def _invalid_input(message: str) -> BadRequest:
    return BadRequest(message, kind="invalid_messages", param="input")

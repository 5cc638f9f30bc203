"""Bodies of /v1/responses: converted to those of /v1/chat/completions, and the messages of a conversation.

A conversation is the input, after that of the response that it continues.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pdserve.errors import BadRequest, InvalidParameter
from pdserve.router.api.generation import Json
from pdserve.router.api.parsing import check_known, checked_fields, quote
from pdserve.router.api.schemas import (
    CalledFunction,
    ChatBody,
    Function,
    GenerationBody,
    JsonSchema,
    Message,
    ResponseFormat,
    StreamOptions,
    Tool,
    ToolCall,
)
from pdserve.router.dialects.responses.schemas import FunctionTool, ResponseBody

# Fields of chat completions in errors → those of responses.
FIELDS = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "tool_call_id": "call_id",
}
ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
ROLES = ("system", "developer", "user", "assistant")
TEXT_PARTS = ("input_text", "output_text", "text")
REASONING_ITEM_FIELDS = {"type", "id", "status", "summary", "content", "encrypted_content"}
ITEM_FIELDS = {"type", "role", "content", "id", "status", "phase"}
PART_FIELDS = {"type", "text", "annotations", "logprobs", "parsed"}  # the last by OpenAI's library, as the next
CALL_FIELDS = {"type", "id", "status", "parsed_arguments"}


@checked_fields()
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
        store=body.store,
        **{name: getattr(body, name) for name in GenerationBody.model_fields},
    )


def conversation(body: ResponseBody) -> list[Json]:
    """Return the messages of the input; instructions apply to one response, and are none of them."""
    return [message.model_dump(exclude_none=True) for message in _messages(body.input)]


def answer_message(response: Mapping[str, Any]) -> Json:
    """Return a finished response as a message of the conversation."""
    texts = {"reasoning": "", "message": ""}
    calls = []
    for item in response["output"]:
        if item["type"] == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            calls.append({"id": item["call_id"], "type": "function", "function": function})
        else:
            texts[item["type"]] += "".join(part["text"] for part in item["content"])
    message: Json = {"role": "assistant", "content": texts["message"]}
    message |= {"reasoning": texts["reasoning"]} if texts["reasoning"] else {}
    return message | ({"tool_calls": calls} if calls else {})


def items(response_id: str, messages: Sequence[Json]) -> list[Json]:
    """Return messages of a conversation as the items of an input, each with an id."""
    found = [item for message in messages for item in _items(message)]
    return [{"id": f"{ID_PREFIXES[str(item['type'])]}_{response_id}_{i}", **item} for i, item in enumerate(found)]


def _items(message: Json) -> Iterator[Json]:
    """Yield the items of a message: its reasoning, its text and its calls, or the result of one."""
    role, done = message["role"], {"status": "completed"}
    content: Any = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    calls: Any = message.get("tool_calls") or ()
    if role == "tool":
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": "\n".join(texts), **done}
        return
    if reasoning := message.get("reasoning"):
        yield {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": reasoning}], **done}
    if any(texts) or not calls:
        kind: Json = {"type": "output_text", "annotations": []} if role == "assistant" else {"type": "input_text"}
        yield {"type": "message", "role": role, "content": [{**kind, "text": text} for text in texts], **done}
    for call in calls:
        function = call["function"]
        yield {"type": "function_call", "call_id": call["id"], **function, **done}


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
            text = _reasoning_text(item, f"input[{i}]")
            reasoning = text if reasoning is None else f"{reasoning}\n{text}"
            continue
        convert = CALL_ITEMS.get(kind, _message) if isinstance(kind, str) else _message
        message = convert(item, f"input[{i}]")
        if message.tool_calls and reasoning is None and messages and messages[-1].role == "assistant":
            if messages[-1].tool_calls is None:
                messages[-1].tool_calls = []
            messages[-1].tool_calls += message.tool_calls
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
    check_known(item, {*CALL_FIELDS, *names}, path)
    values = [item.get(name) for name in names]
    if not all(isinstance(value, str) for value in values):
        raise _invalid_input(f"{path} must have {', '.join(names)} as strings; it may have type, id and status")
    return [str(value) for value in values]


CALL_ITEMS = {"function_call": _call_message, "function_call_output": _result_message}


def _reasoning_text(item: dict[str, object], path: str) -> str:
    """Return the text of an item of reasoning that a client sends back."""
    check_known(item, REASONING_ITEM_FIELDS, path)
    parts = item.get("content") or []
    if not isinstance(parts, list):
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
    check_known(item, ITEM_FIELDS, path)
    if item.get("role") not in ROLES:
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
    check_known(part, PART_FIELDS, path)
    return {"type": "text", "text": part["text"]}


def _function(tool: FunctionTool) -> Function:
    return Function.model_validate(tool.model_dump(exclude={"type"}))


def _tool_choice(body: ResponseBody) -> object:
    """Return `tool_choice` in the form of /v1/chat/completions."""
    named = {tool.name: {"type": "function", "function": {"name": tool.name}} for tool in body.tools or ()}
    match body.tool_choice:
        case {"type": "function", "name": str(name), **rest} if name in named and not rest:
            return named[name]
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [_, *_] as tools, **rest} if (
            not rest and len(tools) <= len(named)
        ):
            allowed = [one for name, one in named.items() if {"type": "function", "name": name} in tools]
            if len(allowed) == len(tools):
                return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
        case choice if not isinstance(choice, dict):
            return choice
    message = (
        'tool_choice must be "none", "auto", "required", {"type": "function", "name": …}, or {"type": "allowed_tools", '
        '"mode": "auto" or "required", "tools": [{"type": "function", "name": …}, …]}, with names of tools'
    )
    raise InvalidParameter("tool_choice", message)


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


def _invalid_input(message: str) -> BadRequest:
    return BadRequest(message, kind="invalid_messages", param="input")

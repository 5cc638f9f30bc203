"""/v1/messages, Anthropic's API: converts its bodies to chat bodies, and generations to messages and their events.

The chat parser validates what is common to both. Thinking blocks of earlier turns are given to the chat template, which may
leave them out of the prompt, and `cache_control` is accepted without effect: every prefix is cached.
"""

import json
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json, to_json

from pdserve.errors import BadRequest, InvalidParameter, RequestError
from pdserve.router.api.chat import invalid_messages
from pdserve.router.api.generation import Delta, Generation, Json
from pdserve.router.api.parsing import check_known, checked_fields, json_type, quote
from pdserve.router.api.schemas import (
    CalledFunction,
    ChatBody,
    Function,
    JsonSchema,
    Message,
    ResponseFormat,
    StreamOptions,
    Thinking,
    Tool,
    ToolCall,
)
from pdserve.router.api.streaming import EventStream, whole_arguments
from pdserve.router.dialects.messages.schemas import CountTokensBody, MessagesBody, OutputConfig
from pdserve.router.text.parsers.output import ToolCallDelta, in_order

# Fields of chat completions in errors → those of messages.
FIELDS = {
    "max_completion_tokens": "max_tokens",
    "parameters": "input_schema",
    "prompt": "messages",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "tool_call_id": "tool_use_id",
    "user": "metadata.user_id",
}
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
# Fields of a tool and of objects of the body.
TOOL_FIELDS = {"type", "name", "description", "input_schema", "strict"}
TOOL_HINTS = {"allowed_callers", "cache_control", "defer_loading", "eager_input_streaming", "input_examples"}
CHOICE_FIELDS = {"type", "name", "disable_parallel_tool_use"}
THINKING_FIELDS = {"type", "budget_tokens", "display"}
THREAD_KIND = "thread_unsupported_request"  # whereupon clients send all messages themselves
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Fields of a block by its type: required ones, and those without effect.
BLOCK_FIELDS: dict[str, tuple[set[str], set[str]]] = {
    "text": ({"text"}, {"citations"}),
    "tool_use": ({"id", "name", "input"}, {"caller"}),
    "tool_result": ({"tool_use_id"}, {"content", "is_error"}),
    "thinking": ({"thinking"}, {"signature"}),
    "redacted_thinking": ({"data"}, set()),
}
BLOCKS_OF_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}


# ---- the request --------------------------------------------------------------------------------------------------


@checked_fields()
def to_chat_body(body: MessagesBody, *, knows_effort: bool) -> ChatBody:
    """Return the equivalent body of /v1/chat/completions.

    A last message of the assistant is continued by the answer.

    Args:
        knows_effort: the chat template has a variable for `output_config.effort`, which is without effect otherwise.

    Raises:
        BadRequest: a message, a tool or the choice of a tool is invalid, or not supported.
    """
    if body.thread is not None:
        message = "thread is not supported: this server keeps no conversations; send all of their messages"
        raise BadRequest(message, kind=THREAD_KIND, param="thread")
    return ChatBody(
        model=body.model,
        max_completion_tokens=body.max_tokens,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        stop=body.stop_sequences,
        stream=body.stream,
        stream_options=StreamOptions() if body.stream else None,
        user=_user(body.metadata),
        response_format=_response_format(body.output_config),
        **_prompt(body, body.max_tokens, knows_effort=knows_effort),
    )


@checked_fields()
def to_counted_body(body: CountTokensBody, *, knows_effort: bool) -> ChatBody:
    """Return the chat body whose prompt has the tokens to count. Takes and raises the same."""
    return ChatBody(model=body.model, **_prompt(body, None, knows_effort=knows_effort))


def _prompt(body: CountTokensBody, max_tokens: int | None, *, knows_effort: bool) -> dict[str, Any]:
    effort = body.output_config.effort if body.output_config and knows_effort else None
    return {
        **_conversation(body),
        **_thinking(body.thinking or {}, max_tokens),
        "reasoning_effort": "xhigh" if effort == "max" else effort,
    }


def _response_format(config: OutputConfig | None) -> ResponseFormat | None:
    if config is None or config.format is None:
        return None
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=config.format.schema_))


def _thinking(thinking: dict[str, Any], max_tokens: int | None) -> dict[str, Any]:
    """Return the fields that turn reasoning on, perhaps within a budget, or off; empty: the chat template decides."""
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if not thinking:
        return {}
    check_known(thinking, THINKING_FIELDS, "thinking")
    has_budget = isinstance(budget, int) and not isinstance(budget, bool) and 1 <= budget < (max_tokens or budget + 1)
    if kind not in ("enabled", "adaptive", "disabled") or (kind == "enabled") != has_budget:
        message = (
            'thinking must be {"type": "enabled", "budget_tokens": …} with a number of tokens less than max_tokens, '
            '{"type": "adaptive"}, or {"type": "disabled"}'
        )
        raise InvalidParameter("thinking", message)
    return {"thinking": Thinking(type=kind), "thinking_token_budget": budget}


def _conversation(body: CountTokensBody) -> dict[str, Any]:
    """Return the fields of messages and tools."""
    messages = [*_system(body.system), *_messages(body.messages)]
    choice = body.tool_choice or {}
    check_known(choice, CHOICE_FIELDS, "tool_choice")
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())]
    return {
        "messages": messages,
        "continue_final_message": messages[-1].role == "assistant" or None,
        "tools": tools or None,
        "tool_choice": _tool_choice(choice, [tool.function.name for tool in tools]),
        "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
    }


def _system(system: object) -> list[Message]:
    if system is None or system == []:
        return []
    return [Message(role="system", content="\n".join(_texts(system, "system")))]


def _messages(messages: list[Any]) -> list[Message]:
    converted: list[Message] = []
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            raise invalid_messages(f"{path} must be an object with role and content")
        check_known(message, {"role", "content"}, path)
        if not isinstance(message["role"], str) or message["role"] not in BLOCKS_OF_ROLE:
            raise invalid_messages(f"{path}.role must be user, assistant or system")
        blocks = list(_blocks(message["content"], f"{path}.content", BLOCKS_OF_ROLE[message["role"]]))
        if message["role"] == "assistant":
            converted.append(_assistant_message(blocks))
        elif not blocks:
            raise invalid_messages(f"{path}.content must hold at least one block")
        else:
            converted += _user_messages(message["role"], blocks, path)
    if not converted:
        raise invalid_messages("messages must hold at least one message")
    return converted


def _user_messages(role: str, blocks: list[dict[str, Any]], path: str) -> Iterator[Message]:
    """Yield one message for each result of a tool, and one of the role for the texts between them."""
    texts: list[str] = []
    for index, block in enumerate(blocks):
        if block["type"] == "text":
            texts.append(block["text"])
            continue
        if texts:
            yield Message(role=role, content="\n".join(texts))
            texts = []
        content = "\n".join(_texts(block.get("content") or "", f"{path}.content[{index}].content"))
        yield Message(role="tool", content=content, tool_call_id=block["tool_use_id"])
    if texts:
        yield Message(role=role, content="\n".join(texts))


def _assistant_message(blocks: list[dict[str, Any]]) -> Message:
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    calls = [
        ToolCall(
            id=block["id"],
            type="function",
            function=CalledFunction(name=block["name"], arguments=json.dumps(block["input"], ensure_ascii=False)),
        )
        for block in blocks
        if block["type"] == "tool_use"
    ]
    reasoning = "\n".join(thoughts) or None
    return Message(role="assistant", content="\n".join(texts), reasoning=reasoning, tool_calls=calls or None)


def _texts(content: object, path: str) -> list[str]:
    return [block["text"] for block in _blocks(content, path, ("text",))]


def _blocks(content: object, path: str, types: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield the valid blocks of a content, which may be a string.

    Raises:
        BadRequest: a block has another type, or lacks a field, or has an unknown or an invalid one.
    """
    if isinstance(content, str):
        yield {"type": "text", "text": content}
        return
    if not isinstance(content, list):
        raise invalid_messages(f"{path} must be a string or a list of blocks, not {json_type(content)}")
    for index, block in enumerate(content):
        where = f"{path}[{index}]"
        if not isinstance(block, dict) or block.get("type") not in types:
            kind = quote(str(block.get("type"))) if isinstance(block, dict) else json_type(block)
            message = f"{where} must be a block of the type {' or '.join(types)}; {kind} is not supported here"
            raise BadRequest(message, kind="unsupported_content", param="messages")
        required, optional = BLOCK_FIELDS[block["type"]]
        if missing := required - set(block):
            raise invalid_messages(f"{where}.{min(missing)} is required")
        check_known(block, {"type", "cache_control", *required, *optional}, where)
        for name in required:
            expected = dict if name == "input" else str
            if not isinstance(block[name], expected):
                kind = "an object" if expected is dict else "a string"
                raise invalid_messages(f"{where}.{name} must be {kind}, not {json_type(block[name])}")
        yield block


def _tool(tool: object, path: str) -> Tool:
    fields = tool if isinstance(tool, dict) else {}
    kind = fields.get("type")
    if kind not in (None, "custom"):
        message = f"{path} is a tool of the server, {quote(str(kind))}, which is not supported; send functions"
        raise BadRequest(message, kind="unsupported_parameter", param="tools")
    check_known(fields, TOOL_FIELDS | TOOL_HINTS, path)
    name, schema, description = fields.get("name"), fields.get("input_schema"), fields.get("description")
    strict = fields.get("strict")
    if not (isinstance(name, str) and isinstance(schema, dict) and isinstance(description, str | None)):
        message = f"{path} must have a name and an input_schema, an object, and may have a description"
        raise InvalidParameter("tools", message)
    if not isinstance(strict, bool | None):
        raise InvalidParameter("tools", f"{path}.strict must be a boolean")
    function = Function(name=name, description=description, parameters=schema, strict=strict)
    return Tool(type="function", function=function)


def _tool_choice(choice: dict[str, Any], names: list[str]) -> object:
    kind = choice.get("type")
    if not choice:
        return None
    if kind == "tool" and choice.get("name") in names:
        return {"type": "function", "function": {"name": choice["name"]}}
    if not isinstance(kind, str) or kind not in CHOICES or (kind == "any" and not names):
        message = (
            'tool_choice must be {"type": "auto"}, "any", "none", or {"type": "tool", "name": …} with a name of tools'
        )
        raise InvalidParameter("tool_choice", message)
    return CHOICES[kind]


def _user(metadata: dict[str, Any] | None) -> str | None:
    user = (metadata or {}).get("user_id")
    if user is not None and not isinstance(user, str):
        raise InvalidParameter("metadata", "metadata.user_id must be a string")
    return user


# ---- the answer ---------------------------------------------------------------------------------------------------


def message_body(generation: Generation, choices: list[Delta]) -> Json:
    """Return the body of a whole message."""
    [choice] = choices
    content: list[Json] = [_thinking_block(choice.reasoning)] if choice.reasoning else []
    arguments = whole_arguments(choice.tool_calls)
    for part in in_order(choice.text, choice.tool_calls):
        if isinstance(part, str):
            content.append(_text_block(part))
        elif part.id:
            content.append(_tool_block(part, _input_of(arguments[part.index])))
    return {**_message(generation, content), **_stop(generation, choice.finish_reason)}


class MessageEventStream(EventStream):
    """The stream of one message: named events, one content block after the other."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation)
        self._num_blocks = 0
        self._open: int | str | None = None  # the block being sent: `thinking`, `text`, or the index of a call
        self._has_begun = False
        self._finish_reason: str | None = None

    def delta_events(self, delta: Delta) -> list[Json]:
        events: list[Json] = []
        if not self._has_begun:
            self._has_begun = True
            started: Json = {**_message(self._generation, []), "stop_reason": None, "stop_sequence": None}
            start: Json = {"type": "message_start", "message": started}
            ping: Json = {"type": "ping"}
            events = [start, ping]
        if delta.reasoning:
            events += self._begin("thinking", _thinking_block(""))
            events.append(self._delta({"type": "thinking_delta", "thinking": delta.reasoning}))
        for part in in_order(delta.text, delta.tool_calls):
            if isinstance(part, str):
                events += self._begin("text", _text_block(""))
                events.append(self._delta({"type": "text_delta", "text": part}))
                continue
            events += self._begin(part.index, _tool_block(part, {})) if part.id else []
            if part.arguments:
                events.append(self._delta({"type": "input_json_delta", "partial_json": part.arguments}))
        self._finish_reason = delta.finish_reason
        return events

    def final_events(self) -> list[Json]:
        usage: Json = {"output_tokens": self._generation.completion_tokens}
        stop: Json = {"type": "message_delta", "delta": _stop(self._generation, self._finish_reason), "usage": usage}
        end: Json = {"type": "message_stop"}
        return [*self._end(), stop, end]

    comment = b'event: ping\ndata: {"type": "ping"}\n\n'

    def error_event(self, error: RequestError) -> Json:
        return error_body(error)

    def encode(self, event: Json) -> bytes:
        return f"event: {event['type']}\n".encode() + b"data: " + to_json(event) + b"\n\n"

    def _begin(self, block: int | str, content: Json) -> list[Json]:
        """Return the events that begin a block, unless it is the open one."""
        if block == self._open:
            return []
        events = self._end()
        self._open = block
        return [*events, {"type": "content_block_start", "index": self._num_blocks, "content_block": content}]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}

    def _end(self) -> list[Json]:
        """Return the events that end the open block, if there is one."""
        if self._open is None:
            return []
        signature = [self._delta({"type": "signature_delta", "signature": ""})] if self._open == "thinking" else []
        self._open = None
        self._num_blocks += 1
        return [*signature, {"type": "content_block_stop", "index": self._num_blocks - 1}]


def _input_of(arguments: str) -> Json:
    """Return the arguments of a call; of those that `max_tokens` has cut off, what is whole, as clients do with a stream."""
    found: Json = from_json(arguments or "{}", allow_partial=True)
    return found


def error_body(error: RequestError, request_id: str = "") -> Json:
    """Return an error in Anthropic's format, with the request's id except in a stream."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    details = {"details": {"error_code": THREAD_KIND, "unsupported": ["thread"]}} if error.kind == THREAD_KIND else {}
    body: Json = {"type": "error", "error": {"type": kind, "message": str(error), **details}}
    return {**body, "request_id": request_id} if request_id else body


def _message(generation: Generation, content: list[Json]) -> Json:
    head = {"id": generation.id, "type": "message", "role": "assistant", "model": generation.model}
    return {**head, "content": content, "usage": _usage(generation)}


def _usage(generation: Generation) -> Json:
    """Return the usage so far; `input_tokens` are those that no cache had."""
    cached = generation.cached_tokens
    return {
        "input_tokens": generation.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": generation.completion_tokens,
    }


def _stop(generation: Generation, finish_reason: str | None) -> Json:
    matched = generation.choices[0].text.matched_stop
    reason = "stop_sequence" if matched else STOP_REASONS.get(finish_reason or "", "end_turn")
    return {"stop_reason": reason, "stop_sequence": matched}


def _text_block(text: str) -> Json:
    return {"type": "text", "text": text}


def _thinking_block(text: str) -> Json:
    """Return a block of reasoning. Its signature is empty: clients may send back any, or other reasoning."""
    return {"type": "thinking", "thinking": text, "signature": ""}


def _tool_block(call: ToolCallDelta, arguments: Json) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}

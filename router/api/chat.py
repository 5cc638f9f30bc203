"""A conversation as chat templates want it: its messages, and the tools that the answer may call."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pdserve.errors import BadRequest
from pdserve.router.api.parsing import json_type, or_default, quote
from pdserve.router.api.schemas import ChatBody, Function, Message, Tool, ToolCall
from pdserve.router.text.tokenizer import Tokenizer

TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Tools:
    """What an answer may call: by these names, in this format, and only once if `single`. If it has to, `grammar` says so."""

    format: str
    names: frozenset[str]
    single: bool
    grammar: str = ""


def chat_messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """The messages as chat templates want them: text parts joined by line breaks, OpenAI's `developer` as `system`, the
    arguments of calls as objects."""
    rendered: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if message.role not in ("system", "developer", "user", "assistant", "tool"):
            text = (
                f"messages[{index}].role must be system, developer, user, assistant or tool, not {quote(message.role)}"
            )
            raise BadRequest(text, kind="invalid_messages", param="messages")
        if (message.tool_call_id is not None) != (message.role == "tool"):
            text = f"messages[{index}]: tool_call_id belongs to messages of the role tool, and to each of them"
            raise BadRequest(text, kind="invalid_messages", param="messages")
        if message.tool_calls and message.role != "assistant":
            text = f"messages[{index}]: tool_calls belong to messages of the role assistant"
            raise BadRequest(text, kind="invalid_messages", param="messages")
        calls = [_called(call, index) for call in message.tool_calls or ()]
        content = "" if calls and message.content is None else _content(message.content, index)
        one: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
        one |= {"tool_calls": calls} if calls else {}
        one |= {name: value for name in ("name", "tool_call_id") if (value := getattr(message, name)) is not None}
        rendered.append(one)
    if not rendered:
        raise BadRequest("messages must hold at least one message", kind="invalid_messages", param="messages")
    return rendered


def tools_of(body: ChatBody, tokenizer: Tokenizer) -> Tools | None:
    """What the answer may call, or None.

    Raises:
        BadRequest: `tools` or `tool_choice` is not as it should be, or the model knows no tools.
    """
    choice = or_default(body.tool_choice, "auto" if body.tools else "none")
    names = [tool.function.name for tool in body.tools or ()]
    for name in names:
        if not TOOL_NAME.fullmatch(name):
            message = (
                f"a function's name must have 1 to 64 characters out of A-Z, a-z, 0-9, '_' and '-', not {quote(name)}"
            )
            raise BadRequest(message, kind="invalid_parameter", param="tools")
    if len(set(names)) < len(names):
        raise BadRequest("each function of tools must have a name of its own", kind="invalid_parameter", param="tools")
    forced = _forced(choice, names)
    if choice == "none" or not names:
        return None
    form = tokenizer.tool_format
    if form is None:
        message = (
            "this model's chat template teaches no tool calls in a format that this router reads (Hermes's, as Qwen's, and "
            "Llama 3's JSON); leave tools out"
        )
        raise BadRequest(message, kind="unsupported_parameter", param="tools")
    single = body.parallel_tool_calls is False
    return Tools(
        form,
        frozenset(names),
        single,
        _grammar(form, [tool for tool in body.tools or () if tool.function.name in forced]),
    )


def _forced(choice: object, names: list[str]) -> list[str]:
    """The functions of which the answer has to call one; none if it need not call any."""
    if choice in ("none", "auto"):
        return []
    if choice == "required" and names:
        return names
    for name in names:
        if choice == {"type": "function", "function": {"name": name}}:
            return [name]
    one = '{"type": "function", "function": {"name": …}} with the name of one of the tools'
    message = f'tool_choice must be "none", "auto", "required", or {one}'
    raise BadRequest(message, kind="invalid_parameter", param="tool_choice")


def _grammar(form: str, tools: list[Tool]) -> str:
    """That the answer is a call of one of these, as `engine/grammar.py` wants it; empty for none."""
    if not tools:
        return ""
    definitions: dict[str, Any] = {}
    calls = [_call_schema(form, tool.function, definitions) for tool in tools]
    schema = {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), **({"$defs": definitions} if definitions else {})}
    around = {"begin": "<tool_call>\n", "end": "\n</tool_call>"} if form == "hermes" else {}
    return json.dumps({"json": schema, **around})


def _call_schema(form: str, function: Function, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a call. What `parameters` defines goes to `definitions`, under names that no other tool uses."""
    parameters = dict(function.parameters or {"type": "object"})
    own = parameters.pop("$defs", {})
    if parameters.setdefault("type", "object") != "object" or not isinstance(own, dict):
        message = f"the parameters of {function.name} must be the JSON schema of an object"
        raise BadRequest(message, kind="invalid_parameter", param="tools")
    definitions |= {f"{function.name}.{name}": _renamed(one, function.name) for name, one in own.items()}
    arguments = "arguments" if form == "hermes" else "parameters"
    properties = {"name": {"const": function.name}, arguments: _renamed(parameters, function.name)}
    return {"type": "object", "properties": properties, "required": ["name", arguments], "additionalProperties": False}


def _renamed(schema: Any, name: str) -> Any:
    """The schema with references to `$defs` as `_call_schema` names these."""
    if isinstance(schema, list):
        return [_renamed(one, name) for one in schema]
    if not isinstance(schema, dict):
        return schema
    begin = "#/$defs/"
    return {
        key: f"{begin}{name}.{value.removeprefix(begin)}"
        if key == "$ref" and isinstance(value, str) and value.startswith(begin)
        else _renamed(value, name)
        for key, value in schema.items()
    }


def _called(call: ToolCall, index: int) -> dict[str, Any]:
    """A call of an earlier answer, with its arguments as an object, which is what templates spell in their own way."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        message = f"messages[{index}]: the arguments of a tool call must be a JSON object in a string"
        raise BadRequest(message, kind="invalid_messages", param="messages")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _content(content: object, index: int) -> str:
    if isinstance(content, str):
        return content
    where = f"messages[{index}].content"
    if not isinstance(content, list):
        message = f"{where} must be a string or a list of text parts, not {json_type(content)}"
        raise BadRequest(message, kind="invalid_messages", param="messages")
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        if set(part) == {"type", "text"}:
            return str(part["text"])
        extra = quote(min(set(part) - {"type", "text"}))
        raise BadRequest(f"{where} has an unknown field {extra}", kind="unknown_field", param="messages")
    kind = quote(str(part.get("type"))) if isinstance(part, dict) else json_type(part)
    message = f'{where} must be a text part, {{"type": "text", "text": "…"}}; {kind} is not supported'
    raise BadRequest(message, kind="unsupported_content", param="messages")

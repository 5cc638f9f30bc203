"""Chat bodies: messages in the form that chat templates expect, and the tools that the model may call."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pdserve.errors import BadRequest
from pdserve.router.api.parsing import json_type, or_default, quote
from pdserve.router.api.schemas import ChatBody, Function, Message, Tool, ToolCall
from pdserve.router.text.parsers.json_calls import HermesParser, Llama3JsonParser
from pdserve.router.text.parsers.tool_parser import ToolParser, Tools
from pdserve.router.text.tokenizer import REASONING_VARIABLES, TemplateOptions, Tokenizer

FORCED_PARSER = (
    Llama3JsonParser  # of calls without tags of their own: plain JSON, which a grammar can force on any model
)
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class AllowedTools:
    """The tools that the model may call.

    Attributes:
        parser: the parser of the calls.
        tools: the functions.
        grammar: the grammar that forces a call, see `grammars/specification.py`; empty if calls are optional.
    """

    parser: type[ToolParser]
    tools: Tools
    grammar: str = ""


def template_messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Convert messages to the form that chat templates expect.

    Text parts are joined by line breaks, OpenAI's role `developer` becomes `system`, and the arguments of tool calls become
    objects.

    Raises:
        BadRequest: a message is invalid, or there is none.
    """
    rendered: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        _check_role(message, index)
        calls = [_template_call(call, index) for call in message.tool_calls or ()]
        content = "" if calls and message.content is None else _text_of(message.content, index)
        item: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
        item |= {"tool_calls": calls} if calls else {}
        item |= {name: value for name in ("name", "tool_call_id") if (value := getattr(message, name)) is not None}
        reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
        if reasoning is not None:
            item |= dict.fromkeys(REASONING_VARIABLES, reasoning)
        rendered.append(item)
    if not rendered:
        raise _invalid_messages("messages must hold at least one message")
    return rendered


def template_options(body: ChatBody, tokenizer: Tokenizer) -> TemplateOptions:
    """Return how the conversation of a body is rendered.

    Raises:
        BadRequest: the options contradict each other or the messages.
    """
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt exclude each other; send one of the two"
        raise BadRequest(message, kind="invalid_parameter", param="continue_final_message")
    if continues and body.messages and body.messages[-1].role != "assistant":
        message = "continue_final_message needs a last message with role assistant, which the answer continues"
        raise BadRequest(message, kind="invalid_parameter", param="continue_final_message")
    template, variables = body.chat_template or "", dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables = tokenizer.effort_variables(body.reasoning_effort, template) | variables
    if body.thinking is not None:
        is_on = body.thinking.type != "disabled"
        if is_on and tokenizer.parsers.reasoning is None:
            message = 'this model does not reason; leave thinking out, or send {"type": "disabled"}'
            raise BadRequest(message, kind="unsupported_parameter", param="thinking")
        variables = tokenizer.thinking_variables(template, is_on=is_on) | variables
    adds_prompt = or_default(body.add_generation_prompt, not continues)
    return TemplateOptions(adds_prompt, continues, variables, body.chat_template or "")


def parse_tools(body: ChatBody, tokenizer: Tokenizer) -> AllowedTools | None:
    """Return the tools that the model may call, or None if there are none.

    Raises:
        BadRequest: `tools` or `tool_choice` is invalid, or the chat template supports no tools.
    """
    choice = or_default(body.tool_choice, "auto" if body.tools else "none")
    names = [tool.function.name for tool in body.tools or ()]
    for name in names:
        if not TOOL_NAME.fullmatch(name):
            raise _invalid_tools(
                f"a function name must have 1 to 64 of the characters A-Z, a-z, 0-9, '_' and '-', not {quote(name)}"
            )
    if len(set(names)) < len(names):
        raise _invalid_tools("the functions in tools must have different names")
    forced = _forced_functions(choice, names)
    if choice == "none" or not names:
        return None
    parser = tokenizer.parsers.tools
    if forced and parser is not HermesParser:
        parser = FORCED_PARSER
    if parser is None:
        message = (
            "this model's chat template has no tool-call format that this router supports; leave tools out, or force a call "
            'with tool_choice "required"'
        )
        raise BadRequest(message, kind="unsupported_parameter", param="tools")
    schemas = {tool.function.name: tool.function.parameters or {} for tool in body.tools or ()}
    grammar = _forced_call_grammar(parser, [tool for tool in body.tools or () if tool.function.name in forced])
    return AllowedTools(parser, Tools(schemas, single_call=body.parallel_tool_calls is False), grammar)


def _forced_functions(choice: object, names: list[str]) -> list[str]:
    """Return the functions of which the model must call one; empty if calls are optional."""
    if choice in ("none", "auto"):
        return []
    if choice == "required" and names:
        return names
    for name in names:
        if choice == {"type": "function", "function": {"name": name}}:
            return [name]
    named = '{"type": "function", "function": {"name": …}} with the name of one of the tools'
    message = f'tool_choice must be "none", "auto", "required", or {named}'
    raise BadRequest(message, kind="invalid_parameter", param="tool_choice")


def _forced_call_grammar(parser: type[ToolParser], tools: list[Tool]) -> str:
    """Return the grammar of a call of one of the tools; empty if there are none."""
    if not tools:
        return ""
    definitions: dict[str, Any] = {}
    calls = [_call_schema(parser, tool.function, definitions) for tool in tools]
    schema = {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), **({"$defs": definitions} if definitions else {})}
    tags = {"begin": "<tool_call>\n", "end": "\n</tool_call>"} if parser is HermesParser else {}
    return json.dumps({"json": schema, **tags})


def _call_schema(parser: type[ToolParser], function: Function, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a call. The `$defs` of its parameters are added to `definitions` under unique names."""
    parameters = dict(function.parameters or {"type": "object"})
    own_definitions = parameters.pop("$defs", {})
    if parameters.setdefault("type", "object") != "object" or not isinstance(own_definitions, dict):
        raise _invalid_tools(f"the parameters of {function.name} must be the JSON schema of an object")
    for name, definition in own_definitions.items():
        definitions[f"{function.name}.{name}"] = _qualify_refs(definition, function.name)
    arguments = "arguments" if parser is HermesParser else "parameters"
    properties = {"name": {"const": function.name}, arguments: _qualify_refs(parameters, function.name)}
    return {"type": "object", "properties": properties, "required": ["name", arguments], "additionalProperties": False}


def _qualify_refs(schema: Any, function_name: str) -> Any:
    """Return the schema with its references to `$defs` renamed as `_call_schema` renames the definitions."""
    if isinstance(schema, list):
        return [_qualify_refs(item, function_name) for item in schema]
    if not isinstance(schema, dict):
        return schema
    prefix = "#/$defs/"
    return {
        key: f"{prefix}{function_name}.{value.removeprefix(prefix)}"
        if key == "$ref" and isinstance(value, str) and value.startswith(prefix)
        else _qualify_refs(value, function_name)
        for key, value in schema.items()
    }


def _check_role(message: Message, index: int) -> None:
    """Raise BadRequest if the role is unknown or the message has a field of another role."""
    if message.role not in ("system", "developer", "user", "assistant", "tool"):
        raise _invalid_messages(
            f"messages[{index}].role must be system, developer, user, assistant or tool, not {quote(message.role)}"
        )
    if (message.tool_call_id is not None) != (message.role == "tool"):
        raise _invalid_messages(f"messages[{index}]: role tool requires tool_call_id, and no other role may have it")
    for name in ("tool_calls", "reasoning", "reasoning_content"):
        if getattr(message, name) and message.role != "assistant":
            raise _invalid_messages(f"messages[{index}]: only messages with role assistant may have {name}")


def _template_call(call: ToolCall, index: int) -> dict[str, Any]:
    """Return an earlier call with its arguments as an object, which each template formats in its own way."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise _invalid_messages(f"messages[{index}]: the arguments of a tool call must be a JSON object in a string")
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


def _text_of(content: object, index: int) -> str:
    if isinstance(content, str):
        return content
    path = f"messages[{index}].content"
    if not isinstance(content, list):
        raise _invalid_messages(f"{path} must be a string or a list of text parts, not {json_type(content)}")
    return "\n".join(_text_of_part(part, f"{path}[{i}]") for i, part in enumerate(content))


def _text_of_part(part: object, path: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        if set(part) == {"type", "text"}:
            return str(part["text"])
        extra = quote(min(set(part) - {"type", "text"}))
        raise BadRequest(f"{path} has an unknown field {extra}", kind="unknown_field", param="messages")
    kind = quote(str(part.get("type"))) if isinstance(part, dict) else json_type(part)
    message = f'{path} must be a text part, {{"type": "text", "text": "…"}}; {kind} is not supported'
    raise BadRequest(message, kind="unsupported_content", param="messages")


def _invalid_messages(message: str) -> BadRequest:
    return BadRequest(message, kind="invalid_messages", param="messages")


def _invalid_tools(message: str) -> BadRequest:
    return BadRequest(message, kind="invalid_parameter", param="tools")

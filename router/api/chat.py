"""Chat bodies: messages in the form that chat templates expect, and how these are rendered."""

from collections.abc import Iterable
from typing import Any

from pdserve.errors import BadRequest, InvalidParameter
from pdserve.router.api.parsing import json_type, or_default, quote
from pdserve.router.api.schemas import ChatBody, Message, ToolCall
from pdserve.router.text.parsers.json_object import mended
from pdserve.router.text.parsers.output import parse_json
from pdserve.router.text.tokenizer import REASONING_VARIABLES, TemplateOptions, Tokenizer

TEXT = {"role", "content"}  # the fields of a plain message,
ROLES = frozenset({"system", "user", "assistant"})  # and the roles that need nothing else
# Fields of a body that change how its conversation is rendered.
OPTIONS = frozenset(
    {
        *("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"),
        *("reasoning_effort", "thinking"),
    }
)


def template_messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Convert messages to the form that chat templates expect.

    Text parts are joined by line breaks, OpenAI's role `developer` becomes `system`, and the arguments of tool calls become
    objects.

    Raises:
        BadRequest: a message is invalid, or there is none.
    """
    rendered: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if message.model_fields_set == TEXT and message.role in ROLES and isinstance(message.content, str):
            rendered.append({"role": message.role, "content": message.content})
            continue
        _check_role(message, index)
        calls = [_template_call(call) for call in message.tool_calls or ()]
        is_silent = message.content is None and message.role in ("assistant", "tool")
        content = "" if is_silent else _text_of(message.content, index)
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
        raise InvalidParameter("continue_final_message", message)
    if continues and body.messages and body.messages[-1].role != "assistant":
        message = "continue_final_message needs a last message with role assistant, which the answer continues"
        raise InvalidParameter("continue_final_message", message)
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


def _template_call(call: ToolCall) -> dict[str, Any]:
    """Return an earlier call with its arguments as an object, which each template formats in its own way.

    Any text is accepted, because answers may have been cut off, or be another server's: the object is what is left of it.
    """
    arguments = parse_json(call.function.arguments)
    if not isinstance(arguments, dict):
        arguments = parse_json(mended(call.function.arguments))
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
        if set(part) <= {"type", "text", "cache_control"}:
            return str(part["text"])
        extra = quote(min(set(part) - {"type", "text", "cache_control"}))
        raise BadRequest(f"{path} has an unknown field {extra}", kind="unknown_field", param="messages")
    kind = quote(str(part.get("type"))) if isinstance(part, dict) else json_type(part)
    message = f'{path} must be a text part, {{"type": "text", "text": "…"}}; {kind} is not supported'
    raise BadRequest(message, kind="unsupported_content", param="messages")


def _invalid_messages(message: str) -> BadRequest:
    return BadRequest(message, kind="invalid_messages", param="messages")

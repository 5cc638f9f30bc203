"""Chat bodies: what they ask for, their messages in the form that chat templates expect, and how these are rendered."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from msgspec import structs

from pdserve.errors import BadRequest, InvalidParameter
from pdserve.grammars.limits import check_grammar
from pdserve.keys import pack_tokens
from pdserve.request import MAX_LOGPROBS
from pdserve.router.api.generation import Generation
from pdserve.router.api.grammars import check_grammar_support
from pdserve.router.api.parsing import check_known, json_type, or_default, quote
from pdserve.router.api.reasoning import ReasoningState, reasoning_span, reasoning_state
from pdserve.router.api.requests import (
    build,
    check_model,
    check_token_ids,
    grammar_of,
    most_tokens_with_logprobs,
    num_choices,
    sampling_params,
    truncate,
)
from pdserve.router.api.schemas import ChatBody, Message, TokenizeBody, ToolCall
from pdserve.router.api.tools import AllowedTools, parse_tools
from pdserve.router.backend import ModelInfo
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.text.parsers.json_object import mended
from pdserve.router.text.parsers.output import parse_value
from pdserve.router.text.tokenizer import PLAIN, REASONING_VARIABLES, TemplateOptions, Tokenizer

TEXT = {"role", "content"}  # the fields of a plain message,
ROLES = frozenset({"system", "user", "assistant"})  # and the roles that need nothing else
TEXT_PART = frozenset({"type", "text", "cache_control"})
# Types of parts of reasoning in earlier answers, as gateways from Anthropic's API send it, and the fields with its text.
THOUGHTS = {"thinking": ("thinking", "text"), "reasoning": ("text", "thinking"), "redacted_thinking": ()}
MAX_MENDED = 1 << 18  # characters of the arguments of earlier calls in one body
# Fields of a body that change how its conversation is rendered.
OPTIONS = frozenset(
    {
        *("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"),
        *("reasoning_effort", "thinking"),
    }
)


def parse_chat(body: ChatBody, draft: RoutedRequest, tokenizer: Tokenizer, info: ModelInfo, max_n: int) -> Generation:
    """Parse a body of /v1/chat/completions; it may ask for at most `max_n` choices.

    Raises:
        BadRequest: the served model cannot do what the body asks for.
        NotFound: the body names another model.
    """
    if body.model != info.name:
        check_model(body.model, info.name)
    n = 1 if body.n is None else num_choices(body.n, 1, max_n)
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if body.max_tokens is not None and body.max_tokens != max_tokens:
        message = "max_tokens (deprecated) and max_completion_tokens contradict each other; send the latter only"
        raise InvalidParameter("max_tokens", message)
    prompt, tools = render(body, tokenizer)
    if body.truncate_prompt_tokens is not None:
        prompt = truncate(prompt, body.truncate_prompt_tokens, max_tokens or 1, info)
    if body.prediction is not None:
        draft = structs.replace(draft, prediction=_predicted(body.prediction.content, tokenizer, info))
    asks_logprobs = body.logprobs or body.top_logprobs
    if max_tokens is None:
        # What the context leaves on every instance, so that any may be selected, unless the prompt fits on some only.
        length = info.common_model_len if len(prompt) < info.common_model_len else info.max_model_len
        max_tokens = max(1, length - len(prompt))
        if asks_logprobs:
            max_tokens = min(max_tokens, most_tokens_with_logprobs(_chat_logprobs(body), n, bool(body.stream)))
    structured = grammar_of(body, info)
    grammar = structured if tools is None else _tool_grammar(body, tools, structured, info)
    logprobs = _chat_logprobs(body) if asks_logprobs else None
    sampling = sampling_params(body, max_tokens, logprobs, grammar, info, tokenizer)
    if tools is None and tokenizer.parsers.reasoning is None and body.thinking_token_budget is None:
        return build(body, draft, [prompt], n, sampling, info, chat=True, multi_turn=True)
    state = reasoning_state(body, prompt, tokenizer)
    may_reason = tools is not None and tools.may_reason(structured)
    calls = tools.parser if tools else None
    span = reasoning_span(body, state, tokenizer, has_grammar=bool(grammar), may_reason=may_reason, calls=calls)
    sampling = sampling if span is None else structs.replace(sampling, reasoning=span)
    # If the next turn's prompt goes on otherwise after this prompt, the KV of the output is of no use to it.
    is_open = state in (ReasoningState.OPEN, ReasoningState.UNDECIDED)
    multi_turn = not (is_open and tools is None and tokenizer.strips_reasoning)
    generation = build(body, draft, [prompt], n, sampling, info, chat=True, multi_turn=multi_turn)
    generation.open_parser = partial(
        tokenizer.parsers.open,
        calls,
        tools.tools if tools else None,
        begins_in_reasoning=state is ReasoningState.OPEN,
        shows_reasoning=body.include_reasoning is not False,
        calls_end_reasoning=span is None or not span.is_required,  # else the grammar begins after the reasoning
    )
    generation.finds_reasoning = tokenizer.parsers.reasoning is not None
    return generation


def render(body: ChatBody, tokenizer: Tokenizer) -> tuple[list[int], AllowedTools | None]:
    """Return the token ids of a conversation, and the tools that the model may call. Raises `BadRequest`."""
    tools, shown = None, []
    if body.tools or body.tool_choice is not None:
        tools = parse_tools(body, tokenizer)
        hidden: Any = {"cache_control": True, "function": {"strict"}}
        shown = [tool.model_dump(exclude_none=True, exclude=hidden) for tool in body.tools or () if tools]
    options = PLAIN if OPTIONS.isdisjoint(body.model_fields_set) else template_options(body, tokenizer)
    return tokenizer.render_chat(template_messages(body.messages), tools=[*shown], options=options), tools


def tokenize(body: TokenizeBody, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of the body's text or, through the chat template, of its messages.

    Raises:
        BadRequest: the body has both or neither, or invalid messages.
    """
    if (body.prompt is None) == (body.messages is None):
        raise InvalidParameter("prompt", "send either prompt or messages")
    if body.messages is not None:
        if body.add_special_tokens:
            message = "add_special_tokens needs a prompt: the chat template writes those of messages"
            raise InvalidParameter("add_special_tokens", message)
        names = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
        return render(ChatBody(**{name: getattr(body, name) for name in names}), tokenizer)[0]
    for name in ("tools", "chat_template_kwargs", "continue_final_message"):
        if getattr(body, name) is not None:
            raise InvalidParameter(name, f"{name} needs messages: a prompt has no chat template")
    assert body.prompt is not None
    return tokenizer.encode(body.prompt, add_special_tokens=or_default(body.add_special_tokens, True))


def template_messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Convert messages to the form that chat templates expect.

    Text parts are joined by line breaks, OpenAI's role `developer` becomes `system`, and the arguments of tool calls become
    objects.

    Raises:
        BadRequest: a message is invalid, or there is none.
    """
    rendered, earlier_calls = list[dict[str, Any]](), _EarlierCalls()
    for index, message in enumerate(messages):
        if message.model_fields_set == TEXT and message.role in ROLES and isinstance(message.content, str):
            rendered.append({"role": message.role, "content": message.content})
            continue
        _check_role(message, index)
        path, content, thoughts = f"messages[{index}].content", message.content, list[str]()
        if message.role == "assistant" and isinstance(content, list):
            content, thoughts = _without_thoughts(content, path)
        calls = list(map(earlier_calls.of, message.tool_calls or ()))
        is_silent = content is None and message.role in ("assistant", "tool")
        text = "" if is_silent else _text_of(content, path, "messages")
        item: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": text}
        item |= {"tool_calls": calls} if calls else {}
        item |= {name: value for name in ("name", "tool_call_id") if (value := getattr(message, name)) is not None}
        reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
        if reasoning is None and thoughts:
            reasoning = "\n".join(thoughts)
        if reasoning is not None:
            item |= dict.fromkeys(REASONING_VARIABLES, reasoning)
        rendered.append(item)
    if not rendered:
        raise invalid_messages("messages must hold at least one message")
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


def _tool_grammar(body: ChatBody, tools: AllowedTools, structured: str, info: ModelInfo) -> str:
    """Return the grammar of forced or strict tool calls and of structured output; empty if none is requested."""
    # A response_format holds answers without a call, of which there are none, and some clients send both.
    in_format = body.response_format is not None and body.response_format.type != "text"
    if structured and tools.forced and not in_format:
        message = "tool_choice forces a tool call, and another field asks for structured output; send one of the two"
        raise InvalidParameter("tool_choice", message)
    if spec := tools.grammar(structured):
        check_grammar_support(body, info, "tool_choice" if tools.forced else "tools")
        check_grammar(spec, "tools")
    return spec


def _chat_logprobs(body: ChatBody) -> int | None:
    """Return the number of top tokens to report per position, or None for no logprobs."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidParameter("top_logprobs", "top_logprobs requires logprobs: true")
    if not 0 <= or_default(body.top_logprobs, 0) <= MAX_LOGPROBS:
        message = f"top_logprobs must be from 0 to {MAX_LOGPROBS}, not {body.top_logprobs}"
        raise InvalidParameter("top_logprobs", message)
    return or_default(body.top_logprobs, 0) if body.logprobs else None


def _check_role(message: Message, index: int) -> None:
    """Raise BadRequest if the role is unknown or the message has a field of another role."""
    if message.role not in ("system", "developer", "user", "assistant", "tool"):
        raise invalid_messages(
            f"messages[{index}].role must be system, developer, user, assistant or tool, not {quote(message.role)}"
        )
    if (message.tool_call_id is not None) != (message.role == "tool"):
        raise invalid_messages(f"messages[{index}]: role tool requires tool_call_id, and no other role may have it")
    for name in ("tool_calls", "reasoning", "reasoning_content"):
        if getattr(message, name) and message.role != "assistant":
            raise invalid_messages(f"messages[{index}]: only messages with role assistant may have {name}")


class _EarlierCalls:
    """Earlier calls in the form that chat templates expect: with their arguments as objects, which each formats its own way.

    Any text is accepted, because answers may have been cut off, or be another server's: the object is what is left of it.

    Attributes:
        left: characters that may still be mended, which takes some microseconds each.
    """

    left = MAX_MENDED

    def of(self, call: ToolCall) -> dict[str, Any]:
        """Return one of them. Raises BadRequest."""
        given = call.function.arguments or ""
        arguments = given if isinstance(given, dict) else parse_value(given)
        if not isinstance(arguments, dict):
            self.left -= len(given)
            if self.left < 0:
                message = f"arguments of tool_calls that are no JSON objects have more than {MAX_MENDED} characters"
                raise invalid_messages(f"{message}; send JSON objects, or leave these calls out")
            arguments = parse_value(mended(str(given)))
        return {
            "id": call.id or "",
            "type": "function",
            "function": {"name": call.function.name, "arguments": arguments},
        }


def _predicted(content: object, tokenizer: Tokenizer, info: ModelInfo) -> bytes:
    """Return the tokens of a predicted answer, packed. Raises `BadRequest`."""
    ids = tokenizer.encode(_text_of(content, "prediction.content", "prediction"), add_special_tokens=False)
    if len(ids) > info.max_model_len:
        message = (
            f"prediction has {len(ids)} tokens, and this model's context is {info.max_model_len}; send a shorter one"
        )
        raise BadRequest(message, kind="context_length_exceeded", param="prediction")
    check_token_ids(ids, info.vocab_size, "prediction")
    return pack_tokens(ids)


def _without_thoughts(content: list[object], path: str) -> tuple[list[object], list[str]]:
    """Return the parts of an earlier answer that are no reasoning, and the texts of those that are. Raises BadRequest."""
    rest, thoughts = list[object](), list[str]()
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(kind, str) or kind not in THOUGHTS:
            rest.append(part)
            continue
        check_known(part, {"type", "thinking", "text", "data", "signature", "cache_control"}, f"{path}[{i}]")
        texts = [text for name in THOUGHTS[kind] if isinstance(text := part.get(name), str)]
        if THOUGHTS[kind] and not texts:
            raise invalid_messages(f'{path}[{i}] must be {{"type": "{kind}", "{THOUGHTS[kind][0]}": "…"}}')
        thoughts += texts[:1]
    return rest, thoughts


def _text_of(content: object, path: str, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        message = f"{path} must be a string or a list of text parts, not {json_type(content)}"
        raise BadRequest(message, kind=f"invalid_{param}", param=param)
    return "\n".join(_text_of_part(part, f"{path}[{i}]", param) for i, part in enumerate(content))


def _text_of_part(part: object, path: str, param: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        check_known(part, TEXT_PART, path)
        return str(part["text"])
    kind = json_type(part)
    if isinstance(part, dict) and isinstance(part.get("type"), str):
        kind = f"a text that is {json_type(part.get('text'))}" if part["type"] == "text" else quote(part["type"])
    message = f'{path} must be a text part, {{"type": "text", "text": "…"}}; {kind} is not supported'
    raise BadRequest(message, kind="unsupported_content", param=param)


def invalid_messages(message: str) -> BadRequest:
    """Return the error for messages that are not as they should be."""
    return BadRequest(message, kind="invalid_messages", param="messages")

"""The shapes of the bodies that clients send: OpenAI's fields and vLLM's, and which of them are refused.

Nothing is ignored silently. A field that is not known is refused with a suggestion; one that OpenAI or vLLM know and
this router cannot do yet is accepted only at the value at which it changes nothing. `metadata`, `safety_identifier`
and `store: false` are accepted and have no effect: they are labels for OpenAI's own books. `prompt_cache_key` and `user`
name a session, for routing only.
"""

import difflib
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from pdserve.errors import BadRequest

# Field → the values at which it changes nothing. Absent is always fine, and so is null.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "request_id": (),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
INSTEAD = {
    "request_id": "send it in the X-Request-Id header",
    "best_of": "ask for n choices and pick one yourself",
    "previous_response_id": "nothing is kept here; send the conversation in input",
}
ALIASES = {"max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens", "messages": "prompt"}
# What an assistant message of an earlier answer may carry when a client sends it back.
NEUTRAL_IN_MESSAGE: dict[str, tuple[object, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning": (),
    "reasoning_content": (),
    "refusal": (),
}


NEUTRAL_IN_RESPONSES: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "parallel_tool_calls": (True, False),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_options": ({},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


class Body(BaseModel):
    """`neutral`: fields that are known and not supported, with the values at which they change nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: Any = Field(None, alias="schema")
    strict: bool | None = None  # the schema is followed to the letter, asked or not


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationBody(Body):
    """What all endpoints that generate have in common. None is the default, as if the field were absent.

    `top_k` of -1 is vLLM's other word for 0: keep all.
    """

    model: str | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class SamplingBody(GenerationBody):
    """What completions and chat have in common."""

    neutral: ClassVar = NEUTRAL

    max_tokens: int | None = None
    n: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    return_token_ids: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionBody(SamplingBody):
    prompt: Any = None  # a string, token ids, or a list of either: `_prompts` says in words what is wrong
    echo: bool | None = None
    logprobs: int | None = None


class CalledFunction(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None  # as clients have it from a stream


class Message(Body):
    role: str
    content: Any = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class ChatBody(SamplingBody):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None  # `chat.tools_of` says in words what is wrong
    parallel_tool_calls: bool | None = None


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Any = Field(None, alias="schema")
    strict: bool | None = None


class Text(Body):
    format: TextFormat | None = None


class ResponseBody(GenerationBody):
    neutral: ClassVar = NEUTRAL_IN_RESPONSES

    input: Any = None  # `responses._messages` says in words what is wrong
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: Text | None = None


class RoleBody(Body):
    role: Literal["prefill", "decode", "both"]


Shape = TypeVar("Shape", bound=Body)


def parse_json(raw: bytes) -> dict[str, Any]:
    """The body's object.

    Raises:
        BadRequest: not JSON, not an object, or a number that JSON does not know (NaN, Infinity).
    """
    if not raw.strip():
        raise BadRequest("the body is empty; it must be a JSON object", kind="invalid_json")
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
    except RecursionError:
        raise BadRequest("the body is nested too deeply", kind="invalid_json") from None
    except ValueError as error:  # malformed, not UTF-8, or a whole number of thousands of digits
        raise BadRequest(f"the body is not valid JSON: {error}", kind="invalid_json") from None
    if b"\\u" in raw and not _is_unicode(body):
        raise BadRequest("the body holds half of a surrogate pair, which is not a character", kind="invalid_unicode")
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, not {json_type(body)}", kind="invalid_json")
    return body


def shape(model: type[Shape], body: dict[str, Any]) -> Shape:
    """The body in the shape of `model`.

    Raises:
        BadRequest: a field is unknown, not supported, missing or of the wrong type; it names the field.
    """
    known = set(model.model_fields)
    fields = _without_neutral(body, known, model.neutral, "")
    messages = fields.get("messages")
    if "messages" in known and isinstance(messages, list):
        own = set(Message.model_fields)
        fields = {**fields, "messages": [_neutral_message(item, own, i) for i, item in enumerate(messages)]}
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        _refuse(error.errors(include_url=False)[0], known)


def _without_neutral(
    body: Mapping[str, Any], known: set[str], neutral: Mapping[str, tuple[object, ...]], prefix: str
) -> dict[str, Any]:
    for name, value in body.items():
        if name in known or name not in neutral or value is None or _is_one_of(value, neutral[name]):
            continue
        may = f"leave it out or send {json.dumps(neutral[name][0])}" if neutral[name] else "leave it out"
        hint = INSTEAD.get(name, may)
        message = f"{prefix}{name} is not supported; {hint}"
        raise BadRequest(message, kind="unsupported_parameter", param=f"{prefix}{name}")
    return {name: value for name, value in body.items() if name in known or name not in neutral}


def _neutral_message(item: object, known: set[str], index: int) -> object:
    if not isinstance(item, dict):
        return item
    return _without_neutral(item, known, NEUTRAL_IN_MESSAGE, f"messages[{index}].")


def _is_one_of(value: object, neutral: tuple[object, ...]) -> bool:
    """Python's `==`, without taking 0 for False."""
    return any(type(value) is type(right) and value == right for right in neutral)


def _refuse(error: ErrorDetails, known: set[str]) -> NoReturn:
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error["loc"]).lstrip(".")
    top = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        hint = _suggestion(name, known) if name == top else ""
        raise BadRequest(f"unknown field {quote(name)}{hint}", kind="unknown_field", param=name[:100])
    if error["type"] == "missing":
        raise BadRequest(f"{name} is required", kind="missing_field", param=name)
    if top == "stop":
        raise BadRequest("stop must be a string or a list of strings", kind="invalid_parameter", param=top)
    if error["type"] == "finite_number":
        raise BadRequest(f"{name} must be a finite number", kind="invalid_parameter", param=name)
    what = error["msg"].removeprefix("Input should be ")
    message = f"{name} must be {what}, not {json_type(error['input'])}"
    raise BadRequest(message, kind="invalid_parameter", param=name)


def _suggestion(name: str, known: set[str]) -> str:
    close = [ALIASES[name]] if name in ALIASES else difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


Value = TypeVar("Value")


def or_default(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def quote(text: str) -> str:
    """The client's own words in an error message, which they must not flood."""
    return repr(text if len(text) <= 100 else text[:100] + "…")


def json_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _is_unicode(body: object) -> bool:
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise BadRequest(f"the body holds {name}, which is not a number in JSON", kind="invalid_json")

"""The shapes of the bodies that clients send: OpenAI's fields and vLLM's.

A field that OpenAI or vLLM know and this router cannot do yet is accepted only at the value at which it changes nothing.
`metadata`, `safety_identifier` and `store: false` are accepted and have no effect: they are labels for OpenAI's own books.
`prompt_cache_key` and `user` name a session, for routing only.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from pdserve.request import MAX_LOGPROBS

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


def within(low: float, high: float) -> Any:
    """None by default. The bounds are for `/openapi.json`; `SamplingParams.validate` refuses others, in words."""
    return Field(None, json_schema_extra={"minimum": low, "maximum": high})


def described(schema: dict[str, Any]) -> Any:
    """None by default; for a field of several forms, of which the code that reads it says in words what is wrong."""
    return Field(None, json_schema_extra=schema)


TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
IDS: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
SEVERAL: list[dict[str, Any]] = [{"type": "array", "minItems": 1, "items": one} for one in (TEXT, IDS)]
PARTS: dict[str, Any] = {"type": "array", "items": {"type": "object", "required": ["type", "text"]}}
MESSAGES: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "object"}}


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
    temperature: float | None = within(0, 100)
    top_p: float | None = within(0, 1)
    top_k: int | None = within(-1, 2**31 - 1)
    min_p: float | None = within(0, 1)
    seed: int | None = within(0, 2**63 - 1)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    frequency_penalty: float | None = within(-2, 2)
    presence_penalty: float | None = within(-2, 2)
    repetition_penalty: float | None = within(0, 10)
    logit_bias: dict[str, float] | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    priority: int | None = within(-(2**31) + 1, 2**31 - 1)
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
    prompt: Any = described({"anyOf": [TEXT, IDS, *SEVERAL]})
    echo: bool | None = None
    logprobs: int | None = within(0, MAX_LOGPROBS)


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
    content: Any = described({"anyOf": [{"type": ["string", "null"]}, PARTS]})
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
    top_logprobs: int | None = within(0, MAX_LOGPROBS)
    tools: list[Tool] | None = None
    tool_choice: Any = described({"type": ["string", "object", "null"]})
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

    input: Any = described({"anyOf": [{"type": "string"}, MESSAGES]})
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: Text | None = None


class RoleBody(Body):
    role: Literal["prefill", "decode", "both"]

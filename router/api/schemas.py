"""Schemas of request bodies: OpenAI's fields and vLLM's.

A field of OpenAI or vLLM that this router does not support is accepted only at values that have no effect. `metadata`
and `safety_identifier` are always accepted without effect: OpenAI uses them for its own bookkeeping.
`session_id`, `prompt_cache_key` and `user` name a session, for routing only.
"""

from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

from msgspec.structs import fields
from pydantic import AfterValidator, BeforeValidator, Field, create_model

from pdserve.reasoning import MAX_BUDGET
from pdserve.request import MAX_BEAM_WIDTH, MAX_LOGPROBS, BodyParams, constraints
from pdserve.router.api.parsing import ANY, MAX_MESSAGES, Body, NoOps, check_size

MAX_ENTRIES = 1024  # of an object with any keys

MAX_TOOLS = 1024
MAX_SHORT = 512  # characters of a name or an id
MAX_METADATA = 16  # entries

Item = TypeVar("Item")


# All lists and objects of bodies are of these types, whose validation ends at the first error: pydantic builds gigabytes of
# errors for a list of wrong items otherwise.
Array = Annotated[list[Item], Field(fail_fast=True)]
Object = Annotated[
    dict[str, Item],
    Field(max_length=MAX_ENTRIES),
    BeforeValidator(lambda value: check_size(value, MAX_ENTRIES)),  # pydantic compares the length after all errors
]
Short = Annotated[str, Field(max_length=MAX_SHORT)]
Messages = Annotated[Array[Item], Field(max_length=MAX_MESSAGES)]
Tools = Annotated[Array[Item], Field(max_length=MAX_TOOLS)]

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# Of what is stored, with OpenAI's limits.
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=MAX_METADATA),
    BeforeValidator(lambda value: check_size(value, MAX_METADATA)),
]


SERVICE_TIERS = ("auto", "default", "flex", "priority", "scale")
NO_OPS: NoOps = {
    "add_special_tokens": (True,),
    "audio": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "kv_transfer_params": (),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "prompt_cache_retention": ("in_memory", "in-memory", "24h"),
    "request_id": (),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True,),
    "service_tier": SERVICE_TIERS,
    "spaces_between_special_tokens": (True,),
    "stream_reasoning": (True,),
    "truncation_side": ("left",),
    "verbosity": ("low", "medium", "high"),
    "web_search_options": (),
}
# Fields of an earlier assistant message that a client sends back.
MESSAGE_NO_OPS: NoOps = {
    "annotations": ([],),
    "audio": (),
    "cache_control": (ANY,),
    "function_call": (),
    "parsed": (ANY,),  # by OpenAI's library, as `parsed_arguments` below
    "provider_specific_fields": (ANY,),  # by LiteLLM, which repeats there what it does not know of an answer
    "reasoning_details": (ANY,),  # of other servers, beside `reasoning`
    "refusal": (),
    "thinking_blocks": (ANY,),  # by LiteLLM, beside `reasoning_content`
}


def bounded(low: float, high: float) -> Any:
    """An optional number. The bounds are for /openapi.json only; `SamplingParams.validate` enforces them."""
    return Field(None, json_schema_extra={"minimum": low, "maximum": high})


def untyped(schema: dict[str, Any]) -> Any:
    """An optional field of several forms. The schema is for /openapi.json only; the parsing code validates the field."""
    return Field(None, json_schema_extra=schema)


TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
IDS: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
LISTS: list[dict[str, Any]] = [{"type": "array", "minItems": 1, "items": item} for item in (TEXT, IDS)]
PARTS: dict[str, Any] = {"type": "array", "items": {"type": "object", "required": ["type", "text"]}}
MESSAGES: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "object"}}


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: Any = Field(None, alias="schema")
    strict: bool | None = None  # without effect: schemas are always enforced


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


def sampling_fields() -> dict[str, Any]:
    """Return the fields of `BodyParams` as optional ones of a pydantic model, with their ranges for /openapi.json."""
    types = get_type_hints(BodyParams)
    found: dict[str, Any] = {}
    for name in BODY_PARAMS:
        ranges = {"minimum": "ge", "exclusiveMinimum": "gt", "maximum": "le"}
        extra = {key: getattr(meta, of) for meta in constraints(name) for key, of in ranges.items()}
        schema = {key: value for key, value in extra.items() if value is not None}
        found[name] = (types[name] | None, Field(None, json_schema_extra=schema))
    return found


BODY_PARAMS = tuple(field.name for field in fields(BodyParams))
SampledBody: Any = create_model("SampledBody", __base__=Body, **sampling_fields())


class GenerationBody(SampledBody):  # type: ignore[misc]  # a class that is made at run time is Any to mypy
    """Fields of all endpoints that generate; None is the default and means that the field is absent.

    `top_k` of -1 means the same as 0 (keep all tokens), and `seed` of -1 the same as none, as in vLLM.
    """

    model: str | None = None
    top_k: int | None = bounded(-1, 2**31 - 1)
    seed: int | None = bounded(-(2**63), 2**63 - 1)
    stop: str | Array[str] | None = None
    stop_token_ids: Array[int] | None = None
    logit_bias: Object[float] | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    cache_salt: Short | None = None
    priority: int | None = bounded(-(2**31) + 1, 2**31 - 1)
    user: Short | None = None
    metadata: Object[Any] | None = None
    safety_identifier: Short | None = None
    prompt_cache_key: Short | None = None
    session_id: Short | None = None


class SamplingBody(GenerationBody):
    """Fields of completions and chat completions."""

    no_ops: ClassVar = NO_OPS

    max_tokens: int | None = None
    n: int | None = None
    store: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Object[Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Array[str] | None = None
    allowed_token_ids: Array[int] | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = bounded(0, MAX_LOGPROBS)
    stream_options: StreamOptions | None = None
    logits_processors: Object[Object[Any]] | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = bounded(1, MAX_BEAM_WIDTH)
    best_of: int | None = bounded(1, MAX_BEAM_WIDTH)
    length_penalty: float | None = bounded(-10, 10)
    early_stopping: bool | Literal["never"] | None = None


class CompletionBody(SamplingBody):
    prompt: Any = untyped({"anyOf": [TEXT, IDS, *LISTS]})
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = bounded(0, MAX_LOGPROBS)


class CalledFunction(Body):
    no_ops: ClassVar = {"parsed_arguments": (ANY,), "provider_specific_fields": (ANY,)}

    name: str
    arguments: str | Object[Any] | None = None  # an object as some other servers return it


class ToolCall(Body):
    """A call in an earlier message, of which clients may have lost what does not matter."""

    no_ops: ClassVar = {"extra_content": (ANY,), "provider_specific_fields": (ANY,)}  # as in messages, and by Gemini

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction
    index: int | None = None  # sent by clients that return the deltas of a stream


class Message(Body):
    no_ops: ClassVar = MESSAGE_NO_OPS

    role: str
    content: Any = untyped({"anyOf": [{"type": ["string", "null"]}, PARTS]})
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # the older name
    tool_calls: Array[ToolCall] | None = None
    tool_call_id: Short | None = None


class Function(Body):
    name: str
    description: str | None = None
    parameters: Object[Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function
    cache_control: Object[Any] | None = None  # without effect: every prefix is cached


class Thinking(Body):
    type: Literal["enabled", "adaptive", "disabled"]


class Prediction(Body):
    type: Literal["content"]
    content: Any = untyped({"anyOf": [{"type": "string"}, PARTS]})


class ChatBody(SamplingBody):
    # The chat template writes special tokens.
    no_ops: ClassVar = {**NO_OPS, "add_special_tokens": (False,), "echo": (False,)}
    message: ClassVar = Message

    messages: Messages[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = bounded(0, MAX_LOGPROBS)
    tools: Tools[Tool] | None = None
    tool_choice: Any = untyped({"type": ["string", "object", "null"]})
    parallel_tool_calls: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Object[Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    thinking: Thinking | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int | None, AfterValidator(lambda budget: None if budget == -1 else budget)] = (
        bounded(-1, MAX_BUDGET)
    )
    prediction: Prediction | None = None


class TokenizeBody(Body):
    message: ClassVar = Message

    model: str | None = None
    prompt: str | None = None
    messages: Messages[Message] | None = None
    tools: Tools[Tool] | None = None
    chat_template_kwargs: Object[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Array[int]


class RoleBody(Body):
    role: Literal["prefill", "decode", "both"]


class MadeChange(Body):
    """A change that a controller has made, at seconds since 1970, and until when it is not to be undone."""

    at: float
    before: str = Field(max_length=20)
    after: str = Field(max_length=20)
    count: int = Field(ge=1)
    until: float


class LeaseBody(Body):
    """A controller's lease; 0 seconds release it. `changes` are kept for the next controller; none: those before remain."""

    holder: str = Field(min_length=1, max_length=200)
    lease_seconds: float = Field(ge=0)
    decision: str = Field("", max_length=1000)
    changes: Array[MadeChange] = Field([], max_length=1000)

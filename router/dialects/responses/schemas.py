"""Schemas of /v1/responses: its bodies and answers."""

from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from pdserve.router.api.answers import Answer
from pdserve.router.api.parsing import ANY, Body, NoOps
from pdserve.router.api.schemas import (
    MESSAGES,
    SERVICE_TIERS,
    Array,
    Function,
    GenerationBody,
    Metadata,
    ReasoningEffort,
    Short,
    Tools,
    untyped,
)

RESPONSES_NO_OPS: NoOps = {
    "background": (False,),
    "client_metadata": (ANY,),  # of Codex
    "context_management": (ANY,),
    "conversation": (),
    "max_tool_calls": (),
    "prompt": (),
    "prompt_cache_retention": ("in_memory", "in-memory", "24h"),
    "service_tier": SERVICE_TIERS,
    "stream_options": ({}, {"include_obfuscation": False}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Any = Field(None, alias="schema")
    strict: bool | None = None


class Text(Body):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # without effect


class Reasoning(Body):
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = (
        None  # there is none: the item of reasoning has the text itself
    )


class FunctionTool(Function):
    """A function of /v1/responses: the fields of one in /v1/chat/completions, without nesting."""

    type: Literal["function"]


# What `include` may name, because this server's answers have nothing of the kind.
Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ResponseBody(GenerationBody):
    no_ops: ClassVar = RESPONSES_NO_OPS

    include: Array[Included] | None = None

    input: Any = untyped({"anyOf": [{"type": "string"}, MESSAGES]})
    previous_response_id: Short | None = None
    store: bool | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None
    tools: Tools[FunctionTool] | None = None
    tool_choice: Any = untyped({"type": ["string", "object", "null"]})
    parallel_tool_calls: bool | None = None
    metadata: Metadata | None = None


Status = Literal["completed", "incomplete"]


class OutputText(Answer):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[dict[str, Any]]


class OutputMessage(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class ReasoningText(Answer):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Answer):
    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[dict[str, Any]]
    content: list[ReasoningText]


class FunctionCallItem(Answer):
    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str


class ResponseObject(Answer):
    """An answer of /v1/responses, which also repeats fields of its request."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    model: str
    output: list[ReasoningItem | OutputMessage | FunctionCallItem]
    usage: dict[str, Any]


class DeletedResponse(Answer):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(Answer):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool

"""Schemas of /v1/messages: its bodies, answers and errors, in Anthropic's format."""

from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from pdserve.router.api.answers import Answer
from pdserve.router.api.parsing import ANY, Body, NoOps
from pdserve.router.api.schemas import MESSAGES, PARTS, Array, Message, Messages, Object, Tools, bounded, untyped

MESSAGES_API_NO_OPS: NoOps = {
    "container": (),
    "context_management": (ANY,),
    "inference_geo": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Any = Field(alias="schema")


class OutputConfig(Body):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountTokensBody(Body):
    """Fields of /v1/messages/count_tokens. `cache_control` has no effect: every prefix is cached."""

    no_ops: ClassVar = MESSAGES_API_NO_OPS
    message: ClassVar = Message
    has_raw_messages: ClassVar = True

    model: str | None = None
    messages: Messages[Any] = Field(json_schema_extra=MESSAGES)
    system: Any = untyped({"anyOf": [{"type": ["string", "null"]}, PARTS]})
    tools: Tools[Any] | None = None
    tool_choice: Object[Any] | None = None
    thinking: Object[Any] | None = None
    output_config: OutputConfig | None = None
    cache_control: Object[Any] | None = None


class MessagesBody(CountTokensBody):
    """Fields of /v1/messages, Anthropic's."""

    max_tokens: int
    temperature: float | None = bounded(0, 1)
    top_k: int | None = bounded(-1, 2**31 - 1)
    top_p: float | None = bounded(0, 1)
    stop_sequences: Array[str] | None = None
    stream: bool | None = None
    metadata: Object[Any] | None = None
    thread: Object[Any] | None = None


class MessageBlock(Answer):
    """A block of a message: reasoning, a text, or the call of a tool."""

    model_config = ConfigDict(extra="allow")

    type: Literal["thinking", "text", "tool_use"]


class MessageAnswer(Answer):
    """An answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: dict[str, int]


class CountedTokens(Answer):
    input_tokens: int


class MessageErrorFields(Answer):
    type: str
    message: str
    details: dict[str, Any] | None = None


class MessageError(Answer):
    """An error of /v1/messages."""

    type: Literal["error"]
    error: MessageErrorFields
    request_id: str

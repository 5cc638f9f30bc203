"""Models of the answers. Endpoints that generate build theirs as dictionaries, and only declare the model.

A field with a default may be missing from an answer.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from pdserve.router.api.schemas import MadeChange


class Answer(BaseModel):
    """Base of all answers: no fields beyond those listed."""

    model_config = ConfigDict(extra="forbid")


class ErrorFields(Answer):
    message: str
    type: str
    param: str | None
    code: str


class Error(Answer):
    """OpenAI's format of errors."""

    error: ErrorFields


# ---- generation ---------------------------------------------------------------------------------------------------

FinishReason = Literal["stop", "length", "tool_calls"]


class CachedTokens(Answer):
    cached_tokens: int


class ReasoningTokens(Answer):
    reasoning_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens = ReasoningTokens(reasoning_tokens=0)


class PromptLogprob(Answer):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class Choice(Answer):
    index: int
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason
    token_ids: list[int] = []


class CompletionChoice(Choice):
    text: str
    prompt_logprobs: PromptLogprobs = []


class FunctionOfCall(Answer):
    name: str
    arguments: str


class Call(Answer):
    id: str
    type: Literal["function"]
    function: FunctionOfCall


class ChatAnswer(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str = ""
    reasoning_content: str = ""
    tool_calls: list[Call] = []


class ChatChoice(Choice):
    message: ChatAnswer


class Generated(Answer):
    """What completions and chat completions have in common."""

    id: str
    created: int
    model: str
    usage: Usage
    prompt_token_ids: list[int] | list[list[int]] = []


class Completion(Generated):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatCompletion(Generated):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs = []


class EmbeddingUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class Embedding(Answer):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Answer):
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class Score(Answer):
    index: int
    object: Literal["score"]
    score: float


class Scores(Answer):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class Classification(Answer):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classifications(Answer):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: EmbeddingUsage


class Document(Answer):
    text: str


class Ranked(Answer):
    index: int
    relevance_score: float
    document: Document | None = None


class Ranking(Answer):
    id: str
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage


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


class StoredFile(Answer):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class DeletedFile(Answer):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class Batch(Answer):
    """A batch, whose further fields say when it reached which status."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    status: Literal["in_progress", "cancelling", "cancelled", "completed", "failed"]
    output_file_id: str | None
    error_file_id: str | None
    request_counts: dict[str, int]


class StoredList(Answer):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool


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


class MessageError(Answer):
    """An error of /v1/messages."""

    type: Literal["error"]
    error: MessageErrorFields
    request_id: str


# ---- the served model ---------------------------------------------------------------------------------------------


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(Answer):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answer):
    prompt: str


# ---- operators ----------------------------------------------------------------------------------------------------


class Health(Answer):
    status: Literal["alive"]


class Readiness(Answer):
    status: Literal["ready"]
    instances: int


class Version(Answer):
    version: str


class Timelines(Answer):
    requests: list[dict[str, Any]]


class TimelineOfRequest(Answer):
    """The timeline of one request, or of each of its choices."""

    model_config = ConfigDict(extra="allow")

    request_id: str


class Instances(Answer):
    instances: list[dict[str, Any]]


class LeaseHeld(Answer):
    """`changes` are those that the last controllers have made."""

    holder: str
    changes: list[MadeChange]


class DrainStarted(Answer):
    instance_id: str
    role: str | None

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


class AnswerTokens(Answer):
    reasoning_tokens: int
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: AnswerTokens = AnswerTokens(reasoning_tokens=0)


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


class CacheReset(Answer):
    """`pools` are the instances that empty theirs; `stores` keep earlier blocks until they evict them, under keys of old."""

    pools: list[str]
    stores: list[str]


class DrainStarted(Answer):
    instance_id: str
    role: str | None

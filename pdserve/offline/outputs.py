"""Results of offline use, in vLLM's shapes."""

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pdserve.offline.params import LoRARequest


@dataclass(frozen=True)
class Logprob:
    """Log probability of a token; `rank` is 1 for the most likely one, None if the server did not send it."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One of the `n` answers to a prompt. `logprobs` has one dictionary from token id for each of `token_ids`."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None

    def finished(self) -> bool:
        """Return whether the answer is complete."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A prompt and its answers. `prompt` is None if token ids were given; `metrics` is always None.

    Attributes:
        num_cached_tokens: tokens of the prompt that were prefix hits.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: None = None
    lora_request: LoRARequest | None = None
    num_cached_tokens: int | None = None

    def add(self, answer: dict[str, Any]) -> None:
        """Add a completion or a chunk of its stream, as the router sends them."""
        self.prompt_token_ids = answer.get("prompt_token_ids", self.prompt_token_ids)
        for choice in answer["choices"]:
            self._add_choice(self.outputs[choice["index"]], choice)
            if entries := choice.get("prompt_logprobs"):
                self.prompt_logprobs = [entry and _logprobs(entry) for entry in entries]
        if usage := answer.get("usage"):
            self.num_cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        self.finished = all(output.finish_reason for output in self.outputs)

    @staticmethod
    def _add_choice(output: CompletionOutput, choice: dict[str, Any]) -> None:
        token_ids = choice.get("token_ids", [])
        output.text += choice["text"]
        output.token_ids += token_ids
        output.finish_reason = choice["finish_reason"]
        if choice["logprobs"]:
            entries = choice["logprobs"]["by_token_id"]
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(choice["logprobs"]["token_logprobs"])
            output.logprobs = (output.logprobs or []) + [_logprobs(entry) for entry in entries]


def _logprobs(entry: dict[str, Any]) -> dict[int, Logprob]:
    return {int(token): Logprob(**fields) for token, fields in entry.items()}


@dataclass
class BeamSearchSequence:
    """One beam: `tokens` and `text` of prompt and answer."""

    tokens: list[int]
    text: str
    cum_logprob: float
    finish_reason: str | None = None


@dataclass
class BeamSearchOutput:
    """The beams of a prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass
class EmbeddingOutput:
    """The embedding of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Size of the embedding."""
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """The probability of each class."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)


@dataclass
class ScoringOutput:
    """The score of a pair of texts."""

    score: float


Pooled = TypeVar("Pooled")


@dataclass
class PoolingRequestOutput(Generic[Pooled]):
    """Result of a pooling model for a text or a pair of texts: an embedding, class probabilities or a score."""

    request_id: str
    outputs: Pooled
    finished: bool = True

"""Results of offline use, in vLLM's shapes."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Logprob:
    """Log probability of a token; `rank` is 1 for the most likely, and None where it is not known."""

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


@dataclass
class RequestOutput:
    """A prompt and its answers. `prompt` is None if token ids were given; `metrics` is always None."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: None = None

    def add(self, answer: dict[str, Any]) -> None:
        """Add a completion or a chunk of its stream, as the router sends them."""
        self.prompt_token_ids = answer.get("prompt_token_ids", self.prompt_token_ids)
        for choice in answer["choices"]:
            self._add_choice(self.outputs[choice["index"]], choice)
            if entries := choice.get("prompt_logprobs"):
                self.prompt_logprobs = [
                    entry and {int(token): Logprob(**fields) for token, fields in entry.items()} for entry in entries
                ]
        self.finished = all(output.finish_reason for output in self.outputs)

    @staticmethod
    def _add_choice(output: CompletionOutput, choice: dict[str, Any]) -> None:
        token_ids = choice.get("token_ids", [])
        output.text += choice["text"]
        output.token_ids += token_ids
        output.finish_reason = choice["finish_reason"]
        if choice["logprobs"]:
            names, values = choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(values)
            output.logprobs = (output.logprobs or []) + [
                {token: Logprob(value, decoded_token=name)}
                for token, value, name in zip(token_ids, values, names, strict=True)
            ]

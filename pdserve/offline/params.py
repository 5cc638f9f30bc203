"""Sampling parameters of offline use, with vLLM's names and defaults."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, model_validator

from pdserve.errors import BadRequest
from pdserve.request import SamplingParams as CheckedParams


class SamplingParams(BaseModel):
    """The fields are those of /v1/completions (docs/api.md), and mean the same.

    Raises:
        ValueError: a field is unknown, or its value is not valid.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.n < 1:
            raise ValueError(f"n must be at least 1, not {self.n}")
        if self.logprobs:
            raise ValueError(f"logprobs must be 0 (the tokens of the output) or None offline, not {self.logprobs}")
        names = ("max_tokens", "min_tokens", "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty")
        values = {name: getattr(self, name) for name in (*names, "repetition_penalty", "prompt_logprobs")}
        top_k = 0 if self.top_k == -1 else self.top_k
        stop_ids, bias = tuple(self.stop_token_ids or ()), self.logit_bias or {}
        try:
            CheckedParams(
                **values, top_k=top_k, seed=self.seed or 0, stop_token_ids=stop_ids, logit_bias=bias
            ).validate()
        except BadRequest as error:
            raise ValueError(str(error)) from error
        return self

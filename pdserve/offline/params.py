"""Sampling parameters of offline use, with vLLM's names and defaults."""

from typing import Any

import msgspec
from msgspec.structs import asdict, fields

from pdserve.errors import BadRequest
from pdserve.request import BodyParams
from pdserve.request import SamplingParams as CheckedParams


class _Fields(BodyParams, frozen=True, kw_only=True):
    n: int = 1
    max_tokens: int = 16
    top_k: int = 0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: dict[str, Any] | None = None


class SamplingParams(_Fields, frozen=True, kw_only=True):
    """The fields are those of /v1/completions (its /docs), and mean the same.

    Raises:
        TypeError: a field is unknown.
        ValueError: a value is not valid.
    """

    def __post_init__(self) -> None:
        try:
            msgspec.convert(asdict(self), _Fields)
            self._checked().validate()
        except (msgspec.ValidationError, BadRequest) as error:
            raise ValueError(str(error)) from error
        if self.n < 1:
            raise ValueError(f"n must be at least 1, not {self.n}")
        if self.logprobs:
            raise ValueError(f"logprobs must be 0 (the tokens of the output) or None offline, not {self.logprobs}")

    def _checked(self) -> CheckedParams:
        return CheckedParams(
            **{field.name: getattr(self, field.name) for field in fields(BodyParams)},
            max_tokens=self.max_tokens,
            top_k=0 if self.top_k == -1 else self.top_k,
            seed=self.seed or 0,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias=self.logit_bias or {},
            prompt_logprobs=self.prompt_logprobs,
        )

    def body(self) -> dict[str, Any]:
        """Return the fields that are set, as a body of /v1/completions has them."""
        return {name: value for name, value in asdict(self).items() if value is not None}

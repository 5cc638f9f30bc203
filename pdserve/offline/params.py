"""Sampling parameters of offline use, with vLLM's names and defaults."""

from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import asdict, fields

from pdserve.errors import BadRequest
from pdserve.request import BodyParams
from pdserve.request import SamplingParams as CheckedParams


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The format of an answer, as in vLLM.

    Attributes:
        json: a JSON schema, as a dictionary or a text.
        regex, choice, grammar: a regular expression, a list of texts, a grammar in EBNF.
        json_object: any JSON object.

    Raises:
        ValueError: not exactly one field is set.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        if len(given := [name for name, value in vars(self).items() if value is not None]) != 1:
            what = " and ".join(given) or "none"
            raise ValueError(f"exactly one of json, regex, choice, grammar and json_object must be set, not {what}")


GuidedDecodingParams = StructuredOutputsParams  # vLLM's older name


@dataclass(frozen=True)
class LoRARequest:
    """The adapter of a request, as in vLLM.

    Attributes:
        lora_name: by which the fleet knows it.
        lora_int_id: without effect.
        lora_path: folder from which it is loaded first, with `LLM(enable_lora=True)`; empty: it is one of `lora_modules`.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of `LLM.beam_search`, as in vLLM."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def body(self) -> dict[str, Any]:
        """Return the fields of a body of /v1/completions."""
        return {**vars(self), "use_beam_search": True, "n": self.beam_width, "logprobs": 0}


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
    structured_outputs: Any = None  # StructuredOutputsParams, or a dictionary of what it would be made of
    guided_decoding: Any = None
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True


class SamplingParams(_Fields, frozen=True, kw_only=True):
    """Sampling parameters of a request, with the fields of /v1/completions (see /docs); `guided_decoding` is the older name
    of `structured_outputs`.

    Raises:
        TypeError: a field is unknown.
        ValueError: a value is not valid.
    """

    def __post_init__(self) -> None:
        try:
            msgspec.convert(asdict(self), _Fields)
            self._checked().validate()
        except msgspec.ValidationError as error:
            expected, _, path = str(error).replace("Expected ", "").replace("`", "").partition(" - at $.")
            raise ValueError(f"{path} must be {expected}") from error
        except BadRequest as error:
            raise ValueError(str(error)) from error
        if self.n < 1:
            raise ValueError(f"n must be at least 1, not {self.n}")
        if not self.detokenize:
            raise ValueError("detokenize=False is not supported, since the router makes the texts; leave it out")
        if self.structured_outputs is not None and self.guided_decoding is not None:
            raise ValueError("guided_decoding is the older name of structured_outputs; give one of them")

    def _checked(self) -> CheckedParams:
        return CheckedParams(
            **{field.name: getattr(self, field.name) for field in fields(BodyParams)},
            max_tokens=self.max_tokens,
            top_k=0 if self.top_k == -1 else self.top_k,
            seed=max(0, self.seed or 0),  # -1 is none, as in vLLM
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias=self.logit_bias or {},
            prompt_logprobs=self.prompt_logprobs,
        )

    def body(self) -> dict[str, Any]:
        """Return the fields that are set, as a body of /v1/completions has them."""
        given = asdict(self) | {"detokenize": None, "guided_decoding": None}
        if isinstance(structured := self.structured_outputs or self.guided_decoding, StructuredOutputsParams):
            structured = {name: value for name, value in vars(structured).items() if value is not None}
        return {name: value for name, value in {**given, "structured_outputs": structured}.items() if value is not None}

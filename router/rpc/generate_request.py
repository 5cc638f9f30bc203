"""Converts vLLM's `GenerateRequest` to the body of /v1/completions, whose parser and limits it shares.

Without effect are `spaces_between_special_tokens`, because answers are tokens, and fast tokenizers put none, and
`grammar_from_first_token`, because every grammar begins there: nothing is held back for reasoning.
"""

from typing import Any

import numpy as np
from msgspec.structs import fields
from smg_grpc_proto import vllm_engine_pb2 as vllm

from pdserve.errors import BadRequest, InvalidParameter
from pdserve.request import BodyParams
from pdserve.router.api.parsing import checked_fields
from pdserve.router.api.requests import most_tokens_with_logprobs
from pdserve.router.api.schemas import CompletionBody
from pdserve.router.backend import ModelInfo
from pdserve.router.text.tokenizer import Tokenizer

# Not set is 0 in protobuf, and the default in vLLM: 0 is the default of these, or no valid value.
FLOATS = tuple(
    field.name
    for field in fields(BodyParams)
    if isinstance(field.default, float) and field.name in vllm.SamplingParams.DESCRIPTOR.fields_by_name
)
ADVICE = {
    "kv_transfer_params": "this router hands KV over itself; address it as one worker that does both phases",
    "kv_transfer_params_json": "this router hands KV over itself; address it as one worker that does both phases",
    "mm_inputs": "only text can be prompts",
    "extra_mm_inputs": "only text can be prompts",
    "media_refs": "only text can be prompts",
    "sampling_params.structural_tag": "use json_schema, regex, grammar or choice",
}


@checked_fields()
def to_completion_body(request: "vllm.GenerateRequest", tokenizer: Tokenizer, info: ModelInfo) -> CompletionBody:
    """Return the equivalent body of /v1/completions; without `max_tokens`, the answer may take what the context leaves.

    Raises:
        BadRequest: the request has a field that is not supported.
    """
    _check_supported(request)
    params = request.sampling_params
    prompt = tokenizer.encode(request.text) if request.HasField("text") else [*request.tokenized.input_ids]
    is_stream = request.stream and not params.HasField("prompt_logprobs")
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": min(
            max(1, info.common_model_len - len(prompt)),
            most_tokens_with_logprobs(
                params.logprobs if params.HasField("logprobs") else None, params.n or 1, is_stream
            ),
        ),
        "top_k": params.top_k,
        "n": params.n or 1,
        "min_tokens": params.min_tokens,
        "stop": [*params.stop],
        "stop_token_ids": [*params.stop_token_ids],
        "skip_special_tokens": params.skip_special_tokens,
        "ignore_eos": params.ignore_eos,
        "include_stop_str_in_output": params.include_stop_str_in_output,
        "logit_bias": {str(token_id): _decimal(bias) for token_id, bias in params.logit_bias.items()},
        "structured_outputs": _structured_outputs(params),
        # Scores of the prompt are in the first message of a stream here, and the body has no such form.
        "stream": is_stream,
    }
    body |= {name: _decimal(getattr(params, name)) for name in FLOATS if getattr(params, name)}
    for name in ("max_tokens", "logprobs", "prompt_logprobs", "seed", "truncate_prompt_tokens"):
        if params.HasField(name):
            body[name] = getattr(params, name)
    if params.HasField("temperature"):
        body["temperature"] = _decimal(params.temperature)
    return CompletionBody(**body)


def _check_supported(request: "vllm.GenerateRequest") -> None:
    given = {field.name for field, _ in request.ListFields()} & ADVICE.keys()
    if request.sampling_params.HasField("structural_tag"):
        given.add("sampling_params.structural_tag")
    for name in sorted(given):
        raise BadRequest(f"{name} is not supported; {ADVICE[name]}", kind="unsupported_parameter", param=name)
    if request.data_parallel_rank:
        message = (
            f"data_parallel_rank must be 0 or left out, not {request.data_parallel_rank}: this router has one rank"
        )
        raise InvalidParameter("data_parallel_rank", message)


def _structured_outputs(params: "vllm.SamplingParams") -> dict[str, Any] | None:
    kind = params.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not params.json_object):
        return None
    value = [*params.choice.choices] if kind == "choice" else getattr(params, kind)
    return {"json" if kind == "json_schema" else kind: value}


def _decimal(value: float) -> float:
    """Return the shortest decimal number that a 32-bit float stands for: 0.7 and not 0.699999988, as a client wrote it."""
    return float(str(np.float32(value)))

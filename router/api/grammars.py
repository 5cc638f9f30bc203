"""Structured output: `response_format`, `structured_outputs` and `guided_*` as one grammar for the instances."""

import json
from typing import Any

from pdserve.errors import BadRequest, InvalidParameter
from pdserve.grammars.limits import check_grammar
from pdserve.router.api.parsing import DECODER, check_known
from pdserve.router.api.schemas import SamplingBody
from pdserve.router.backend import ModelInfo

KINDS = {"json": (dict, str, bool), "regex": (str,), "choice": (list,), "grammar": (str,)}
EXPECTED = {"json": "a JSON schema", "regex": "a string", "choice": "a list of strings", "grammar": "a string in EBNF"}
FIELDS = {"response_format", "structured_outputs", *(f"guided_{kind}" for kind in KINDS)}
SWITCHES = {"disable_fallback", "disable_any_whitespace", "disable_additional_properties"}  # of vLLM, harmless if off
ANY_OBJECT = {"type": "object"}


def parse_grammar(body: SamplingBody, info: ModelInfo) -> str:
    """Return the grammar that the body asks for, in the format of `grammars/specification.py`; empty if it asks for none.

    Raises:
        BadRequest: it asks for two grammars or an invalid one, or the instances support none.
    """
    if FIELDS.isdisjoint(body.model_fields_set) or not (requested := _requested_grammars(body)):
        return ""
    if len(requested) > 1:
        names = " and ".join(name for name, _, _ in requested)
        raise InvalidParameter(requested[1][0], f"{names} exclude each other; send one of them")
    name, kind, value = requested[0]
    if kind == "json" and isinstance(value, str):
        value = _parse_schema(value, name)
    spec = json.dumps({kind: value})
    check_grammar_support(body, info, name)
    check_grammar(spec, name)
    return spec


def check_grammar_support(body: SamplingBody, info: ModelInfo, name: str) -> None:
    """Raise BadRequest if the instances, or other fields of the body, rule out the grammar that field `name` asks for."""
    if not info.supports_grammars:
        message = f"{name} is not supported by all instances, some of which are older; update them, or leave it out"
        raise BadRequest(message, kind="unsupported_parameter", param=name)
    if not info.eos_token_ids:
        raise InvalidParameter(name, f"{name} is not supported by this model: it has no end-of-sequence token")
    for other in ("ignore_eos", "min_tokens"):
        if getattr(body, other):
            message = f"{other} and {name} contradict each other: the grammar decides where the answer ends"
            raise InvalidParameter(other, message)


def _requested_grammars(body: SamplingBody) -> list[tuple[str, str, Any]]:
    """Return (field, kind, value) of each grammar in the body."""
    requested = []
    response_format = body.response_format
    if response_format is not None and response_format.type != "text":
        if (response_format.type == "json_schema") != (response_format.json_schema is not None):
            expected = '{"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}'
            raise InvalidParameter("response_format", f"response_format must be {expected}, or have another type")
        schema = response_format.json_schema.schema_ if response_format.json_schema else None
        requested.append(("response_format", "json", ANY_OBJECT if schema is None else schema))
    fields = {f"guided_{kind}": (kind, getattr(body, f"guided_{kind}")) for kind in KINDS}
    given = body.structured_outputs or {}
    structured = {name: value for name, value in given.items() if name not in SWITCHES or value is not False}
    check_known(structured, {*KINDS, "json_object"}, "structured_outputs")
    fields |= {f"structured_outputs.{kind}": (kind, value) for kind, value in structured.items()}
    for name, (kind, value) in fields.items():
        if kind == "json_object" and value is not None:
            if value is not True:
                raise InvalidParameter(name, f"{name} must be true, or left out")
            requested.append((name, "json", ANY_OBJECT))
        elif value is not None:
            _check_value(name, kind, value)
            requested.append((name, kind, value))
    return requested


def _check_value(name: str, kind: str, value: Any) -> None:
    if not isinstance(value, KINDS[kind]):
        raise InvalidParameter(name, f"{name} must be {EXPECTED[kind]}")
    if isinstance(value, list) and not (value and all(isinstance(item, str) and item for item in value)):
        raise InvalidParameter(name, f"{name} must be a list of strings, none of them empty")


def _parse_schema(text: str, name: str) -> Any:
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError):
        raise InvalidParameter(name, f"{name} must be a JSON schema, as an object or as JSON in a string") from None

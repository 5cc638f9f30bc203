"""What an answer must look like: `response_format`, `structured_outputs` and `guided_*`, as one grammar for the instances."""

import json
from typing import Any

from pdserve.errors import BadRequest
from pdserve.router.api.parsing import quote
from pdserve.router.api.schemas import SamplingBody
from pdserve.router.backend import ModelInfo

MAX_CHARS = 65536
KINDS = {"json": (dict, str, bool), "regex": (str,), "choice": (list,), "grammar": (str,)}
ANY_OBJECT = {"type": "object"}


def grammar_of(body: SamplingBody, info: ModelInfo) -> str:
    """The grammar as instances want it, see `engine/grammar.py`; empty if the body asks for none.

    Raises:
        BadRequest: it asks for two, for one that cannot be, or the instances cannot follow any.
    """
    asked = _asked(body)
    if not asked:
        return ""
    if len(asked) > 1:
        names = " and ".join(name for name, _, _ in asked)
        raise _refusal(f"{names} exclude each other; send one of them", asked[1][0])
    name, kind, value = asked[0]
    if kind == "json" and isinstance(value, str):
        value = _parsed(value, name)
    spec = json.dumps({kind: value})
    if len(spec) > MAX_CHARS:
        raise _refusal(f"{name} has {len(spec)} characters as JSON; {MAX_CHARS} are the most", name)
    check_possible(body, info, name)
    return spec


def check_possible(body: SamplingBody, info: ModelInfo, name: str) -> None:
    """Raises BadRequest where the instances cannot follow the grammar that `name` asks for."""
    if not info.grammars:
        message = f"{name} needs xgrammar on all instances: pip install 'pdserve[structured]' there, or leave it out"
        raise BadRequest(message, kind="unsupported_parameter", param=name)
    if not info.eos_token_ids:
        raise _refusal(f"{name} cannot be followed: this model has no token that ends an answer", name)
    for other in ("ignore_eos", "min_tokens"):
        if getattr(body, other):
            raise _refusal(
                f"{other} and {name} contradict each other: what the answer looks like says where it ends", other
            )


def _asked(body: SamplingBody) -> list[tuple[str, str, Any]]:
    """(field, kind, value) of each grammar in the body."""
    asked = []
    form = body.response_format
    if form is not None and form.type != "text":
        if (form.type == "json_schema") != (form.json_schema is not None):
            right = '{"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}'
            message = f"response_format must be {right}, or have another type"
            raise _refusal(message, "response_format")
        schema = form.json_schema.schema_ if form.json_schema else None
        asked.append(("response_format", "json", ANY_OBJECT if schema is None else schema))
    given = {f"guided_{kind}": (kind, getattr(body, f"guided_{kind}")) for kind in KINDS}
    structured = body.structured_outputs or {}
    if unknown := set(structured) - set(KINDS) - {"json_object"}:
        raise _refusal(
            f"structured_outputs has no {quote(min(unknown))}; it takes {', '.join(KINDS)}, json_object",
            "structured_outputs",
        )
    given |= {f"structured_outputs.{kind}": (kind, value) for kind, value in structured.items()}
    for name, (kind, value) in given.items():
        if kind == "json_object" and value is not None:
            if value is not True:
                raise _refusal(f"{name} must be true, or left out", name)
            asked.append((name, "json", ANY_OBJECT))
        elif value is not None:
            _check(name, kind, value)
            asked.append((name, kind, value))
    return asked


def _check(name: str, kind: str, value: Any) -> None:
    if not isinstance(value, KINDS[kind]):
        right = {
            "json": "a JSON schema",
            "regex": "a string",
            "choice": "a list of strings",
            "grammar": "a string in EBNF",
        }
        raise _refusal(f"{name} must be {right[kind]}", name)
    if isinstance(value, list) and not (value and all(isinstance(one, str) and one for one in value)):
        raise _refusal(f"{name} must be a list of strings, none of them empty", name)


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _refusal(f"{name} must be a JSON schema, as an object or as JSON in a string", name) from None


def _refusal(message: str, param: str) -> BadRequest:
    return BadRequest(message, kind="invalid_parameter", param=param)

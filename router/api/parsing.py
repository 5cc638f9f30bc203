"""Parses and validates the bytes of a request body.

No field is ignored silently: an unknown field is an error, with a suggestion where one is close.
"""

import difflib
import json
from collections.abc import Set
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pdserve.errors import BadRequest, InvalidParameter
from pdserve.router.api.schemas import ANY, MESSAGE_NO_OPS, Body, Message, NoOps

ADVICE = {
    "request_id": "send it in the X-Request-Id header",
}
ALIASES = {"max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens", "messages": "prompt"}

BYTE_ORDER_MARK = "\ufeff"  # which some clients put before UTF-8

BodyType = TypeVar("BodyType", bound=Body)


def _reject_constant(name: str) -> NoReturn:
    raise BadRequest(f"the body holds {name}, which is not a number in JSON", kind="invalid_json")


DECODER = json.JSONDecoder(parse_constant=_reject_constant)  # `json.loads` would build one for each body


def parse_json(raw: bytes) -> dict[str, Any]:
    """Parse a body that must be a JSON object.

    Raises:
        BadRequest: it is not JSON or not an object, or it holds NaN, Infinity or half of a surrogate pair.
    """
    if not raw.strip():
        raise BadRequest("the body is empty; it must be a JSON object", kind="invalid_json")
    try:
        body = DECODER.decode(raw.decode().removeprefix(BYTE_ORDER_MARK))
    except RecursionError:
        raise BadRequest("the body is nested too deeply", kind="invalid_json") from None
    except ValueError as error:  # malformed, not UTF-8, or an integer with thousands of digits
        raise BadRequest(f"the body is not valid JSON: {error}", kind="invalid_json") from None
    if b"\\u" in raw and not _is_valid_unicode(body):
        raise BadRequest("the body holds half of a surrogate pair, which is not a character", kind="invalid_unicode")
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, not {json_type(body)}", kind="invalid_json")
    return body


def validate(model: type[BodyType], body: dict[str, Any]) -> BodyType:
    """Validate a parsed body against its schema.

    Raises:
        BadRequest: a field is unknown, unsupported, missing or of the wrong type; the message names it.
    """
    known = model.model_fields.keys()
    fields = _drop_no_ops(body, known, model.no_ops)
    messages = fields.get("messages")
    if "messages" in known and isinstance(messages, list):
        fields = {**fields, "messages": [_drop_message_no_ops(item, i) for i, item in enumerate(messages)]}
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        _raise_bad_field(error.errors(include_url=False)[0], known)


def _drop_no_ops(body: dict[str, Any], known: Set[str], no_ops: NoOps, prefix: str = "") -> dict[str, Any]:
    """Return the body without unsupported fields; raise BadRequest if one has a value that would have an effect."""
    if body.keys() <= known:
        return body
    for name, value in body.items():
        if name in known or name not in no_ops or value is None or _is_one_of(value, no_ops[name]):
            continue
        default = f"leave it out or send {json.dumps(no_ops[name][0])}" if no_ops[name] else "leave it out"
        message = f"{prefix}{name} is not supported; {ADVICE.get(name, default)}"
        raise BadRequest(message, kind="unsupported_parameter", param=f"{prefix}{name}")
    return {name: value for name, value in body.items() if name in known or name not in no_ops}


def _drop_message_no_ops(message: object, index: int) -> object:
    if not isinstance(message, dict):
        return message
    return _drop_no_ops(message, Message.model_fields.keys(), MESSAGE_NO_OPS, f"messages[{index}].")


def _is_one_of(value: object, allowed: tuple[object, ...]) -> bool:
    """Compare with `==` and by type, so that 0 is not taken for False."""
    return ANY in allowed or any(type(value) is type(item) and value == item for item in allowed)


def _raise_bad_field(error: ErrorDetails, known: Set[str]) -> NoReturn:
    """Raise BadRequest for a validation error of pydantic."""
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error["loc"]).lstrip(".")
    top = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        hint = _suggestion(name, known) if name == top else ""
        raise BadRequest(f"unknown field {quote(name)}{hint}", kind="unknown_field", param=name[:100])
    if error["type"] == "missing":
        raise BadRequest(f"{name} is required", kind="missing_field", param=name)
    if top == "stop":
        raise InvalidParameter(top, "stop must be a string or a list of strings")
    if error["type"] == "finite_number":
        raise InvalidParameter(name, f"{name} must be a finite number")
    expected, given = error["msg"].removeprefix("Input should be "), error["input"]
    shows_value = error["type"] == "literal_error" and isinstance(given, str)
    raise InvalidParameter(name, f"{name} must be {expected}, not {quote(given) if shows_value else json_type(given)}")


def _suggestion(name: str, known: Set[str]) -> str:
    close = [ALIASES[name]] if name in ALIASES else difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


Value = TypeVar("Value")


def or_default(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def quote(text: str) -> str:
    """Return client text quoted for an error message, cut to 100 characters."""
    return repr(text if len(text) <= 100 else text[:100] + "…")


def json_type(value: object) -> str:
    """Return the JSON type of a parsed value with its article, such as `an object`."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _is_valid_unicode(body: object) -> bool:
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True

"""From the bytes of a client's body to its shape, or to what is wrong with it. Nothing is ignored silently: a field that is
not known is refused with a suggestion.
"""

import difflib
import json
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pdserve.errors import BadRequest
from pdserve.router.api.schemas import NEUTRAL_IN_MESSAGE, Body, Message

INSTEAD = {
    "request_id": "send it in the X-Request-Id header",
    "best_of": "ask for n choices and pick one yourself",
    "previous_response_id": "nothing is kept here; send the conversation in input",
}
ALIASES = {"max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens", "messages": "prompt"}

Shape = TypeVar("Shape", bound=Body)


def parse_json(raw: bytes) -> dict[str, Any]:
    """The body's object.

    Raises:
        BadRequest: not JSON, not an object, or a number that JSON does not know (NaN, Infinity).
    """
    if not raw.strip():
        raise BadRequest("the body is empty; it must be a JSON object", kind="invalid_json")
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
    except RecursionError:
        raise BadRequest("the body is nested too deeply", kind="invalid_json") from None
    except ValueError as error:  # malformed, not UTF-8, or a whole number of thousands of digits
        raise BadRequest(f"the body is not valid JSON: {error}", kind="invalid_json") from None
    if b"\\u" in raw and not _is_unicode(body):
        raise BadRequest("the body holds half of a surrogate pair, which is not a character", kind="invalid_unicode")
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, not {json_type(body)}", kind="invalid_json")
    return body


def shape(model: type[Shape], body: dict[str, Any]) -> Shape:
    """The body in the shape of `model`.

    Raises:
        BadRequest: a field is unknown, not supported, missing or of the wrong type; it names the field.
    """
    known = set(model.model_fields)
    fields = _without_neutral(body, known, model.neutral, "")
    messages = fields.get("messages")
    if "messages" in known and isinstance(messages, list):
        own = set(Message.model_fields)
        fields = {**fields, "messages": [_neutral_message(item, own, i) for i, item in enumerate(messages)]}
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        _refuse(error.errors(include_url=False)[0], known)


def _without_neutral(
    body: Mapping[str, Any], known: set[str], neutral: Mapping[str, tuple[object, ...]], prefix: str
) -> dict[str, Any]:
    for name, value in body.items():
        if name in known or name not in neutral or value is None or _is_one_of(value, neutral[name]):
            continue
        may = f"leave it out or send {json.dumps(neutral[name][0])}" if neutral[name] else "leave it out"
        hint = INSTEAD.get(name, may)
        message = f"{prefix}{name} is not supported; {hint}"
        raise BadRequest(message, kind="unsupported_parameter", param=f"{prefix}{name}")
    return {name: value for name, value in body.items() if name in known or name not in neutral}


def _neutral_message(item: object, known: set[str], index: int) -> object:
    if not isinstance(item, dict):
        return item
    return _without_neutral(item, known, NEUTRAL_IN_MESSAGE, f"messages[{index}].")


def _is_one_of(value: object, neutral: tuple[object, ...]) -> bool:
    """Python's `==`, without taking 0 for False."""
    return any(type(value) is type(right) and value == right for right in neutral)


def _refuse(error: ErrorDetails, known: set[str]) -> NoReturn:
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error["loc"]).lstrip(".")
    top = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        hint = _suggestion(name, known) if name == top else ""
        raise BadRequest(f"unknown field {quote(name)}{hint}", kind="unknown_field", param=name[:100])
    if error["type"] == "missing":
        raise BadRequest(f"{name} is required", kind="missing_field", param=name)
    if top == "stop":
        raise BadRequest("stop must be a string or a list of strings", kind="invalid_parameter", param=top)
    if error["type"] == "finite_number":
        raise BadRequest(f"{name} must be a finite number", kind="invalid_parameter", param=name)
    what, given = error["msg"].removeprefix("Input should be "), error["input"]
    one_of = error["type"] == "literal_error" and isinstance(given, str)
    message = f"{name} must be {what}, not {quote(given) if one_of else json_type(given)}"
    raise BadRequest(message, kind="invalid_parameter", param=name)


def _suggestion(name: str, known: set[str]) -> str:
    close = [ALIASES[name]] if name in ALIASES else difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


Value = TypeVar("Value")


def or_default(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def quote(text: str) -> str:
    """The client's own words in an error message, which they must not flood."""
    return repr(text if len(text) <= 100 else text[:100] + "…")


def json_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _is_unicode(body: object) -> bool:
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise BadRequest(f"the body holds {name}, which is not a number in JSON", kind="invalid_json")

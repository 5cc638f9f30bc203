"""Parses and validates JSON bodies of requests, with errors in the router's own format.

No field is ignored silently: an unknown field is an error, with a suggestion where one is close. One that is null says
nothing: libraries of clients write those that their server has and others lack.
"""

import difflib
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, NoReturn, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from pdserve.errors import BadRequest, InvalidParameter

ADVICE = {
    "request_id": "send it in the X-Request-Id header",
}
# Fields that mean the same in different endpoints.
ALIASES = (
    ("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens"),
    ("prompt", "messages", "input"),
    ("stop", "stop_sequences"),
    ("response_format", "text", "output_config"),
)

BYTE_ORDER_MARK = "\ufeff"  # which some clients put before UTF-8
MAX_DEPTH = 200  # of lists and objects; pydantic writes no JSON beyond 255
MAX_NAME = 100  # characters of a name in an error message
MAX_UNKNOWN = 32  # unknown fields of one body
MAX_NAMES = 100  # that are logged
DEFAULT_LIMIT, MAX_LIMIT = 20, 100  # items of a page
STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")  # of a field's path, such as tools[0].function.name
MAX_FIELDS = 128  # of an object with fixed fields, unknown ones included: each of these is an error of its own
MAX_MESSAGES = 16_384
NoOps = Mapping[str, tuple[object, ...]]  # unsupported field → values without effect; null and absence always are
ANY = object()  # among these values: all are without effect
log = logging.getLogger(__name__)


def check_size(value: object, most: int) -> object:
    """Return the value. Raises PydanticCustomError if it is an object with more keys: for each, an error may be built."""
    if isinstance(value, dict) and len(value) > most:
        raise PydanticCustomError("too_many_keys", "an object with at most {most} fields", {"most": most})
    return value


class Body(BaseModel):
    """Base of all bodies: unknown fields are errors, unless they are null.

    Attributes:
        no_ops: unsupported fields and their values without effect.
        message: of what its messages are; None: it has none.
        has_raw_messages: its messages are not checked here, and may have fields without effect all the same.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    no_ops: ClassVar[NoOps] = {}
    message: ClassVar["type[Body] | None"] = None
    has_raw_messages: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _without_effectless(cls, fields: object) -> object:
        """Return the fields without unknown ones that are null, or are without effect whatever they hold."""
        if not isinstance(fields, dict) or fields.keys() <= cls.model_fields.keys():
            return fields
        check_size(fields, MAX_FIELDS)
        return {
            name: value
            for name, value in fields.items()
            if name in cls.model_fields or not (value is None or ANY in cls.no_ops.get(name, ()))
        }


BodyType = TypeVar("BodyType", bound=Body)
Result = TypeVar("Result")


class JsonBody(bytes, Generic[BodyType]):
    """A body that has been read and not parsed: plain bytes. For FastAPI, and so in /openapi.json, it is a `BodyType`."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler(get_args(source)[0])


class UnknownFields:
    """Drops fields that the router does not know from bodies, counts them, and logs each name once.

    Pickled, it is another one, whose drops are in `num_dropped` only.

    Attributes:
        num_dropped: fields that were dropped in this process.
    """

    num_dropped: ClassVar[int] = 0

    def __init__(self, count: Callable[[], object] = int) -> None:
        self._count = count
        self._names: set[str] = set()

    def __reduce__(self) -> tuple[type["UnknownFields"], tuple[()]]:
        return UnknownFields, ()

    def without(self, raw: bytes, convert: Callable[[dict[str, Any]], Result]) -> Result:
        """Return what a function makes of a decoded body, once the fields are dropped that it does not know.

        Raises:
            BadRequest: what the function raises, also where there are more than `MAX_UNKNOWN` of these fields.
        """
        body = parse_json(raw)
        for _ in range(MAX_UNKNOWN):
            try:
                return convert(body)
            except BadRequest as error:
                if not self._drop(body, error):
                    raise
        return convert(body)

    def _drop(self, body: Any, error: BadRequest) -> bool:
        """Drop the field that an error of validation names; return False if it names none."""
        steps = [int(index) if index else name for index, name in STEP.findall(error.param or "")]
        if error.kind != "unknown_field" or not steps:
            return False
        for step in steps[:-1]:
            if not isinstance(body, dict | list) or (step not in body if isinstance(body, dict) else step == len(body)):
                return False
            body = body[step]
        if not isinstance(body, dict) or steps[-1] not in body:
            return False
        del body[steps[-1]]
        self._count()
        UnknownFields.num_dropped += 1
        name = str(steps[-1])
        if name not in self._names and len(self._names) < MAX_NAMES:
            self._names.add(name)
            log.warning("requests have the unknown field %r, which is ignored (--unknown-fields)", name)
        return True


def _reject_constant(name: str) -> NoReturn:
    raise BadRequest(f"the body holds {name}, which is not a number in JSON", kind="invalid_json")


def _finite(text: str) -> float:
    """Return a number. One beyond all floats would be Infinity here, and in the JSON of answers that repeat it."""
    if math.isinf(value := float(text)):
        raise BadRequest(f"the body holds {quote(text)}, and a number must be finite", kind="invalid_json")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of these names and values. Two values of a name would mean one thing here and another to a gateway."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise BadRequest(f"an object of the body has two fields {quote(name)}", kind="invalid_json")
    return fields


# `json.loads` would build one for each body.
DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_reject_constant, object_pairs_hook=_without_duplicates)


def parse_json(raw: bytes) -> dict[str, Any]:
    """Parse a body that must be a JSON object.

    Raises:
        BadRequest: it is not JSON, not an object, or nested too deeply, or it holds NaN, Infinity, half of a surrogate pair,
            or two fields of the same name in an object.
    """
    if not raw.strip():
        raise BadRequest("the body is empty; it must be a JSON object", kind="invalid_json")
    try:
        body = DECODER.decode(raw.decode().removeprefix(BYTE_ORDER_MARK))
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # malformed, not UTF-8, or an integer with thousands of digits
        raise BadRequest(f"the body is not valid JSON: {error}", kind="invalid_json") from None
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
        _check_depth(body)
    if b"\\u" in raw and not _is_valid_unicode(body):
        raise BadRequest("the body holds half of a surrogate pair, which is not a character", kind="invalid_unicode")
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, not {json_type(body)}", kind="invalid_json")
    return body


def parse_body(model: type[BodyType], raw: bytes | dict[str, Any]) -> BodyType:
    """Return the validated body, of JSON or of what that was decoded to.

    Raises:
        BadRequest: it is not valid JSON, or a field is unknown, unsupported, missing or of the wrong type.
    """
    body = parse_json(raw) if isinstance(raw, bytes) else raw
    if not model.has_raw_messages:
        try:
            return model.model_validate(body)
        except ValidationError:  # perhaps because of fields without effect
            pass
    return _validate(model, body)


def check_known(value: Mapping[str, object], known: Set[str], path: str) -> None:
    """Raise BadRequest for a field of an object that is none of these. One that is null says nothing."""
    if unknown := [name for name, one in value.items() if name not in known and one is not None]:
        raise _unknown_field(f"{path}.{min(unknown)}", known, f"; {path} takes {', '.join(sorted(known))}")


def _validate(model: type[BodyType], body: dict[str, Any]) -> BodyType:
    """Validate a parsed body against its schema, without the fields that have no effect."""
    known = model.model_fields.keys()
    # Some libraries of clients write all numbers as 8.0, which is an integer to JSON schemas.
    whole = {
        name: int(value)
        for name, value in body.items()
        if isinstance(value, float) and abs(value) < 2**63 and value.is_integer()
    }
    fields = _drop_no_ops({**body, **whole}, known, model.no_ops)
    messages = fields.get("messages")
    if model.message is not None and isinstance(messages, list) and len(messages) <= MAX_MESSAGES:
        of_message, no_ops = model.message.model_fields.keys(), model.message.no_ops
        dropped = [
            _drop_no_ops(one, of_message, no_ops, f"messages[{i}].") if isinstance(one, dict) else one
            for i, one in enumerate(messages)
        ]
        fields = {**fields, "messages": dropped}
    with checked_fields(known):
        return model.model_validate(fields)


@contextmanager
def checked_fields(known: Set[str] = frozenset()) -> Iterator[None]:
    """Raise BadRequest for what pydantic finds wrong in a block, or in a decorated function that converts a body.

    `known` are the names to suggest in place of an unknown one.
    """
    try:
        yield
    except ValidationError as error:
        # There are few errors: see `schemas.Array` and `schemas.Object`. Of an object of another type, that one says most.
        first, *others = error.errors(include_url=False)
        kinds = (one for one in others if one["loc"] == (*first["loc"][:-1], "type"))
        _raise_bad_field(next(kinds, first), known)


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Have errors of a block, or of a decorated function, name the fields of the body that the client sent.

    Args:
        names: of fields of the body to which it was converted → names of the client's.
    """
    try:
        yield
    except BadRequest as error:
        if error.param is not None and error.param in names:
            words = re.compile(rf"(?<!')\b({'|'.join(map(re.escape, names))})\b")
            error.args = (words.sub(lambda match: names[match[0]], str(error)),)
            error.param = names[error.param]
        raise


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


def _is_one_of(value: object, allowed: tuple[object, ...]) -> bool:
    """Compare with `==` and by type, so that 0 is not taken for False."""
    return ANY in allowed or any(type(value) is type(item) and value == item for item in allowed)


def _raise_bad_field(error: ErrorDetails, known: Set[str]) -> NoReturn:
    """Raise BadRequest for a validation error of pydantic."""
    steps = [step if isinstance(step, int) else step[: MAX_NAME + 1] for step in error["loc"]]
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).lstrip(".")
    top = str(steps[0]) if steps else ""
    if error["type"] == "extra_forbidden":
        raise _unknown_field(name, known if name == top else frozenset())
    name = name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}…"
    if error["type"] == "missing":
        raise BadRequest(f"{name} is required", kind="missing_field", param=name)
    if top == "stop":
        raise InvalidParameter(top, "stop must be a string or a list of strings")
    if error["type"] == "too_many_keys":
        raise InvalidParameter(name, f"{name or 'the body'} must be {error['msg']}, not with {len(error['input'])}")
    for bound, word in (("min_length", "least"), ("max_length", "most")):
        if bound in error.get("ctx", ()):
            unit = "characters" if isinstance(error["input"], str) else "items"
            raise InvalidParameter(name, f"{name} must have at {word} {error['ctx'][bound]} {unit}")
    if error["type"] == "finite_number":
        raise InvalidParameter(name, f"{name} must be a finite number")
    expected, given = error["msg"].removeprefix("Input should be "), error["input"]
    expected = "an object" if error["type"] in ("model_type", "dict_type") else expected
    shown = json_type(given)
    if error["type"] == "literal_error" and isinstance(given, str | bool):
        expected = re.sub("True|False", lambda match: match[0].lower(), expected)
        shown = quote(given) if isinstance(given, str) else json.dumps(given)
    elif shown == "a number" and error["type"].startswith(("int", "greater", "less")):
        shown = str(given)[:MAX_NAME]
    raise InvalidParameter(name, f"{name} must be {expected}, not {shown}")


def _unknown_field(path: str, known: Set[str], otherwise: str = "") -> BadRequest:
    """Return the error for a field, with one of those that are known there, if that is close, or what to say otherwise."""
    hint = _suggestion(path.rpartition(".")[2][:MAX_NAME], known) or otherwise
    return BadRequest(f"unknown field {quote(path)}{hint}", kind="unknown_field", param=path[:MAX_NAME])


def _suggestion(name: str, known: Set[str]) -> str:
    close = [other for names in ALIASES if name in names for other in names if other in known]
    close = close or difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


Value = TypeVar("Value")


def or_default(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def quote(text: str) -> str:
    """Return client text quoted for an error message, cut to `MAX_NAME` characters."""
    return repr(text if len(text) <= MAX_NAME else text[:MAX_NAME] + "…")


def json_type(value: object) -> str:
    """Return the JSON type of a parsed value with its article, such as `an object`."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def page_limit(query: Mapping[str, str]) -> int:
    """Return the most items of a page, the query's `limit`. Raises BadRequest if it is invalid."""
    limit = query.get("limit", str(DEFAULT_LIMIT))
    if not (len(limit) < 4 and limit.isascii() and limit.isdecimal() and 1 <= int(limit) <= MAX_LIMIT):
        raise InvalidParameter("limit", f"limit must be from 1 to {MAX_LIMIT}, not {quote(limit)}")
    return int(limit)


def is_ascending(query: Mapping[str, str]) -> bool:
    """Return whether a page begins with the oldest item, by the query's `order`. Raises BadRequest if it is invalid."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidParameter("order", f'order must be "asc" or "desc", not {quote(order)}')
    return order == "asc"


def _check_depth(body: object) -> None:
    """Raise BadRequest if lists and objects are nested too deeply for what reads them recursively later."""
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        items = (one.values() if type(one) is dict else one for one in level)
        level = [item for several in items for item in several if type(item) is dict or type(item) is list]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> BadRequest:
    return BadRequest(f"the body is nested too deeply; at most {MAX_DEPTH} levels are allowed", kind="invalid_json")


def _is_valid_unicode(body: object) -> bool:
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True

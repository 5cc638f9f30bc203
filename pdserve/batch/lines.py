"""The lines of OpenAI's batch files.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}                     a request
    {"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, "request_id": "…", "body": {…}}, "error": null}

`id` has the number of the request's line, from 1, by which a batch is resumed. A line that is no request has an `error`
instead of a `response`.
"""

from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from pydantic_core import from_json

from pdserve.lines.untrusted import read_json

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
MAX_ID_CHARS = 512
ID_PREFIX = "batch_req_"
MAX_ERRORS = 100  # that are named of one file
_ANSWER = f'{{"id": "{ID_PREFIX}'.encode()  # the beginning of each line of answers
Json = dict[str, Any]


@dataclass(frozen=True)
class BatchRequest:
    """One request. `line` is the number of its line, from 1."""

    line: int
    custom_id: str
    url: str
    body: Json


class InvalidLine(ValueError):
    """A line is not a request. The text says what would be one."""

    def __init__(self, line: int, message: str, code: str, custom_id: str | None = None) -> None:
        super().__init__(f"line {line}: {message}")
        self.line, self.code, self.custom_id = line, code, custom_id


def read_lines(file: BinaryIO, max_bytes: int) -> Iterator[bytes]:
    """Return the lines of a file, and of a longer one the first `max_bytes` + 1 bytes."""
    while raw := file.readline(max_bytes + 1):
        part = raw
        while len(part) > max_bytes and not part.endswith(b"\n"):
            part = file.readline(max_bytes + 1)
        yield raw


def parse_lines(
    lines: Iterable[bytes], endpoints: Sequence[str] = ENDPOINTS, max_bytes: int | None = None
) -> Iterator[BatchRequest | InvalidLine]:
    """Return the request of each line that is not blank, or what is wrong with it.

    Args:
        endpoints: the paths that requests may have.
        max_bytes: of a line.
    """
    seen: set[str] = set()
    for number, raw in enumerate(lines, 1):
        if max_bytes is not None and len(raw) > max_bytes:
            yield InvalidLine(number, f"a line has at most {max_bytes} bytes", "line_too_long")
            continue
        if not raw.strip():
            continue
        try:
            request = _parse(number, raw, endpoints)
        except InvalidLine as error:
            yield error
            continue
        if request.custom_id in seen:
            message = f"the custom_id {request.custom_id[:100]!r} has occurred before; each must be unique"
            yield InvalidLine(number, message, "duplicate_custom_id", request.custom_id)
            continue
        seen.add(request.custom_id)
        yield request


def _parse(number: int, raw: bytes, endpoints: Sequence[str]) -> BatchRequest:
    try:
        # Strict: NaN and lone surrogates could be neither sent nor written as JSON.
        line = from_json(raw.removeprefix(BOM_UTF8), allow_inf_nan=False)
    except ValueError as error:
        raise InvalidLine(number, f"this is not JSON: {error}", "invalid_json") from None
    if not isinstance(line, dict):
        raise InvalidLine(number, "this must be a JSON object", "invalid_json")
    name = line.get("custom_id")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_ID_CHARS:
        message = f"custom_id must be a string of 1 to {MAX_ID_CHARS} characters"
        raise InvalidLine(number, message, "invalid_custom_id")
    if unknown := set(line) - {"custom_id", "method", "url", "body"}:
        raise InvalidLine(number, f"unknown field {min(unknown)[:100]!r}", "unknown_field", name)
    if line.get("method") != "POST":
        raise InvalidLine(number, 'method must be "POST"', "invalid_method", name)
    if line.get("url") not in endpoints:
        raise InvalidLine(number, f"url must be {' or '.join(endpoints)}", "invalid_url", name)
    body = line.get("body")
    if not isinstance(body, dict):
        raise InvalidLine(number, "body must be a JSON object", "invalid_body", name)
    if body.get("stream"):
        raise InvalidLine(number, "stream is not possible in a batch; leave it out", "invalid_body", name)
    return BatchRequest(number, name, line["url"], body)


def check_lines(lines: Iterable[BatchRequest | InvalidLine], max_lines: int) -> tuple[int, list[InvalidLine]]:
    """Return the number of requests, and the first errors: of lines, or that there are too many or none."""
    count, errors = 0, []
    for line in lines:
        count += 1
        if count > max_lines:
            errors.append(InvalidLine(line.line, f"a batch has at most {max_lines} requests", "too_many_requests"))
        elif isinstance(line, InvalidLine):
            errors.append(line)
        if count > max_lines or len(errors) == MAX_ERRORS:
            break
    if not count:
        errors.append(InvalidLine(1, "the file has no request", "empty_file"))
    return count, errors


def answer_line(request: BatchRequest, status: int, request_id: str, body: Json) -> Json:
    """Return the line of an answer."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {
        "id": f"{ID_PREFIX}{request.line}",
        "custom_id": request.custom_id,
        "response": response,
        "error": None,
    }


def error_line(error: InvalidLine) -> Json:
    """Return the line in place of an answer."""
    fields = {"code": error.code, "message": str(error)}
    return {"id": f"{ID_PREFIX}{error.line}", "custom_id": error.custom_id, "response": None, "error": fields}


def read_done(file: BinaryIO) -> dict[int, str | None]:
    """Return the custom id of each answered line, by its number, and cut off a last line that is incomplete.

    Raises:
        ValueError: another line is no answer, or an incomplete one is not the beginning of an answer.
    """
    done: dict[int, str | None] = {}
    end = 0
    for number, raw in enumerate(file, 1):
        if not raw.endswith(b"\n"):
            if not _ANSWER.startswith(raw[: len(_ANSWER)]):  # another file, which must not be truncated
                raise ValueError(f"line {number} is not an answer of a batch")
            break
        try:
            line = read_json(raw)
            done[int(line["id"].removeprefix(ID_PREFIX))] = line["custom_id"]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"line {number} is not an answer of a batch") from None
        end += len(raw)
    file.truncate(end)
    file.seek(end)
    return done

"""JSON responses, and error responses in OpenAI's format."""

from collections.abc import Callable, Iterator, Mapping

from pydantic_core import to_json
from starlette.responses import Response

from pdserve.errors import RequestError

SLICE_ITEMS = 256  # of a list, as of log probabilities of one token each: less than a millisecond
ErrorBody = Callable[
    [RequestError, str], Mapping[str, object]
]  # what a dialect says of an error to a request of this id
CLIENT_GONE = 499  # nginx's status for a client that disconnected; no client ever receives it


def json_response(data: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(data), status, headers, media_type="application/json")


def sliced_json(value: object) -> bytes:
    """Return the same as `to_json`, built in slices. To be run in a thread.

    `to_json` keeps the interpreter's lock: serializing a large answer at once would stall all streams.
    """
    return b"".join(_pieces(value))


def _pieces(value: object) -> Iterator[bytes]:
    if isinstance(value, dict):
        opening = b"{"
        for name, item in value.items():
            yield opening + to_json(str(name)) + b":"
            yield from _pieces(item)
            opening = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and len(value) > SLICE_ITEMS:
        for start in range(0, len(value), SLICE_ITEMS):
            yield (b"," if start else b"[") + to_json(value[start : start + SLICE_ITEMS])[1:-1]
        yield b"]"
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        for start, item in enumerate(value):
            yield b"," if start else b"["
            yield from _pieces(item)
        yield b"]"
    else:
        yield to_json(value)


def error_response(error: RequestError, body: Mapping[str, object] | None = None) -> Response:
    """Return the response to a failed request, with `Retry-After` where a retry can help. The default body is OpenAI's."""
    headers: dict[str, str] = {}
    if error.status == 429 or error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s or 1)
    if error.status in (408, 413):
        headers["Connection"] = "close"  # the unread rest of the body must not be parsed as the next request
    return json_response(body or error.body(), error.status, headers)


class InternalError(RequestError):
    """An unexpected exception in the router; the log has its traceback."""

    def __init__(self) -> None:
        super().__init__("internal error in the router; its log has the details", kind="internal_error")

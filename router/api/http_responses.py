"""JSON responses, and error responses in OpenAI's format."""

from pydantic_core import to_json
from starlette.responses import Response

from pdserve.errors import RequestError

CLIENT_GONE = 499  # nginx's status for a client that disconnected; no client ever receives it


def json_response(data: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(data), status, headers, media_type="application/json")


def error_response(error: RequestError) -> Response:
    """Return the response to a failed request, with `Retry-After` where a retry can help."""
    headers: dict[str, str] = {}
    if error.status == 429 or error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s or 1)
    if error.status in (408, 413):
        headers["Connection"] = "close"  # the unread rest of the body must not be parsed as the next request
    return json_response(error.body(), error.status, headers)


class InternalError(RequestError):
    """An unexpected exception in the router; the log has its traceback."""

    def __init__(self) -> None:
        super().__init__("internal error in the router; its log has the details", kind="internal_error")

"""JSON responses, and errors in OpenAI's format."""

from pydantic_core import to_json
from starlette.responses import Response

from pdserve.errors import RequestError

CLIENT_GONE = 499  # nginx's status for a client that disconnected; it appears in the access log only


def json_response(data: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(data), status, headers, media_type="application/json")


def error_data(error: RequestError) -> dict[str, object]:
    """OpenAI's error object, as a body or as an event in a stream."""
    fields = {"message": str(error), "type": error.openai_type, "param": error.param, "code": error.kind}
    return {"error": fields}


def error_response(error: RequestError) -> Response:
    headers: dict[str, str] = {}
    if error.status == 429 or error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s or 1)
    if error.status in (408, 413):
        headers["Connection"] = "close"  # what is left of the body must not be taken for the next request
    return json_response(error_data(error), error.status, headers)


class InternalError(RequestError):
    """A mistake of ours; the log has the traceback."""

    def __init__(self) -> None:
        super().__init__("the router made a mistake; its log has the details", kind="internal_error")

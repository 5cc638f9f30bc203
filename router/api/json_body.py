"""JSON request bodies that endpoints parse themselves, with errors in OpenAI's format."""

from typing import Any, Generic, get_args

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema
from starlette.requests import Request

from pdserve.errors import BadRequest
from pdserve.router.api import parsing
from pdserve.router.api.parsing import BodyType, quote


class UnsupportedMediaType(BadRequest):
    """The body is not JSON, or compressed."""

    status = 415


class JsonBody(Generic[BodyType]):
    """A body that has been read and not parsed. For FastAPI, and so in /openapi.json, it is a `BodyType`."""

    __slots__ = ("_model", "raw")

    def __init__(self, model: type[BodyType], raw: bytes) -> None:
        self._model = model
        self.raw = raw

    def parse(self) -> BodyType:
        """Return the validated body.

        Raises:
            BadRequest: it is not valid JSON, or does not fit the model.
        """
        return parsing.validate(self._model, parsing.parse_json(self.raw))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler(get_args(source)[0])


class ParsedBody(JsonBody[BodyType]):
    """A body that has been parsed already."""

    __slots__ = ("_parsed",)

    def __init__(self, parsed: BodyType, raw: bytes) -> None:
        super().__init__(type(parsed), raw)
        self._parsed = parsed

    def parse(self) -> BodyType:
        return self._parsed


async def read_json(request: Request) -> bytes:
    """Return the raw body; raise UnsupportedMediaType if its content type is not JSON, or it is compressed.

    A missing content type and the one that `curl -d` sends by default are accepted as JSON, but not from a web page, which
    could send them to other origins without asking.
    """
    check_not_compressed(request)
    media_type = content_type(request)
    accepted = media_type == "application/json" or media_type.endswith("+json")
    if not accepted and media_type in ("", "application/x-www-form-urlencoded"):
        accepted = "origin" not in request.headers
    if not accepted:
        message = "the body must be JSON, with Content-Type: application/json"
        raise UnsupportedMediaType(message, kind="unsupported_content_type", param="Content-Type")
    return await request.body()


def require_json(request: Request) -> None:
    """Raise UnsupportedMediaType unless the content type is exactly JSON.

    This prevents cross-site requests to a router without keys: a page of another origin cannot send this header without a
    preflight, which the router refuses.
    """
    if content_type(request) != "application/json":
        message = "this path requires the header Content-Type: application/json"
        raise UnsupportedMediaType(message, kind="unsupported_content_type", param="Content-Type")


def check_not_compressed(request: Request) -> None:
    """Raise UnsupportedMediaType for a body in a content coding such as gzip: a few kilobytes of one can be gigabytes."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", ""):
        message = f"the body must not be compressed: leave out Content-Encoding ({quote(coding)})"
        raise UnsupportedMediaType(message, kind="unsupported_content_encoding", param="Content-Encoding")


def content_type(request: Request) -> str:
    """Return the media type of the body in lower case, without parameters."""
    return request.headers.get("content-type", "").split(";")[0].strip().lower()

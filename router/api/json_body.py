"""JSON request bodies that endpoints parse themselves, with errors in OpenAI's format."""

import logging
import re
from collections.abc import Callable
from typing import Any, ClassVar, Generic, get_args

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema
from starlette.requests import Request

from pdserve.errors import BadRequest
from pdserve.router.api import parsing
from pdserve.router.api.parsing import BodyType, quote

log = logging.getLogger(__name__)
MAX_UNKNOWN = 32  # unknown fields of one body
MAX_NAMES = 100  # that are logged
STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")  # of a field's path, such as tools[0].function.name


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

    def drop(self, body: Any, error: BadRequest) -> bool:
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


class UnsupportedMediaType(BadRequest):
    """The body is not JSON, or compressed."""

    status = 415


class JsonBody(Generic[BodyType]):
    """A body that has been read and not parsed. For FastAPI, and so in /openapi.json, it is a `BodyType`."""

    __slots__ = ("_model", "_unknown", "raw")

    def __init__(self, model: type[BodyType], raw: bytes, unknown: "UnknownFields | None" = None) -> None:
        """`unknown` drops fields that the model does not know; None: they are errors."""
        self._model = model
        self._unknown = unknown
        self.raw = raw

    def parse(self) -> BodyType:
        """Return the validated body.

        Raises:
            BadRequest: it is not valid JSON, or does not fit the model.
        """
        body = parsing.parse_json(self.raw)
        for _ in range(MAX_UNKNOWN if self._unknown else 0):
            try:
                return parsing.validate(self._model, body)
            except BadRequest as error:
                if self._unknown is None or not self._unknown.drop(body, error):
                    raise
        return parsing.validate(self._model, body)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler(get_args(source)[0])


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

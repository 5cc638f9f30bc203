"""The OpenAPI document: what FastAPI derives from the endpoints' declarations, and what those cannot say."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from pdserve import __version__
from pdserve.router.api.field_texts import text_of


class Described(Protocol):
    """An endpoint with FastAPI's description of it."""

    @property
    def described(self) -> APIRoute: ...


def openapi_document(routes: Sequence[Described], model: str, keys: Mapping[str, str]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the routes.

    `model` is the name of the served model, the only one that a body may name. `keys` tells for each path that requires a key
    which one.
    """
    document = get_openapi(title="pdserve", version=__version__, routes=[route.described for route in routes])
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's own errors; endpoints answer with those they declare
            for parameter in operation.get("parameters", ()):
                _describe("", parameter["name"], parameter)
            if path in keys:
                operation["security"] = [{keys[path]: []}]
    components = document["components"]
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    for name, schema in components["schemas"].items():
        if "model" in schema["properties"]:
            schema["properties"]["model"] = {
                "enum": [model] if "model" in schema.get("required", ()) else [model, None]
            }
        for field, properties in schema["properties"].items():
            _describe(name, field, properties)
    if keys:
        components["securitySchemes"] = {
            key: {"type": "http", "scheme": "bearer"} for key in sorted(set(keys.values()))
        }
    return document


def _describe(schema: str, field: str, described: dict[str, Any]) -> None:
    """Add what the field means. One that no text names, such as of another package's dialect, stays as it is."""
    text = text_of(schema, field)
    if text is not None:
        described.setdefault("description", text)

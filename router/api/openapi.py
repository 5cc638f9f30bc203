"""The OpenAPI document: what FastAPI derives from the endpoints' declarations, and what those cannot say."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from pdserve import __version__


def openapi_document(routes: Sequence[APIRoute], model: str, keys: Mapping[str, str]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the routes.

    `model` is the name of the served model, the only one that a body may name. `keys` tells for each path that requires a key
    which one.
    """
    document = get_openapi(title="pdserve", version=__version__, routes=routes)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's own errors; endpoints answer with those they declare
            if path in keys:
                operation["security"] = [{keys[path]: []}]
    components = document["components"]
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    for schema in components["schemas"].values():
        if "model" in schema["properties"]:
            schema["properties"]["model"] = {
                "enum": [model] if "model" in schema.get("required", ()) else [model, None]
            }
    if keys:
        components["securitySchemes"] = {
            key: {"type": "http", "scheme": "bearer"} for key in sorted(set(keys.values()))
        }
    return document

"""The description of the endpoints at /openapi.json, made from the routes and the shapes of the bodies."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from pdserve import __version__
from pdserve.router import schemas

BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": schemas.CompletionBody,
    "/v1/chat/completions": schemas.ChatBody,
    "/v1/responses": schemas.ResponseBody,
    "/tokenize": schemas.TokenizeBody,
    "/detokenize": schemas.DetokenizeBody,
    "/admin/instances/{instance_id}/role": schemas.RoleBody,
}
ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


def describe(app: FastAPI) -> dict[str, Any]:
    """OpenAPI 3.1. The endpoints read bodies themselves, so their shapes are put in here; every other answer is an error."""
    models = [(model, "validation") for model in BODIES.values()]
    _, shapes = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]  # lists are invariant
    # The page's files are no API.
    routes = [route for route in app.routes if "HEAD" not in getattr(route, "methods", ())]
    described = get_openapi(title="pdserve", version=__version__, routes=routes)
    described["components"] = {"schemas": {**shapes["$defs"], "Error": ERROR}}
    for path, methods in described["paths"].items():
        for operation in methods.values():
            good = "202" if path.startswith("/admin/") else "200"
            operation["responses"] = {
                good: {"description": "The answer"},
                "default": {"description": "Error", "content": _json("Error")},
            }
            if path in BODIES:
                operation["requestBody"] = {"required": True, "content": _json(BODIES[path].__name__)}
    return described


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}

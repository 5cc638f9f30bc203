"""The description of the endpoints at /openapi.json, made from the routes and the shapes of bodies and answers."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import Route

from pdserve import __version__
from pdserve.router.api import response_schemas, schemas

BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": schemas.CompletionBody,
    "/v1/chat/completions": schemas.ChatBody,
    "/v1/responses": schemas.ResponseBody,
    "/tokenize": schemas.TokenizeBody,
    "/detokenize": schemas.DetokenizeBody,
    "/admin/instances/{instance_id}/role": schemas.RoleBody,
}
QUESTION = {"role": "user", "content": "What is the capital of France?"}
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "The capital of France is", "max_tokens": 8},
    "/v1/chat/completions": {"messages": [QUESTION], "max_completion_tokens": 8},
    "/v1/responses": {"input": QUESTION["content"], "max_output_tokens": 8},
    "/tokenize": {"prompt": "The capital of France is"},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/admin/instances/{instance_id}/role": {"role": "decode"},
}
ERRORS = {
    "400": "The request is not one that can be served; the message says what would be right",
    "401": "The API key is missing or wrong",
    "404": "There is no such model, request or instance",
    "409": "The order does not go with what the instances do",
    "413": "The body is too large",
    "415": "The body is not JSON",
    "429": "Too much is asked of this router, or by this API key; Retry-After says when to ask again",
    "500": "A mistake of the server, which its log explains",
    "503": "Nobody can serve the request now",
}
ALWAYS = {"400", "401", "500"}  # 400: a malformed X-Request-Id
WITH_BODY = ALWAYS | {"404", "413", "415"}
GENERATING = WITH_BODY | {"429", "503"}


def describe(routes: Iterable[Route], model: str) -> dict[str, Any]:
    """OpenAPI 3.1. The endpoints read bodies and write answers themselves, so the shapes are put in here.

    `model` is the name of the served one, which is the only one that a body can ask for.
    """
    models = [(model, "validation") for model in BODIES.values()]
    _, shapes = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]  # lists are invariant
    for shape in shapes["$defs"].values():
        if "model" in shape["properties"]:
            shape["properties"]["model"] = {"enum": [model, None]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdserve", "version": __version__},
        "paths": {route.path_format: _operations(route) for route in routes},
        "components": {"schemas": {**shapes["$defs"], "Error": response_schemas.ERROR}},
    }


def _operations(route: Route) -> dict[str, Any]:
    path = route.path_format
    operation: dict[str, Any] = {"responses": _responses(path)}
    if path in BODIES:
        operation["requestBody"] = {"required": True, "content": _json(BODIES[path].__name__, _examples(path))}
    operation["parameters"] = [
        {"name": name, "in": "path", "required": True, "schema": response_schemas.TEXT}
        for name in route.param_convertors
    ]
    return {method.lower(): operation for method in route.methods or ()}


def _responses(path: str) -> dict[str, Any]:
    streams: dict[str, Any] = {"text/event-stream": {}} if path in response_schemas.STREAMED else {}
    kind = "text/plain" if path == "/metrics" else "application/json"
    good = {"description": "The answer", "content": {kind: {"schema": response_schemas.OF[path]}, **streams}}
    errors = {status: {"description": ERRORS[status], "content": _json("Error")} for status in sorted(_errors(path))}
    return {"202" if path.startswith("/admin/") else "200": good, **errors}


def _errors(path: str) -> set[str]:
    if path in response_schemas.STREAMED:
        return GENERATING
    if path.startswith("/admin/"):
        return WITH_BODY | {"409"}
    if path in BODIES:
        return WITH_BODY
    return ALWAYS | ({"404"} if "{" in path else set()) | ({"503"} if path == "/ready" else set())


def _examples(path: str) -> dict[str, Any]:
    ways = {"whole": {}, "streamed": {"stream": True}} if path in response_schemas.STREAMED else {"example": {}}
    return {"examples": {name: {"value": EXAMPLES[path] | way} for name, way in ways.items()}}


def _json(name: str, more: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}, **more}}

"""The OpenAPI document at /openapi.json, derived from the routes and the schemas of bodies and responses."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import Route

from pdserve import __version__
from pdserve.router.api import response_schemas, schemas

REQUEST_BODIES: dict[str, type[BaseModel]] = {
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
    "400": "The request is invalid; the message says what would be valid",
    "401": "The API key is missing or wrong",
    "403": "A web page of another site sent the request",
    "404": "There is no such model, request or instance",
    "408": "The headers or the body did not arrive in time",
    "409": "The order conflicts with the state of the instances",
    "413": "The body is too large",
    "415": "The body is not JSON",
    "421": "The Host header names no host that this router serves",
    "429": "The router or the API key is over a limit; Retry-After says when to retry",
    "431": "The headers are too large, or too many requests are pipelined",
    "500": "Internal error; the router's log has the details",
    "503": "No instance can serve the request now, or the router has too many connections",
}
COMMON_ERRORS = {"400", "401", "403", "408", "421", "431", "500", "503"}  # 503: too many connections
BODY_ERRORS = COMMON_ERRORS | {"404", "413", "415"}
GENERATION_ERRORS = BODY_ERRORS | {"429"}


def openapi_document(routes: Iterable[Route], model: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the routes.

    The endpoints parse bodies and build responses themselves, so the schemas are added here. `model` is the name of the
    served model, the only one that a body may name.
    """
    body_models = [(body, "validation") for body in REQUEST_BODIES.values()]
    _, generated = models_json_schema(body_models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]  # lists are invariant
    body_schemas = generated["$defs"]
    for schema in body_schemas.values():
        if "model" in schema["properties"]:
            schema["properties"]["model"] = {"enum": [model, None]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdserve", "version": __version__},
        "paths": {route.path_format: _operations(route) for route in routes},
        "components": {"schemas": {**body_schemas, "Error": response_schemas.ERROR}},
    }


def _operations(route: Route) -> dict[str, Any]:
    path = route.path_format
    operation: dict[str, Any] = {"responses": _responses(path)}
    if path in REQUEST_BODIES:
        operation["requestBody"] = {
            "required": True,
            "content": _json_content(REQUEST_BODIES[path].__name__, _examples(path)),
        }
    operation["parameters"] = [
        {"name": name, "in": "path", "required": True, "schema": response_schemas.TEXT}
        for name in route.param_convertors
    ]
    return {method.lower(): operation for method in route.methods or ()}


def _responses(path: str) -> dict[str, Any]:
    streams: dict[str, Any] = {"text/event-stream": {}} if path in response_schemas.STREAMING_PATHS else {}
    media_type = "text/plain" if path == "/metrics" else "application/json"
    content = {media_type: {"schema": response_schemas.BY_PATH[path]}, **streams}
    errors = {
        status: {"description": ERRORS[status], "content": _json_content("Error")} for status in sorted(_errors(path))
    }
    return {"202" if path.startswith("/admin/") else "200": {"description": "The answer", "content": content}, **errors}


def _errors(path: str) -> set[str]:
    if path in response_schemas.STREAMING_PATHS:
        return GENERATION_ERRORS
    if path.startswith("/admin/"):
        return BODY_ERRORS | {"409"}
    if path in REQUEST_BODIES:
        return BODY_ERRORS
    return COMMON_ERRORS | ({"404"} if "{" in path else set())


def _examples(path: str) -> dict[str, Any]:
    is_streaming = path in response_schemas.STREAMING_PATHS
    variants = {"whole": {}, "streamed": {"stream": True}} if is_streaming else {"example": {}}
    return {"examples": {name: {"value": EXAMPLES[path] | variant} for name, variant in variants.items()}}


def _json_content(name: str, extra: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}, **extra}}

"""The OpenAPI document at /openapi.json."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import httpx
from starlette.applications import Starlette

from pdserve.router.api.openapi import REQUEST_BODIES

if TYPE_CHECKING:
    pass


def test_every_path_and_reference_is_described(app: Starlette) -> None:
    """Every path that takes a body has its schema, and every reference resolves."""

    async def get() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            return await http.get("/openapi.json")

    schema = asyncio.run(get()).json()
    assert schema["openapi"].startswith("3.1")
    with_body = {path for path, methods in schema["paths"].items() if "requestBody" in methods.get("post", {})}
    assert with_body == set(REQUEST_BODIES)
    assert {"/v1/models", "/debug/requests/{request_id}"} <= schema["paths"].keys() and "/" not in schema["paths"]
    text = json.dumps(schema)
    references = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert references <= schema["components"]["schemas"].keys() and "CompletionBody" in references

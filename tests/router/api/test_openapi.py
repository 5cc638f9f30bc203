"""The OpenAPI document at /openapi.json."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.application import Application

if TYPE_CHECKING:
    from tests.router.conftest import Client, ScriptedBackend

BODIES = {
    "/v1/load_lora_adapter": "LoadBody",
    "/v1/unload_lora_adapter": "UnloadBody",
    "/v1/completions": "CompletionBody",
    "/v1/chat/completions": "ChatBody",
    "/v1/responses": "ResponseBody",
    "/v1/messages": "MessagesBody",
    "/v1/messages/count_tokens": "CountTokensBody",
    "/v1/batches": "BatchBody",
    "/v1/embeddings": "EmbeddingBody",
    "/score": "ScoreBody",
    "/v1/score": "ScoreBody",
    "/classify": "ClassifyBody",
    "/rerank": "RerankBody",
    "/v1/rerank": "RerankBody",
    "/v2/rerank": "RerankBody",
    "/tokenize": "TokenizeBody",
    "/detokenize": "DetokenizeBody",
    "/admin/instances/{instance_id}/role": "RoleBody",
    "/admin/autoscaler": "LeaseBody",
}


def json_schema(described: dict[str, Any]) -> Any:
    return described["content"]["application/json"]["schema"]


def test_every_path_and_reference_is_described(client: Client, backend: ScriptedBackend) -> None:
    """Every body has its schema, its example is accepted, and every reference resolves."""
    document = client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    with_body = {
        path: post for path, methods in document["paths"].items() if "requestBody" in (post := methods.get("post", {}))
    }
    found = {path: json_schema(operation["requestBody"])["$ref"] for path, operation in with_body.items()}
    assert found == {path: f"#/components/schemas/{name}" for path, name in BODIES.items()}
    assert {"/v1/models", "/debug/requests/{request_id}"} <= document["paths"].keys() and "/" not in document["paths"]
    references = {part.split('"')[0] for part in json.dumps(document).split('"#/components/schemas/')[1:]}
    assert references == document["components"]["schemas"].keys()
    json_only: Any = {"headers": {"Content-Type": "application/json"}}
    for path, operation in with_body.items():
        for example in operation["requestBody"]["content"]["application/json"]["examples"].values():
            assert backend.info is not None
            backend.info = replace(backend.info, classifies=path == "/classify")
            answer = client.post(path.format(instance_id="p0"), example["value"], **json_only)
            assert str(answer.status_code) in operation["responses"], answer.text
            assert answer.status_code < 300 or path == "/v1/batches", answer.text  # which has no folder here


def test_answers_errors_and_the_served_model_are_described(client: Client) -> None:
    document = client.get("/openapi.json").json()
    chat = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert (
        json_schema(chat["200"])["$ref"].endswith("/ChatCompletion") and "text/event-stream" in chat["200"]["content"]
    )
    assert json_schema(chat["429"])["$ref"].endswith("/Error") and "422" not in chat
    assert document["paths"]["/metrics"]["get"]["responses"]["200"]["content"].keys() == {"text/plain"}
    schemas = document["components"]["schemas"]
    assert schemas["ChatBody"]["properties"]["model"]["enum"] == ["demo", None]
    assert (
        schemas["ChatChoice"]["additionalProperties"] is False and "token_ids" not in schemas["ChatChoice"]["required"]
    )


def test_keys_are_described_where_they_are_required(
    make_app: Callable[..., Application], make_client: type[Client], tokenizer: Tokenizer, client: Client
) -> None:
    document = make_client(make_app(tokenizer, api_key="one", admin_key="root")).get("/openapi.json").json()
    bearer = {"type": "http", "scheme": "bearer"}
    assert document["components"]["securitySchemes"] == {"api_key": bearer, "admin_key": bearer}
    security = {
        path: method.get("security") for path, methods in document["paths"].items() for method in methods.values()
    }
    assert security["/v1/models"] == [{"api_key": []}] and security["/debug/instances"] == [{"admin_key": []}]
    assert security["/health"] is None
    assert "security" not in client.get("/openapi.json").text.lower()


def test_others_are_answered_while_the_document_is_built_once(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, built = threading.Event(), threading.Event(), 0

    def build(*_: object) -> dict[str, str]:
        nonlocal built
        built += 1
        begun.set()
        assert go_on.wait(600)
        return {"openapi": "3.1"}

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            documents = [asyncio.create_task(client.get("/openapi.json")) for _ in range(3)]
            await asyncio.to_thread(begun.wait)
            assert (await client.get("/health")).status_code == 200
            assert not any(task.done() for task in documents)
            go_on.set()
            return await asyncio.gather(*documents)

    monkeypatch.setattr("pdserve.router.web.app.openapi_document", build)
    answers = asyncio.run(ask())
    assert [answer.json() for answer in answers] == [{"openapi": "3.1"}] * 3 and built == 1

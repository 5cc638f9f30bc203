"""The assembled application: unknown paths and methods, and CORS."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.application import Application

if TYPE_CHECKING:
    from tests.router.conftest import Client

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def test_unknown_paths_and_methods(client: Client) -> None:
    unknown = client.get("/v2/completions")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"] == "there is no such path; try /v1/models or /v1/completions"
    wrong = client.get(COMPLETIONS)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "OPTIONS, POST")
    assert wrong.json()["error"] == {
        "message": "this path does not support GET",
        "type": "invalid_request_error",
        "param": None,
        "code": "method_not_allowed",
    }


def test_cors(make_app: Callable[..., Application], make_client: type[Client], tokenizer: Tokenizer) -> None:
    client = make_client(make_app(tokenizer, cors_origins="https://a.example, https://b.example", api_key="one"))
    asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for origin, allowed in (("https://b.example", "https://b.example"), ("https://c.example", None)):
        before = client.request("OPTIONS", "/v1/completions", headers={"Origin": origin, **asking})
        refused = client.request("GET", "/v1/models", headers={"Origin": origin})
        for response in (before, refused):
            assert response.headers.get("access-control-allow-origin") == allowed
    plain = make_client(make_app(tokenizer)).request("GET", "/v1/models", headers={"Origin": "https://a.example"})
    assert "access-control-allow-origin" not in plain.headers

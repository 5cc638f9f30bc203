"""The assembled application: unknown paths and methods, and CORS."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import SetupError
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.application import Application
from pdserve.router.web.dialect import Dialect, OpenAI
from pdserve.router.web.endpoint import Access, endpoint

if TYPE_CHECKING:
    from tests.router.conftest import Client


class Copy(Dialect):
    """Another dialect with the path of OpenAI's completions."""

    tag = "copy"

    @endpoint("POST", "/v1/completions", Access.CLIENT)
    async def copied(self) -> None:
        """Nothing."""


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def test_unknown_paths_and_methods(client: Client) -> None:
    for path, hint in {
        "/v1/images": "try /v1/models or /v1/completions",
        "/": "",
        "/chat/completions": "did you mean /v1/chat/completions?",
        "/completions": "did you mean /v1/completions?",
        "/v1/v1/messages": "did you mean /v1/messages?",
        "/v1/chat/completion": "did you mean /v1/chat/completions?",
        "/" + "v" * 10_000: "try /v1/models or /v1/completions",
    }.items():
        unknown = client.post(path, {})
        assert unknown.status_code == (404 if hint else 405)
        assert not hint or unknown.json()["error"]["message"] == f"there is no such path; {hint}"
    wrong = client.get(COMPLETIONS)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "OPTIONS, POST")
    assert wrong.json()["error"] == {
        "message": "this path does not support GET; use POST",
        "type": "invalid_request_error",
        "param": None,
        "code": "method_not_allowed",
    }


def test_a_path_without_a_route_takes_any_key(
    make_app: Callable[..., Application], make_client: type[Client], tokenizer: Tokenizer
) -> None:
    for settings, keys in (({"api_key": "one"}, ["one"]), ({"api_key": "one", "admin_key": "two"}, ["one", "two"])):
        client = make_client(make_app(tokenizer, **settings))
        for path in ("/chat/completions", "/debug/nothing"):
            answers = [client.request("GET", path, headers={"Authorization": f"Bearer {key}"}) for key in keys]
            assert [answer.json()["error"]["code"] for answer in answers] == ["not_found"] * len(keys)
            wrong = client.request("GET", path, headers={"Authorization": "Bearer none"})
            assert wrong.status_code == 401 and "needs a valid API key" in wrong.json()["error"]["message"]


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


def test_two_dialects_that_answer_the_same_path_are_refused(
    make_app: Callable[..., Application], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.router.web.app.load_dialects", lambda: [OpenAI, Copy])
    with pytest.raises(
        SetupError, match=r"pdserve.router.web.dialect and .*test_app both answer POST /v1/completions;"
    ):
        make_app(tokenizer)

"""Fixtures of the API tests: errors of requests, and helpers that read streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.router.conftest import Client


@pytest.fixture
def expect_error(client: Client) -> Callable[..., dict[str, Any]]:
    """expect_error(path, body, status=400) posts the body and returns OpenAI's error object."""

    def post(path: str, body: object, status: int = 400) -> dict[str, Any]:
        response = client.post(path, body)
        assert response.status_code == status, response.text
        error: dict[str, Any] = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        return error

    return post


@pytest.fixture
def text_of() -> Callable[..., str]:
    """text_of(answers, index=0) joins the text of one choice over whole answers or events of a stream."""

    def join(answers: list[dict[str, Any]], index: int = 0) -> str:
        choices = [choice for answer in answers for choice in answer["choices"] if choice["index"] == index]
        return "".join(choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices)

    return join


@pytest.fixture
def token_ids_of() -> Callable[[list[dict[str, Any]]], list[int]]:
    """token_ids_of(choices) joins the token ids of choices."""
    return lambda choices: [token_id for choice in choices for token_id in choice.get("token_ids", [])]

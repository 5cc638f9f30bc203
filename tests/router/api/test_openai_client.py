"""OpenAI's official Python client, unmodified."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from pdserve.errors import Overloaded, Unavailable

if TYPE_CHECKING:
    from tests.router.conftest import ScriptedBackend


@pytest.fixture
def official(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_completions_chat_and_models(official: openai.OpenAI) -> None:
    completion = official.completions.create(model="demo", prompt="hello", n=2)
    assert [choice.text for choice in completion.choices] == [" Paris.", " Paris."]
    chat = official.chat.completions.create(model="demo", messages=[{"role": "user", "content": "hello"}])
    assert chat.choices[0].message.content == " Paris."
    assert chat.usage is not None and chat.usage.completion_tokens == 2
    assert [model.id for model in official.models.list()] == ["demo"]
    assert official.models.retrieve("demo").id == "demo"


def test_an_answer_can_be_sent_back(official: openai.OpenAI) -> None:
    chat = official.chat.completions.create(model="demo", messages=[{"role": "user", "content": "hello"}])
    messages: Any = [{"role": "user", "content": "hello"}, chat.choices[0].message, {"role": "user", "content": "?"}]
    assert official.chat.completions.create(model="demo", messages=messages).choices


def test_streams(official: openai.OpenAI) -> None:
    parts = official.completions.create(model="demo", prompt="hello", stream=True)
    assert "".join(part.choices[0].text for part in parts) == " Paris."
    chat = list(
        official.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "hello"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(part.choices[0].delta.content or "" for part in chat if part.choices) == " Paris."
    assert chat[-1].usage is not None and chat[-1].usage.total_tokens > 2


def test_errors(official: openai.OpenAI, backend: ScriptedBackend) -> None:
    with pytest.raises(openai.NotFoundError, match="this router serves 'demo'") as caught:
        official.completions.create(model="gpt", prompt="hello")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="length_penalty needs use_beam_search"):
        official.completions.create(model="demo", prompt="hello", extra_body={"length_penalty": 2})
    backend.fails(Overloaded("too much to do", kind="overloaded", retry_after_s=7), error_at_open=True)
    with pytest.raises(openai.RateLimitError, match="too much to do") as limited:
        official.completions.create(model="demo", prompt="hello")
    assert limited.value.response.headers["retry-after"] == "7"


def test_an_error_within_a_stream_raises(official: openai.OpenAI, backend: ScriptedBackend) -> None:
    backend.generates([7, 8], finish_reason=None, error=Unavailable("instance d0 was lost", kind="instance_lost"))
    parts = official.completions.create(model="demo", prompt="hello", stream=True)
    got = []
    with pytest.raises(openai.APIError, match="instance d0 was lost") as caught:
        for part in parts:
            got.append(part.choices[0].text)
    assert len(got) == 2
    assert caught.value.code == "instance_lost"

"""LangChain's ChatOpenAI, unmodified, calls tools and answers in given shapes. What it says for itself is in test_up.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel
from starlette.applications import Starlette

from pdserve.router.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tests.router.conftest import ScriptedBackend

FORMATS = ["hermes", "llama"]


class Weather(BaseModel):
    """The weather in a city."""

    city: str
    days: list[int]


CALLED: dict[str, Any] = {"city": "Par}is", "days": [1, 2]}
CALL = {
    "hermes": f'<tool_call>\n{{"name": "Weather", "arguments": {json.dumps(CALLED)}}}\n</tool_call>',
    "llama": f'{{"name": "Weather", "parameters": {json.dumps(CALLED)}}}',
}


@pytest.fixture(scope="module")
def chat_model() -> Any:
    from langchain_openai import ChatOpenAI  # takes a second, and modules are imported to collect tests

    return ChatOpenAI


@pytest.mark.parametrize("kind", FORMATS)
def test_tools_and_shapes(
    chat_model: Any,
    kind: str,
    backend: ScriptedBackend,
    make_app: Callable[..., Starlette],
    serving: Callable[[Starlette], AbstractContextManager[str]],
    tool_tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tool_tokenizers[kind]
    assert backend.info is not None
    backend.info = replace(backend.info, max_model_len=4000)

    def plays(text: str) -> None:
        backend.plays([*tokenizer.encode(text), 0], "stop")

    def grammar() -> Any:
        return json.loads(backend.requests[-1].sampling.grammar or "null")

    with serving(make_app(tokenizer)) as url:
        chat = chat_model(model="demo", base_url=f"{url}/v1", api_key="none", max_retries=0)

        plays(CALL[kind])
        with_tools = chat.bind_tools([Weather])
        answer = with_tools.invoke("sunny?")
        [call] = answer.tool_calls
        assert (call["name"], call["args"], answer.content) == ("Weather", CALLED, "")
        assert answer.response_metadata["finish_reason"] == "tool_calls" and grammar() is None
        whole: Any = None
        for piece in with_tools.stream("sunny?"):
            whole = piece if whole is None else whole + piece
        assert [(one["name"], one["args"]) for one in whole.tool_calls] == [("Weather", CALLED)]

        plays("It is.")
        shown = [("user", "sunny?"), answer, {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
        assert with_tools.invoke(shown).content == "It is."
        assert "sunny" in tokenizer.decode(backend.requests[-1].prompt).split("tool\n")[-1]

        plays(CALL[kind])
        forced = chat.bind_tools([Weather], tool_choice="Weather", parallel_tool_calls=False)
        assert forced.invoke("sunny?").tool_calls[0]["args"] == CALLED and grammar() is not None
        shaped = chat.with_structured_output(Weather, method="function_calling")
        assert shaped.invoke("sunny?") == Weather(**CALLED) and grammar() is not None

        plays(json.dumps(CALLED))
        assert chat.with_structured_output(Weather).invoke("sunny?") == Weather(**CALLED)
        assert grammar()["json"]["properties"].keys() == {"city", "days"}
        assert chat.with_structured_output(None, method="json_mode").invoke("sunny?") == CALLED
        told = chat.with_structured_output(Weather, include_raw=True).invoke("sunny?")
        assert told["parsed"] == Weather(**CALLED) and told["raw"].usage_metadata["output_tokens"] > 0

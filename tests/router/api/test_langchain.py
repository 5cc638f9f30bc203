"""LangChain's ChatOpenAI, unmodified: tool calls and structured output. test_up.py has plain chats."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.application import Application

if TYPE_CHECKING:
    from tests.router.conftest import ScriptedBackend

FORMATS = ["hermes", "llama"]


class Weather(BaseModel):
    """The weather in a city."""

    city: str
    days: list[int]


ARGUMENTS: dict[str, Any] = {"city": "Par}is", "days": [1, 2]}
CALL = {
    "hermes": f'<tool_call>\n{{"name": "Weather", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>',
    "llama": f'{{"name": "Weather", "parameters": {json.dumps(ARGUMENTS)}}}',
}


@pytest.fixture(scope="module")
def chat_model() -> Any:
    from langchain_openai import ChatOpenAI  # imported here because it takes a second

    return ChatOpenAI


@pytest.mark.parametrize("kind", FORMATS)
def test_tools_and_structured_output(
    chat_model: Any,
    kind: str,
    backend: ScriptedBackend,
    make_app: Callable[..., Application],
    serving: Callable[[Application], AbstractContextManager[str]],
    tool_tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tool_tokenizers[kind]
    assert backend.info is not None
    backend.info = replace(backend.info, max_model_len=4000, common_model_len=4000)

    def generates(text: str) -> None:
        backend.generates([*tokenizer.encode(text), 0], "stop")

    def grammar() -> Any:
        return json.loads(backend.requests[-1].sampling.grammar or "null")

    with serving(make_app(tokenizer)) as url:
        chat = chat_model(model="demo", base_url=f"{url}/v1", api_key="none", max_retries=0)

        generates(CALL[kind])
        with_tools = chat.bind_tools([Weather])
        answer = with_tools.invoke("sunny?")
        [call] = answer.tool_calls
        assert (call["name"], call["args"], answer.content) == ("Weather", ARGUMENTS, "")
        assert answer.response_metadata["finish_reason"] == "tool_calls" and grammar() is None
        whole: Any = None
        for piece in with_tools.stream("sunny?"):
            whole = piece if whole is None else whole + piece
        assert [(one["name"], one["args"]) for one in whole.tool_calls] == [("Weather", ARGUMENTS)]

        strictly = chat.bind_tools([Weather], strict=True)
        assert strictly.invoke("sunny?").tool_calls[0]["args"] == ARGUMENTS
        assert "city" in json.dumps(grammar()["format"])
        structured = chat.with_structured_output(Weather, method="function_calling", strict=True)
        assert structured.invoke("sunny?") == Weather(**ARGUMENTS)

        generates("It is.")
        turns = [("user", "sunny?"), answer, {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
        assert with_tools.invoke(turns).content == "It is."
        assert "sunny" in tokenizer.decode(backend.requests[-1].prompt).split("tool\n")[-1]

        generates(CALL[kind])
        forced = chat.bind_tools([Weather], tool_choice="Weather", parallel_tool_calls=False)
        assert forced.invoke("sunny?").tool_calls[0]["args"] == ARGUMENTS and grammar() is not None
        structured = chat.with_structured_output(Weather, method="function_calling")
        assert structured.invoke("sunny?") == Weather(**ARGUMENTS) and grammar() is not None

        generates(json.dumps(ARGUMENTS))
        assert chat.with_structured_output(Weather, strict=True).invoke("sunny?") == Weather(**ARGUMENTS)
        assert chat.with_structured_output(Weather).invoke("sunny?") == Weather(**ARGUMENTS)
        assert grammar()["json"]["properties"].keys() == {"city", "days"}
        assert chat.with_structured_output(None, method="json_mode").invoke("sunny?") == ARGUMENTS
        result = chat.with_structured_output(Weather, include_raw=True).invoke("sunny?")
        assert result["parsed"] == Weather(**ARGUMENTS) and result["raw"].usage_metadata["output_tokens"] > 0

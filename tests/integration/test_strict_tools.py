"""OpenAI's client with its helpers: arguments of strict functions follow their schemas on real instances."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from tokenizers import Tokenizer

TEMPLATE = (
    "{% if tools %}FORMAT{{ tools | length }}{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
FORMATS = {"hermes": "<tool_call>", "qwen3_coder": "<tool_call><function=f><parameter=p>", "pythonic": "[func_name1("}
MESSAGES: Any = [{"role": "user", "content": "Is it sunny in Ulm?"}]


class Weather(BaseModel):
    """The weather of a city."""

    days: list[bool]
    unit: Literal["C", "F"] | None


class Report(BaseModel):
    sunny: bool


def make_model(checkpoint: Callable[..., Path], path: Path, kind: str) -> Path:
    """Return a random Qwen3 with the token `<tool_call>`, whose template has the calls of a format."""
    shutil.copytree(checkpoint("qwen3"), path)
    parsed = json.loads((path / "tokenizer.json").read_text().replace("<|user|>", "<tool_call>"))
    for token in parsed["added_tokens"]:
        token["special"] = token["content"].startswith("<|")
    (path / "tokenizer.json").write_text(json.dumps(parsed))
    settings = json.loads((path / "tokenizer_config.json").read_text()) | {
        "chat_template": TEMPLATE.replace("FORMAT", FORMATS[kind])
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize(
    ("kind", "roles"),
    [
        ("hermes", {"prefill": 1, "decode": 1}),
        ("qwen3_coder", {"prefill": 0, "decode": 0, "both": 1}),
        pytest.param("pythonic", {"prefill": 1, "decode": 1}, marks=pytest.mark.slow),
    ],
)
def test_the_helpers_of_openai(
    kind: str, roles: dict[str, int], checkpoint: Callable[..., Path], tmp_path: Path, deploy: Callable[..., Any]
) -> None:
    model = make_model(checkpoint, tmp_path / "model", kind)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    with deploy(model=str(model), num_blocks=256, **roles) as deployment:
        client = openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0)
        tool = openai.pydantic_function_tool(Weather)
        # The random model begins a call wherever it can.
        bias = {str(tokenizer.encode("[" if kind == "pythonic" else "<tool_call>").ids[0]): 100}
        asking: Any = {
            "model": deployment.config.name,
            "messages": MESSAGES,
            "tools": [tool],
            "parallel_tool_calls": False,
            "logit_bias": bias,
        }
        for seed in range(3):
            parsed = client.chat.completions.parse(**asking, seed=seed).choices[0]
            assert parsed.finish_reason == "tool_calls" and parsed.message.tool_calls
            [call] = parsed.message.tool_calls
            assert isinstance(call.function.parsed_arguments, Weather)
            with client.chat.completions.stream(**asking, seed=seed) as stream:
                kinds = {event.type for event in stream}
                [streamed] = stream.get_final_completion().choices[0].message.tool_calls or []
            assert "tool_calls.function.arguments.done" in kinds
            assert streamed.function.arguments == call.function.arguments

        # The answer is text, in the given format.
        brace = tokenizer.encode("{").ids[0]
        asking["logit_bias"] = {str(brace): 100}
        report = client.chat.completions.parse(**asking, response_format=Report).choices[0].message
        assert isinstance(report.parsed, Report) and not report.tool_calls

        in_responses: Any = {
            "model": deployment.config.name,
            "input": "Is it sunny?",
            "tools": [openai.pydantic_function_tool(Weather)["function"] | {"type": "function"}],
            "parallel_tool_calls": False,
            "extra_body": {"logit_bias": bias, "seed": 1},
        }
        [item] = client.responses.parse(**in_responses).output
        assert item.type == "function_call" and Weather.model_validate_json(item.arguments)
        with client.responses.stream(**in_responses) as events:
            assert "response.function_call_arguments.done" in {event.type for event in events}
            [again] = events.get_final_response().output
        assert again.type == "function_call" and again.arguments == item.arguments
        in_responses["extra_body"]["logit_bias"] = {str(brace): 100}
        with client.responses.stream(**in_responses, text_format=Report) as events:
            assert "response.output_text.delta" in {event.type for event in events}
            assert isinstance(events.get_final_response().output_parsed, Report)

        tool["function"]["parameters"] = {"type": "object", "properties": {"a": {"type": "nothing"}}}
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(**asking)
        assert raised.value.code == "invalid_grammar"

"""Reasoning on real instances: budgets and grammars after it, on every topology, and the prefix hits of later turns."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers

# As Qwen3's: reasoning of turns before the last question is left out. `<think>` and `</think>` are the tokens 258 and 259.
TEMPLATE = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% if tools %}<tool_call>{{ tools | length }}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content and loop.index0 > ns.last %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
BUDGET = 40
QUESTION = {"role": "user", "content": "a question of some length, so that its prompt has several blocks of tokens"}
LETTERS = "abcdefgh"


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with a template that strips reasoning."""
    path = tmp_path_factory.mktemp("reasoning") / "model"
    shutil.copytree(checkpoint("qwen3"), path)
    text = (path / "tokenizer.json").read_text().replace("<|user|>", "<think>").replace("<|assistant|>", "</think>")
    parsed = json.loads(text)
    for token in parsed["added_tokens"]:
        token["special"] = token["content"].startswith("<|")
    (path / "tokenizer.json").write_text(json.dumps(parsed))
    settings = json.loads((path / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="module")
def letters(model: Path) -> list[str]:
    """The ids of the letters, of which text is the same tokens again."""
    return list(map(str, tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")).encode(LETTERS).ids))


def chat(deployment: Any, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0, "return_token_ids": True, **fields}
    reply = httpx.post(f"{deployment.url}/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


@pytest.mark.parametrize(
    "roles",
    [{"prefill": 1, "decode": 1}, pytest.param({"prefill": 0, "decode": 0, "both": 1}, marks=pytest.mark.slow)],
)
def test_budget_grammar_and_hits(
    roles: dict[str, int],
    model: Path,
    letters: list[str],
    deploy: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:
    open_id, close_id = 258, 259
    with deploy(model=str(model), num_blocks=256, **roles) as deployment:
        # The model never closes its reasoning, so the budget does.
        biased = {"logit_bias": {str(open_id): 100, str(close_id): -100}, "max_tokens": BUDGET + 20}
        limited = chat(deployment, [QUESTION], **biased, thinking_token_budget=BUDGET, ignore_eos=True)
        ids = limited["choices"][0]["token_ids"]
        assert ids[0] == open_id and ids.index(close_id) == BUDGET + 1
        assert limited["usage"]["completion_tokens_details"] == {"reasoning_tokens": BUDGET}

        # A grammar makes the output begin with reasoning, and applies after it.
        structured = {"guided_regex": "[ab]{5}", "thinking_token_budget": BUDGET, "max_tokens": BUDGET + 20}
        choice = chat(deployment, [QUESTION], **structured)["choices"][0]
        assert choice["token_ids"][0] == open_id and close_id in choice["token_ids"]
        assert len(choice["message"]["content"]) == 5 and set(choice["message"]["content"]) <= set("ab")
        assert choice["finish_reason"] == "stop"

        # So does the grammar of a forced call.
        x = {
            "type": "object",
            "properties": {"x": {"enum": ["a", "b"]}},
            "required": ["x"],
            "additionalProperties": False,
        }
        function = {"type": "function", "function": {"name": "f", "parameters": x}}
        forced = {
            "tools": [function],
            "tool_choice": "required",
            "thinking_token_budget": BUDGET,
            "max_tokens": BUDGET + 100,
        }
        choice = chat(deployment, [QUESTION], **forced)["choices"][0]
        assert choice["token_ids"][0] == open_id and close_id in choice["token_ids"]
        assert choice["message"]["reasoning"] and choice["finish_reason"] == "tool_calls"
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "f" and json.loads(call["function"]["arguments"]) in ({"x": "a"}, {"x": "b"})

        # In a loop of calls, the next prompt contains the output; after another question, it goes on after the last prompt.
        tools = [{"type": "function", "function": {"name": "f"}}]
        first = chat(deployment, [QUESTION], **structured, tools=tools, logit_bias=dict.fromkeys(letters, 100))
        message = first["choices"][0]["message"]
        assert set(message["reasoning"]) <= set(LETTERS)
        earlier = {"role": "assistant", "reasoning": message["reasoning"], "content": message["content"]}
        prompt, output = first["prompt_token_ids"], first["choices"][0]["token_ids"]
        reused = len(prompt) + len(output) - 1  # the last token has no KV
        results = (
            {"role": "tool", "tool_call_id": "1", "content": str(at)} for at in itertools.count(1000)
        )  # each asked once: a prompt asked again hits its own blocks

        def hits(messages: list[dict[str, Any]]) -> int:
            answer = chat(deployment, messages, tools=tools, max_tokens=1)
            cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return cached

        wait_until(
            lambda: hits([QUESTION, earlier, next(results)]) == reused // 16 * 16, "the output's blocks are hits"
        )
        assert hits([QUESTION, earlier, QUESTION]) == len(prompt) // 16 * 16

"""Strict tools: what the grammar of each format of calls lets through, and OpenAI's client with its helpers."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest
import torch
from pydantic import BaseModel

from pdserve.grammars.specification import build_grammar
from pdserve.router.api.schemas import ChatBody
from pdserve.router.api.tools import parse_tools
from pdserve.router.text.parsers.registry import TOOL_PARSERS
from pdserve.router.text.parsers.tool_parser import ToolParser, Tools

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from pdserve.router.text.tokenizer import Tokenizer
    from tests.router.conftest import Client, ScriptedBackend

CHAT = "/v1/chat/completions"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {"Unit": {"enum": ["C", "F"]}},
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 3},
        "unit": {"$ref": "#/$defs/Unit"},
        "days": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
STRICT = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]
ASKING: dict[str, Any] = {"messages": [{"role": "user", "content": "sunny?"}], "tools": STRICT}
FORMATS = {parser: name for name, parser in TOOL_PARSERS.items() if parser.FORMS}  # names by parser
OTHERS = {parser: name for name, parser in TOOL_PARSERS.items() if not parser.FORMS}
END = 256


class Matcher:
    """Follows a grammar, of which every byte is a token."""

    def __init__(self, spec: dict[str, Any]) -> None:
        xgrammar = pytest.importorskip(
            "xgrammar", reason="xgrammar is not installed: pip install 'pdserve[structured]'"
        )
        vocabulary = xgrammar.TokenizerInfo([bytes([i]) for i in range(256)] + [b"<|end|>"], stop_token_ids=[END])
        self._matcher = xgrammar.GrammarMatcher(
            xgrammar.GrammarCompiler(vocabulary).compile_grammar(build_grammar(spec))
        )
        self._mask_1W = xgrammar.allocate_token_bitmask(1, END + 1)

    def accepts(self, text: str, *, ends: bool = True) -> bool:
        return all(self._matcher.accept_token(token) for token in [*text.encode(), *([END] if ends else [])])

    def generate(self, choose: random.Random, most: int = 2000) -> Iterator[int]:
        """Yield random bytes up to the end of the output, which comes as soon as the grammar allows it.

        Every second byte ends a string, object or list, if one of them may: so the output ends.
        """
        for _ in range(most):
            self._matcher.fill_next_token_bitmask(self._mask_1W, 0)
            words = self._mask_1W.view(torch.uint8).numpy()
            allowed = [int(i) for i in np.flatnonzero(np.unpackbits(words, bitorder="little", count=END + 1))]
            closing = [token for token in b'"}]' if token in allowed and choose.random() < 0.5]
            token = END if END in allowed else choose.choice(closing or allowed)
            assert self._matcher.accept_token(token)
            if token == END:
                return
            yield token
        raise AssertionError("the output does not end")


def with_parser(tokenizer: Tokenizer, parser: type[ToolParser]) -> Tokenizer:
    tokenizer = copy.copy(tokenizer)
    tokenizer.parsers = replace(tokenizer.parsers, tools=parser)
    return tokenizer


def grammar_of(tokenizer: Tokenizer, parser: type[ToolParser], **fields: Any) -> dict[str, Any]:
    tools = parse_tools(ChatBody.model_validate(ASKING | fields), with_parser(tokenizer, parser))
    assert tools is not None
    return tools.grammar


@pytest.mark.parametrize("parser", FORMATS, ids=FORMATS.values())
def test_calls_follow_their_schemas(parser: type[ToolParser], tokenizer: Tokenizer) -> None:
    """Whatever begins like a call is a whole one that the parser finds, and its arguments follow the schema."""
    spec, choose, found = grammar_of(tokenizer, parser), random.Random(0), set()
    for seed in range(30):
        tag = parser.BEGINS[seed % len(parser.BEGINS)] if parser.BEGINS else ""
        begin = f"text {tag}" if tag else ("{", "<|python_tag|>{")[seed % 2]
        matcher = Matcher(spec)
        assert matcher.accepts(begin, ends=False)
        text = begin + bytes(matcher.generate(choose)).decode(errors="replace")
        output = parser(Tools({"weather": SCHEMA, "time": {}}), {}).push(text, is_end=True)
        [head, *rest] = output.calls
        assert output.text == ("text" if tag else ""), text
        arguments = json.loads("".join(delta.arguments for delta in (head, *rest)))
        jsonschema.validate(arguments, SCHEMA if head.name == "weather" else {"type": "object"})
        found.add(head.name)
    assert found == {"weather", "time"}


@pytest.mark.parametrize("parser", FORMATS, ids=FORMATS.values())
def test_text_is_free(parser: type[ToolParser], tokenizer: Tokenizer) -> None:
    spec = grammar_of(tokenizer, parser)
    begin, end = (side.replace("NAME", "weather").replace("INDEX", "0") for side in parser.FORMS[0])
    good, bad = '{"city": "Ulm", "unit": "C", "days": []}', '{"city": 5}'
    for text in ("", "No, {it} is not.\n", "é<b>漢</b>", f"{begin}{good}{end}"):
        assert Matcher(spec).accepts(text), text
    for text in (f"{begin}{bad}{end}", f"{begin}{good}"[:-1], begin.replace("weather", "rm") + "{}" + end):
        assert not Matcher(spec).accepts(text), text
    two = f"{begin}{good}{end}\n{begin}{good}{end}"
    assert Matcher(spec).accepts(two) and not Matcher(grammar_of(tokenizer, parser, parallel_tool_calls=False)).accepts(
        two
    )


@pytest.mark.parametrize("text", ["{", " {", "\xa0{", "\u2003{", "\x1c{", "<|python_tag|>{"])
def test_json_calls_cannot_hide_behind_white_space(text: str, tokenizer: Tokenizer) -> None:
    """Llama's parser takes a first JSON object for a call, so nothing else may begin like one."""
    call = text + ' "name": "weather", "parameters": {"city": 5}}'
    parser = TOOL_PARSERS["llama3_json"]
    assert parser(Tools({"weather": SCHEMA}), {}).push(call, is_end=True).calls
    assert not Matcher(grammar_of(tokenizer, parser)).accepts(call)


@pytest.mark.parametrize("parser", OTHERS, ids=OTHERS.values())
def test_formats_without_json(
    parser: type[ToolParser], tokenizer: Tokenizer, make_app: Callable[..., Starlette], make_client: type[Client]
) -> None:
    error = make_client(make_app(with_parser(tokenizer, parser))).post(CHAT, ASKING).json()["error"]
    assert error["message"].startswith(
        "this model writes the arguments of calls in a format that the router cannot hold"
    )
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")


class Report(BaseModel):
    sunny: bool


def test_structured_output_beside_strict_tools(
    tool_tokenizers: dict[str, Tokenizer],
    make_app: Callable[..., Starlette],
    make_client: type[Client],
    backend: ScriptedBackend,
) -> None:
    """The answer is either a call or follows the format of answers."""
    client = make_client(make_app(tool_tokenizers["hermes"]))
    assert backend.info is not None
    backend.info = replace(backend.info, max_model_len=4000)
    answer = {"type": "json_schema", "json_schema": {"name": "r", "schema": Report.model_json_schema()}}
    response = client.post(CHAT, {**ASKING, "response_format": answer})
    assert response.status_code == 200, response.text
    spec = json.loads(backend.requests[0].sampling.grammar)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "unit": "C", "days": []}}\n</tool_call>'
    for text, is_valid in (
        (call, True),
        ('{"sunny": true}', True),
        ("Yes.", False),
        (call.replace("Ulm", "Bonn"), False),
    ):
        assert Matcher(spec).accepts(text) is is_valid, text


def test_strict_is_not_shown_to_the_model(
    tool_tokenizers: dict[str, Tokenizer],
    make_app: Callable[..., Starlette],
    make_client: type[Client],
    backend: ScriptedBackend,
) -> None:
    client = make_client(make_app(tool_tokenizers["hermes"]))
    assert backend.info is not None
    backend.info = replace(backend.info, max_model_len=4000)
    tools = [{"type": "function", "function": {**tool["function"], "strict": False}} for tool in STRICT]  # type: ignore[dict-item]
    for body in (ASKING, {**ASKING, "tools": tools}):
        assert client.post(CHAT, body).status_code == 200
    assert backend.requests[0].prompt == backend.requests[1].prompt
    assert [bool(request.sampling.grammar) for request in backend.requests] == [True, False]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_tokens": 2}, "min_tokens and tools contradict each other"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}, "strict": True}}
                ]
            },
            "the parameters of f must be the JSON schema of an object",
        ),
    ],
)
def test_invalid_strict_tools(
    tool_tokenizers: dict[str, Tokenizer],
    make_app: Callable[..., Starlette],
    make_client: type[Client],
    fields: dict[str, Any],
    message: str,
) -> None:
    response = make_client(make_app(tool_tokenizers["hermes"])).post(CHAT, {**ASKING, **fields})
    assert response.status_code == 400 and response.json()["error"]["message"].startswith(message), response.text

"""Strict tools: what the grammar of each format of calls lets through, and OpenAI's client with its helpers."""

from __future__ import annotations

import copy
import functools
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLTokenizer, TokenizerWrapper
from pydantic import BaseModel

from pdserve.errors import BadRequest, InvalidParameter
from pdserve.grammars.specification import lark_grammar
from pdserve.router.api.schemas import ChatBody
from pdserve.router.api.tools import AllowedTools, parse_tools
from pdserve.router.text.parsers.harmony import HarmonyParser, HarmonyReasoning
from pdserve.router.text.parsers.json_calls import HermesParser, Llama3JsonParser
from pdserve.router.text.parsers.output import ParsedOutput, ToolCallDelta
from pdserve.router.text.parsers.output_parser import OutputParser
from pdserve.router.text.parsers.pythonic import PythonicParser
from pdserve.router.text.parsers.registry import TOOL_PARSERS
from pdserve.router.text.parsers.tool_parser import ToolParser, Tools
from pdserve.router.text.parsers.xml_calls import Qwen3CoderParser, XmlCallParser
from tests.grammars.byte_matcher import END, ByteMatcher, Bytes

if TYPE_CHECKING:
    from pdserve.router.text.tokenizer import Tokenizer
    from pdserve.router.web.application import Application
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
FORMATS = {parser: name for name, parser in TOOL_PARSERS.items()}  # names by parser
CALL = ["<|channel|>", "commentary to=functions.f ", "<|constrain|>", "json", "<|message|>", '{"a": true}', "<|call|>"]
VALUE_ENDS = (b"\n</parameter>\n", b"</arg_value>")


@functools.cache
def compiled(spec: str) -> str:
    return lark_grammar(json.loads(spec), {})


class Matcher(ByteMatcher):
    """Follows the grammar of a specification."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(compiled(json.dumps(spec)))

    def generate(self, choose: random.Random, most: int = 2000) -> Iterator[int]:
        """Yield random bytes up to the end of the output, which comes as soon as the grammar allows it.

        Every second byte ends a value, string, object or list, if one of them may: so the output ends.
        """
        for _ in range(most):
            words = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
            allowed = [int(i) for i in np.flatnonzero(np.unpackbits(words, bitorder="little", count=END + 1))]
            end = choose.choice(VALUE_ENDS)
            ends_value = self.matcher.validate_tokens(list(end)) == len(end)
            if END not in allowed and choose.random() < 0.5 and ends_value:
                assert self.matcher.consume_tokens(list(end))
                yield from end
                continue
            closing = [token for token in b'"}]' if token in allowed and choose.random() < 0.5]
            token = END if END in allowed else choose.choice(closing or allowed)
            assert self.matcher.consume_token(token)
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
    spec: dict[str, Any] = json.loads(tools.grammar(""))
    return spec


def parse(parser: type[ToolParser], text: str) -> ParsedOutput:
    reasoning = HarmonyReasoning(False, {}) if parser is HarmonyParser else None
    tools = parser(Tools({"weather": SCHEMA, "time": {}}), {})
    return OutputParser(reasoning, tools, {}).push(text, is_end=True)


def arguments_of(calls: list[ToolCallDelta]) -> list[tuple[str, Any]]:
    """Return the name and the arguments of each call."""
    heads = [call for call in calls if call.name]
    return [
        (head.name, json.loads("".join(one.arguments for one in calls if one.index == head.index))) for head in heads
    ]


def write(parser: type[ToolParser], *calls: tuple[str, dict[str, Any]]) -> str:
    """Return calls as a model writes them."""
    if issubclass(parser, XmlCallParser):
        begin, end = ("<function=NAME>\n", "</function>") if parser is Qwen3CoderParser else ("NAME\n", "")
        write_one = (
            "<parameter={}>\n{}\n</parameter>\n" if end else "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
        )
        lead, final = ("<tool_call>\n", "\n</tool_call>") if end else ("<tool_call>", "</tool_call>")
        texts = [
            lead
            + begin.replace("NAME", name)
            + "".join(write_one.format(k, v if k == "city" else json.dumps(v)) for k, v in args.items())
            + end
            + final
            for name, args in calls
        ]
        return "\n".join(texts)
    if parser is PythonicParser:
        texts = [f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})" for name, args in calls]
        return f"[{', '.join(texts)}]".replace("'", '"')
    if parser is HarmonyParser:
        head = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>"
        return "<|call|><|start|>assistant".join(head.replace("NAME", name) + json.dumps(args) for name, args in calls)
    begin, end = (side.replace("INDEX", "0") for side in parser.FORMS[0])
    return "\n".join(begin.replace("NAME", name) + json.dumps(args) + end for name, args in calls)


def beginnings(parser: type[ToolParser]) -> list[str]:
    """Return beginnings of outputs after which a call must follow."""
    if parser is HarmonyParser:
        return [
            "<|channel|>commentary to=",
            " to=functions.time<|channel|>",
            "text <|end|><|start|>assistant<|channel|>analysis to=functions.",
        ]
    if parser.BEGINS:
        return [f"text {tag}" for tag in parser.BEGINS]
    return ["[", "<|python_start|>["] if parser is PythonicParser else ["{", "<|python_tag|>{"]


@pytest.mark.parametrize("parser", FORMATS, ids=FORMATS.values())
def test_calls_follow_their_schemas(parser: type[ToolParser], tokenizer: Tokenizer) -> None:
    """Whatever begins like a call is a whole one that the parser finds, and its arguments follow the schema."""
    spec, choose, found = grammar_of(tokenizer, parser), random.Random(0), set()
    for seed in range(30):
        begin = beginnings(parser)[seed % len(beginnings(parser))]
        matcher = Matcher(spec)
        assert matcher.accepts(begin, ends=False)
        text = begin + bytes(matcher.generate(choose)).decode(errors="replace")
        output = parse(parser, text)
        assert output.text.strip() in ("text", "") and output.calls, text
        for name, arguments in arguments_of(output.calls):
            jsonschema.validate(arguments, SCHEMA if name == "weather" else {"type": "object"})
            found.add(name)
    assert found == {"weather", "time"}


@pytest.mark.parametrize("parser", FORMATS, ids=FORMATS.values())
def test_text_is_free(parser: type[ToolParser], tokenizer: Tokenizer) -> None:
    spec, good = grammar_of(tokenizer, parser), {"city": "Ulm", "unit": "C", "days": []}
    call = write(parser, ("weather", good))
    assert arguments_of(parse(parser, call).calls) == [("weather", good)]
    for text in ("", "No, {it} is not.\n", "é<b>漢</b>", call, write(parser, ("time", {"zone": "UTC"}))):
        assert Matcher(spec).accepts(text), text
    for text in (write(parser, ("weather", {"city": 5})), call.replace("Ulm", "Bonn"), call.replace("weather", "rm")):
        assert not Matcher(spec).accepts(text), text
    two, single = (
        write(parser, ("weather", good), ("weather", good)),
        grammar_of(tokenizer, parser, parallel_tool_calls=False),
    )
    assert Matcher(spec).accepts(two) and not Matcher(single).accepts(two)


@pytest.mark.parametrize(
    ("parts", "is_accepted"),
    [
        (
            ["<|channel|>", "analysis", "<|message|>", "to=functions.f", "<|end|>", "<|start|>", "assistant", *CALL],
            True,
        ),
        ([" to=functions.f", "<|channel|>", "commentary json", "<|message|>", '{"a": true}', "<|call|>"], True),
        (["<|channel|>", "final", "<|message|>", "It is.", "<|return|>"], True),
        ([*CALL[:-2], '{"a": 5}', "<|call|>"], False),
        (["to=functions.f", "<|end|>", "<|start|>", "assistant", *CALL], False),
    ],
)
def test_harmony_in_tokens_that_end_the_output(parts: list[str], is_accepted: bool) -> None:
    """Of gpt-oss, `<|call|>` and `<|return|>` are stop tokens, and other tags special tokens."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    spec = {"format": HarmonyParser.output_format({"f": schema}, single=False, text=None)}
    ids = {tag: END + 1 + number for number, tag in enumerate(HarmonyReasoning.TAGS)}
    stops = (ids["<|call|>"], ids["<|return|>"])
    special = {tag: None if token in stops else token for tag, token in ids.items()}
    tokenizer = LLTokenizer(TokenizerWrapper(Bytes(*ids, eos=stops)), eos_token=list(stops))
    matcher = ByteMatcher(lark_grammar(spec, special), tokenizer).matcher
    tokens = [token for part in parts for token in ([ids[part]] if part in ids else part.encode())]
    assert (all(map(matcher.consume_token, tokens)) and matcher.is_stopped()) is is_accepted


@pytest.mark.parametrize("text", ["{", " {", "\xa0{", "\u2003{", "\x1c{", "<|python_tag|>{", "[{", " [ {"])
def test_json_calls_cannot_hide_behind_white_space(text: str, tokenizer: Tokenizer) -> None:
    """Llama's parser takes a first JSON object, or a list of them, for calls, so nothing else may begin like one."""
    call = text + ' "name": "weather", "parameters": {"city": 5}}'
    parser = TOOL_PARSERS["llama3_json"]
    assert parser(Tools({"weather": SCHEMA}), {}).push(call, is_end=True).calls
    assert not Matcher(grammar_of(tokenizer, parser)).accepts(call)


@pytest.mark.parametrize("parser", FORMATS, ids=FORMATS.values())
@pytest.mark.parametrize("parameters", [{}, {"parameters": None}, {"parameters": {}}])
def test_a_function_without_parameters_has_no_arguments(
    parser: type[ToolParser], parameters: dict[str, Any], tokenizer: Tokenizer
) -> None:
    function = {"name": "time", **parameters}
    strict = grammar_of(tokenizer, parser, tools=[{"type": "function", "function": {**function, "strict": True}}])
    assert Matcher(strict).accepts(write(parser, ("time", {})))
    assert not Matcher(strict).accepts(write(parser, ("time", {"zone": "UTC"})))
    tools = [{"type": "function", "function": function}]
    forced = Matcher(grammar_of(tokenizer, parser, tools=tools, tool_choice="required"))
    text = bytes(forced.generate(random.Random(0), most=100)).decode()
    calls = OutputParser(None, (HermesParser if "<tool" in text else Llama3JsonParser)(Tools({"time": {}}), {}), {})
    assert arguments_of(calls.push(text, is_end=True).calls) == [("time", {})]


class Report(BaseModel):
    sunny: bool


def test_structured_output_beside_strict_tools(
    tool_tokenizers: dict[str, Tokenizer],
    make_app: Callable[..., Application],
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


@pytest.mark.parametrize("parser", FORMATS, ids=FORMATS.values())
def test_structured_output_leaves_calls_possible(parser: type[ToolParser], tokenizer: Tokenizer) -> None:
    """Tools that are not strict may be called with any arguments, and other answers follow the format."""
    loose: Any = copy.deepcopy(STRICT)
    del loose[0]["function"]["strict"]
    tools = parse_tools(ChatBody.model_validate(ASKING | {"tools": loose}), with_parser(tokenizer, parser))
    assert tools is not None and not tools.grammar("")
    spec = json.loads(tools.grammar('{"json": {"enum": [true, 5]}}'))
    final = "<|channel|>final<|message|>" if parser is HarmonyParser else ""
    for text in (write(parser, ("weather", {"city": "anything"})), "true", f"{final}5"):
        assert Matcher(spec).accepts(text), text
    for text in ("", "Yes.", f"{final}6", write(parser, ("rm", {}))):
        assert not Matcher(spec).accepts(text), text


ALL = ["weather", "time"]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    named = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


@pytest.mark.parametrize(
    ("mode", "names", "weather", "time", "text"),
    [
        ("auto", ["time"], False, True, True),
        ("required", ["time"], False, True, False),
        ("required", ALL, True, True, False),
    ],
)
def test_allowed_tools_are_a_part_of_those_in_the_prompt(
    mode: str,
    names: list[str],
    weather: bool,
    time: bool,
    text: bool,
    tool_tokenizers: dict[str, Tokenizer],
    make_app: Callable[..., Application],
    make_client: type[Client],
    backend: ScriptedBackend,
) -> None:
    client = make_client(make_app(tool_tokenizers["hermes"]))
    assert backend.info is not None
    backend.info = replace(backend.info, max_model_len=4000)
    tools: Any = copy.deepcopy(STRICT)
    tools[1]["function"]["strict"] = True
    for choice in ("auto", allowed(mode, *names)):
        assert client.post(CHAT, {**ASKING, "tools": tools, "tool_choice": choice}).status_code == 200
    everything, restricted = backend.requests
    assert everything.prompt == restricted.prompt, "so the prompt's KV is the same"
    spec = json.loads(restricted.sampling.grammar)
    a_call = write(HermesParser, ("weather", {"city": "Ulm", "unit": "C", "days": []}))
    assert Matcher(spec).accepts(a_call) is weather
    assert Matcher(spec).accepts(write(HermesParser, ("time", {}))) is time
    assert Matcher(spec).accepts("It is sunny.") is text


def test_a_call_of_a_tool_that_is_not_allowed_is_text(
    tool_tokenizers: dict[str, Tokenizer],
    make_app: Callable[..., Application],
    make_client: type[Client],
    backend: ScriptedBackend,
) -> None:
    tokenizer = tool_tokenizers["hermes"]
    client = make_client(make_app(tokenizer))
    assert backend.info is not None
    backend.info = replace(backend.info, max_model_len=4000)
    loose = [{"type": "function", "function": {"name": name}} for name in ALL]
    for name, is_call in (("weather", False), ("time", True)):
        backend.generates(tokenizer.encode(write(HermesParser, (name, {}))), "stop")
        body = {**ASKING, "tools": loose, "tool_choice": allowed("auto", "time")}
        [choice] = client.post(CHAT, body).json()["choices"]
        assert bool(choice["message"].get("tool_calls")) is is_call, choice


@pytest.mark.parametrize(
    "choice",
    [
        allowed("none", "time"),
        allowed("auto"),
        allowed("auto", "time", "time"),
        allowed("required", "rm"),
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [5]}},
        allowed("auto", *["time"] * 1_000_000),
        allowed("auto", *["rm"] * 1_000_000),
        {"type": "allowed_tools"},
    ],
)
def test_allowed_tools_that_are_none(choice: dict[str, Any], tool_tokenizers: dict[str, Tokenizer]) -> None:
    body = ChatBody.model_validate({**ASKING, "tool_choice": choice})
    with pytest.raises(InvalidParameter, match="allowed_tools"):
        parse_tools(body, tool_tokenizers["hermes"])


NO_STRING = "an argument of the type string without a string among its values"


@pytest.mark.parametrize(
    ("name", "schema", "reason"),
    [
        ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "^.+$"}}}, "a pattern that may match '<'"),
        ("glm45", {"properties": {"a": {"enum": ["</arg_value>"]}}}, "a value with '</arg_value>'"),
        ("glm45", {"properties": {"a>": {}}}, "an argument with the name 'a>'"),
        ("pythonic", {"properties": {"a b": {}}}, "an argument with the name 'a b'"),
        ("pythonic", {"anyOf": [{"required": ["a"]}]}, "anyOf beside properties"),
        ("pythonic", {"properties": {"a": {"$ref": "#"}}}, "a $ref that does not point to $defs"),
        ("qwen3_coder", {"required": ["a"]}, "required arguments that are not among properties"),
        ("pythonic", {"properties": {"a": {}}, "required": [{}]}, "required arguments that are not among properties"),
        ("glm45", {"properties": {"a": {"type": "string", "enum": 5}}}, NO_STRING),
        ("glm45", {"properties": {"a": {"type": "string", "const": 5}}}, NO_STRING),
    ],
)
def test_schemas_that_a_format_cannot_hold(
    name: str,
    schema: dict[str, Any],
    reason: str,
    tokenizer: Tokenizer,
    make_app: Callable[..., Application],
    make_client: type[Client],
) -> None:
    function = {"name": "f", "parameters": {"type": "object", **schema}, "strict": True}
    client = make_client(make_app(with_parser(tokenizer, TOOL_PARSERS[name])))
    error = client.post(CHAT, {**ASKING, "tools": [{"type": "function", "function": function}]}).json()["error"]
    assert error["message"].startswith(f"a grammar cannot hold {reason} in the format in which this model writes calls")
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")


def with_references(count: int) -> dict[str, Any]:
    unit = {"enum": [f"unit {i}" for i in range(1000)]}
    return {"properties": {f"a{i}": {"$ref": "#/$defs/unit"} for i in range(count)}, "$defs": {"unit": unit}}


@pytest.mark.parametrize(
    ("parser", "schema", "reason"),
    [
        (Qwen3CoderParser, with_references(50), "$defs to which 50 arguments refer"),
        (PythonicParser, with_references(50), "$defs to which 50 arguments refer"),
        (
            PythonicParser,
            {"properties": {f"a{i}": {"type": "integer"} for i in range(500)}},
            "so many optional arguments",
        ),
        (HermesParser, {"properties": {"a": {"enum": ["b" * 1000 for _ in range(70)]}}}, "tools has "),
    ],
)
def test_a_grammar_that_would_be_too_large_is_not_written(
    parser: type[ToolParser], schema: dict[str, Any], reason: str
) -> None:
    """Of a body of 160 KB it would have had 25 GB."""
    tools = AllowedTools(parser, Tools({"f": {"type": "object", **schema}}), strict=frozenset("f"))
    with pytest.raises(BadRequest, match=re.escape(reason)):
        tools.grammar("")


def test_a_budget_of_reasoning_that_calls_may_end(
    tokenizer: Tokenizer,
    make_app: Callable[..., Application],
    make_client: type[Client],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The grammar would begin after the reasoning, in which such a model may already call."""
    tokenizer = with_parser(tokenizer, HarmonyParser)
    tokenizer.parsers = replace(tokenizer.parsers, reasoning=HarmonyReasoning)
    error = make_client(make_app(tokenizer)).post(CHAT, {**ASKING, "thinking_token_budget": 5}).json()["error"]
    assert error["param"] == "thinking_token_budget" and "tokens that end it" in error["message"]
    marks = {tag: number for number, tag in enumerate(HarmonyReasoning.TAGS)}
    monkeypatch.setattr(tokenizer, "token_id", marks.get)
    error = make_client(make_app(tokenizer)).post(CHAT, {**ASKING, "thinking_token_budget": 5}).json()["error"]
    assert error["message"].startswith("thinking_token_budget cannot be combined with strict tools")


def test_strict_is_not_shown_to_the_model(
    tool_tokenizers: dict[str, Tokenizer],
    make_app: Callable[..., Application],
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
    make_app: Callable[..., Application],
    make_client: type[Client],
    fields: dict[str, Any],
    message: str,
) -> None:
    response = make_client(make_app(tool_tokenizers["hermes"])).post(CHAT, {**ASKING, **fields})
    assert response.status_code == 400 and response.json()["error"]["message"].startswith(message), response.text

"""Tools of a chat: the functions that the model may call, and the grammar that holds their arguments to the schemas."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pdserve.errors import BadRequest
from pdserve.router.api.parsing import or_default, quote
from pdserve.router.api.schemas import ChatBody, Function
from pdserve.router.text.parsers.json_calls import HermesParser, Llama3JsonParser
from pdserve.router.text.parsers.tool_parser import ToolParser, Tools
from pdserve.router.text.tokenizer import Tokenizer

FORCED_PARSER = (
    Llama3JsonParser  # of calls without tags of their own: plain JSON, which a grammar can force on any model
)
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# An output that is text to parsers of calls without a tag: it begins neither with white space, a call nor `<|python_tag|>`.
SPACE = r" \t-\r\x1c-\x1f\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
PLAIN_TEXT = rf'root ::= "" | ([^{{<{SPACE}] | "<" [^|]) [\0-\U0010ffff]*'


@dataclass(frozen=True)
class AllowedTools:
    """The tools that the model may call.

    Attributes:
        parser: the parser of the calls.
        tools: the functions.
        grammar: the grammar of an output with calls, in the form `calls` of `grammars/specification.py`; empty if neither
            a call nor its arguments are forced.
    """

    parser: type[ToolParser]
    tools: Tools
    grammar: dict[str, Any] = field(default_factory=dict)

    @property
    def are_forced(self) -> bool:
        """True if the output must be a call."""
        return bool(self.grammar) and not self.grammar["may_be_text"]

    @property
    def are_among_text(self) -> bool:
        """True if the grammar allows any text around the calls."""
        return "triggers" in self.grammar


def parse_tools(body: ChatBody, tokenizer: Tokenizer) -> AllowedTools | None:
    """Return the tools that the model may call, or None if there are none.

    Raises:
        BadRequest: `tools` or `tool_choice` is invalid, or the chat template supports no tools.
    """
    functions = {tool.function.name: tool.function for tool in body.tools or ()}
    for name in functions:
        if not TOOL_NAME.fullmatch(name):
            raise _invalid_tools(
                f"a function name must have 1 to 64 of the characters A-Z, a-z, 0-9, '_' and '-', not {quote(name)}"
            )
    if len(functions) < len(body.tools or ()):
        raise _invalid_tools("the functions in tools must have different names")
    choice = or_default(body.tool_choice, "auto" if functions else "none")
    forced = _forced_functions(choice, list(functions))
    if choice == "none" or not functions:
        return None
    parser = tokenizer.parsers.tools
    if forced and parser is not HermesParser:
        parser = FORCED_PARSER
    if parser is None:
        message = (
            "this model's chat template has no tool-call format that this router supports; leave tools out, or force a call "
            'with tool_choice "required"'
        )
        raise BadRequest(message, kind="unsupported_parameter", param="tools")
    tools = Tools(
        {name: function.parameters or {} for name, function in functions.items()},
        single_call=body.parallel_tool_calls is False,
    )
    if forced:
        calls = [_call(function, parser.FORMS[0]) for name, function in functions.items() if name in forced]
        return AllowedTools(parser, tools, {"calls": calls, "single": True, "may_be_text": False})
    if any(function.strict for function in functions.values()):
        return AllowedTools(parser, tools, _optional_calls(parser, functions.values(), single=tools.single_call))
    return AllowedTools(parser, tools)


def _forced_functions(choice: object, names: list[str]) -> list[str]:
    """Return the functions of which the model must call one; empty if calls are optional."""
    if choice in ("none", "auto"):
        return []
    if choice == "required" and names:
        return names
    for name in names:
        if choice == {"type": "function", "function": {"name": name}}:
            return [name]
    named = '{"type": "function", "function": {"name": …}} with the name of one of the tools'
    message = f'tool_choice must be "none", "auto", "required", or {named}'
    raise BadRequest(message, kind="invalid_parameter", param="tool_choice")


def _optional_calls(parser: type[ToolParser], functions: Iterable[Function], *, single: bool) -> dict[str, Any]:
    """Return the grammar of text and calls, in which those of strict functions follow their schemas."""
    if not parser.FORMS:
        message = (
            "this model writes the arguments of calls in a format that the router cannot hold to a JSON schema; send "
            'strict: false, or force a call with tool_choice "required"'
        )
        raise BadRequest(message, kind="unsupported_parameter", param="tools")
    any_object: dict[str, Any] = {"type": "object"}
    calls = [
        _call(function if function.strict else function.model_copy(update={"parameters": any_object}), form)
        for function in functions
        for form in parser.FORMS
    ]
    found_by = {"triggers": list(parser.BEGINS)} if parser.BEGINS else {"text": {"grammar": PLAIN_TEXT}}
    return {"calls": calls, "single": single, "may_be_text": True, **found_by}


def _call(function: Function, form: tuple[str, str]) -> dict[str, Any]:
    """Return a call of the function in a form of its parser: what surrounds its arguments, and their JSON schema."""
    schema = {"type": "object", **(function.parameters or {})}
    if schema["type"] != "object":
        raise _invalid_tools(f"the parameters of {function.name} must be the JSON schema of an object")
    begin, end = form
    return {"begin": begin.replace("NAME", function.name), "json": schema, "end": end}


def _invalid_tools(message: str) -> BadRequest:
    return BadRequest(message, kind="invalid_parameter", param="tools")

"""Tools of a chat: the functions that the model may call, and the grammar that holds their arguments to the schemas."""

import json
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from pdserve.errors import BadRequest, InvalidParameter
from pdserve.grammars import formats
from pdserve.grammars.limits import check_size
from pdserve.router.api.parsing import or_default, quote
from pdserve.router.api.schemas import ChatBody
from pdserve.router.text.parsers.json_calls import HermesParser, Llama3JsonParser
from pdserve.router.text.parsers.tool_parser import Functions, Schema, ToolParser, Tools
from pdserve.router.text.tokenizer import Tokenizer

FORCED_PARSER = (
    Llama3JsonParser  # of calls without tags of their own: plain JSON, which a grammar can force on any model
)
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")  # of Anthropic's length, which is twice OpenAI's


@dataclass(frozen=True)
class AllowedTools:
    """The tools that the model may call.

    Attributes:
        parser: the parser of the calls.
        tools: the functions.
        strict: those whose arguments a grammar holds to their schemas.
        forced: those of which the output must be a call; empty if calls are optional.
    """

    parser: type[ToolParser]
    tools: Tools
    strict: frozenset[str] = frozenset()
    forced: tuple[str, ...] = ()

    def grammar(self, structured: str) -> str:
        """Return the grammar of the output, in the format of `grammars/specification.py`; empty if any output is allowed.

        Args:
            structured: the grammar of an output without calls, or empty.

        Raises:
            BadRequest: the format of this model's calls cannot be held to the schemas, or they are too large.
        """
        schemas = {name: _object_schema(name, self.tools.schemas[name]) for name in self.forced or self.strict}
        check_size(sum(len(json.dumps(one)) for one in schemas.values()), "tools")  # before it is written with them
        if self.forced:
            return json.dumps({"format": self.parser.forced_format(schemas)})
        if not (self.strict or structured):
            return ""
        functions = {name: schemas.get(name) for name in self.tools.schemas}
        return json.dumps({"format": self._output_format(functions, structured)})

    def may_reason(self, structured: str) -> bool:
        """Return whether `grammar` allows reasoning before the answer."""
        return self.parser.SAYS_REASONING or (bool(self.parser.BEGINS) and not (self.forced or structured))

    def _output_format(self, functions: Functions, structured: str) -> formats.Format:
        text = formats.specified(json.loads(structured)) if structured else None
        try:
            if self.parser.call_formats(functions):
                return self.parser.output_format(functions, single=self.tools.single_call, text=text)
            reason = "the arguments"
        except ValueError as error:
            reason = str(error)
        way_out = "send strict: false" if self.strict else "leave tools or the structured output out"
        message = (
            f"a grammar cannot hold {reason} in the format in which this model writes calls; {way_out}, or force a call "
            'with tool_choice "required"'
        )
        raise BadRequest(message, kind="unsupported_parameter", param="tools")


def parse_tools(body: ChatBody, tokenizer: Tokenizer) -> AllowedTools | None:
    """Return the tools that the model may call, or None if there are none.

    Raises:
        BadRequest: `tools` or `tool_choice` is invalid, or the chat template supports no tools.
    """
    functions = {tool.function.name: tool.function for tool in body.tools or ()}
    for name in functions:
        if not TOOL_NAME.fullmatch(name):
            message = (
                f"a function name must have 1 to 128 of the characters A-Z, a-z, 0-9, '_' and '-', not {quote(name)}"
            )
            raise InvalidParameter("tools", message)
    if len(functions) < len(body.tools or ()):
        raise InvalidParameter("tools", "the functions in tools must have different names")
    choice = or_default(body.tool_choice, "auto" if functions else "none")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, names = _allowed_functions(choice, functions.keys())
        functions = {name: functions[name] for name in names}
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
    strict = frozenset(name for name, function in functions.items() if function.strict)
    return AllowedTools(parser, tools, strict, tuple(forced))


def _allowed_functions(choice: Mapping[str, Any], names: Set[str]) -> tuple[str, list[str]]:
    """Return the mode of a choice of the type `allowed_tools`, and the functions that it leaves of these."""
    match choice:
        case {"allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as tools}} if len(tools) <= len(
            names
        ):
            allowed = [name for name in names if {"type": "function", "function": {"name": name}} in tools]
            if len(allowed) == len(tools):
                return mode, allowed
    message = (
        'tool_choice of the type "allowed_tools" needs {"allowed_tools": {"mode": "auto" or "required", "tools": [{"type": '
        '"function", "function": {"name": …}}, …]}} with different names, each of one of the tools'
    )
    raise InvalidParameter("tool_choice", message)


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
    raise InvalidParameter("tool_choice", f'tool_choice must be "none", "auto", "required", or {named}')


def _object_schema(name: str, parameters: Schema) -> Schema:
    """Return the schema of a function's arguments; without parameters it has none."""
    schema = {"type": "object", **(parameters or {"properties": {}})}
    if schema["type"] != "object":
        raise InvalidParameter("tools", f"the parameters of {name} must be the JSON schema of an object")
    return schema

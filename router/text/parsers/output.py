"""Output of parsers, in increments: text, reasoning and tool calls."""

import json
import math
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from pydantic_core import from_json


@dataclass(frozen=True)
class ToolCallDelta:
    """An increment of one call; only its first delta has the name and the id.

    Attributes:
        at: characters of text that the output has before it.
    """

    index: int
    arguments: str
    name: str = ""
    id: str = ""
    at: int = 0


@dataclass
class ParsedOutput:
    """The result of parsing a piece of output: text outside of calls and reasoning, reasoning, and increments of calls."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)

    def extend(self, other: "ParsedOutput") -> None:
        """Append what follows this output."""
        self.calls += [replace(call, at=call.at + len(self.text)) for call in other.calls]
        self.text += other.text
        self.reasoning += other.reasoning


def in_order(text: str, calls: Iterable[ToolCallDelta]) -> Iterator[str | ToolCallDelta]:
    """Yield the parts of a text and the increments of calls as the model wrote them."""
    begin = 0
    for call in calls:
        if call.at > begin:
            yield text[begin : call.at]
            begin = call.at
        yield call
    if begin < len(text):
        yield text[begin:]


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def parse_value(text: str) -> object:
    """Return the parsed value, or None if the text is not valid JSON, or has a value that JSON could not give back."""
    try:
        from_json(
            text, allow_inf_nan=False
        )  # knows halves of surrogate pairs, and refuses more levels than can be written
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return None


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value

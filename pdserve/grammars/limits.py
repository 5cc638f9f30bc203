"""Limits of a grammar: what its specification may hold, checked before anything is computed, and what compiling may use."""

import json
from dataclasses import dataclass
from typing import Any

from pdserve.errors import BadRequest
from pdserve.grammars.formats import specifications

MAX_CHARS = 65536  # of the specification as JSON
MAX_DEPTH = 64  # levels of objects and arrays in a JSON schema, or of parentheses in a regular expression or EBNF
MASK_CPU_S = 1.0  # CPU time for the masks of one request, plus
MASK_CPU_S_PER_TOKEN = 0.02  # this much for each token of its choices
MAX_MASK_CPU_S = 0.25  # CPU time for one of them
# How the last thing begins that a process sends when it exceeds a limit: "Fatal Python error", of a signal such as that of a
# lack of stack, or "Stack", of one of time. Python's `faulthandler` writes that while the signal ends the process.
EXCEEDED = b"FS"


class GrammarTooComplex(BadRequest):
    """The grammar exceeds a limit."""


@dataclass(frozen=True)
class CompileLimits:
    """Resource limits of compiling one grammar; a process that exceeds one is killed.

    Attributes:
        cpu_s: CPU time in whole seconds, which unlike elapsed time does not depend on the load of the machine.
        elapsed_s: elapsed time in whole seconds; ends a process that hangs, which is not the grammar's fault.
        memory_bytes: memory on top of what the process starts with; for masks as well.
    """

    cpu_s: int = 2
    elapsed_s: int = 60
    memory_bytes: int = 128 * 2**20

    def __str__(self) -> str:
        return f"{self.cpu_s} s of CPU time and {self.memory_bytes / 2**20:g} MiB of memory"


def mask_budget_s(num_tokens: int) -> float:
    """Return the CPU time in seconds that the masks of a request of `num_tokens` may take in all."""
    return MASK_CPU_S + MASK_CPU_S_PER_TOKEN * num_tokens


def check_size(num_chars: int, param: str | None = None) -> None:
    """Raise GrammarTooComplex if a specification has more characters than are allowed."""
    if num_chars > MAX_CHARS:
        message = f"{param or 'the grammar'} has {num_chars} characters as JSON; at most {MAX_CHARS} are allowed"
        raise GrammarTooComplex(message, kind="invalid_grammar", param=param)


def check_grammar(spec: str, param: str | None = None) -> None:
    """Check the size and the depth of a specification in the format of `grammars/specification.py`.

    Raises:
        GrammarTooComplex: it exceeds MAX_CHARS or MAX_DEPTH; `param` is the field of the request that it came from.
    """
    check_size(len(spec), param)
    name = param or "the grammar"
    parsed = json.loads(spec)
    specs = [*specifications(parsed.get("format")), parsed]
    texts = [one[kind] for one in specs for kind in ("regex", "grammar") if kind in one]
    schemas = [one.get(kind) for one in specs for kind in ("json", "text")]
    if not all(map(_is_shallow, texts)) or not all(map(_is_shallow_json, schemas)):
        message = f"{name} is nested too deeply; at most {MAX_DEPTH} levels are allowed"
        raise GrammarTooComplex(message, kind="invalid_grammar", param=param)


def _is_shallow_json(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        children = [
            item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)
        ]
        if not children:
            return True
        level = [child for group in children for child in group]
    return False


def _is_shallow(text: str) -> bool:
    """Return whether parentheses nest at most MAX_DEPTH deep; those in quotes and character classes count as well."""
    depth, escaped = 0, False
    for char in text:
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char in "()":
            depth = max(0, depth + (1 if char == "(" else -1))
            if depth > MAX_DEPTH:
                return False
    return True

"""Logits processors of other packages, found by entry point. Requests name them: `"logits_processors": {"name": {…}}`.

    [project.entry-points."pdserve.logits_processors"]
    mine = "my_package:make"

`make(arguments)` gets the request's object and returns a `LogitsProcessor`, or raises `ValueError` with a sentence for the
client. All instances need the package.
"""

import json
from collections.abc import Sequence
from typing import Any, Protocol

from pdserve import plugins
from pdserve.errors import BadRequest, SetupError

ENTRY_POINT_GROUP = "pdserve.logits_processors"


class LogitsProcessor(Protocol):
    """Changes the logits of the next token."""

    def __call__(self, prompt: Sequence[int], output: Sequence[int], logits_V: Any) -> None:
        """Change `logits_V`, a float tensor on the model's device, in place. Must depend on the arguments alone, so that a
        request that moves to another instance has the same tokens."""


def make_processors(specification: str) -> list[LogitsProcessor]:
    """Return the processors of a request.

    Args:
        specification: JSON object from names to arguments.

    Raises:
        BadRequest: a name is not installed, or its package cannot be imported or refuses the arguments.
    """
    processors: list[LogitsProcessor] = []
    for name, arguments in json.loads(specification).items():
        if name not in (names := plugins.names(ENTRY_POINT_GROUP)):
            message = f"no logits processor {name!r} is installed; there are: {', '.join(names) or 'none'}"
            raise BadRequest(message, kind="invalid_logits_processor", param="logits_processors")
        try:
            processors.append(plugins.load(ENTRY_POINT_GROUP, name)(arguments))
        except Exception as error:  # code of another package, on a client's arguments
            reason = error if isinstance(error, ValueError | SetupError) else repr(error)
            raise BadRequest(
                f"logits_processors.{name}: {reason}", kind="invalid_logits_processor", param="logits_processors"
            ) from error
    return processors


def apply_processors(
    processors: Sequence[LogitsProcessor], prompt: Sequence[int], output: Sequence[int], logits_V: Any
) -> BadRequest | None:
    """Apply processors in order. Returns the error of one that fails: it must not end other requests."""
    for processor in processors:
        try:
            processor(prompt, output, logits_V)
        except Exception as error:  # noqa: BLE001 — code of another package
            return BadRequest(
                f"a logits processor failed: {error!r}", kind="invalid_logits_processor", param="logits_processors"
            )
    return None

"""JSON and TOML of others: files, settings and answers. Whatever is wrong in them is a ValueError.

For nesting that is too deep, the parsers of the standard library raise a RecursionError, which is none.
"""

import json
import tomllib
from typing import Any

_TOO_DEEP = "it is nested too deeply"


def read_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError with what is wrong in it."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def read_toml(text: bytes) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises ValueError with what is wrong in it."""
    try:
        return tomllib.loads(text.decode())
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None

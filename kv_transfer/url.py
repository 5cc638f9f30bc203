"""Connector URLs: `scheme://host:port/path?name=value`.

A connector reads its parameters one by one and then calls `Query.done`. So each parameter name is written once in the code,
and a misspelt name in a URL is rejected with a list of the valid ones.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import TypeVar
from urllib.parse import SplitResult, parse_qsl, urlsplit

from pdserve.errors import SetupError
from pdserve.sizes import parse_size

MAX_SECONDS = 1e9  # beyond, clocks overflow
P = TypeVar("P")
D = TypeVar("D")


def split(url: str) -> SplitResult:
    """Split a connector URL into its parts. Raises `SetupError` if it is malformed."""
    try:
        parts = urlsplit(url)
        if "," not in parts.netloc:  # a list of several hosts is parsed by the connector
            _ = parts.port  # validated on access only
    except ValueError as error:
        raise SetupError(f"The connector URL {without_password(url)!r} cannot be parsed: {error}.") from None
    return parts


def split_tiers(url: str) -> tuple[str, list[str]]:
    """Split `tiered://?x=1,first,second` into the URL without its tiers and the list of the tiers' URLs."""
    own, *urls = re.split(r",(?=[a-z][a-z0-9+.-]*://)", url, flags=re.IGNORECASE)
    scheme, _, first = own.partition("://")
    return (f"{scheme}://", [first, *urls]) if first and not first.startswith("?") else (own, urls)


def without_password(url: str) -> str:
    """Return the URL with passwords masked, for output. Also works for a URL that contains several URLs."""
    masked = re.sub(r"//[^/?#]*", lambda match: _mask_password(match[0]), url)
    # A password with an unquoted /, ? or #, because of which the URL is refused: up to the last @ before another URL.
    return re.sub(r"//([^/?#@:]*):(?!//|\*\*\*@)(?:(?!://).)*@", r"//\1:***@", masked)


def _mask_password(authority: str) -> str:
    login, at, host = authority.rpartition("@")
    user, colon, _ = login.partition(":")
    return f"{user}{colon and ':***'}{at}{host}"


class Query:
    """Typed access to the query parameters of a connector URL. Each reader raises `SetupError` for an invalid value."""

    def __init__(self, url: str) -> None:
        self._url = without_password(url)
        self._params = dict(parse_qsl(split(url).query, keep_blank_values=True))
        self._valid_names: list[str] = []

    def size(self, name: str, default: D) -> int | D:
        """Read a number of bytes, such as 512MiB."""
        return self._read(name, parse_size, default)

    def seconds(self, name: str, default: D) -> float | D:
        """Read a positive number of seconds."""
        return self._read(name, _seconds, default)

    def count(self, name: str, default: D) -> int | D:
        """Read an integer of at least 1."""
        return self._read(name, _count, default)

    def flag(self, name: str, default: bool) -> bool:
        """Read a boolean: 0, 1, false or true."""
        return self._read(name, _flag, default)

    def text(self, name: str, default: str) -> str:
        return self._read(name, str, default)

    def choice(self, name: str, values: Sequence[str], default: str) -> str:
        """Read one of `values`."""

        def parse(text: str) -> str:
            if text not in values:
                raise ValueError(f"{text!r} is not one of {', '.join(values)}")
            return text

        return self._read(name, parse, default)

    def done(self) -> None:
        """Reject unknown parameters. Call after all parameters have been read."""
        for name in self._params:
            if name not in self._valid_names:
                valid = ", ".join(sorted(self._valid_names))
                raise SetupError(
                    f"The connector URL {self._url!r} has no parameter {name!r}; valid parameters are {valid}."
                )

    def _read(self, name: str, parse: Callable[[str], P], default: D) -> P | D:
        self._valid_names.append(name)
        if name not in self._params:
            return default
        try:
            return parse(self._params[name])
        except ValueError as error:
            raise SetupError(f"In the connector URL {self._url!r}, {name} is invalid: {error}.") from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"{text!r} is not a positive number of seconds, at most {MAX_SECONDS:g}")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not an integer of at least 1")
    return int(text)


def _flag(text: str) -> bool:
    values = {"0": False, "1": True, "false": False, "true": True}
    if text not in values:
        raise ValueError(f"{text!r} is not 0, 1, false or true")
    return values[text]

"""Connector URLs: `scheme://host:port/path?name=value`.

A connector reads its parameters one by one and then calls `done`, so the names it knows are written once, and a typing
mistake in a URL is answered with the names that would have been right.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import TypeVar
from urllib.parse import SplitResult, parse_qsl, urlsplit

from pdserve.config import parse_size
from pdserve.errors import SetupError

P = TypeVar("P")
D = TypeVar("D")


def split(url: str) -> SplitResult:
    """Raises `SetupError` for a URL that cannot be read at all."""
    try:
        parts = urlsplit(url)
        if "," not in parts.netloc:  # several hosts are for the connector to read
            _ = parts.port  # parsed on access only
    except ValueError as error:
        raise SetupError(f"The connector URL {without_password(url)!r} cannot be read: {error}.") from None
    return parts


def tiers(url: str) -> tuple[str, list[str]]:
    """Of `tiered://first,second`: the URL without its tiers, and theirs."""
    own, *urls = re.split(r",(?=[a-z][a-z0-9+.-]*://)", url, flags=re.IGNORECASE)
    scheme, _, first = own.partition("://")
    return (f"{scheme}://", [first, *urls]) if first and not first.startswith("?") else (own, urls)


def without_password(url: str) -> str:
    """The URL as it may be printed, also where it stands for several URLs."""
    return re.sub(r"//[^/?#]*", lambda authority: _masked(authority[0]), url)


def _masked(authority: str) -> str:
    login, at, host = authority.rpartition("@")
    user, colon, _ = login.partition(":")
    return f"{user}{colon and ':***'}{at}{host}"


class Query:
    """The parameters behind the `?` of a connector URL."""

    def __init__(self, url: str) -> None:
        self._url = without_password(url)
        self._given = dict(parse_qsl(split(url).query, keep_blank_values=True))
        self._known: list[str] = []

    def size(self, name: str, default: D) -> int | D:
        """Bytes, such as 512MiB."""
        return self._read(name, parse_size, default)

    def seconds(self, name: str, default: D) -> float | D:
        return self._read(name, _seconds, default)

    def count(self, name: str, default: D) -> int | D:
        """A whole number from 1 on."""
        return self._read(name, _count, default)

    def flag(self, name: str, default: bool) -> bool:
        return self._read(name, _flag, default)

    def text(self, name: str, default: str) -> str:
        return self._read(name, str, default)

    def choice(self, name: str, values: Sequence[str], default: str) -> str:
        """One of these words."""

        def parse(text: str) -> str:
            if text not in values:
                raise ValueError(f"{text!r} is none of {', '.join(values)}")
            return text

        return self._read(name, parse, default)

    def done(self) -> None:
        """Call after the last parameter is read: refuses those that nobody asked for."""
        for name in self._given:
            if name not in self._known:
                known = ", ".join(sorted(self._known))
                raise SetupError(f"The connector URL {self._url!r} has no parameter {name!r}; it knows {known}.")

    def _read(self, name: str, parse: Callable[[str], P], default: D) -> P | D:
        self._known.append(name)
        if name not in self._given:
            return default
        try:
            return parse(self._given[name])
        except ValueError as error:
            raise SetupError(f"In the connector URL {self._url!r}, {name} is wrong: {error}.") from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _flag(text: str) -> bool:
    values = {"0": False, "1": True, "false": False, "true": True}
    if text not in values:
        raise ValueError(f"{text!r} is neither 0 nor 1")
    return values[text]

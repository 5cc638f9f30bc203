"""API-key authentication and path authorisation: API keys open the paths of clients, an admin key those of operators."""

import hashlib
import hmac
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import Scope

from pdserve.errors import BadRequest
from pdserve.router.limits.key_file import ANONYMOUS, ApiKey

log = logging.getLogger(__name__)

MAX_LOGGED = 100  # characters of a path


class Access(Enum):
    """Which key a path requires. The value names the key."""

    OPEN = ""
    CLIENT = "API key"
    OPERATOR = "admin key"


class DeclaresAccess(Protocol):
    """A route that declares its access."""

    path: str
    path_regex: re.Pattern[str]
    access: Access


class Unauthorized(BadRequest):
    """The request lacks a valid key."""

    status = 401


class PathAccess:
    """The access of each path, from the declarations of the routes.

    A path without a route is the clients' if theirs are below the same first segment (`/v1/`), and otherwise the operators'.
    """

    def __init__(self, routes: Sequence[DeclaresAccess]) -> None:
        self._fixed = {route.path: route.access for route in routes if "{" not in route.path}
        self._patterns = [(route.path_regex, route.access) for route in routes if "{" in route.path]
        self._client_prefixes = tuple(
            {f"/{route.path.split('/')[1]}/" for route in routes if route.access is Access.CLIENT}
        )

    def of(self, path: str) -> Access:
        access = self._fixed.get(path)
        if access is not None:
            return access
        for pattern, declared in self._patterns:
            if pattern.match(path):
                return declared
        return Access.CLIENT if path.startswith(self._client_prefixes) else Access.OPERATOR


class KeySet:
    """A set of keys that authorise the same paths."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = keys

    def __bool__(self) -> bool:
        return bool(self._keys)

    def identify(self, key: str) -> str | None:
        """Return the name of the key, or None if it is wrong.

        Takes the same time for every key, valid or not, so that timing reveals nothing about the valid ones.
        """
        digest = hashlib.sha256(key.encode("latin-1")).digest()  # the encoding that header bytes were decoded with
        names = [valid.name for valid in self._keys if hmac.compare_digest(digest, valid.digest)]
        return names[0] if names else None


def presented_key(headers: Mapping[str, str]) -> str:
    """Return the key that a client sent; empty if it sent none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = headers.get("x-api-key", "")  # of Anthropic's clients
    return key.strip()


class Authentication:
    """Rejects requests without a valid key and stores the key's name in `request.state.key`.

    If only API keys are configured, the paths of operators are closed. `on_refusal` is called with `missing` or `wrong`.
    """

    def __init__(
        self, access: PathAccess, clients: KeySet, operators: KeySet, on_refusal: Callable[[str], None]
    ) -> None:
        self.access = access
        self.clients = clients
        self.operators = operators
        self._on_refusal = on_refusal

    def check(self, scope: Scope) -> Unauthorized | None:
        """Store the key's name in the scope; return an error if the path needs another key."""
        scope["state"]["key"] = ANONYMOUS
        access = self.access.of(scope["path"])
        if access is Access.OPEN:
            return None
        valid_keys = self.clients if access is Access.CLIENT else self.operators
        if not valid_keys and (access is Access.CLIENT or not self.clients):
            return None
        key = presented_key(Headers(scope=scope))
        if key and (name := valid_keys.identify(key)) is not None:
            scope["state"]["key"] = name
            return None
        self._on_refusal("wrong" if key else "missing")
        if key:
            address = (scope.get("client") or ("an unknown address",))[0]
            log.warning("a wrong key from %s for %s", address, scope["path"][:MAX_LOGGED])
        scope["state"]["headers"] = {"WWW-Authenticate": "Bearer"}
        message = "this path is closed because the router has no admin key; start it with --admin-key"
        if valid_keys:
            message = f"this path needs a valid {access.value}, in the header `Authorization: Bearer KEY`"
        return Unauthorized(message, kind="invalid_api_key")

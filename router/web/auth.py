"""API-key authentication and path authorisation: API keys open the paths of clients, an admin key those of operators."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.errors import BadRequest
from pdserve.router.api.http_responses import error_response
from pdserve.router.limits.key_file import ANONYMOUS, ApiKey

# Open without a key: probes and Prometheus send none, and the live page asks for one before it shows data.
PUBLIC_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/", "/page.css", "/page.js"})
CLIENT_PREFIXES = ("/v1/", "/tokenize", "/detokenize")


class Unauthorized(BadRequest):
    """The request lacks a valid key."""

    status = 401


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


class Authentication:
    """Middleware that rejects requests without a valid key and stores the key's name in `request.state.key`.

    If only API keys are configured, the paths of operators are closed.
    """

    def __init__(self, app: ASGIApp, clients: KeySet, operators: KeySet) -> None:
        self.app = app
        self.clients = clients
        self.operators = operators

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._authenticate(scope)) is not None:
            response = error_response(refusal)
            response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _authenticate(self, scope: Scope) -> Unauthorized | None:
        """Store the key's name in the scope; return an error if the path needs another key."""
        path = scope["path"]
        scope["state"]["key"] = ANONYMOUS
        if path in PUBLIC_PATHS:
            return None
        is_client_path = path.startswith(CLIENT_PREFIXES)
        valid_keys = self.clients if is_client_path else self.operators
        if not valid_keys and (is_client_path or not self.clients):
            return None
        if not valid_keys:
            message = "this path is closed because the router has no admin key; start it with --admin-key"
            return Unauthorized(message, kind="invalid_api_key")
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and (name := valid_keys.identify(key.strip())) is not None:
            scope["state"]["key"] = name
            return None
        expected = "API key" if is_client_path else "admin key"
        message = f"this path needs a valid {expected}, in the header `Authorization: Bearer KEY`"
        return Unauthorized(message, kind="invalid_api_key")

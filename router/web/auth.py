"""Who may ask what: API keys for the paths of clients, another for those of operators."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.errors import BadRequest
from pdserve.router.api.http_responses import error_response
from pdserve.router.limits.key_file import ApiKey

# Probes and Prometheus send no keys; the page asks for one before it shows anything.
OPEN = frozenset({"/health", "/ready", "/metrics", "/version", "/", "/page.css", "/page.js"})
OF_CLIENTS = ("/v1/", "/tokenize", "/detokenize")
ANYONE = "anonymous"  # whose requests come without a key, where none is asked for


class Unauthorized(BadRequest):
    status = 401


class Keys:
    """Keys that open something."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = keys

    def __bool__(self) -> bool:
        return bool(self._keys)

    def name_of(self, key: str) -> str | None:
        """None for a wrong one. In the same time whatever is right about the key, and whichever key it is."""
        digest = hashlib.sha256(key.encode("latin-1")).digest()  # as the header's bytes were decoded
        found = [one.name for one in self._keys if hmac.compare_digest(digest, one.digest)]
        return found[0] if found else None


class Guard:
    """Refuses requests without a right key. Where only API keys are set, nobody gets at the paths of operators.

    The endpoints find the name of the key in `request.state.key`.
    """

    def __init__(self, app: ASGIApp, clients: Keys, operators: Keys) -> None:
        self.app = app
        self.clients = clients
        self.operators = operators

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            response = error_response(refusal)
            response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Unauthorized | None:
        path = scope["path"]
        scope["state"]["key"] = ANYONE
        if path in OPEN:
            return None
        of_clients = path.startswith(OF_CLIENTS)
        right = self.clients if of_clients else self.operators
        if not right and (of_clients or not self.clients):
            return None
        if not right:
            message = "the router was given no admin key, so this path is closed; start it with --admin-key"
            return Unauthorized(message, kind="invalid_api_key")
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and (name := right.name_of(key.strip())) is not None:
            scope["state"]["key"] = name
            return None
        what = "API key" if of_clients else "admin key"
        message = f"this path needs the right {what}, in the header `Authorization: Bearer KEY`"
        return Unauthorized(message, kind="invalid_api_key")

"""Who may ask what: API keys for the paths of clients, another for those of operators.

A key stands in a setting as it is, or as `sha256:` and the hexadecimal digest of it; the router keeps digests only.
"""

import hashlib
import hmac
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.errors import BadRequest, SetupError
from pdserve.router.middleware import error_response

# Probes and Prometheus send no keys; the page asks for one before it shows anything.
OPEN = frozenset({"/health", "/ready", "/metrics", "/version", "/", "/page.css", "/page.js"})
OF_CLIENTS = ("/v1/", "/tokenize", "/detokenize")
DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")


class Unauthorized(BadRequest):
    status = 401


class Keys:
    """The digests of some keys."""

    def __init__(self, setting: str) -> None:
        """`setting` holds keys, comma separated. Raises SetupError for a digest that is none, or an empty key."""
        self._digests = [_digest_of(one.strip()) for one in setting.split(",")] if setting else []

    def __bool__(self) -> bool:
        return bool(self._digests)

    def know(self, key: str) -> bool:
        """In the same time whatever is right about the key, and whichever key it is."""
        digest = hashlib.sha256(key.encode("latin-1")).digest()  # as the header's bytes were decoded
        return sum(hmac.compare_digest(digest, one) for one in self._digests) > 0


class Guard:
    """Refuses requests without a right key. Where only API keys are set, nobody gets at the paths of operators."""

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
        if scheme.lower() == "bearer" and right.know(key.strip()):
            return None
        what = "API key" if of_clients else "admin key"
        message = f"this path needs the right {what}, in the header `Authorization: Bearer KEY`"
        return Unauthorized(message, kind="invalid_api_key")


def _digest_of(setting: str) -> bytes:
    if not setting:
        raise SetupError("a key is empty: keys are separated by single commas, with none at either end")
    if not setting.startswith("sha256:"):
        return hashlib.sha256(setting.encode()).digest()
    digest = DIGEST.fullmatch(setting)
    if digest is None:
        raise SetupError("a key that begins with sha256: must go on with the 64 hexadecimal digits of its digest")
    return bytes.fromhex(digest[1])

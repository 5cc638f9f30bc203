"""HTTP client of a router's operator endpoints, /admin and /debug."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import httpx

from pdserve.errors import SetupError
from pdserve.lines.untrusted import read_json

ADMIN_KEY_VARIABLE = "PDSERVE_ADMIN_KEY"
TIMEOUT_S = 30.0
ROW = ("instance_id", "role", "draining", "requests")
# Where httpx uses no proxy, whatever the environment says: none knows the addresses of this machine.
DIRECT = dict.fromkeys(("all://127.0.0.1", "all://localhost", "all://[::1]"))


def admin_headers() -> httpx.Headers:
    """Return the header with the admin key of the environment, of several the first; empty without one.

    Raises:
        SetupError: no header can have it.
    """
    return key_header(ADMIN_KEY_VARIABLE, os.environ.get(ADMIN_KEY_VARIABLE, "").split(",")[0])


def key_header(name: str, key: str) -> httpx.Headers:
    """Return the header with a key in UTF-8, as routers compare it; empty without one.

    Args:
        name: of the setting that has it.

    Raises:
        SetupError: no header can have it, or it is the digest that a router may have in its place.
    """
    key = key.strip()
    if not key.isprintable():
        raise SetupError(f"{name} must have printable characters only, since a header carries it")
    if re.fullmatch("sha256:[0-9a-fA-F]{64}", key):
        raise SetupError(f"{name} is the digest of a key, which only routers take; give the key itself")
    return httpx.Headers({"Authorization": f"Bearer {key}"} if key else {}, encoding="utf-8")


@contextmanager
def reading(url: object) -> Iterator[None]:
    """Context in which a router's answer is read: raises SetupError if its form is another one."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SetupError(
            f"{url} is not a router: its answer has another form: {type(error).__name__} {error}"
        ) from error


class StateConflict(SetupError):
    """The router refuses with status 409: the instance drains already, or another controller holds the lease."""


class AdminClient:
    """Client of one router.

    Args:
        key: its admin key; empty: that of the environment.

    Raises:
        SetupError: URL or key are invalid; from `get` and `post`: the router does not respond, or refuses, with its message.
        StateConflict: it refuses because of its present state.
    """

    def __init__(self, url: str, key: str = "") -> None:
        if not url.startswith(("http://", "https://")):
            raise SetupError(f"{url!r} is not the URL of a router; write http://127.0.0.1:8000, for example")
        headers = key_header("the admin key", key) or admin_headers()
        try:
            self._http = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, mounts=DIRECT)
        except httpx.InvalidURL as error:
            raise SetupError(f"{url!r} is not the URL of a router: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, **parameters: object) -> httpx.Response:
        return self._request("GET", path, params=parameters)

    def post(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        return self._request("POST", path, json=body or {})

    def instances(self) -> list[dict[str, Any]]:
        """Return the rows of /debug/instances, with the fields `ROW` at least."""
        answer = self.get("/debug/instances")
        with reading(self._http.base_url):
            return [{**row, **{name: row[name] for name in ROW}} for row in read_json(answer.content)["instances"]]

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        url = self._http.base_url
        try:
            response = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise SetupError(f"{url} does not respond: {error}; name the router with --router") from error
        if response.is_success:
            return response
        try:
            message = str(read_json(response.content)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            raise SetupError(f"{url} is not a router: {path} responds with {response.status_code}") from None
        raise (StateConflict if response.status_code == httpx.codes.CONFLICT else SetupError)(message)

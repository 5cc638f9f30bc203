"""HTTP client of a router's operator endpoints, /admin and /debug."""

import os
from types import TracebackType
from typing import Any, Self

import httpx

from pdserve.errors import SetupError

ADMIN_KEY_VARIABLE = "PDSERVE_ADMIN_KEY"
TIMEOUT_S = 30.0
# Where httpx uses no proxy, whatever the environment says: none knows the addresses of this machine.
DIRECT = dict.fromkeys(("all://127.0.0.1", "all://localhost", "all://[::1]"))


def admin_headers() -> dict[str, str]:
    """Return the header with the admin key of the environment, of several the first; empty without one."""
    key = os.environ.get(ADMIN_KEY_VARIABLE, "").split(",")[0].strip()
    return {"Authorization": f"Bearer {key}"} if key else {}


class StateConflict(SetupError):
    """The router refuses with status 409: the instance drains already, or another controller holds the lease."""


class AdminClient:
    """Client of one router, with the admin key of the environment.

    Raises:
        SetupError: the URL is invalid; from `get` and `post`: the router does not respond, or refuses, with its message.
        StateConflict: it refuses because of its present state.
    """

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise SetupError(f"{url!r} is not the URL of a router; write http://127.0.0.1:8000, for example")
        try:
            self._http = httpx.Client(base_url=url, headers=admin_headers(), timeout=TIMEOUT_S, mounts=DIRECT)
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
        """Return the rows of /debug/instances."""
        rows: list[dict[str, Any]] = self.get("/debug/instances").json()["instances"]
        return rows

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        url = self._http.base_url
        try:
            response = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise SetupError(f"{url} does not respond: {error}; name the router with --router") from error
        if response.is_success:
            return response
        try:
            message = str(response.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            raise SetupError(f"{url} is not a router: {path} responds with {response.status_code}") from None
        raise (StateConflict if response.status_code == httpx.codes.CONFLICT else SetupError)(message)

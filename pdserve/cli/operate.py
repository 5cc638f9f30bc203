"""`pdserve drain` and `pdserve role`: admin requests to a router, which wait until the instance has complied."""

import os
import time
from typing import Any

import httpx

from pdserve.errors import SetupError

POLL_S = 0.1


def drain(router: str, instance_id: str) -> None:
    """Drain an instance and wait until it has migrated or finished its requests and exited.

    Raises:
        SetupError: the router refuses or does not respond.
    """
    with _client(router) as http:
        epoch = _find_instance(http, instance_id).get("epoch")
        _request(http, "POST", f"/admin/instances/{instance_id}/drain", {})
        while _find_instance(http, instance_id).get("epoch") == epoch:
            time.sleep(POLL_S)
    print(f"{instance_id} is drained and gone")


def change_role(router: str, instance_id: str, role: str) -> None:
    """Change the role of an instance and wait until it serves in that role.

    Raises:
        SetupError: the router refuses or does not respond, or the instance exits first.
    """
    with _client(router) as http:
        epoch = _find_instance(http, instance_id).get("epoch")
        _request(http, "POST", f"/admin/instances/{instance_id}/role", {"role": role})
        while (state := _find_instance(http, instance_id)).get("role") != role or state["draining"]:
            if state.get("epoch") != epoch:
                raise SetupError(f"{instance_id} exited before it took the role {role}")
            time.sleep(POLL_S)
    print(f"{instance_id} serves as {role}")


def _client(router: str) -> httpx.Client:
    key = os.environ.get("PDSERVE_ADMIN_KEY", "")
    return httpx.Client(base_url=router, headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=30.0)


def _find_instance(http: httpx.Client, instance_id: str) -> dict[str, Any]:
    """Return the router's view of the instance, or {} if it has none of that name."""
    instances = _request(http, "GET", "/debug/instances")["instances"]
    return next((instance for instance in instances if instance["instance_id"] == instance_id), {})


def _request(http: httpx.Client, method: str, path: str, body: dict[str, str] | None = None) -> Any:
    try:
        response = http.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise SetupError(f"{http.base_url} does not respond: {error}; name the router with --router") from error
    if response.is_success:
        return response.json()
    try:
        raise SetupError(response.json()["error"]["message"])
    except (ValueError, KeyError):
        raise SetupError(f"{http.base_url} is not a router: {path} responds with {response.status_code}") from None

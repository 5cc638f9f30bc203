"""`pdserve drain` and `pdserve role`: what operators ask a router for, and wait for."""

import os
import time
from typing import Any

import httpx

from pdserve.errors import SetupError

POLL_S = 0.1


def drain(router: str, instance_id: str) -> None:
    """Returns when the instance has handed over or finished what it had, and is gone.

    Raises:
        SetupError: the router refuses, or does not answer.
    """
    with _client(router) as http:
        epoch = _found(http, instance_id).get("epoch")
        _answer(http, "POST", f"/admin/instances/{instance_id}/drain", {})
        while _found(http, instance_id).get("epoch") == epoch:
            time.sleep(POLL_S)
    print(f"{instance_id} is drained and gone")


def take_role(router: str, instance_id: str, role: str) -> None:
    """Returns when the instance serves in that role.

    Raises:
        SetupError: the router refuses or does not answer, or the instance has gone meanwhile.
    """
    with _client(router) as http:
        epoch = _found(http, instance_id).get("epoch")
        _answer(http, "POST", f"/admin/instances/{instance_id}/role", {"role": role})
        while (now := _found(http, instance_id)).get("role") != role or now["draining"]:
            if now.get("epoch") != epoch:
                raise SetupError(f"{instance_id} has gone before it took the role {role}")
            time.sleep(POLL_S)
    print(f"{instance_id} serves as {role}")


def _client(router: str) -> httpx.Client:
    key = os.environ.get("PDSERVE_ADMIN_KEY", "")
    return httpx.Client(base_url=router, headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=30.0)


def _found(http: httpx.Client, instance_id: str) -> dict[str, Any]:
    """What the router says of the instance; empty where it knows none of that name."""
    instances = _answer(http, "GET", "/debug/instances")["instances"]
    return next((one for one in instances if one["instance_id"] == instance_id), {})


def _answer(http: httpx.Client, method: str, path: str, body: dict[str, str] | None = None) -> Any:
    try:
        reply = http.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise SetupError(f"{http.base_url} does not answer: {error}; name the router with --router") from error
    if reply.is_success:
        return reply.json()
    try:
        raise SetupError(reply.json()["error"]["message"])
    except (ValueError, KeyError):
        raise SetupError(f"{http.base_url} is no router: it answers {path} with {reply.status_code}") from None

"""`pdserve drain` and `pdserve role`, which wait until the instance has complied, and `pdserve health`."""

import ssl
import sys
import time
from contextlib import suppress
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPSHandler, ProxyHandler, build_opener

from pdserve.admin_client import AdminClient
from pdserve.errors import SetupError, reason
from pdserve.lines.untrusted import read_json

POLL_S = 0.1
HEALTH_TIMEOUT_S = 3.0
MAX_ERROR_BYTES = 1 << 16


def drain(router: str, instance_id: str) -> None:
    """Drain an instance and wait until it has migrated or finished its requests and exited.

    Raises:
        SetupError: the router refuses or does not respond.
    """
    with AdminClient(router) as client:
        epoch = _find_instance(client, instance_id).get("epoch")
        client.post(f"/admin/instances/{instance_id}/drain")
        while _find_instance(client, instance_id).get("epoch") == epoch:
            time.sleep(POLL_S)
    print(f"{instance_id} is drained and gone")


def change_role(router: str, instance_id: str, role: str) -> None:
    """Change the role of an instance and wait until it serves in that role.

    Raises:
        SetupError: the router refuses or does not respond, or the instance exits first.
    """
    with AdminClient(router) as client:
        epoch = _find_instance(client, instance_id).get("epoch")
        client.post(f"/admin/instances/{instance_id}/role", {"role": role})
        while (state := _find_instance(client, instance_id)).get("role") != role or state["draining"]:
            if state.get("epoch") != epoch:
                raise SetupError(f"{instance_id} exited before it took the role {role}")
            time.sleep(POLL_S)
    print(f"{instance_id} serves as {role}")


def _find_instance(client: AdminClient, instance_id: str) -> dict[str, Any]:
    """Return the router's view of the instance, or {} if it has none of that name."""
    return next((instance for instance in client.instances() if instance["instance_id"] == instance_id), {})


def health(url: str) -> bool:
    """Return whether `/ready` of a URL answers with 200; print why not. Its certificate is not verified.

    Raises:
        SetupError: `url` is none of http or https.
    """
    if not url.startswith(("http://", "https://")):
        raise SetupError(f"{url!r} is not a URL; write http://127.0.0.1:8000, for example")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))  # no proxy knows this machine's addresses
    try:
        with opener.open(f"{url.rstrip('/')}/ready", timeout=HEALTH_TIMEOUT_S):
            return True
    except (OSError, ValueError, HTTPException) as error:  # a status of 400 or more is an OSError
        print(f"pdserve: {url} is not ready: {_why(error)}", file=sys.stderr)
        return False


def _why(error: Exception) -> str:
    """Return the message of an answer with an error, or what kept the answer from coming."""
    if isinstance(error, HTTPError):
        with suppress(OSError, HTTPException, ValueError, LookupError, TypeError):
            return str(read_json(error.read(MAX_ERROR_BYTES))["error"]["message"]).removeprefix("not ready: ")
    cause = error.reason if isinstance(error, URLError) else error
    return reason(cause) if isinstance(cause, Exception) else str(cause)

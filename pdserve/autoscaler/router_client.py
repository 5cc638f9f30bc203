"""Client of the routers of one fleet: what they see, the lease of the controller, and changes of roles."""

import os
from collections.abc import Sequence
from typing import Any

import httpx

from pdserve.autoscaler.change import Change
from pdserve.autoscaler.forecast import choose
from pdserve.autoscaler.observation import Member, Observation, merge_traffic, parse_traffic
from pdserve.errors import SetupError
from pdserve.launchers.launcher import Launcher

TIMEOUT_S = 30.0
ADMIN_KEY = "PDSERVE_ADMIN_KEY"


class RouterClient:
    """Talks to all routers of a fleet, in turn. Each answers for its own requests; their clocks should agree.

    Raises:
        SetupError: a router does not respond or refuses, in every method.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        key = os.environ.get(ADMIN_KEY, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._https = [httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S) for url in urls]

    def observe(self, window: float) -> Observation:
        """Return the fleet, and the requests of the last `window` seconds."""
        now, parts, members = 0.0, [], dict[str, Member]()
        for http in self._https:
            clock = self._request(http, "GET", "/debug/traffic", params={"since_ms": "inf"})
            now = now or float(clock.headers["X-Time-Ms"]) / 1e3
            lines = self._request(http, "GET", "/debug/traffic", params={"since_ms": f"{(now - window) * 1e3:.0f}"})
            parts.append(parse_traffic(lines.text.splitlines()))
            for row in self._request(http, "GET", "/debug/instances").json()["instances"]:
                name, other = row["instance_id"], members.get(row["instance_id"])
                draining = row["draining"] or (other is not None and other.is_draining)
                requests = row["requests"] + (other.requests if other else 0)
                members[name] = Member(name, row["role"], draining, requests)
        return Observation(now, tuple(members[name] for name in sorted(members)), merge_traffic(parts))

    def hold_lease(self, holder: str, seconds: float, decision: str = "") -> str:
        """Renew the controller's lease at each router, and show a decision. Returns why it is refused; empty if it is not."""
        body = {"holder": holder, "lease_seconds": seconds, "decision": decision}
        for http in self._https:
            response = self._request(http, "POST", "/admin/autoscaler", may_conflict=True, json=body)
            if response.status_code == httpx.codes.CONFLICT:
                return str(response.json()["error"]["message"])
        return ""

    def make(self, change: Change, members: Sequence[Member], launcher: Launcher | None) -> list[str]:
        """Make a change. Returns the names of the instances that change their role or end."""
        if not change.before:
            assert launcher is not None
            for _ in range(change.count):
                launcher.start(change.after)
            return []
        names = choose(members, change.before, change.count)
        for name in names:
            if change.after:
                path = f"/admin/instances/{name}/role"
                self._request(self._https[0], "POST", path, json={"role": change.after})
            else:
                assert launcher is not None
                launcher.stop(name)
        return names

    def close(self) -> None:
        for http in self._https:
            http.close()

    def _request(
        self, http: httpx.Client, method: str, path: str, *, may_conflict: bool = False, **options: Any
    ) -> httpx.Response:
        try:
            response = http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise SetupError(f"the router {http.base_url} does not respond: {error}") from error
        if response.is_success or (may_conflict and response.status_code == httpx.codes.CONFLICT):
            return response
        try:
            message = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"status {response.status_code}"
        raise SetupError(f"the router {http.base_url} refuses {path}: {message}")

"""Client of the routers of one fleet: what they see, the lease of the controller, and changes of roles."""

import socket
from collections.abc import Sequence
from dataclasses import asdict
from urllib.parse import urlsplit

import httpx

from pdserve.admin_client import AdminClient, StateConflict, reading
from pdserve.errors import SetupError
from pdserve.launchers.launcher import Launcher
from pdserve.lines.untrusted import read_json
from pdserve.router.telemetry.traffic import TIME_HEADER
from pdserve.tools.autoscaler.change import Change, MadeChange
from pdserve.tools.autoscaler.forecast import choose
from pdserve.tools.autoscaler.observation import Member, Observation, merge_traffic, parse_traffic


class RouterClient:
    """Client of all routers of a fleet, asked one after the other. Each reports its own requests; their clocks should agree.

    Args:
        urls: of the routers. `dns://HOST:PORT` stands for a router at each address of the host at the time, such as the pods
            behind a headless Service.
        key: their admin key; empty: that of the environment.

    Attributes:
        changes: those that the routers keep of the controllers that held the lease.

    Raises:
        SetupError: from every method: a router does not respond or refuses, or a name has no address.
    """

    def __init__(self, urls: Sequence[str], key: str = "") -> None:
        self.changes: list[MadeChange] = []
        self._urls, self._key = urls, key
        self._clients: dict[str, AdminClient] = {}

    @property
    def _routers(self) -> list[AdminClient]:
        urls = list(dict.fromkeys(one for url in self._urls for one in _resolve(url)))
        for gone in self._clients.keys() - set(urls):
            self._clients.pop(gone).close()
        self._clients |= {url: AdminClient(url, self._key) for url in urls if url not in self._clients}
        return [self._clients[url] for url in urls]

    def observe(self, window: float) -> Observation:
        """Return the fleet, and the requests of the last `window` seconds."""
        now, parts, members = 0.0, [], dict[str, Member]()
        for router in self._routers:
            traffic = router.get("/debug/traffic", seconds=window)
            with reading(traffic.url):
                now = max(now, float(traffic.headers[TIME_HEADER]) / 1e3)
                parts.append(parse_traffic(traffic.text))
            for row in router.instances():
                name, other = row["instance_id"], members.get(row["instance_id"])
                draining = row["draining"] or (other is not None and other.is_draining)
                requests = row["requests"] + (other.requests if other else 0)
                members[name] = Member(name, row["role"], draining, requests)
        return Observation(now, tuple(members[name] for name in sorted(members)), merge_traffic(parts))

    def hold_lease(self, holder: str, seconds: float, decision: str = "", changes: Sequence[MadeChange] = ()) -> str:
        """Renew the controller's lease at each router. Returns why it is refused; empty if it is not.

        If one router refuses, the leases of the others are released: two controllers that ask in different orders would
        otherwise keep one each for ever.

        Args:
            decision: that the live page is to show.
            changes: that the routers are to keep for the next controller; none: those before remain.
        """
        body = {"holder": holder, "lease_seconds": seconds, "decision": decision}
        body |= {"changes": [asdict(change) for change in changes]}
        held, kept = list[AdminClient](), set[MadeChange]()
        try:
            for router in self._routers:
                answer = router.post("/admin/autoscaler", body)
                with reading(answer.url):
                    kept |= {MadeChange(**row) for row in read_json(answer.content)["changes"]}
                held.append(router)
        except StateConflict as refusal:
            for router in held:
                router.post("/admin/autoscaler", {"holder": holder, "lease_seconds": 0.0})
            return str(refusal)
        self.changes = sorted(kept, key=lambda one: one.at)
        return ""

    def make(self, change: Change, members: Sequence[Member], launcher: Launcher | None) -> list[str]:
        """Make a change. Returns the names of the instances that change their role or end."""
        if not change.before:
            assert launcher is not None
            for part in change.parts:
                for _ in range(part.count):
                    launcher.start(part.after)
            return []
        names = choose(members, change.before, change.count)
        for name in names:
            if change.after:
                self._routers[0].post(f"/admin/instances/{name}/role", {"role": change.after})
            else:
                assert launcher is not None
                launcher.stop(name)
        return names

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


def _resolve(url: str) -> list[str]:
    if not url.startswith("dns://"):
        return [url]
    try:
        parts = urlsplit(url)
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # ValueError: of its host or port
        raise SetupError(f"{url} has no address: {error}") from error
    return sorted(str(httpx.URL(scheme="http", host=address[0], port=address[1])) for *_, address in found)

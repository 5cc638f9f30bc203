"""Random fault injection, in rounds that contain one fault of every kind; each may come as a pair: two at once."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from stage import Stage

if TYPE_CHECKING:
    from chaos import Settings

KINDS = ("kill", "freeze", "drain", "flip", "store", "cut", "rank", "dark")
ROLES = ("prefill", "decode", "both")
LEASE_S = 1.5  # of instances: a freeze that is longer detaches them


def followers_of(pid: int) -> list[int]:
    """Return the processes of the other ranks of an instance."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if "pdserve.ranks.follower" in Path(f"/proc/{child}/cmdline").read_text()]


class FaultInjector:
    """Injects faults that must not change any answer.

    Attributes:
        done: faults by kind and result: `done`, `refused` by the router, or `not now`, if another fault of the same victim
            still lasts, or the victim already has that role. The kind `dark` is all instances at once, some killed and the
            others frozen.
    """

    def __init__(self, at: Stage, settings: "Settings") -> None:
        self.done: Counter[str] = Counter()
        self.log: list[str] = []
        self._deployment, self._store, self._settings = at.deployment, at.store, settings
        self._http = httpx.AsyncClient(base_url=at.deployment.url, timeout=settings.deadline)
        self._lasting: dict[str, asyncio.Task[None]] = {}
        self._kinds = [kind for kind in KINDS if kind not in at.left_out]

    @property
    def missing(self) -> list[str]:
        """Return the kinds of faults that have not occurred yet."""
        return [kind for kind in self._kinds if not self.done[f"{kind} done"]]

    async def inject(self) -> None:
        """Inject faults for the given time, or longer until each kind has occurred; undo lasting faults before returning."""
        drawn, names = random.Random(f"faults {self._settings.seed}"), [c.name for c in self._deployment.instances]
        started, round_ = time.monotonic(), list[str]()
        until = started + self._settings.seconds
        async with self._http:
            while (now := time.monotonic()) < until or (self.missing and now < until + self._settings.deadline):
                # Always draw every value, so that the sequence does not depend on the results.
                round_ = round_ or drawn.sample(self._kinds, len(self._kinds))
                kind, pause = round_.pop(), drawn.uniform(0, 2 * self._settings.every)
                victim, role, seconds = (
                    drawn.choice(names),
                    drawn.choice(ROLES),
                    drawn.uniform(0.1, self._settings.lasting),
                )
                other, second = drawn.choice([kind for kind in self._kinds if kind != "dark"]), drawn.choice(names)
                is_pair = drawn.random() < self._settings.pairs
                if now < until or kind in self.missing:
                    await asyncio.sleep(pause)
                    await self._inject(kind, victim, seconds, role, started)
                    if is_pair:
                        await self._inject(other, second, seconds, role, started)
            await asyncio.gather(*self._lasting.values())

    async def _inject(self, kind: str, victim: str, seconds: float, role: str, started: float) -> None:
        """Inject one fault, and note its result."""
        result = await self._inject_one(kind, victim, seconds, role)
        self.done[f"{kind} {result}"] += 1
        at = time.monotonic() - started
        self.log.append(f"{at:.1f} s: {kind} {victim} {seconds:.1f} s {role}: {result}")

    async def _inject_dark(self, seconds: float, role: str) -> str:
        """Freeze the instances whose names begin with one role, and kill the others: all that still run, at once."""
        for name in (child.name for child in self._deployment.instances):
            kind = "freeze" if name.startswith(role) or role == "both" else "kill"
            await self._inject_one(kind, name, max(seconds, 2 * LEASE_S), role)
        return "done"

    async def _inject_one(self, kind: str, victim: str, seconds: float, role: str) -> str:
        """Inject one fault and return its result."""
        child, store, island = self._deployment.child(victim), self._store, self._deployment.island
        match kind:
            case "dark":
                return await self._inject_dark(seconds, role)
            case "store":
                assert store is not None
                return self._inject_for("store", seconds, store.kill, store.start)
            case "cut":
                assert island is not None
                return self._inject_for("link", seconds, island.cut, island.mend)
            case "drain":
                return await self._post_admin(victim, "drain", {})
            case "flip":
                attached = (await self._http.get("/debug/instances")).json()["instances"]
                if (victim, role) in ((one["instance_id"], one["role"]) for one in attached):
                    return "not now"
                return await self._post_admin(victim, "role", {"role": role})
        if victim in self._lasting or not child.running:
            return "not now"
        pid = child.pid
        if kind in ("kill", "rank"):
            victims = [pid] if kind == "kill" else followers_of(pid)
            if not victims:
                return "not now"
            child.failures = 0
            os.kill(victims[0], signal.SIGKILL)
            return "done"

        def thaw() -> None:
            if child.running and child.pid == pid:
                os.kill(pid, signal.SIGCONT)

        return self._inject_for(victim, seconds, lambda: os.kill(pid, signal.SIGSTOP), thaw)

    async def _post_admin(self, victim: str, path: str, body: dict[str, str]) -> str:
        reply = await self._http.post(f"/admin/instances/{victim}/{path}", json=body)
        assert reply.status_code in (202, 404, 409), reply.text
        return "done" if reply.status_code == 202 else "refused"

    def _inject_for(self, victim: str, seconds: float, begin: Callable[[], object], end: Callable[[], object]) -> str:
        if victim in self._lasting:
            return "not now"

        async def undo_later() -> None:
            try:
                await asyncio.sleep(seconds)
            finally:
                end()
                del self._lasting[victim]

        begin()
        self._lasting[victim] = asyncio.create_task(undo_later())
        return "done"

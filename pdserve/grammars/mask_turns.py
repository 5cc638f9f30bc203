"""Turns of grammars whose masks are wanted: whose are computed next, so that slow ones do not hold up others. Plain Python.

Each grammar of each tenant has a worker. One worker of each tenant may compute at any time, further ones only while few do:
so tenants do not wait for each other. Among the grammars of a tenant, the one that has used least CPU time goes first, and
its turn ends after `TURN_S`. Workers of a tenant whose masks take much CPU time run at a lower priority than models.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

from pdserve.request import NO_TENANT, Tenant

SHARE = 0.1  # of a core, which the masks of a tenant may take at the priority of models in the long run
BURST_S = 0.05  # and at once


@dataclass(eq=False, kw_only=True)
class Line:
    """The masks that are wanted of one grammar, for one tenant.

    Attributes:
        wanted: in order.
        is_busy: its worker computes some.
        used_s: CPU time of its masks. While a line wants none, it falls behind by as much as others of its tenant get.
    """

    tenant: Tenant = NO_TENANT
    wanted: deque[Any] = field(default_factory=deque)
    is_busy: bool = False
    used_s: float = 0.0


class _Tenant:
    """The lines of a tenant: those that wait for their turns, the one that has used least first, and those that have one."""

    def __init__(self) -> None:
        self.waiting: list[tuple[float, int, Line]] = []  # a heap
        self.busy: set[Line] = set()


class MaskTurns:
    """Lines that wait for their turns, or have them.

    Args:
        num_workers: how many may compute at once, unless there are more tenants.
        is_high: whether a tenant's masks take so much CPU time that it may have half of them only.
    """

    def __init__(self, num_workers: int, is_high: Callable[[Tenant], bool] = lambda _: False) -> None:
        self._num_workers = num_workers
        self._is_high = is_high
        self._tenants: dict[Tenant, _Tenant] = {}  # that have lines
        self._num_busy = 0
        self._new_number = count().__next__

    def __len__(self) -> int:
        return self._num_busy + sum(len(tenant.waiting) for tenant in self._tenants.values())

    def add(self, line: Line, item: Any) -> None:
        """Want a mask."""
        if not (line.wanted or line.is_busy):
            tenant = self._tenants.setdefault(line.tenant, _Tenant())
            others = [other.used_s for other in tenant.busy] + [used_s for used_s, _, _ in tenant.waiting[:1]]
            line.used_s = max(line.used_s, min(others, default=0.0))
            self._wait(tenant, line)
        line.wanted.append(item)

    def take(self) -> tuple[Line, list[Any]] | None:
        """Return the next line whose worker computes, and all that is wanted of it; None if there is none."""
        may_go = [
            (len(tenant.busy) / key.weight, *tenant.waiting[0][:2], tenant)
            for key, tenant in self._tenants.items()
            if tenant.waiting and (not tenant.busy or self._has_room(key, len(tenant.busy)))
        ]
        if not may_go:
            return None
        tenant = min(may_go)[-1]
        line = heappop(tenant.waiting)[-1]
        wanted = [*line.wanted]
        line.wanted.clear()
        line.is_busy = True
        tenant.busy.add(line)
        self._num_busy += 1
        return line, wanted

    def end(self, line: Line, left: list[Any]) -> None:
        """End a turn, which has not come to what is left."""
        tenant = self._tenants[line.tenant]
        line.is_busy = False
        tenant.busy.remove(line)
        self._num_busy -= 1
        line.wanted.extendleft(reversed(left))
        if line.wanted:
            self._wait(tenant, line)
        elif not (tenant.waiting or tenant.busy):
            del self._tenants[line.tenant]

    def _has_room(self, key: Tenant, num_busy: int) -> bool:
        """Return whether a worker of a tenant may compute beside others of it."""
        may_have = self._num_workers // 2 if self._is_high(key) else self._num_workers
        return self._num_busy < self._num_workers and num_busy < may_have

    def _wait(self, tenant: _Tenant, line: Line) -> None:
        heappush(tenant.waiting, (line.used_s, self._new_number(), line))


class Spending:
    """CPU time that the masks of each tenant have taken above its share. It wears off. Times in seconds."""

    def __init__(self) -> None:
        self._above: dict[Tenant, tuple[float, float]] = {}  # how much, and when

    def add(self, tenant: Tenant, cpu_s: float, now: float) -> None:
        """Count the CPU time of a mask."""
        self._above[tenant] = self._above_share(tenant, now) + cpu_s, now

    def is_high(self, tenant: Tenant, now: float) -> bool:
        """Return whether masks of a tenant take so much that models go before them."""
        return self._above_share(tenant, now) > BURST_S

    def _above_share(self, tenant: Tenant, now: float) -> float:
        above_s, then = self._above.get(tenant, (0.0, now))
        return max(0.0, above_s - SHARE * (now - then))

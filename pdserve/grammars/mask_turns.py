"""Turns of grammars whose masks are wanted: whose are computed next, so that slow ones do not hold up others. Plain Python.

Each grammar of each tenant has a worker. One worker of each tenant may compute at any time, further ones only while few do:
so tenants do not wait for each other. Among the grammars of a tenant, the one that has used least CPU time goes first, and
its turn ends after `TURN_S`. Workers of a tenant whose masks take much CPU time run at a lower priority than models.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from pdserve.request import NO_TENANT, Tenant

SHARE = 0.1  # of a core, which the masks of a tenant may take at the priority of models in the long run
BURST_S = 0.2  # and at once


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


class MaskTurns:
    """Lines that wait for their turns, or have them.

    Args:
        num_workers: how many may compute at once, unless there are more tenants.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._lines: dict[Line, None] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, line: Line, item: Any) -> None:
        """Want a mask."""
        if line not in self._lines:
            others = [other.used_s for other in self._lines if other.tenant == line.tenant]
            line.used_s = max(line.used_s, min(others, default=0.0))
            self._lines[line] = None
        line.wanted.append(item)

    def take(self) -> tuple[Line, list[Any]] | None:
        """Return the next line whose worker computes, and all that is wanted of it; None if there is none."""
        busy = [line.tenant for line in self._lines if line.is_busy]
        may_go = [
            line
            for line in self._lines
            if line.wanted and not line.is_busy and (len(busy) < self._num_workers or line.tenant not in busy)
        ]
        if not may_go:
            return None
        line = min(may_go, key=lambda one: (busy.count(one.tenant) / one.tenant.weight, one.used_s))
        wanted = [*line.wanted]
        line.wanted.clear()
        line.is_busy = True
        return line, wanted

    def end(self, line: Line, left: list[Any]) -> None:
        """End a turn, which has not come to what is left."""
        line.is_busy = False
        line.wanted.extendleft(reversed(left))
        if not line.wanted:
            del self._lines[line]


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

"""A simple controller on averages, to compare with: thresholds of the mean utilisation by role, as other autoscalers have."""

from collections import Counter

from pdserve.autoscaler.change import ROLES, Change
from pdserve.autoscaler.controller import Decision, Limits
from pdserve.autoscaler.observation import Observation
from pdserve.simulator.simulation import Simulation

HIGH, LOW = 0.8, 0.5  # mean share of the time in which the instances of a role are in a step


class MeanController:
    """Decides by how busy the instances of a role were since its last look, in the mean.

    Above `HIGH` the role gets an instance of the other one if that is below `LOW`, else a new one within the budget; with
    both below `LOW`, one of the less busy role ends. After a change it waits for the cooldown.
    """

    def __init__(self, simulation: Simulation, limits: Limits) -> None:
        self._simulation = simulation
        self._limits = limits
        self._seconds: dict[str, float] = {}
        self._at = self._hold_until = 0.0

    def decide(self, seen: Observation) -> Decision:
        """Return what to do now."""
        busy = self._busy(seen)
        change = None
        if seen.at >= self._hold_until and not any(member.is_draining for member in seen.members):
            change = self._change(seen.counts, busy)
        if change is not None:
            self._hold_until = seen.at + self._limits.cooldown
        reason = ", ".join(f"{role} {share:.0%} busy" for role, share in busy.items())
        return Decision(seen.at, dict(seen.counts), reason, change=change)

    def _busy(self, seen: Observation) -> dict[str, float]:
        """Return the mean share of each role since the last look."""
        seconds = {name: one.busy_seconds for name, one in self._simulation.instances.items()}
        passed, shares = seen.at - self._at, dict[str, float]()
        for role in ROLES:
            spent = [seconds[one.name] - self._seconds.get(one.name, 0.0) for one in seen.members if one.role == role]
            shares[role] = sum(spent) / len(spent) / passed if spent else 0.0
        self._seconds, self._at = seconds, seen.at
        return shares

    def _change(self, counts: Counter[str], busy: dict[str, float]) -> Change | None:
        limits, size = self._limits, sum(counts.values())
        for role, other in (ROLES, ROLES[::-1]):
            if busy[role] <= HIGH:
                continue
            if busy[other] < LOW and counts[other] > max(1, limits.least[other]):
                return Change(other, role)
            if size < limits.most:
                return Change("", role)
        role = min(ROLES, key=lambda one: busy[one])
        if limits.most and max(busy.values()) < LOW and counts[role] > max(1, limits.least[role]):
            return Change(role, "")
        return None

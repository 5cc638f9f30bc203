"""Forecasts of the controller: the traffic of the window again, then the expected one, on the fleet with a change."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from pdserve.errors import Conflict, NotFound
from pdserve.tools.autoscaler.cell import make_cell
from pdserve.tools.autoscaler.change import Change
from pdserve.tools.autoscaler.observation import Member
from pdserve.tools.autoscaler.situation import Situation
from pdserve.tools.bench.metrics import summarize
from pdserve.tools.bench.requests import Sample
from pdserve.tools.bench.slo import METRICS
from pdserve.tools.planner.targets import FAILED, Target, attainment, compare
from pdserve.tools.simulator.fleet import PERCENTILES
from pdserve.tools.simulator.model import InstanceModel
from pdserve.tools.simulator.simulation import Deployment, Simulation

MAX_FAILED_SHARE = 0.01  # of the requests, above which the SLO is not met


@dataclass(frozen=True)
class Rating:
    """Attainment of an SLO by some requests, and their percentiles.

    Attributes:
        attainment: share of the requests that are within all targets.
        values: by target, the percentile in seconds.
        ratio: of the worst of them to its target; at most 1 if the SLO is met.
        worst: the same in words, such as `TTFT p90 812 of 500 ms`.
        count: of the requests.
    """

    attainment: float
    values: dict[str, float]
    ratio: float
    worst: str
    count: int

    @property
    def meets(self) -> bool:
        return self.ratio <= 1


def rate(targets: Sequence[Target], samples: Sequence[Sample]) -> Rating:
    """Compare samples with the targets. Without samples, the SLO is met."""
    figures = summarize(samples, {}, METRICS, PERCENTILES, [])
    values, worst, ratio = compare(targets, figures, samples)
    text = worst.beside(values[worst])
    if figures["failed"] > MAX_FAILED_SHARE * len(samples):
        ratio, text = max(ratio, FAILED), f"{figures['failed']} of {len(samples)} requests failed"
    share = attainment(targets, samples) if samples else 1.0
    return Rating(share, {str(one): seconds for one, seconds in values.items()}, ratio, text, len(samples))


def choose(members: Sequence[Member], role: str, count: int) -> list[str]:
    """Return the names of the instances of a role that a change is for: those with the fewest requests."""
    able = [member for member in members if member.role == role and not member.is_draining]
    return [member.name for member in sorted(able, key=lambda one: (one.requests, one.name))[:count]]


class Forecaster:
    """Simulates situations. The forecast is of the requests that wait now, and of those that are expected."""

    def __init__(self, deployment: Deployment, model: InstanceModel, targets: Sequence[Target], seed: int) -> None:
        """`deployment` has the settings, without instances."""
        self._deployment = deployment
        self._model = model
        self._targets = targets
        self._seed = seed

    def forecast(self, situation: Situation, change: Change | None = None) -> Rating:
        """Return how the fleet will do with a change made now; None: without one. Of a large fleet, a cell is simulated."""
        situation, change = make_cell(situation, change)
        start_up_s = max(self._model.start_up_s, situation.start_up_s)
        simulation = Simulation(self._deployment, replace(self._model, start_up_s=start_up_s), self._seed)
        self._plan_moves(simulation, situation)
        if change is not None:
            simulation.clock.at(situation.now - situation.began_at, partial(make, simulation, change))
        loads = [*situation.received, *situation.expected]
        loads = [replace(one, at=max(0.0, (one.at or 0.0) - situation.began_at)) for one in loads]
        samples = simulation.play(loads).samples
        first = len(situation.received)
        return rate(self._targets, [one for one in samples if one.index >= first or one.index in situation.waiting])

    def _plan_moves(self, simulation: Simulation, situation: Situation) -> None:
        """Let the fleet change within the window as it did."""
        simulated = {name: simulation.add(role) for name, role in situation.members.items()}

        def move(name: str, role: str) -> None:
            if name not in simulated:
                simulated[name] = simulation.add(role)
                return
            with suppress(Conflict, NotFound):  # the simulated drain before this one may take longer than the real one
                simulation.drain(simulated[name], role)

        for at, name, role in situation.moves:
            simulation.clock.at(at - situation.began_at, partial(move, name, role))


def make(simulation: Simulation, change: Change) -> None:
    """Make a change of a simulated fleet now."""
    if not change.before:
        for part in change.parts:
            for _ in range(part.count):
                simulation.start(part.after)
        return
    for name in choose(simulated_members(simulation), change.before, change.count):
        with suppress(Conflict):  # an earlier change is still under way
            simulation.drain(name, change.after)


def simulated_members(simulation: Simulation) -> list[Member]:
    """Return the instances of a simulated fleet, as its routers see them."""
    members = []
    for handle in simulation.routers[0].fleet.instances.values():
        requests = sum(len(router.fleet.instances[handle.id].requests) for router in simulation.routers)
        members.append(Member(handle.id, handle.role, handle.is_draining, requests))
    return members

"""The controller inside of a simulation: what it would have done with a load."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdserve.router.telemetry.traffic import traffic_lines
from pdserve.tools.autoscaler.change import Change
from pdserve.tools.autoscaler.controller import Decision
from pdserve.tools.autoscaler.forecast import make, simulated_members
from pdserve.tools.autoscaler.observation import Observation, merge_traffic, parse_traffic
from pdserve.tools.bench.requests import Request, Sample
from pdserve.tools.simulator.simulation import Simulation

Decide = Callable[[Observation], Decision]

MAX_TRAFFIC = 100_000  # requests in a window


@dataclass
class Rehearsal:
    """A simulated run with a controller.

    Attributes:
        samples: one per request.
        decisions: all of them, in order of time.
        instance_seconds: sum over the instances, from their start to their end.
    """

    samples: list[Sample] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    instance_seconds: float = 0.0

    @property
    def changes(self) -> list[tuple[float, Change]]:
        return [(one.at, one.change) for one in self.decisions if one.change is not None]


def rehearse(
    simulation: Simulation,
    decide: Decide,
    loads: Sequence[Request],
    interval: float,
    window: float,
    on_decision: Callable[[Decision], None] = lambda decision: None,
) -> Rehearsal:
    """Play a load while a controller decides every `interval` seconds."""
    rehearsal = Rehearsal()
    starting: list[float] = []
    ticked_at = 0.0

    def tick() -> None:
        nonlocal ticked_at
        seen = observe(simulation, window)
        starting[:] = [ready for ready in starting if ready > seen.at]
        rehearsal.instance_seconds += (seen.at - ticked_at) * (len(seen.members) + len(starting))
        ticked_at = seen.at
        decision = decide(seen)
        rehearsal.decisions.append(decision)
        on_decision(decision)
        if decision.change is not None:
            make(simulation, decision.change)
            if not decision.change.before:
                count = decision.change.count + decision.change.others
                starting.extend([seen.at + simulation.start_up_s] * count)

    simulation.clock.every(interval, tick)
    rehearsal.samples = simulation.play(loads).samples
    size = len(simulated_members(simulation)) + len(starting)
    rehearsal.instance_seconds += (simulation.clock.time - ticked_at) * size
    return rehearsal


def observe(simulation: Simulation, window: float) -> Observation:
    """Return what a controller sees of a simulated fleet, by the routers' own records."""
    now, parts = simulation.clock.time, []
    for router in simulation.routers:
        router.catch_up()
        timelines = router.dispatcher.timelines.latest(MAX_TRAFFIC)
        parts.append(parse_traffic(traffic_lines(timelines, 0.0, now - window, router.admission.queued())))
    return Observation(now, tuple(simulated_members(simulation)), merge_traffic(parts))

"""Check of a planned fleet against the cores of the profile's machine, with a forecast if there are too few."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.profile.profile import Profile
from pdserve.tools import machine
from pdserve.tools.load_config import PlanConfig
from pdserve.tools.planner.search import Trial
from pdserve.tools.planner.targets import Target
from pdserve.tools.simulator.cores import cores_needed
from pdserve.tools.simulator.fleet import Fleet


@dataclass(frozen=True)
class Here:
    """A machine that has fewer free cores than a fleet with its routers and a client needs.

    Attributes:
        name: of the machine, as in a sentence.
        cores, busy: how many it has, and how many threads of other programs compute on them.
        trial: the fleet there, forecast with shared cores.
    """

    name: str
    needed: int
    cores: int
    busy: float
    trial: Trial

    def sentence(self, targets: Sequence[Target]) -> str:
        """Say whether the fleet holds there, and why not."""
        trial, free = self.trial, max(0.0, self.cores - self.busy)
        verdict = "it holds nevertheless" if trial.meets else "it cannot hold"
        others = f", of which {free:.1f} are free" if self.busy >= 0.05 else ""
        figures = ", ".join([*(one.beside(trial.values[one]) for one in targets), *filter(None, [trial.failure])])
        return (
            f"On {self.name} {verdict}: {trial.fleet.shape}, routers and a client need {self.needed} cores, and there are "
            f"{self.cores}{others}; with shared cores it has {figures}."
        )


def config_here(config: PlanConfig, profile: Profile, fleet: Fleet) -> PlanConfig | None:
    """Return the settings that have the fleet share the cores of the profile's machine; None if there are enough, or if
    the settings or the profile do not tell."""
    known = profile.machine
    if config.cores is not None or not known.cores:
        return None
    busy = round(machine.busy_threads(), 1) if is_this_machine(profile) else 0.0
    if needed_by(config, profile, fleet) + busy <= known.cores:
        return None
    return replace(config, cores=known.cores, busy_threads=busy)


def needed_by(config: PlanConfig, profile: Profile, fleet: Fleet) -> int:
    """Return the cores with which no process of a fleet waits for another."""
    return cores_needed(fleet.size, profile.machine.busy_threads, config.routers)


def is_this_machine(profile: Profile) -> bool:
    """Return whether the profile seems to be of the machine that this runs on."""
    return (profile.machine.processor, profile.machine.cores) == (machine.processor(), machine.num_cores())

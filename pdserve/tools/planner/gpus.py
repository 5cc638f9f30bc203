"""GPUs of a planned fleet: how many each instance has, and what they cost. Plain decisions: the caller simulates."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from pdserve.errors import SetupError
from pdserve.profile.profile import Profile
from pdserve.tools.load_config import PlanConfig
from pdserve.tools.planner.search import Trial
from pdserve.tools.simulator.fleet import Fleet, estimate_of, gpus_of, num_gpus

DEGREES = (1, 2, 4, 8)
LEAST_TOKENS = 2048  # of KV, without which a model does not really fit
ROLES = ("prefill", "decode")
SCREENED = 80  # requests with which numbers of GPUs are compared


def fitting(config: PlanConfig) -> list[int]:
    """Return the numbers of GPUs on which an instance fits, and among which its heads can be divided.

    Raises:
        SetupError: it fits on none.
    """
    estimates = {gpus: estimate_of(config, gpus) for gpus in DEGREES}
    found = [gpus for gpus, one in estimates.items() if one.shape.can_divide(gpus) and one.kv_tokens >= LEAST_TOKENS]
    if not found:
        raise SetupError(f"--model {config.model} in {config.weights} does not fit on {DEGREES[-1]} x {config.gpu}")
    return found


def cheapest(
    config: PlanConfig,
    degrees: Sequence[int],
    screen: Callable[[PlanConfig], Trial],
    best_of: Callable[[PlanConfig, int], Trial],
) -> PlanConfig:
    """Return the settings with the number of GPUs by instance that needs the fewest of them; of equal ones, with the most
    margin. If none meets the SLO, with the one that is nearest to it.

    Args:
        screen: returns a fleet of the smallest size that suffices for some settings, or of the largest if none does.
        best_of: returns the best fleet of a size, which only equal ones need.
    """
    found: list[tuple[tuple[bool, int], int, PlanConfig, PlanConfig]] = []
    fewest = config.max_instances * max(degrees)
    for degree in sorted(degrees, reverse=True):  # few large instances set the bound soonest
        most = min(config.max_instances, fewest // degree)
        if config.instances is not None or most < 1:
            most = config.max_instances
        settings = replace(config, tensor_parallel_size=str(degree))
        small = replace(settings, max_instances=most, num_prompts=min(config.num_prompts, SCREENED))
        trial = screen(small)
        gpus = trial.fleet.size * degree
        found.append(((not trial.meets, gpus if trial.meets else 0), trial.fleet.size, small, settings))
        fewest = min(fewest, gpus) if trial.meets else fewest
    rank = min(one[0] for one in found)
    equal = [one for one in found if one[0] == rank]
    return (equal[0] if len(equal) == 1 else min(equal, key=lambda one: best_of(one[2], one[1]).ratio))[3]


def thrifty(config: PlanConfig, trial: Trial, degrees: Sequence[int], simulate: Callable[[Fleet], Trial]) -> Trial:
    """Return the trial of a split with fewer GPUs for instances of one role, as long as it meets the SLO."""
    while trial.meets and not trial.is_colocated:
        options = []
        for role in ROLES:
            settings = dict(trial.fleet.settings)
            gpus = gpus_of(replace(config, **settings), role)
            if gpus // 2 in degrees:
                settings[f"{role}_tensor_parallel_size"] = gpus // 2
                options.append(simulate(replace(trial.fleet, settings=tuple(sorted(settings.items())))))
        enough = [one for one in options if one.meets]
        if not enough:
            break
        trial = min(enough, key=lambda one: (num_gpus(config, one.fleet), one.ratio))
    return trial


def gpus_by_role(config: PlanConfig, fleet: Fleet, profile: Profile | None = None) -> dict[str, int]:
    """Return the GPUs of an instance of each role; without a data sheet, those of the one that was measured."""
    own = replace(config, **dict(fleet.settings))
    measured = 1 if profile is None else int(profile.flags.get("tensor-parallel-size", 1))
    return {role: gpus_of(own, role) if config.gpu else measured for role in (*ROLES, "both")}


def prices(config: PlanConfig, fleet: Fleet) -> dict[str, float]:
    """Return the price per hour of the instances of each role."""
    return {role: getattr(fleet, role) * config.price * gpus for role, gpus in gpus_by_role(config, fleet).items()}


def costs(config: PlanConfig, trial: Trial, rate: float) -> str:
    """Return what a fleet costs, in a sentence; of one that answers nothing, by the hour only. Prefill instances are
    also paid for prompts, and decode instances for answers.

    Args:
        rate: requests per second, all of which a fleet answers that keeps up: the run itself ends with answers to the last
            requests, beside which fewer and fewer run.
    """
    fleet, figures = trial.fleet, trial.forecast.figures
    price = prices(config, fleet)
    total = sum(price.values())
    text = f"{fleet.shape} costs {total:.2f} per hour"
    if not (figures["total_output_tokens"] and figures["duration"]):
        return f"{text}."
    seconds = figures["duration"] if trial.failure else figures["completed"] / rate
    prompts, answers = (figures[f"total_{kind}_tokens"] / seconds * 3600 / 1e6 for kind in ("input", "output"))
    text += f", {total / (prompts + answers):.3g} per million tokens"
    by_role = (price["prefill"] / prompts, price["decode"] / answers)
    return text + ("." if fleet.both else " ({:.3g} of prompts, {:.3g} of answers).".format(*by_role))

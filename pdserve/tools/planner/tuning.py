"""The second stage of a plan: the settings of the best fleets of a size, one after the other, and then fewer instances."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pdserve.tools.planner.search import Simulate, Trial, best, fleets_of
from pdserve.tools.planner.settings import Dimension
from pdserve.tools.simulator.fleet import Fleet

ROUNDS = 3  # over all dimensions, at most
NEAR = 1.25  # ratio from which a fleet of one instance fewer is worth tuning


@dataclass
class Tuned:
    """A fleet with its best settings.

    Attributes:
        worth: by dimension, the trials of its values while the others were as chosen.
        trials: all.
    """

    trial: Trial
    worth: dict[Dimension, list[Trial]] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)


def tune(trials: Sequence[Trial], dimensions: Sequence[Dimension], simulate: Simulate) -> Tuned:
    """Begin with the best of some trials, and change one setting after the other, and the split by one instance, as long
    as the worst figure gains by it."""
    tuned = Tuned(best(trials), trials=list(trials))
    for _ in range(ROUNDS):
        before = tuned.trial.fleet
        _move(tuned, list(simulate(_neighbours(before))))
        for dimension in dimensions:
            options = list(simulate(dimension.variants(tuned.trial.fleet)))
            tuned.worth[dimension] = options
            _move(tuned, options)
        if tuned.trial.fleet == before:
            break
    return tuned


def _move(tuned: Tuned, options: Sequence[Trial]) -> None:
    tuned.trials += options
    tuned.trial = best(tuned.trials)


def _neighbours(fleet: Fleet) -> list[Fleet]:
    """Return the splits with one prefill instance more or fewer."""
    counts = [(fleet.prefill + step, fleet.decode - step) for step in (-1, 1)]
    return [replace(fleet, prefill=p, decode=d) for p, d in counts if p > 0 and d > 0]


def tune_sizes(
    trials: Sequence[list[Trial]], dimensions: Sequence[Dimension], simulate: Simulate, *, may_shrink: bool
) -> tuple[list[list[Trial]], dict[Dimension, list[Trial]]]:
    """Tune the best fleets of the last size, and while that suffices, those of one instance fewer.

    Returns:
        The trials by size, the last of the size to choose from; and what the settings of its best fleet are worth.
    """
    by_size = {one[0].fleet.size: one for one in trials}
    size = trials[-1][0].fleet.size
    kinds = _tune_kinds(by_size[size], dimensions, simulate)
    by_size[size] = _all_trials(kinds)
    while may_shrink and size > 1 and best(by_size[size]).meets:
        found = by_size.get(size - 1, []) + list(simulate(_shrink(kinds)))
        if best(found).ratio > NEAR:
            break
        fewer = _tune_kinds(found, dimensions, simulate)
        by_size[size - 1] = _all_trials(fewer)
        if not best(by_size[size - 1]).meets:
            break
        size, kinds = size - 1, fewer
    chosen = next(one for one in kinds if one.trial.is_colocated is best(by_size[size]).is_colocated)
    return [by_size[one] for one in sorted(by_size) if one <= size], chosen.worth


def _tune_kinds(trials: Sequence[Trial], dimensions: Sequence[Dimension], simulate: Simulate) -> list[Tuned]:
    """Tune the best colocated fleet and the best split."""
    kinds = [[trial for trial in trials if trial.is_colocated is one] for one in (True, False)]
    return [tune(kind, dimensions, simulate) for kind in kinds if kind]


def _all_trials(kinds: Sequence[Tuned]) -> list[Trial]:
    """Return the trials of all, each fleet once."""
    return list({trial.fleet: trial for one in kinds for trial in one.trials}.values())


def _shrink(kinds: Sequence[Tuned]) -> list[Fleet]:
    """Return the fleets of one instance fewer, with the settings that were best."""
    fleets = []
    for one in kinds:
        fleet = one.trial.fleet
        shapes = [shape for shape in fleets_of(fleet.size - 1, [None]) if bool(shape.both) == bool(fleet.both)]
        near = [shape for shape in shapes if abs(shape.prefill - fleet.prefill) <= 1]
        fleets += [replace(shape, itl_target_ms=fleet.itl_target_ms, settings=fleet.settings) for shape in near]
    return fleets

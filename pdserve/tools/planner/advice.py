"""Sentences of `pdserve plan`: which fleet, how far from the SLO, and whether disaggregation pays."""

from collections.abc import Sequence

from pdserve.tools.planner.search import NOISE, Trial, best
from pdserve.tools.planner.targets import Target

TRADED = {"throughput": "request_throughput", "TTFT p50": "p50_ttft_ms", "ITL p99": "p99_itl_ms"}  # figures, by name


def describe(trial: Trial, targets: Sequence[Target]) -> str:
    """Return a fleet with its figures, such as `2P+1D: TTFT p90 310 of 500 ms, ITL p99 41 of 50 ms`."""
    parts = [target.beside(trial.values[target]) for target in targets]
    parts += [trial.failure] if trial.failure else []
    return f"{trial.fleet}: {', '.join(parts)}"


def advise(trials: Sequence[Trial], targets: Sequence[Target]) -> str:
    """Compare the best disaggregated fleet with the best colocated one of the same size, in one sentence."""
    colocated = [trial for trial in trials if trial.is_colocated]
    split = [trial for trial in trials if not trial.is_colocated]
    if not colocated or not split:
        return "One instance cannot be split: it serves both phases."
    ours, theirs = best(split), best(colocated)
    if ours.meets and not theirs.meets:
        return f"Disaggregation pays: {describe(ours, targets)}; colocated, {_worst(theirs)}."
    if theirs.meets and not ours.meets:
        return f"Disaggregation does not pay: {describe(theirs, targets)}; the best split, {_worst(ours)}."
    if not ours.meets:
        nearer, other = (ours, theirs) if ours.ratio <= theirs.ratio else (theirs, ours)
        return f"Neither suffices: the nearest, {_worst(nearer)}; otherwise, {_worst(other)}."
    if abs(ours.ratio - theirs.ratio) <= NOISE:
        return f"Both suffice alike: {describe(ours, targets)}; {describe(theirs, targets)}. Colocated is simpler."
    winner, other = (ours, theirs) if ours.ratio < theirs.ratio else (theirs, ours)
    kind = "Disaggregation has" if winner is ours else "Colocated instances have"
    return f"Both suffice. {kind} more margin: {describe(winner, targets)}; {describe(other, targets)}."


def trade(compared: Sequence[Trial]) -> str:
    """Return what the other kind of fleet of the same size has more or less of than the nearest one, in two sentences.

    The second has the worst figure of each beside its target, as the SLO is judged: a share of good requests would be of
    another SLO, since ten bad ones of a hundred are within a target on p90.

    Args:
        compared: the nearest fleet, and the best of the other kind, if there is one.
    """
    if len(compared) < 2:
        return ""
    nearest, other = compared
    ratios = {
        name: other.forecast.figures[figure] / nearest.forecast.figures[figure]
        for name, figure in TRADED.items()
        if nearest.forecast.figures[figure]
    }
    parts = ", ".join(f"{ratio:.2g} times the {name}" for name, ratio in ratios.items())
    worst = f"Worst figures beside their targets: {_worst(other)}; {_worst(nearest)}."
    return f"Beside {nearest.fleet}, {other.fleet} has {parts}. {worst}"


def _worst(trial: Trial) -> str:
    """Return a fleet with its worst figure beside the target, or how it fails."""
    if trial.failure:
        return f"{trial.fleet} {trial.failure}"
    return f"{trial.fleet} has {trial.binding.beside(trial.values[trial.binding])}"

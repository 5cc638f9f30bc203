"""Compares a profile with steps observed live, and says where it no longer holds."""

import statistics
from collections.abc import Sequence

from pdserve.errors import SetupError
from pdserve.profile.fit import Timing, kind_of
from pdserve.profile.profile import Profile, StepModel

USUAL_STEPS = (
    *([(1, past)] * batch for batch in (1, 4, 16, 48) for past in (64, 512)),
    *([(tokens, past)] for tokens in (32, 128, 512, 1024) for past in (0, 512)),
)
MIN_STEPS = 8  # of a kind
LEAST_DRIFT = 0.15  # of the median, below which the differences between runs on a machine are too


def check_match(profile: Profile, live: Profile, *, force: bool) -> str:
    """Check that two profiles are of the same model, device, numerics class and dtype.

    Returns:
        How they differ, which only `force` allows; empty if they do not.

    Raises:
        SetupError: they differ.
    """
    pairs = {
        "model": (profile.model, live.model),
        "device": (profile.machine.device, live.machine.device),
        "class of numerics": (profile.machine.numerics, live.machine.numerics),
        "dtype": (profile.engine.dtype, live.engine.dtype),
    }
    differences = [f"{name} {one}, not {other}" for name, (one, other) in pairs.items() if one != other]
    if not differences:
        return ""
    reason = f"the profile is of another model or machine than the instance: {'; '.join(differences)}"
    if not force:
        raise SetupError(f"{reason}; --force compares them nevertheless")
    return reason


def drift(profile: Profile, observed: Sequence[Timing]) -> list[str]:
    """Return a sentence for each kind of step whose median duration is not what the profile says.

    What counts is more than `LEAST_DRIFT`, and more than 90 % of the steps missed by when the profile was made. Too few steps
    of a kind say nothing about it.
    """
    ratios: dict[str, list[float]] = {}
    for work, seconds in observed:
        if (forecast := profile.step.seconds(work)) > 0:
            ratios.setdefault(kind_of(work), []).append(seconds / forecast)
    sentences = []
    for kind, values in ratios.items():
        known = profile.residuals.get(kind)
        allowed = max(LEAST_DRIFT, known.p90 if known else 0.0)
        ratio = statistics.median(values)
        if len(values) >= MIN_STEPS and not 1 / (1 + allowed) <= ratio <= 1 + allowed:
            sentences.append(f"The profile has drifted: {kind} steps take {ratio:.2f} times as long as it says.")
    return sentences


def drift_of(profile: Profile, live: StepModel) -> list[str]:
    """Return the sentences of `drift` for the step model that a live instance has fitted to its own steps."""
    return drift(profile, [(work, live.seconds(work)) for work in USUAL_STEPS])

"""Compares a profile with steps observed live, once or all the time, and says where it no longer holds."""

import statistics
from collections.abc import Sequence

from pdserve.costs import Work
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


WINDOW = 100  # steps of a phase, of which the median counts
STREAK = 3  # windows in turn that must agree, so that a short disturbance is not taken for a change
LEAST, MOST = 0.8, 1.25  # measured ÷ profile, within which the profile holds


class ProfileWatch:
    """Compares steps of one phase (prefill or decode) with the times of a profile.

    Attributes:
        ratios: by phase, the median of measured ÷ profile over the newest full window.
    """

    def __init__(self, model: StepModel) -> None:
        self.ratios: dict[str, float] = {}
        self._model = model
        self._window: dict[str, list[float]] = {"prefill": [], "decode": []}
        self._streak = {"prefill": 0, "decode": 0}  # windows that contradict the state
        self._has_drifted = {"prefill": False, "decode": False}

    def observe(self, steps: Sequence[Work], seconds: float) -> str:
        """Add steps of one phase that were measured together.

        Returns:
            A sentence when the phase has drifted from the profile, or is as the profile says again; else empty.
        """
        forecast = sum(self._model.seconds(work) for work in steps)
        phase = "decode" if steps[0][0][0] == 1 else "prefill"
        window = self._window[phase]
        if forecast > 0:
            window.append(seconds / forecast)
        if len(window) < WINDOW:
            return ""
        ratio = self.ratios[phase] = statistics.median(window)
        window.clear()
        self._streak[phase] = self._streak[phase] + 1 if (LEAST <= ratio <= MOST) is self._has_drifted[phase] else 0
        if self._streak[phase] < STREAK:
            return ""
        self._streak[phase] = 0
        drifted = self._has_drifted[phase] = not self._has_drifted[phase]
        verdict = "the profile no longer holds" if drifted else "the profile holds again"
        return f"{verdict}: {phase} steps take {ratio:.2f} times as long as it says"

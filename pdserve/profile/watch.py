"""Watch over a profile: compares the steps of a live instance with it, and says when it no longer holds. Plain decisions."""

import statistics
from collections.abc import Sequence

from pdserve.costs import Work
from pdserve.profile.profile import StepModel

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

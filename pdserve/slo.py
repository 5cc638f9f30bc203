"""Service-level objectives: time to first token (TTFT) and inter-token latency (ITL)."""

import math
import re
from dataclasses import dataclass

UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Slo:
    """Targets in seconds; infinite where there is no target."""

    ttft: float = math.inf
    itl: float = math.inf

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Parse text such as `ttft=500ms,itl=50ms`. Either target may be omitted.

        Raises:
            ValueError: the text has another form, or a target is 0 or given twice.
        """
        targets: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            match = re.fullmatch(r"\s*(ttft|itl)\s*=\s*(\d+\.?\d*)\s*(ms|s)\s*", part)
            if match is None or match[1] in targets or not float(match[2]):
                raise ValueError(
                    f"{part!r} is no valid SLO; give ttft or itl, each at most once, as in ttft=500ms,itl=50ms"
                )
            targets[match[1]] = float(match[2]) * UNITS[match[3]]
        return cls(**targets)

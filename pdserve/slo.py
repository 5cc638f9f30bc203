"""What users are promised: the time to the first token, and the time between tokens."""

import math
import re
from dataclasses import dataclass

UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Slo:
    """Both in seconds; infinite where nothing is promised."""

    ttft: float = math.inf
    itl: float = math.inf

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """From `ttft=500ms,itl=50ms`. Either may be left out.

        Raises:
            ValueError: it is something else.
        """
        found: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            match = re.fullmatch(r"\s*(ttft|itl)\s*=\s*(\d+\.?\d*)\s*(ms|s)\s*", part)
            if match is None or match[1] in found or not float(match[2]):
                raise ValueError(f"{part!r} is no SLO; write ttft or itl, each once, as in ttft=500ms,itl=50ms")
            found[match[1]] = float(match[2]) * UNITS[match[3]]
        return cls(**found)

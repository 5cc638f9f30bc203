"""How many random cases a test draws: few in `make test`, where each run draws others, and many in `make slow`."""

from hypothesis import settings


def examples(times: float) -> int:
    """Return some times as many examples as the profile has, which are 40 in `make test` and 500 in `make slow`."""
    assert settings.default is not None
    return max(1, int(times * settings.default.max_examples))

"""Numbers of random cases that hypothesis draws for a test: few in `make test`, many in `make slow`."""

from hypothesis import settings


def examples(times: float) -> int:
    """Return some times as many examples as the profile has, which are 40 in `make test` and 500 in `make slow`."""
    assert settings.default is not None
    return max(1, int(times * settings.default.max_examples))

"""Waiting for what other processes do."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], description: object = "", seconds: float = 600.0) -> None:
    """Wait until a condition holds, which it asks less and less often.

    Most conditions are requests, which take CPU from what the test waits for.
    """
    started = time.monotonic()
    while not condition():
        waited = time.monotonic() - started
        assert waited < seconds, f"not within {seconds:g} s: {description}"
        time.sleep(min(0.2, max(0.02, waited / 20)))

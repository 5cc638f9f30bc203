"""Attacks in random order, each of which must be refused or served. `schema_fuzz.py` repeats them beside its requests.

Routers end connections that are silent for 10 s. So an attack that fails while its own client was stalled, on a crowded
machine, says nothing about the router: it is counted and not judged.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable

from attacking import bodies, connections
from attacking.answers import burst, left_streams
from attacking.instances import rogue_instances
from attacking.target import ENDED, Target
from pdserve.control.frame_connection import AwakeClock

# The client was stalled if its clock's thread, which wakes ten times in this time, did not run for so long.
STALL_S = 1.0
KINDS: dict[str, Callable[[Target], None]] = {
    "endless header": connections.endless_header,
    "many headers": connections.many_headers,
    "silent connections": connections.silent_connections,
    "left streams": left_streams,
    "burst": burst,
    "grammar bombs": bodies.grammar_bombs,
    "foreign pages": connections.foreign_pages,
    "log injection": bodies.log_injection,
    "rogue instances": rogue_instances,
}


class Attacks:
    """Attacks on a deployment, within `with Attacks(…) as attacks`.

    Attributes:
        stopped: ends `run` after the current attack.
        judged: number of attacks that were refused or served, by kind.
        unjudged: number of attacks that failed while this process was stalled for more than a second, by kind.
    """

    def __init__(self, url: str, control_port: int) -> None:
        """`url` is that of a router, and `control_port` the port for its instances."""
        self._target = Target(url, control_port)
        self._clock = _StallClock()
        self.stopped = threading.Event()
        self.judged: Counter[str] = Counter()
        self.unjudged: Counter[str] = Counter()

    def __enter__(self) -> "Attacks":
        self._clock.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._clock.stop()

    def run(self) -> None:
        """Attack until stopped, in random order.

        Raises:
            RuntimeError: an attack was neither refused nor served, or most attacks of a kind could not be judged.
        """
        while not self.stopped.is_set():
            self.attack(random.choice(list(KINDS)))
        for kind, count in self.unjudged.items():
            if count > self.judged[kind]:
                raise RuntimeError(f"{kind}: {count} attacks could not be judged, {self.judged[kind]} could")

    def attack(self, kind: str) -> None:
        """Attack once.

        Raises:
            RuntimeError: the attack was neither refused nor served.
        """
        stalled_before_s = self._clock.stalled_s()
        try:
            KINDS[kind](self._target)
        except (RuntimeError, *ENDED) as error:
            if self._clock.stalled_s() < stalled_before_s + 0.01:  # not stalled
                raise RuntimeError(f"{kind}: {error!r}") from error
            self.unjudged[kind] += 1
        else:
            self.judged[kind] += 1


class _StallClock:
    """Measures for how long this process did not run: stopped, frozen, or starved of CPU."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started_at = time.monotonic()
        self._clock = AwakeClock(STALL_S, time.monotonic)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def stalled_s(self) -> float:
        """Return the sum of all times without a tick, less `STALL_S` of each."""
        with self._lock:
            return time.monotonic() - self._started_at - self._clock.read()

    def _run(self) -> None:
        while not self._stopped.wait(STALL_S / 10):
            with self._lock:
                self._clock.tick()

"""The owner's side of `nixl://`: what peers may read, until when, and the thread that listens for them."""

import itertools
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from pdserve.kv_transfer.connectors.nixl_agent import Agent, NixlFault
from pdserve.kv_transfer.connectors.nixl_tickets import unpack_message

_LINGER_S: Final = 5.0  # polling goes on for this long after the last lease, for reads that began before its end

# How often to poll, by seconds since the last lease or message: readers come soon, or late, or never.
_POLL_EVERY: Final = ((0.05, 0.0005), (1.0, 0.002), (float("inf"), 0.01))


@dataclass
class _Lease:
    unread: int
    ends: float
    held: Future[None] = field(default_factory=Future)


class Leases:
    """What peers may read here, and the thread that listens for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._leases: dict[int, _Lease] = {}
        self._numbers = itertools.count(1)
        self._active = 0.0  # when the last lease was granted, or the last message came
        self._linger_until = 0.0
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(self, agent: Agent) -> None:
        self._agent = agent
        self._thread = threading.Thread(target=self._poll, name="kv-nixl-leases", daemon=True)
        self._thread.start()

    def grant(self, blocks: int, lease_s: float) -> tuple[int, Future[None]]:
        now = time.monotonic()
        lease = _Lease((1 << blocks) - 1, now + lease_s)
        lease.held.set_running_or_notify_cancel()
        with self._changed:
            number = next(self._numbers)
            self._active = now
            stopped = self._stopped
            if not stopped:
                self._leases[number] = lease
                self._changed.notify()
        if stopped:
            lease.held.set_result(None)
        return number, lease.held

    def note(self, message: bytes) -> None:
        """A reader has read blocks, or does not want them any more."""
        if (unpacked := unpack_message(message)) is None:
            return
        number, read = unpacked
        with self._changed:
            lease = self._leases.get(number)
            if lease is None:
                return
            self._active = time.monotonic()
            lease.unread &= ~read
            if lease.unread:
                return
            self._end(number)
        lease.held.set_result(None)

    def linger(self) -> None:
        """Lets NIXL work for a while, though nothing is leased: a connection is being made."""
        with self._changed:
            self._active = time.monotonic()
            self._linger_until = self._active + _LINGER_S
            self._changed.notify()

    def stop(self) -> None:
        """Ends all leases."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(1.0)  # not for ever, should NIXL hang
        self._expire(float("inf"))

    def listen(self) -> None:
        """Lets NIXL work for peers, and takes note of what they say."""
        for message in self._agent.progress():
            self.note(message)

    def _poll(self) -> None:
        while (pause := self._next_pause()) is not None:
            with suppress(NixlFault):  # a reader died while it was connected
                self.listen()
            self._expire(time.monotonic())
            time.sleep(pause)

    def _next_pause(self) -> float | None:
        """Waits until there is something to listen for. None: stop."""
        with self._changed:
            while not self._stopped:
                now = time.monotonic()
                if self._leases or now < self._linger_until:
                    return next(pause for age, pause in _POLL_EVERY if now - self._active <= age)
                self._changed.wait()
        return None

    def _expire(self, now: float) -> None:
        with self._changed:
            over = [number for number, lease in self._leases.items() if lease.ends <= now]
            ended = [self._leases[number] for number in over]
            for number in over:
                self._end(number)
        for lease in ended:
            lease.held.set_result(None)

    def _end(self, number: int) -> None:
        del self._leases[number]
        self._linger_until = time.monotonic() + _LINGER_S

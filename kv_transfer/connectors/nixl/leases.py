"""The owner's side of `nixl://`: leases on rows that peers may read, and the thread that polls NIXL meanwhile."""

import itertools
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from pdserve.kv_transfer.connectors.nixl.agent import Agent, NixlError
from pdserve.kv_transfer.connectors.nixl.tickets import unpack_notification, unpack_prolongation

_LINGER_S: Final = 5.0  # polling continues for this long after the last lease, for reads that began before its end

# Polling interval by seconds since the last lease or notification: readers come soon, or late, or never.
_POLL_INTERVALS: Final = ((0.05, 0.0005), (1.0, 0.002), (float("inf"), 0.01))


@dataclass
class _Lease:
    """`unread`: one bit per block not read yet. `expires_at`: monotonic. `held`: done when the lease has ended."""

    unread: int
    expires_at: float
    held: Future[None] = field(default_factory=Future)


class Leases:
    """The leases granted by this instance. Its thread polls NIXL while peers may be reading. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._leases: dict[int, _Lease] = {}
        self._lease_ids = itertools.count(1)
        self._last_activity = 0.0  # time of the last lease granted or notification received
        self._linger_until = 0.0
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(self, agent: Agent) -> None:
        self._agent = agent
        self._thread = threading.Thread(target=self._run, name="kv-nixl-leases", daemon=True)
        self._thread.start()

    def grant(self, blocks: int, lease_s: float) -> tuple[int, Future[None]]:
        """Grant a lease. Returns its id, and a future that is done when the lease has ended."""
        now = time.monotonic()
        lease = _Lease((1 << blocks) - 1, now + lease_s)
        lease.held.set_running_or_notify_cancel()
        with self._changed:
            lease_id = next(self._lease_ids)
            self._last_activity = now
            stopped = self._stopped
            if not stopped:
                self._leases[lease_id] = lease
                self._changed.notify()
        if stopped:
            lease.held.set_result(None)
        return lease_id, lease.held

    def acknowledge(self, notification: bytes) -> None:
        """Process a reader's notification that it has read blocks or does not need them, which ends the lease after the last,
        or that it still needs them."""
        if (prolongation := unpack_prolongation(notification)) is not None:
            lease_id, lease_s = prolongation
            with self._changed:
                if (lease := self._leases.get(lease_id)) is not None:
                    lease.expires_at = max(lease.expires_at, time.monotonic() + lease_s)
            return
        if (unpacked := unpack_notification(notification)) is None:
            return
        lease_id, read = unpacked
        with self._changed:
            lease = self._leases.get(lease_id)
            if lease is None:
                return
            self._last_activity = time.monotonic()
            lease.unread &= ~read
            if lease.unread:
                return
            self._remove(lease_id)
        lease.held.set_result(None)

    def keep_polling(self) -> None:
        """Poll NIXL for `_LINGER_S` more seconds, even without leases: a connection is being established."""
        with self._changed:
            self._last_activity = time.monotonic()
            self._linger_until = self._last_activity + _LINGER_S
            self._changed.notify()

    def stop(self) -> None:
        """End all leases and stop the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(1.0)  # limited, in case NIXL hangs
        self._expire(float("inf"))

    def poll(self) -> None:
        """Let NIXL make progress for peers, and process their notifications."""
        for notification in self._agent.poll():
            self.acknowledge(notification)

    def _run(self) -> None:
        while (interval := self._wait_until_active()) is not None:
            with suppress(NixlError):  # a reader died while connected
                self.poll()
            self._expire(time.monotonic())
            time.sleep(interval)

    def _wait_until_active(self) -> float | None:
        """Wait until polling is needed. Returns the polling interval in seconds; None once stopped."""
        with self._changed:
            while not self._stopped:
                now = time.monotonic()
                if self._leases or now < self._linger_until:
                    return next(interval for age, interval in _POLL_INTERVALS if now - self._last_activity <= age)
                self._changed.wait()
        return None

    def _expire(self, now: float) -> None:
        with self._changed:
            expired = [(lease_id, lease) for lease_id, lease in self._leases.items() if lease.expires_at <= now]
            for lease_id, _ in expired:
                self._remove(lease_id)
        for _, lease in expired:
            lease.held.set_result(None)

    def _remove(self, lease_id: int) -> None:
        del self._leases[lease_id]
        self._linger_until = time.monotonic() + _LINGER_S

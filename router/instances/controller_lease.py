"""The lease of the one controller (`pdserve autoscale`) that may change this router's fleet."""

import logging

from pdserve.errors import Conflict

log = logging.getLogger(__name__)

MAX_LEASE_S = 600.0


class ControllerLease:
    """Given to one controller at a time; another gets it when it has expired or was released."""

    def __init__(self) -> None:
        self._holder = ""
        self._expires_at = 0.0
        self._decision = ""

    def renew(self, holder: str, seconds: float, now: float) -> None:
        """Take or prolong the lease; 0 seconds release it.

        Raises:
            Conflict: another controller holds it.
        """
        if self._holder not in ("", holder) and now < self._expires_at:
            left = self._expires_at - now
            raise Conflict(f"the controller {self._holder} holds the lease for another {left:.0f} s", kind="lease_held")
        self._holder, self._expires_at = holder if seconds else "", now + min(seconds, MAX_LEASE_S)

    def show(self, decision: str) -> None:
        """Log the holder's decision, once, which also shows it on the live page."""
        if decision and decision != self._decision:
            log.info("autoscaler: %s", decision, extra={"event": "autoscaler"})
        self._decision = decision

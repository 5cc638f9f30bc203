"""The lease of the one controller (`pdserve autoscale`) that may change this router's fleet."""

from pdserve.errors import Conflict

MAX_LEASE_S = 600.0


class ControllerLease:
    """Given to one controller at a time; another gets it when it has expired or was released."""

    def __init__(self) -> None:
        self._holder = ""
        self._expires_at = 0.0

    def renew(self, holder: str, seconds: float, now: float) -> None:
        """Take or prolong the lease; 0 seconds release it.

        Raises:
            Conflict: another controller holds it.
        """
        if self._holder not in ("", holder) and now < self._expires_at:
            left = self._expires_at - now
            raise Conflict(f"the controller {self._holder} holds the lease for another {left:.0f} s", kind="lease_held")
        self._holder, self._expires_at = holder if seconds else "", now + min(seconds, MAX_LEASE_S)

"""Mistakes that show only in use: in what is asked at other times, of other blocks, or beside another user.

`BROKEN` lists the rule that finds each.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pdserve.errors import SetupError
from pdserve.kv_transfer.connectors.memory import MemoryConnector

if TYPE_CHECKING:
    from tests.kv_transfer.broken_clients import WireConnector
else:
    from pdserve_broken_clients import WireConnector


class AddsLogHandler(WireConnector):
    """Sets up logging for the whole process."""

    def open(self) -> None:
        logging.basicConfig()
        super().open()


class ProlongsOnlyOwn(MemoryConnector):
    """Raises an exception if a block is to be prolonged that it does not know."""

    def prolong(self, keys: Sequence[bytes], *, lease_s: float, tickets: Sequence[bytes] = ()) -> None:
        if any(self._name(key) not in self._store.values for key in keys):
            raise KeyError("an unknown block")
        super().prolong(keys, lease_s=lease_s, tickets=tickets)


class MatchesFirstPage(WireConnector):
    """Looks for blocks in the first page of a listing, of a thousand names."""

    def contains_many(self, keys: Sequence[bytes]) -> Iterable[bool]:
        return super().contains_many(keys[:1000])


class TellsPassword(WireConnector):
    """Tells its URL in an error."""

    def open(self) -> None:
        try:
            super().open()
        except SetupError as error:
            raise SetupError(f"{self.url} does not answer.") from error


class LeasesForEver(MemoryConnector):
    """Takes seconds for minutes in leases."""

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        super().put(name, header, payload, 60 * lease_s)

    def renew(self, name: str, lease_s: float) -> bool:
        return super().renew(name, 60 * lease_s)


class SaysGoodbye(WireConnector):
    """Waits for the server's last answer in `close`."""

    def close(self) -> None:
        if not self._closed and hasattr(self, "_sockets"):
            with self._connect() as last:
                last.settimeout(None)
                self._send(last, b"C", "goodbye")
                self._receive_start(last)
        super().close()


# Class, the rule that finds it, and part of the detail that the kit reports.
BROKEN: list[tuple[type, str, str]] = [
    (AddsLogHandler, "clean-close", "saw logging.root.handlers"),
    (ProlongsOnlyOwn, "release", "saw KeyError: 'an unknown block'"),
    (MatchesFirstPage, "large-operations", "1100 keys to match, saw 1000"),
    (TellsPassword, "attaching", "not to tell the password of the URL"),
    (LeasesForEver, "capacity", "in which no lease runs any more, saw 8 full"),
    (SaysGoodbye, "attaching", "expected close to end while the store hangs"),
]

# The kit reports these after its wait limits, which tests reduce.
SLOW_TO_DETECT = (SaysGoodbye,)

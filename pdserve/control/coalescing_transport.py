"""Transport that coalesces all writes of one event-loop turn into one: each write wakes the peer, which costs more than
its bytes.
"""

import asyncio
from typing import Any


class CoalescingTransport:
    """Wraps an asyncio transport and delays its writes to the end of the turn. Everything else is delegated unchanged."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._pending: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        """Flush pending writes, then close the transport."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if pending and not self._transport.is_closing():
            self._transport.write(b"".join(pending))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

"""A transport that writes once in each turn of the event loop: a write wakes the other end, which costs more than what is in
it.
"""

import asyncio
from typing import Any


class Corked:
    """Around a transport of the event loop, which writes at once. Everything else is the transport's own."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._leaving: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._leaving:
            self._loop.call_soon(self._flush)
        self._leaving.append(data)

    def close(self) -> None:
        """What was written leaves first."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        leaving, self._leaving = self._leaving, []
        if leaving and not self._transport.is_closing():
            self._transport.write(b"".join(leaving))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

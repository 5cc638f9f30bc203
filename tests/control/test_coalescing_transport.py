"""Coalescing of writes within one event-loop turn."""

import asyncio
from typing import Any, cast

from pdserve.control.coalescing_transport import CoalescingTransport


class Recorder:
    """Records the calls of a transport."""

    def __init__(self) -> None:
        self.calls: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.calls.append(data)

    def is_closing(self) -> bool:
        return "close" in self.calls

    def close(self) -> None:
        self.calls.append("close")


def test_writes_of_one_turn_are_coalesced_and_close_flushes() -> None:
    async def scenario() -> None:
        recorder = Recorder()
        transport = CoalescingTransport(cast(Any, recorder))
        transport.write(b"a")
        transport.write(b"b")
        assert recorder.calls == []
        await asyncio.sleep(0)
        assert recorder.calls == [b"ab"]
        transport.write(b"c")
        transport.close()
        transport.write(b"d")
        await asyncio.sleep(0)
        assert recorder.calls == [b"ab", b"c", "close"] and transport.is_closing()

    asyncio.run(scenario())

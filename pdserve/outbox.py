"""Frames on their way into a stream. Those that wait for it leave together: a message costs gRPC more than what is in it."""

import asyncio
from typing import Protocol, TypeVar

MESSAGE_BYTES = 1 << 20  # a message with more than this takes no further frame


class _Frame(Protocol):
    def ByteSize(self) -> int: ...


Frame = TypeVar("Frame", bound=_Frame)


class Outbox(asyncio.Queue[Frame | None]):
    """None ends the stream."""

    async def take(self) -> list[Frame]:
        """What waits, in order, at least one frame, as soon as there is one; nothing at the end."""
        frames: list[Frame] = []
        nbytes = 0
        frame = await self.get()
        while frame is not None:
            frames.append(frame)
            if self.empty() or (nbytes := nbytes + frame.ByteSize()) > MESSAGE_BYTES:
                return frames
            frame = self.get_nowait()
        if frames:
            self.put_nowait(None)
        return frames

"""Server-sent events of a body that arrives in pieces."""

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator


class EventReader:
    """Finds the events in the pieces of one body. Comments and the names of events are left out."""

    def __init__(self) -> None:
        self._rest = b""  # of an event that is not complete

    def feed(self, piece: bytes) -> list[str]:
        """Return the data of the events that a piece completes."""
        *events, self._rest = (self._rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        return [data for event in events if (data := _data_of(event)) is not None]


def read_events(pieces: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of each event as it is complete, `[DONE]` included."""
    reader = EventReader()
    for piece in pieces:
        yield from reader.feed(piece)


async def read_events_async(pieces: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """Yield the same of pieces that are waited for."""
    reader = EventReader()
    async for piece in pieces:
        for data in reader.feed(piece):
            yield data


def _data_of(event: bytes) -> str | None:
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines).decode(errors="replace") if lines else None

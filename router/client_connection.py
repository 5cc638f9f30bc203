"""The client's end of a request: runs work only for as long as the client is there to read the answer."""

import asyncio
from collections.abc import Callable, Coroutine


class ClientConnection:
    """The connection on which a request came, as `request.state.client`.

    The server calls `disconnect`, from the event loop. A client that cannot disconnect, such as a batch, has one, too.

    Attributes:
        body_size: returns the bytes of the request's body once all of it has arrived, until then None.
    """

    def __init__(self, body_size: Callable[[], int | None] = lambda: None) -> None:
        self.body_size = body_size
        self.is_connected = True
        self._workers: list[asyncio.Task[object]] = []  # that run for the client

    def disconnect(self) -> None:
        """Cancel what runs for the client."""
        self.is_connected = False
        for worker in self._workers:
            worker.cancel()

    async def run(self, work: Coroutine[None, None, None]) -> bool:
        """Run the work and cancel it as soon as the client disconnects. Return whether it ran to its end.

        It runs in the caller's task, so a request needs no second one that waits for the disconnect.
        """
        if not self.is_connected:
            work.close()
            return False
        worker = asyncio.current_task()
        assert worker is not None
        self._workers.append(worker)
        try:
            await work
        except asyncio.CancelledError:
            if self.is_connected or worker.uncancel() > 0:  # the task is also being cancelled from elsewhere
                raise
            return False
        finally:
            self._workers.remove(worker)
        return True

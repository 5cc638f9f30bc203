"""SIGINT and SIGTERM: while a process starts they end it at once, later they set an event."""

import _thread
import os
import signal
import threading
from types import FrameType


def exit_on_signals() -> None:
    """Let SIGINT and SIGTERM end this process at once, until it installs other handlers.

    Exceptions would not do: Python drops one that is raised in a callback, such as those of its import system. Handlers do,
    also for PID 1 of a container, for which default actions have no effect.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit)


def _exit(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)


def set_on_signals(event: threading.Event) -> list[int]:
    """Let SIGINT and SIGTERM set an event, and return a list to which their numbers are appended.

    The event is set in a thread: the main thread, which runs handlers, may just hold the event's lock, since it waits.
    """
    received: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        received.append(number)
        _thread.start_new_thread(event.set, ())  # that of `threading` takes locks, too

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    return received

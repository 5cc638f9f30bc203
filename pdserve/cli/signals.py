"""SIGINT and SIGTERM while a process starts."""

import os
import signal
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

"""Progress of a long command: what it is doing now, on standard error."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status

Step = Callable[[str, Callable[[], str]], None]


class _Line:
    """A step with the call that is being waited for and the time since its start, which change as it is shown."""

    def __init__(self, step: str, call: Callable[[], str]) -> None:
        self._step = step
        self._call = call
        self._started = time.monotonic()

    def __rich__(self) -> str:
        return f"{self._step}: {self._call()} ({time.monotonic() - self._started:.0f} s)".replace("[", r"\[")


@contextmanager
def progress() -> Iterator[Step]:
    """Yield a function to be called at the start of each step, with its name and a function that returns the current call.

    On a terminal, one line shows both as they change. Otherwise each step is a line.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda step, _: console.print(step, markup=False, highlight=False, soft_wrap=True)
        return
    with Status("", console=console) as status:
        yield lambda step, call: status.update(_Line(step, call))

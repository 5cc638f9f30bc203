"""SIGINT and SIGTERM at bad moments: in a destructor while a process starts, and while it holds the lock of an event."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pdserve.cli.signals import set_on_signals

# Python imports this module first, as PYTHONPATH has its folder.
SEND_IN_A_DESTRUCTOR = """
import os, sys

class Sender:
    def __del__(self):
        os.kill(os.getpid(), {number})

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            Sender()

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("command", "module", "signum"),
    [
        ("decode", "torch", signal.SIGINT),
        ("decode", "uvloop", signal.SIGTERM),
        ("router", "tokenizers", signal.SIGINT),
        ("version", "pdserve.cli.commands", signal.SIGTERM),
    ],
)
def test_a_process_that_starts_ends_at_once(command: str, module: str, signum: signal.Signals, tmp_path: Path) -> None:
    tmp_path.joinpath("sitecustomize.py").write_text(SEND_IN_A_DESTRUCTOR.format(number=int(signum), module=module))
    paths = [str(tmp_path), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    # As in the background of a shell, where SIGINT is ignored at first.
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    model = ["--model", "demo"] if command != "version" else []
    done = subprocess.run(
        [*ignoring, sys.executable, "-m", "pdserve", command, *model],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + signum, "", "")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_sets_an_event_whose_lock_the_main_thread_holds(signum: signal.Signals) -> None:
    """So it does for a moment whenever it begins or ends to wait."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    event = threading.Event()
    try:
        received = set_on_signals(event)
        with event._cond:  # type: ignore[attr-defined]
            signal.raise_signal(signum)
        assert event.wait(60) and received == [signum]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

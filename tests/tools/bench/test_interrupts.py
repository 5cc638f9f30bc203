"""Ctrl-C, which a terminal sends to all processes of a command, while other processes of it are started or compute."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.waiting import wait_until

PLAY = """
from pdserve.tools.bench.load import Target
from pdserve.tools.bench.requests import Request
from pdserve.tools.bench.workers import play

if __name__ == "__main__":
    target = Target("http://127.0.0.1:1", "/v1/completions", False, "m", {}, {}, ("a",), "run")
    run = play([Request(0, 1, text="a", at=0.0)], target, 1, lambda run: None)
    print(len(run.samples))
"""
# Python imports this module first, as PYTHONPATH has its folder.
INTERRUPT = "import os, sys\nif '--multiprocessing-fork' in sys.orig_argv: os.kill(os.getpid(), 2)\n"


def test_client_processes_that_start_do_not_end(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT)
    (tmp_path / "play.py").write_text(PLAY)
    paths = [str(tmp_path), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(tmp_path / "play.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert (done.stdout, done.stderr) == ("1\n", "")


def processes_of(session: int) -> int:
    """Return how many processes a session has."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            stat = path.read_text().rpartition(")")[2].split()
            found += int(stat[3]) == session and stat[0] != "Z"
    return found


def test_simulations_are_not_waited_for(tiny_profile: Path) -> None:
    fleets = ["--prefill", "1,2", "--decode", "1", "--jobs", "2"]
    load = ["--request-rate", "10", "--num-prompts", "1000000", "--random-output-len", "200"]  # an hour or so
    command = [sys.executable, "-m", "pdserve", "simulate", "--profile", str(tiny_profile), *fleets, *load]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            wait_until(lambda: processes_of(process.pid) >= 3)  # with those that simulate
            process.send_signal(signal.SIGINT)
            _, printed = process.communicate(timeout=300)
            assert (process.returncode, printed) == (130, "")
            wait_until(lambda: processes_of(process.pid) == 0)
        finally:
            if processes_of(process.pid):
                os.killpg(process.pid, signal.SIGKILL)

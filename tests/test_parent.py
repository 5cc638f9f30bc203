"""Children that end with their parent."""

import os
import signal
import subprocess
import sys

import pytest

CHILD = "import time; from pdserve.parent import end_with_parent; end_with_parent(); print('up', flush=True); time.sleep(600)"
PARENT = """
import os, signal, subprocess, sys, time
from pdserve import parent
environment = os.environ | parent.environment(signal.Signals(int(sys.argv[1])))
subprocess.Popen([sys.executable, "-c", sys.argv[2]], env=environment)
time.sleep(600)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_ends_when_its_parent_is_killed(signum: signal.Signals) -> None:
    command = [sys.executable, "-c", PARENT, str(int(signum)), CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "up\n"
        parent.kill()
        assert parent.stdout.read() == "", "both ends of the pipe are closed"

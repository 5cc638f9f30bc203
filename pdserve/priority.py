"""The priority of processes that work beside requests, such as those that compile grammars."""

import os
import time
from contextlib import suppress
from pathlib import Path

NICENESS = 10  # of work that requests need not wait for
# Of work that is expensive. Beside a session with the default niceness, which weighs 1,024, it weighs 15, and not 110.
LOWEST = 19
SESSION = Path("/proc/self/autogroup")
TRIES = 20  # Linux lets one process of all users' change its session at a time, and the next one 0.1 s later


def lower_session(niceness: int = NICENESS) -> None:
    """Let other sessions run before that of this process, which leads it.

    Where Linux groups processes by session (`sched_autogroup_enabled`), the niceness of a process counts only within its
    session, and between sessions theirs.
    """
    assert os.getsid(0) == os.getpid(), "it would lower the priority of others, too"
    _lower_session_of(SESSION, niceness)


def lower(pid: int) -> None:
    """Let others run before another process of ours, which leads its session. No effect if it has ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid) + NICENESS)
        _lower_session_of(Path(f"/proc/{pid}/autogroup"), NICENESS)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of another process; 0 if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _lower_session_of(session: Path, niceness: int) -> None:
    for _ in range(TRIES):
        with suppress(FileNotFoundError, PermissionError):  # Linux does not group, or a container hides it
            try:
                session.write_text(str(niceness))
            except BlockingIOError:
                time.sleep(0.1)
                continue
        return

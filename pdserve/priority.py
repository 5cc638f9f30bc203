"""The priority of processes that work beside requests, such as those that compile grammars."""

import os
import time
from contextlib import suppress
from pathlib import Path

NICENESS = 10  # of work that requests need not wait for
# Of work that is expensive. Beside a session with the default niceness, which weighs 1,024, it weighs 15, and not 110.
LOWEST = 19
NORMAL = os.nice(0)  # of this process and of those that it starts, before any is lowered
SESSION = Path("/proc/self/autogroup")
TRIES = 20  # Linux lets one process of all users' change its session at a time, and the next one 0.1 s later


def lower_session() -> None:
    """Let other sessions run before that of this process, which leads it.

    Where Linux groups processes by session (`sched_autogroup_enabled`), the niceness of a process counts only within its
    session, and between sessions theirs.
    """
    assert os.getsid(0) == os.getpid(), "it would lower the priority of others, too"
    _lower_session_of(SESSION, NICENESS)


def lower(pid: int = 0, niceness: int = NICENESS) -> None:
    """Let others run before a process of ours, by default this one, which leads its session. No effect if it has ended.

    Args:
        niceness: beyond the normal one, however often the process was lowered before.
    """
    with suppress(ProcessLookupError, PermissionError):
        now = os.getpriority(os.PRIO_PROCESS, pid)
        os.setpriority(os.PRIO_PROCESS, pid, max(now, NORMAL + niceness))
        _lower_session_of(Path(f"/proc/{pid or 'self'}/autogroup"), niceness)


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

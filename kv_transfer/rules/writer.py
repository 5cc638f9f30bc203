"""The writers of `processes.py`: one process that forks them, as it is told on its standard input.

in     {"seed": 7, "passes": 2, "lease_s": 60}
out    {"pid": 0, "what": "pid", "value": 123}          forked
       {"pid": 123, "what": "ready", "value": null}     attached; SIGUSR1 makes it store
       {"pid": 123, "what": "pass", "value": 0}         begins to store this pass
       {"pid": 123, "what": "outcomes", "value": [..]}  has stored everything
       {"pid": 123, "what": "tickets", "value": [..]}   in hex; if there are any, it stays until SIGUSR1 comes again
       {"pid": 123, "what": "dead", "value": null}      has ended, for whatever reason
"""

import contextlib
import importlib
import json
import os
import re
import signal
import sys
from typing import Any

from pdserve.errors import SetupError
from pdserve.kv_transfer.connector import PoolMemory
from pdserve.kv_transfer.registry import connect, installed
from pdserve.kv_transfer.rules.processes import BLOCK_BYTES, COUNT, key_of, rows_of
from pdserve.kv_transfer.rules.trial import make_layout, mark


def say(pid: int, what: str, value: Any) -> None:
    os.write(1, f"{json.dumps({'pid': pid, 'what': what, 'value': value})}\n".encode())


def write(url: str, fingerprint: str, seed: int, passes: int, lease_s: float) -> None:
    rows = rows_of(seed)
    connector = connect(url)
    connector.attach(PoolMemory(rows, make_layout(BLOCK_BYTES, fingerprint)))
    say(os.getpid(), "ready", None)
    signal.sigwait({signal.SIGUSR1})
    outcomes: list[str] = []
    tickets: list[str] = []
    parent = os.getppid()
    for number in range(passes):
        if os.getppid() != parent:
            return  # nobody is there to kill this one any more
        say(os.getpid(), "pass", number)
        mark(rows, number)
        keys = [key_of(seed, number, n) for n in range(COUNT)]
        result = connector.store(keys, range(COUNT), lease_s=lease_s).result()
        outcomes = [*outcomes[-COUNT:], *result.outcomes]
        tickets = [*tickets[-1:], *([result.ticket.hex()] if result.ticket else [])]
    if not tickets:
        connector.close()  # what is stored stays for others
    say(os.getpid(), "outcomes", outcomes)
    say(os.getpid(), "tickets", tickets)
    while tickets and os.getppid() == parent and signal.sigtimedwait({signal.SIGUSR1}, 0.5) is None:
        pass


def run(url: str, fingerprint: str, seed: int, passes: int, lease_s: float) -> None:
    try:
        write(url, fingerprint, seed, passes, lease_s)
    except SetupError as error:
        say(os.getpid(), "refused", str(error))
    except BaseException as error:  # noqa: BLE001 - the parent wants to hear of all of them
        say(os.getpid(), "error", f"{type(error).__name__}: {error}")


def bury(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            say(pid, "dead", None)


def import_connector(url: str) -> None:
    """Once for all writers. Nothing is made: a connector may start threads, and these do not survive a fork."""
    schemes = re.findall(r"([a-z][a-z0-9+.-]*)://", url.lower())  # a URL may have others in it
    for one in installed():
        if one.scheme in schemes:
            importlib.import_module(one.target.partition(":")[0])


def main() -> None:
    url, fingerprint = sys.argv[1:]
    import_connector(url)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # in all threads of the writers, for sigwait
    signal.signal(signal.SIGCHLD, bury)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run(url, fingerprint, **order)
            os._exit(0)
        say(0, "pid", pid)


if __name__ == "__main__":
    main()

"""Writer processes for `processes.py`: a parent that forks writers on commands from its standard input.

in     {"seed": 7, "passes": 2, "lease_s": 60}
out    {"pid": 0, "what": "pid", "value": 123}          forked
       {"pid": 123, "what": "ready", "value": null}     attached; starts to store on SIGUSR1
       {"pid": 123, "what": "pass", "value": 0}         begins this pass
       {"pid": 123, "what": "outcomes", "value": [..]}  all passes stored
       {"pid": 123, "what": "warnings", "value": [..]}  that its connector has logged last
       {"pid": 123, "what": "tickets", "value": [..]}   in hex; the writer keeps its connector until the next SIGUSR1
       {"pid": 123, "what": "refused", "value": ".."}   could not attach
       {"pid": 123, "what": "error", "value": ".."}     raised an exception
       {"pid": 123, "what": "dead", "value": null}      ended, for any reason
"""

import contextlib
import importlib
import json
import os
import re
import select
import signal
import sys
import threading
import time
from typing import Any

from pdserve.errors import SetupError
from pdserve.kv_transfer.connector import PoolMemory
from pdserve.kv_transfer.registry import connect, connector_class, installed
from pdserve.kv_transfer.rules.context import batched_connectors, make_layout, stamp
from pdserve.kv_transfer.rules.processes import BLOCK_BYTES, COUNT, key_of, rows_of


def send(pid: int, what: str, value: Any) -> None:
    os.write(1, f"{json.dumps({'pid': pid, 'what': what, 'value': value})}\n".encode())


def end_with(parent: int) -> None:
    """End this process once its parent has died, whatever it waits for. To be run in a thread."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


def write(url: str, fingerprint: str, seed: int, passes: int, lease_s: float) -> None:
    """Attach, wait for SIGUSR1, and store the passes."""
    rows = rows_of(seed)
    connector = connect(url)
    connector.attach(PoolMemory(rows, make_layout(BLOCK_BYTES, fingerprint)))
    send(os.getpid(), "ready", None)
    signal.sigwait({signal.SIGUSR1})
    outcomes: list[str] = []
    tickets: list[str] = []
    for number in range(passes):
        send(os.getpid(), "pass", number)
        stamp(rows, number)
        keys = [key_of(seed, number, n) for n in range(COUNT)]
        result = connector.store(keys, range(COUNT), lease_s=lease_s).result()
        outcomes = [*outcomes[-COUNT:], *result.outcomes]
        tickets = [*tickets[-1:], *([result.ticket.hex()] if result.ticket else [])]
    send(os.getpid(), "outcomes", outcomes)
    said = [one.last_warning for one in batched_connectors(connector) if one.last_warning]
    send(os.getpid(), "warnings", said)
    send(os.getpid(), "tickets", tickets)
    signal.sigwait({signal.SIGUSR1})
    if not tickets:
        connector.close()  # stored blocks stay available


def run(url: str, fingerprint: str, seed: int, passes: int, lease_s: float) -> None:
    try:
        write(url, fingerprint, seed, passes, lease_s)
    except SetupError as error:
        send(os.getpid(), "refused", str(error))
    except BaseException as error:  # noqa: BLE001 - reported to the parent
        send(os.getpid(), "error", f"{type(error).__name__}: {error}")


def import_connector(url: str) -> None:
    """Import the connector's module, and the libraries that it imports when it attaches, once for all writers.

    No connector is constructed: it may start threads, which do not survive a fork.
    """
    schemes = re.findall(r"([a-z][a-z0-9+.-]*)://", url.lower())  # a URL may contain others
    for connector in installed():
        if connector.scheme in schemes:
            for library in connector_class(connector.scheme).libraries:
                with contextlib.suppress(ImportError):  # reported by `attach`
                    importlib.import_module(library)


def main() -> None:
    url, fingerprint = sys.argv[1:]
    import_connector(url)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # in all threads of the writers, for sigwait
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    writers: dict[
        int, int
    ] = {}  # pid of each, by its pidfd; no handler of SIGCHLD would run between two lines for sure
    commands = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)  # noqa: SIM115 - open until the end
    while True:
        for ready in select.select([commands.fileno(), *writers], [], [])[0]:
            if ready in writers:
                os.waitpid(writers[ready], 0)
                send(writers.pop(ready), "dead", None)
                os.close(ready)
            elif line := commands.readline():
                pid = fork_writer(url, fingerprint, json.loads(line))
                writers[os.pidfd_open(pid)] = pid
                send(0, "pid", pid)
            else:
                return


def fork_writer(url: str, fingerprint: str, command: dict[str, Any]) -> int:
    """Return the pid of a new process that runs a command."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    run(url, fingerprint, **command)
    os._exit(0)


if __name__ == "__main__":
    main()

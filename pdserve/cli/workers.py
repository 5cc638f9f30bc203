"""`pdserve router --workers K`: routers that share a port, as children of one process.

The kernel assigns each new connection to one of the listening processes (SO_REUSEPORT). Every instance connects to all of
them and reports its load, which includes the requests of the other routers. Quotas of API keys are shared through a file,
unless there is a registry.
"""

import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from pdserve.cli.signals import set_on_signals
from pdserve.cli.supervisor import Child, Supervisor, child_of, print_line
from pdserve.config import RouterConfig, UpConfig

POLL_S = 0.2


def run_workers(config: RouterConfig) -> None:
    """Serve until SIGINT, or until SIGTERM and the end of the requests that are running then.

    Raises:
        SetupError: a worker cannot start or restart.
    """
    from pdserve.router.web.listening import listen

    listen(config).close()  # fails if the port is in use; the workers' SO_REUSEPORT would share it silently
    stop = threading.Event()
    received_signals = set_on_signals(stop)
    with (
        quota_file(config) as path,
        Supervisor(worker_children(replace(config, quota_file=path)), on_line=print_line) as supervisor,
    ):
        while not stop.wait(POLL_S):
            supervisor.check_children()
        if signal.SIGTERM in received_signals:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second SIGTERM ends this process and its workers at once
            supervisor.drain(config.drain_seconds)


@contextmanager
def quota_file(config: RouterConfig | UpConfig) -> Iterator[str]:
    """Yield the path of the file through which workers share quotas, which exists until the end; empty if none is needed."""
    given, has_registry = getattr(config, "quota_file", ""), getattr(config, "registry", "")
    if given or has_registry or config.workers == 1 or not config.keys_file:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="pdserve-quotas-") as folder:
        yield f"{folder}/accounts.json"


def worker_children(config: RouterConfig) -> list[Child]:
    """Return the workers, which differ in their --control-port and --own-port."""
    return [
        child_of(
            f"router-{i}",
            "router",
            replace(
                config,
                workers=1,
                reuse_port=True,
                control_port=config.control_port + i,
                own_port=config.own_port and config.own_port + i,
            ),
        )
        for i in range(config.workers)
    ]

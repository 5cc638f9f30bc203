"""`pdserve router --workers K`: routers that share a port, as children of one process.

The kernel gives each new connection to one of those that listen (SO_REUSEPORT). Nothing else is shared: instances dial all
of them, and what one does the others hear from them.
"""

import signal
import threading
from dataclasses import fields, replace
from types import FrameType

from pdserve.cli.supervisor import Child, Supervisor
from pdserve.config import RouterConfig

TEND_S = 0.2
SECRETS = ("api_key", "admin_key", "control_token")  # go by environment: everybody reads the list of processes


def workers(config: RouterConfig) -> None:
    """Serves until SIGINT, or until SIGTERM and the requests that there are then have ended.

    Raises:
        SetupError: a worker cannot start, now or again.
    """
    from pdserve.router.web.listening import listen

    listen(config).close()  # workers would share the port with any other that does
    stop, told = threading.Event(), list[int]()

    def end(number: int, _: FrameType | None) -> None:
        told.append(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    children = [
        router_child(
            f"router-{i}",
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
    with Supervisor(children, say=lambda line: print(line, flush=True)) as supervisor:
        while not stop.wait(TEND_S):
            supervisor.tend()
        if signal.SIGTERM in told:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # another one ends us, and so the workers at once
            supervisor.drain(config.drain_seconds)


def router_child(name: str, config: RouterConfig) -> Child:
    """A router as a child process, with what differs from the defaults as arguments."""
    arguments, environment = ["router"], {}
    for one in fields(config):
        value = getattr(config, one.name)
        if value == one.default:
            continue
        if one.name in SECRETS:
            environment[f"PDSERVE_{one.name.upper()}"] = value
        elif value is True:
            arguments.append(f"--{one.name.replace('_', '-')}")
        else:
            arguments += [f"--{one.name.replace('_', '-')}", str(value)]
    return Child(name, arguments, environment)

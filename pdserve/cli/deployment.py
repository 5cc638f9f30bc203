"""Routers and their instances as child processes on this machine.

with Deployment(config) as deployment:
    deployment.wait_ready()
    ...                          # deployment.url answers; call deployment.tend() now and then
"""

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import httpx

from pdserve.cli.supervisor import Child, Supervisor
from pdserve.cli.workers import router_child
from pdserve.config import DEFAULT_CONNECTOR, ControlConfig, RouterConfig, TransferConfig, UpConfig
from pdserve.errors import SetupError

OF_UP = {"served_model_name", "control_port", "workers", "lease_seconds"}  # mean something else, or are set by us
PORTS = range(10_000, 22_000)  # below those that a system gives to connections, which could take one before we listen


class Deployment(Supervisor):
    """Everything that `pdserve up` starts.

    Attributes:
        url: where clients ask.
        routers: the URL of each router, which reaches that one alone.
    """

    def __init__(self, config: UpConfig, say: Callable[[str], None] = print) -> None:
        if config.prefill + config.decode + config.both == 0:
            raise SetupError("nothing to start: give --prefill and --decode, or --both")
        if not config.both and not (config.prefill and config.decode):
            raise SetupError("no request could be served: give at least one --prefill and one --decode, or one --both")
        self.config = config
        self.connector = config.connector
        if self.connector == DEFAULT_CONNECTOR:
            self.connector = f"shm://up-{os.getpid()}"  # ours alone, so that it can be removed at the end
        self.url = f"http://{config.host}:{config.port}"
        routers = self._routers()
        self.routers = [f"http://{config.host}:{one.own_port or one.port}" for one in routers]
        self._control = ",".join(f"127.0.0.1:{one.control_port}" for one in routers)
        names = ["router"] if len(routers) == 1 else [f"router-{i}" for i in range(len(routers))]
        children = [router_child(name, one) for name, one in zip(names, routers, strict=True)]
        super().__init__([*children, *self._instances()], say)

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Returns once a request can be served by all instances.

        Raises:
            SetupError: a child cannot start, or the time runs out.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.poll_ready():
                return
            time.sleep(0.05)
        raise SetupError(f"not ready within {timeout_s:.0f} s")

    def poll_ready(self) -> bool:
        """Tends the children, and says whether all instances have registered with all routers."""
        self.tend()
        try:
            with httpx.Client(timeout=1.0, verify=False) as http:  # reading certificates takes longer than asking
                answers = [http.get(f"{url}/ready") for url in self.routers]
        except httpx.TransportError:
            return False
        instances = len(self.children) - len(self.routers)
        if any(one.status_code != 200 or one.json()["instances"] < instances for one in answers):
            return False
        self._was_ready = True
        return True

    def stop(self) -> None:
        """Ends all children, the instances first, and removes what they shared."""
        super().stop()
        if self.connector.startswith("shm://") and self.connector != self.config.connector:
            from pdserve.kv_transfer.connectors.shm import unlink

            unlink(self.connector)

    def _routers(self) -> list[RouterConfig]:
        """One, or workers that share the port, each with a control port and a port of its own."""
        config, taken = self.config, {self.config.port, self.config.control_port}

        def free() -> int:
            port = next(port for port in iter(free_port, 0) if port not in taken)
            taken.add(port)
            return port

        shared = {one.name for one in fields(RouterConfig)} & {one.name for one in fields(UpConfig)} - OF_UP
        settings = {name: getattr(config, name) for name in shared}
        try:
            first = RouterConfig(**settings, served_model_name=config.name, control_port=config.control_port or free())
        except ValueError as error:
            raise SetupError(str(error)) from error
        if config.workers == 1:
            return [first]
        more = [replace(first, control_port=free()) for _ in range(config.workers - 1)]
        return [replace(one, own_port=free(), reuse_port=True) for one in (first, *more)]

    def _instances(self) -> list[Child]:
        config = self.config
        names = [f"prefill-{i}" for i in range(config.prefill)]
        names += [f"decode-{i}" for i in range(config.decode)]
        names += [f"both-{i}" for i in range(config.both)]
        gpus = len(list(Path("/dev").glob("nvidia[0-9]*"))) if config.device in ("auto", "cuda") else 0
        settings = _flags(config)
        if not gpus and config.threads is None:
            settings["threads"] = max(1, len(os.sched_getaffinity(0)) // len(names))
        if gpus and len(names) > gpus:
            settings["gpu_memory_utilization"] = config.gpu_memory_utilization / -(-len(names) // gpus)
        children = []
        for i, name in enumerate(names):
            arguments = [name.split("-")[0], "--instance-id", name, "--router", self._control]
            arguments += ["--connector", self.connector]
            for key, value in settings.items():
                arguments += [f"--{key.replace('_', '-')}", str(value)]
            environment = {"CUDA_VISIBLE_DEVICES": str(i % gpus)} if gpus else {}
            children.append(Child(name, arguments, environment))
        return children


def _unused_port() -> int:
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def free_port(but: int = 0) -> int:
    """A TCP port that nothing on 127.0.0.1 uses at the moment, and not `but`, which is spoken for."""
    return next(port for port in iter(_unused_port, 0) if port != but)


def _flags(config: UpConfig) -> dict[str, object]:
    """The instances' settings that differ from their defaults, but for the connector, which may be one of our own."""
    settings = {
        f.name: f.default for of in (TransferConfig, ControlConfig) for f in fields(of) if f.name != "connector"
    }
    values = {name: (getattr(config, name), default) for name, default in settings.items()}
    return {name: value for name, (value, default) in values.items() if value is not None and value != default}

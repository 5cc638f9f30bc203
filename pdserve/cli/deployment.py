"""Routers and their instances as child processes on this machine.

with Deployment(config) as deployment:
    deployment.wait_ready()
    ...                          # deployment.url serves; call deployment.check_children() periodically
"""

import contextlib
import os
import random
import secrets
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import httpx

from pdserve.cli.gpus import VISIBLE, gpus_for
from pdserve.cli.supervisor import STOP_TIMEOUT_S, Child, Supervisor, child_of, print_line
from pdserve.cli.workers import quota_file
from pdserve.config import (
    DEFAULT_CONNECTOR,
    INTERRUPT_GRACE_S,
    REGISTRY_VARIABLE,
    ROLES,
    InstanceConfig,
    RouterConfig,
    UpConfig,
)
from pdserve.cores import num_cores
from pdserve.errors import SetupError
from pdserve.model_path import check_model
from pdserve.settings import shared_settings

# Fields of both UpConfig and RouterConfig that mean different things in the two, or that Deployment sets itself.
NOT_SHARED = ("served_model_name", "control_port", "workers")
# Below the ephemeral ports of the system: an outgoing connection could take one of those before a child listens on it.
PORT_RANGE = range(10_000, 22_000)
GPU_STORE_BYTES = 8 << 30
START_TIMEOUT_S = (
    1800.0  # also of a machine that is slow to compile the kernels, of which nothing is kept before the end
)
# URLs that are private to one deployment, so that `stop` may unlink the segment: one process may have several deployments.
_private_stores = (f"shm://up-{os.getpid()}" + (f"-{number}" if number else "") for number in count())


def gpu_store_bytes() -> int:
    """Return the size of a private store for pools on GPUs: what is in flight there fills the default of `shm://` at once."""
    file_system = os.statvfs("/dev/shm")
    return min(GPU_STORE_BYTES, file_system.f_bavail * file_system.f_frsize // 2)


class Deployment(Supervisor):
    """All processes of `pdserve up`: one or more routers, and their instances. It is the `Launcher` of further ones.

    Args:
        on_line: called with each line that a child prints, prefixed with the child's name.

    Attributes:
        url: base URL for clients.
        routers: URL of each router; requests to it reach that router only.
        control_host: address of this machine that instances dial.

    Raises:
        SetupError: the settings are inconsistent.
    """

    control_host = "127.0.0.1"

    def __init__(self, config: UpConfig, on_line: Callable[[str], None] = print_line) -> None:
        if config.prefill + config.decode + config.both == 0:
            raise SetupError("nothing to start: give --prefill and --decode, or --both")
        if not config.both and not (config.prefill and config.decode):
            raise SetupError("no request could be served: give at least one --prefill and one --decode, or one --both")
        check_model(config.model)  # reports a wrong one once, and before its children have imported anything
        self.config = config
        self.connector = config.connector
        if self.connector == DEFAULT_CONNECTOR:
            self.connector = next(_private_stores)
        self._cleanup = contextlib.ExitStack()
        # One for all questions whether routers are ready. Loading CA certificates would be slower than these, and a
        # proxy of the environment does not know them.
        self._http = self._cleanup.enter_context(
            httpx.Client(timeout=1.0, verify=False, limits=httpx.Limits(max_keepalive_connections=0), trust_env=False)
        )
        self._quota_file = self._cleanup.enter_context(quota_file(config))
        host = f"[{config.host}]" if ":" in config.host else config.host or "127.0.0.1"  # that of IPv6; all addresses
        origin = f"{'https' if config.ssl_certfile else 'http'}://{host}"
        self.url = f"{origin}:{config.port}"
        routers = self._router_configs()
        self.routers = [f"{origin}:{router.own_port or router.port}" for router in routers]
        self._control_addresses = ",".join(f"{self.control_host}:{router.control_port}" for router in routers)
        self._numbers = {role: count() for role in ROLES}
        self._placing = threading.Lock()
        self._place_instances()
        names = ["router"] if len(routers) == 1 else [f"router-{i}" for i in range(len(routers))]
        children = [self._child(name, "router", router) for name, router in zip(names, routers, strict=True)]
        # CUDA does not survive a fork; a deployment on Ray has routers only here, which need no torch.
        preload = sys.platform == "linux" and not self._gpus and config.on != "ray"
        super().__init__(children, on_line, preload)
        for role in ROLES:
            for _ in range(getattr(config, role)):
                self.children.append(self._instance_child(role))

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until all instances can serve requests from all routers.

        Raises:
            SetupError: a child cannot start, or `timeout_s` has passed.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.poll_ready():
                return
            time.sleep(0.05)
        raise SetupError(f"not ready within {timeout_s:.0f} s")

    def poll_ready(self) -> bool:
        """Restart exited children, and return True if all instances have registered with all routers.

        Raises:
            SetupError: a child cannot start.
        """
        self.check_children()
        try:
            responses = [self._http.get(f"{url}/ready") for url in self.routers]
        except httpx.TransportError:
            return False
        instances = len(self.children) - len(self.routers)
        if any(response.status_code != 200 or response.json()["instances"] < instances for response in responses):
            return False
        self._was_ready = True
        return True

    def start(self, role: str) -> None:
        """Start one more instance, with the settings and the CPU threads of the others, under a name not used before.

        Raises:
            SetupError: every GPU has its full number of instances.
            ValueError: `role` is no role.
        """
        if role not in self._numbers:
            raise ValueError(f"an instance is prefill, decode or both, not {role!r}")
        with self._placing:
            self.add(self._instance_child(role))

    def stop(self, instance_id: str) -> None:
        """End an instance for good: it drains, which takes up to its --drain-seconds, and is not restarted.

        Raises:
            SetupError: there is no such instance.
        """
        instances = {child.name: child for child in self._instances()}
        if instance_id not in instances:
            raise SetupError(f"there is no instance {instance_id!r} here, but {', '.join(instances) or 'none'}")
        self.remove(instances[instance_id], InstanceConfig.drain_seconds)

    def stop_all(self) -> None:
        """Stop the routers, whose running requests may take 5 s, then the instances, and remove their shared memory."""
        routers = [child for child in self.children if child.arguments[0] == "router"]
        self._terminate(routers, signal.SIGINT, INTERRUPT_GRACE_S + STOP_TIMEOUT_S)
        super().stop_all()
        self._cleanup.close()
        if self.connector.startswith("shm://") and self.connector != self.config.connector:
            from pdserve.kv_transfer.connectors.shm.connector import unlink

            unlink(self.connector)

    def _router_configs(self) -> list[RouterConfig]:
        """Return one config, or those of workers that share the port, each with its own port and control port."""
        config, taken = self.config, {self.config.port, self.config.control_port}

        def reserve_port() -> int:
            port = next(port for port in iter(free_port, 0) if port not in taken)
            taken.add(port)
            return port

        shared = {
            name: value for name, value in shared_settings(config, RouterConfig).items() if name not in NOT_SHARED
        }
        try:
            first = RouterConfig(
                **shared,
                served_model_name=config.name,
                control_host=self.control_host,
                control_port=config.control_port or reserve_port(),
            )
        except ValueError as error:
            raise SetupError(str(error)) from error
        if config.workers == 1:
            return [first]
        more = [replace(first, control_port=reserve_port()) for _ in range(config.workers - 1)]
        return [
            replace(router, own_port=reserve_port(), reuse_port=True, quota_file=self._quota_file)
            for router in (first, *more)
        ]

    def _place_instances(self) -> None:
        """Divide CPU threads, GPUs and GPU memory among the instances with which the deployment starts."""
        config = self.config
        instances, ranks = config.prefill + config.decode + config.both, config.tensor_parallel_size
        self._settings = shared_settings(config, InstanceConfig)
        self._gpus, self._gpus_of = gpus_for(config.device), dict[str, list[str]]()
        if not self._gpus and config.threads is None:
            self._settings["threads"] = max(1, num_cores() // instances)
        if any(self._gpus) and len(self._gpus) < ranks:
            raise SetupError(f"--tensor-parallel-size {ranks} needs as many GPUs; there are {len(self._gpus)} here")
        self._per_gpu = -(-instances * ranks // len(self._gpus)) if self._gpus else 0
        if self._gpus and self.connector != config.connector:
            self.connector += f"?size={gpu_store_bytes()}"
        if self._per_gpu > 1:
            self._settings["gpu_memory_utilization"] = config.gpu_memory_utilization / self._per_gpu
        if any(self._gpus) and config.device != "auto":
            self._settings["device"] = "cuda"  # of those that it sees

    def _instances(self) -> list[Child]:
        return [child for child in self.children if child.arguments[0] != "router"]

    def _child(self, name: str, command: str, config: RouterConfig | InstanceConfig) -> Child:
        child = child_of(name, command, config)
        child.environment[REGISTRY_VARIABLE] = ""  # they know each other's addresses, and no registry is asked for
        return child

    def _instance_child(self, role: str) -> Child:
        """Return one more instance, on the GPU that has fewest of them, or on several.

        Raises:
            SetupError: every GPU has its full number of instances.
        """
        gpus: list[str] = []
        if self._gpus:
            used = Counter(gpu for child in self._instances() for gpu in self._gpus_of[child.name])
            least_used = sorted(self._gpus, key=lambda one: used[one])[: self.config.tensor_parallel_size]
            gpus = [gpu for gpu in self._gpus if gpu in least_used]
            if any(used[gpu] >= self._per_gpu for gpu in gpus):
                raise SetupError(f"no GPU is free: each of {len(self._gpus)} GPUs has {self._per_gpu} instance(s)")
        name = f"{role}-{next(self._numbers[role])}"
        own = {"instance_id": name, "router": self._control_addresses, "connector": self.connector}
        child = self._child(name, role, InstanceConfig(**self._settings | own))
        self._gpus_of[name] = gpus
        if any(gpus):
            child.environment[VISIBLE] = ",".join(gpus)
        return child


def with_own_admin_key(config: UpConfig) -> tuple[UpConfig, str]:
    """Return settings with a new random admin key added, and that key; unchanged and "" if the router needs no keys.

    A router that asks clients for keys refuses operators unless there is an admin key.
    """
    if not (config.api_key or config.admin_key or config.keys_file):
        return config, ""
    own = secrets.token_urlsafe()
    return replace(config, admin_key=",".join(filter(None, (config.admin_key, own)))), own


def _random_unused_port() -> int:
    while True:
        port = random.SystemRandom().choice(PORT_RANGE)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def free_port(exclude: int = 0) -> int:
    """Return a TCP port other than `exclude` that is currently unused on 127.0.0.1."""
    return next(port for port in iter(_random_unused_port, 0) if port != exclude)

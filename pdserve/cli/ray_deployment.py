"""`pdserve up --on ray`: the routers are processes of this machine, and each instance is an actor of a Ray cluster."""

import os
import secrets
from collections.abc import Callable

from pdserve.cli.deployment import Deployment
from pdserve.cli.supervisor import Child, Process
from pdserve.config import CONTROL_TOKEN_VARIABLE, InstanceConfig, RouterConfig, UpConfig


class RayDeployment(Deployment):
    """A deployment whose instances are actors. Those that die are replaced as processes are, on the place that they had.

    Instances dial this node's address in the cluster, with a secret of this deployment.

    Raises:
        SetupError: Ray is not installed, there is no cluster, or it has no room for all instances.
    """

    def __init__(self, config: UpConfig, on_line: Callable[[str], None] = print) -> None:
        from pdserve.launchers.ray_cluster import Place, RayCluster

        ranks = config.tensor_parallel_size
        gpus = ranks if config.device != "cpu" else 0
        one_node = config.connector.startswith("shm://")
        instances = config.prefill + config.decode + config.both
        self._cluster = RayCluster(max(1, instances), config.threads, ranks=ranks, gpus=gpus, one_node=one_node)
        self._places: dict[str, Place] = {}
        self._token = os.environ.get(CONTROL_TOKEN_VARIABLE) or secrets.token_urlsafe()
        self.control_host = self._cluster.host
        try:
            super().__init__(config, on_line)
        except BaseException:
            self._cluster.close()
            raise
        self._cleanup.callback(self._cluster.close)

    def _place_instances(self) -> None:
        super()._place_instances()
        self._gpus = []  # Ray says which GPU an instance uses
        self._settings["gpu_memory_utilization"] = self.config.gpu_memory_utilization
        self._settings["device"] = self.config.device
        self._settings["threads"] = None if "GPU" in self._cluster.bundle else self._cluster.bundle["CPU"]

    def _child(self, name: str, command: str, config: RouterConfig | InstanceConfig) -> Child:
        child = super()._child(name, command, config)
        child.environment[CONTROL_TOKEN_VARIABLE] = self._token
        return child

    def _instance_child(self, role: str) -> Child:
        child = super()._instance_child(role)
        self._places[child.name] = self._cluster.place()
        return child

    def _process_of(self, child: Child) -> Process:
        from pdserve.launchers.ray_actor import ActorProcess

        if child.name not in self._places:
            return super()._process_of(child)
        actor = self._cluster.start_actor(child.name, self._places[child.name])
        return ActorProcess(actor, child.arguments, child.environment)

    def _end(self, child: Child, drain_s: float, now: float) -> None:
        super()._end(child, drain_s, now)
        if child not in self.children:
            self._cluster.release(self._places.pop(child.name))
